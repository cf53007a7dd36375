"""The calls of the CUDA driver that torch does not offer, by ctypes: memory with IPC handles, and stream memory operations.

torch's own way to share memory (`UntypedStorage._share_cuda_`) keeps reference counts in files under /dev/shm, which a
killed process leaves behind; the driver's needs none. `libcuda.so.1` comes with the GPU's driver; its interface is stable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polytempo.errors import PeerError

HANDLE = 64
#: Flags of the calls below, as cuda.h has them.
LAZY_PEER_ACCESS, PORTABLE, DEVICE_MAP = 1, 1, 2
ALREADY_REGISTERED = 712


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE),)


class CudaDriver:
    """The driver, for one device: its primary context is current inside each call, as torch's calls expect it.

    Args:
        index: The device's number in this process.

    Raises:
        PeerError: There is no driver, or it refuses.
    """

    def __init__(self, index: int) -> None:
        try:
            self._library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PeerError(f"the CUDA driver cannot be loaded: {error}") from None
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise DriverError(name, status, (text.value or b"unknown").decode())

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def allocate(self, nbytes: int) -> int:
        """The address of new memory, not initialised."""
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        """Give memory back."""
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle_of(self, address: int) -> bytes:
        """By which another process opens this memory."""
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """The address of another process's memory here."""
        address = ctypes.c_uint64()
        with self._current():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(LAZY_PEER_ACCESS),
            )
        return address.value

    def close(self, address: int) -> None:
        """Unmap another process's memory."""
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def pin(self, address: int, nbytes: int) -> int:
        """Pin host memory, so that the device reaches it; its address there. Memory may be pinned already."""
        with self._current():
            try:
                flags = ctypes.c_uint(PORTABLE | DEVICE_MAP)
                self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags)
            except DriverError as error:
                if error.status != ALREADY_REGISTERED:
                    raise
            there = ctypes.c_uint64()
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), ctypes.c_void_p(address), ctypes.c_uint(0))
        return there.value

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        with self._current():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def write_behind(self, stream: int, address: int, value: int) -> None:
        """The stream writes 32 bits behind what it was given; all writes before are visible then."""
        with self._current():
            where = ctypes.c_void_p(stream), ctypes.c_uint64(address)
            self._call("cuStreamWriteValue32_v2", *where, ctypes.c_uint32(value), ctypes.c_uint(0))

    def wait_for(self, stream: int, address: int, value: int) -> None:
        """The stream waits until 32 bits are at least this value, modulo 2**32."""
        with self._current():
            where = ctypes.c_void_p(stream), ctypes.c_uint64(address)
            self._call("cuStreamWaitValue32_v2", *where, ctypes.c_uint32(value), ctypes.c_uint(0))

    def functions(self, program: bytes, names: Sequence[str]) -> dict[str, int]:
        """Load a program (PTX) for the device: its functions of these names."""
        module = ctypes.c_void_p()
        found: dict[str, int] = {}
        with self._current():
            self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(program))
            for name in names:
                function = ctypes.c_void_p()
                self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
                found[name] = function.value or 0
        return found

    def launch(self, function: int, stream: int, blocks: int, threads: int, argument: ctypes.Structure) -> None:
        """Give a stream a kernel with one argument, which is copied."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        sizes = [ctypes.c_uint(number) for number in (blocks, 1, 1, threads, 1, 1, 0)]
        with self._current():
            self._call("cuLaunchKernel", ctypes.c_void_p(function), *sizes, ctypes.c_void_p(stream), arguments, None)


class DriverError(PeerError):
    """A call of the driver has failed."""

    def __init__(self, call: str, status: int, name: str) -> None:
        super().__init__(f"{call} failed: {name} ({status})")
        self.status = status

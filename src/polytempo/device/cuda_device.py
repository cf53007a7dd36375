"""A GPU: memory by CUDA IPC, fences by stream memory operations. Its streams are torch's, of high priority, so
that other ranks wait for them no longer than they must.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar

import torch

from polytempo.device.device import SPACING, Device, DeviceMemory, DeviceStream, Fences, StreamPoint
from polytempo.device.driver import CudaDriver, DriverError
from polytempo.device.pinned_memory import HostPins
from polytempo.device.weighted_sum import DTYPES, TERMS, WeightedSum, sum_by_torch
from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes
from polytempo.transport.shared_memory import address_of


class CudaPoint(StreamPoint):
    """An event that was recorded in a stream.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event, self._device = torch.cuda.Event(), stream.device
        self._event.record(stream)

    def reached(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError:  # the device has failed: whatever is given to it next says how
            return True

    def order(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for it."""
        self._event.wait(stream)


class CudaStream(DeviceStream):
    """A stream of one GPU.

    Args:
        place: torch's name for the GPU.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._stream = torch.cuda.Stream(place, priority=-1)

    def here(self) -> StreamPoint:
        return CudaPoint(torch.cuda.current_stream(self._place))

    def after(self, point: StreamPoint) -> None:
        if isinstance(point, CudaPoint):
            point.hold(self._stream)

    def current(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def mark(self) -> StreamPoint:
        return CudaPoint(self._stream)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()


#: Allocations are multiples of this.
GRAIN = 512


class _Range:
    """What torch makes a tensor of, and what keeps the memory mapped: tensors hold on to it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _in_place(of: _Range, nbytes: int, place: torch.device) -> torch.Tensor:
    """A tensor on this memory. Memory of a peer is a tensor on the peer: asked for on another GPU, torch makes a copy of it.

    Raises:
        PeerError: torch makes copies of it on all GPUs.
    """
    peers = (torch.device("cuda", index) for index in range(torch.cuda.device_count()) if index != place.index)
    for device in (place, *peers):
        tensor = torch.as_tensor(of, device=device)
        if tensor.data_ptr() == of.address or not nbytes:
            return tensor
    raise PeerError(f"memory of another process cannot be used on {place}: torch takes it for that of no GPU here")


class CudaMemory(DeviceMemory):
    """A range of a GPU's memory, this process's own or another's."""

    def __init__(self, of: _Range, nbytes: int, handle: bytes, place: torch.device) -> None:
        self.nbytes, self.handle = nbytes, handle
        self._all = _in_place(of, nbytes, place)

    def tensor(self, dtype: torch.dtype, offset: int = 0, length: int | None = None) -> torch.Tensor:
        stop = self.nbytes if length is None else offset + length * dtype.itemsize
        return self._all[offset:stop].view(dtype)


class CudaFences(Fences):
    """Fences that a GPU writes and waits for."""

    def __init__(self, words: Bytes, device: CudaDevice) -> None:
        super().__init__(words)
        self._device, self._driver = device.place, device.driver
        self._at = self._driver.pin(address_of(words), words.nbytes)
        # Before the memory is unmapped: what is mapped at its address later would pass for it.
        weakref.finalize(self, _unpin, self._driver, words).atexit = False

    def signal(self, index: int, value: int) -> None:
        self._driver.write_behind(self._stream(), self._at + index * SPACING, value % (1 << 32))

    def wait(self, index: int, value: int) -> None:
        self._driver.wait_for(self._stream(), self._at + index * SPACING, value % (1 << 32))

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)


def _unpin(driver: CudaDriver, words: Bytes) -> None:
    with suppress(DriverError):
        driver.unpin(address_of(words))


class CudaDevice(Device):
    """A GPU of this process.

    Args:
        index: Its number in this process.
    """

    #: Memory that this process has allocated, by handle: CUDA refuses to open a handle in the process that made it, and the
    #: ranks of a job in threads are one process.
    _of_this_process: ClassVar[weakref.WeakValueDictionary[bytes, _Range]] = weakref.WeakValueDictionary()

    def __init__(self, index: int) -> None:
        torch.cuda.init()
        self.place = torch.device("cuda", index)
        self.driver = CudaDriver(index)
        self.identity = str(torch.cuda.get_device_properties(index).uuid)
        self.allocated = 0
        self._stream: Any = None
        self._sum: WeightedSum | None = None
        self._pins = HostPins(self.driver)

    def allocate(self, nbytes: int) -> DeviceMemory:
        size = max(GRAIN, -(-nbytes // GRAIN) * GRAIN)
        try:
            address = self.driver.allocate(size)
        except DriverError as error:
            free, total = torch.cuda.mem_get_info(self.place)
            raise PeerError(
                f"{size} bytes of {self.place} were asked for, {free} of {total} are free ({error}); use a smaller model or "
                "batch, fewer processes on this GPU, or --server-device cpu"
            ) from None
        of = _Range(address, size)
        self.allocated += size
        weakref.finalize(of, self._free, address, size).atexit = False
        memory = CudaMemory(of, nbytes, self.driver.handle_of(address), self.place)
        self._of_this_process[memory.handle] = of
        memory.tensor(torch.uint8).zero_()
        return memory

    def _free(self, address: int, size: int) -> None:
        self.allocated -= size
        with suppress(DriverError):  # the process ends, and the driver with it
            self.driver.free(address)

    def open(self, handle: bytes, nbytes: int) -> DeviceMemory:
        mine = self._of_this_process.get(handle)
        if mine is not None:
            return CudaMemory(mine, nbytes, handle, self.place)
        address = self.driver.open(handle)
        of = _Range(address, nbytes)
        weakref.finalize(of, self._close, address).atexit = False
        return CudaMemory(of, nbytes, handle, self.place)

    def _close(self, address: int) -> None:
        with suppress(DriverError):
            self.driver.close(address)

    def fences(self, words: Bytes) -> Fences:
        return CudaFences(words, self)

    def own_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.place)
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def pin(self, buffer: Bytes) -> None:
        self._pins.pin(buffer)

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def here(self) -> StreamPoint:
        return CudaPoint(torch.cuda.current_stream(self.place))

    def stream(self) -> DeviceStream:
        return CudaStream(self.place)

    def weighted_sum(
        self, terms: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor, divisor: float = 1.0
    ) -> None:
        if len(terms) > TERMS or str(out.dtype).removeprefix("torch.") not in DTYPES:
            sum_by_torch(terms, weights, divisor, out)
            return
        if self._sum is None:
            self._sum = WeightedSum(self.driver)
        stream = int(torch.cuda.current_stream(self.place).cuda_stream)
        self._sum.launch(stream, terms, weights, divisor, out)

    def reachable(self) -> frozenset[str]:
        mine = self.place.index
        peers = (i for i in range(torch.cuda.device_count()) if i == mine or torch.cuda.can_device_access_peer(mine, i))
        return frozenset(str(torch.cuda.get_device_properties(i).uuid) for i in peers)

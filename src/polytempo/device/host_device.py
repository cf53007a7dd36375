"""The stand-in for a GPU, in tests: memory is shared host memory, tensors are on the CPU, and a stream runs what it is given
at once. A wait of a stream is therefore a wait of its caller."""

from __future__ import annotations

import os
import time
import weakref
from contextlib import AbstractContextManager, nullcontext

import torch

from polytempo.device.device import Device, DeviceMemory, Fences
from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes
from polytempo.transport.shared_memory import Segment, make_segment

#: Seconds after which a wait for a fence is given up.
PATIENCE = 60.0
POLL = 50e-6


def _keep(segment: Segment) -> None:
    """What a view calls at its end; until then it holds the segment."""


class HostMemory(DeviceMemory):
    """A segment of shared memory. Its handle is a path to the descriptor of the process that made it."""

    def __init__(self, segment: Segment, nbytes: int, handle: bytes) -> None:
        self.nbytes, self.handle, self._segment = nbytes, handle, segment

    def tensor(self, dtype: torch.dtype, offset: int = 0, length: int | None = None) -> torch.Tensor:
        count = (self.nbytes - offset) // dtype.itemsize if length is None else length
        if not count:
            return torch.empty(0, dtype=dtype)
        block = self._segment.view(offset, count * dtype.itemsize, _keep, self._segment)
        return torch.from_numpy(block).view(dtype)


class HostFences(Fences):
    """Fences that the caller sets and waits for."""

    def signal(self, index: int, value: int) -> None:
        self._counts[index] = value % (1 << 32)

    def wait(self, index: int, value: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.reached(index, value):
            if time.monotonic() > deadline:
                raise PeerError(f"fence {index} has not reached {value} after {PATIENCE:g} s")
            time.sleep(POLL)


class HostDevice(Device):
    """A stand-in. `identity`: processes with the same one share their memory."""

    def __init__(self, identity: str = "host") -> None:
        self.identity, self.place, self.allocated = identity, torch.device("cpu"), 0

    def allocate(self, nbytes: int) -> DeviceMemory:
        segment = make_segment(max(nbytes, 1))
        self.allocated += nbytes
        weakref.finalize(segment, self._give_back, nbytes)
        return HostMemory(segment, nbytes, f"/proc/{os.getpid()}/fd/{segment.descriptor}".encode())

    def _give_back(self, nbytes: int) -> None:
        self.allocated -= nbytes

    def open(self, handle: bytes, nbytes: int) -> DeviceMemory:
        try:
            descriptor = os.open(handle.decode(), os.O_RDWR)
        except (OSError, ValueError) as error:
            raise PeerError(f"memory of another process cannot be mapped: {error}") from None
        return HostMemory(Segment(descriptor, os.fstat(descriptor).st_size), nbytes, handle)

    def fences(self, words: Bytes) -> Fences:
        return HostFences(words)

    def own_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self) -> None:
        pass

    def reachable(self) -> frozenset[str]:
        return frozenset({self.identity})

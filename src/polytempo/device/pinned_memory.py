"""Pinned host memory: a GPU copies to and from it by itself, at the full speed of the bus.

Memory that is shared between processes is pinned where it lies (`HostPins`): also what another process has shared, such as a
server's values, from which a GPU then reads them. It stays pinned as long as the process has it mapped, since pinning costs
more than a copy. Memory that is not shared is torch's own pinned memory (`pinned_bytes`).
"""

from __future__ import annotations

import weakref
from contextlib import suppress

import numpy
import torch

from polytempo.device.driver import CudaDriver, DriverError
from polytempo.transport.channel import Bytes
from polytempo.transport.shared_memory import Borrowed, Segment, address_of

#: Smaller memory is not pinned: it may share pages with other memory, and its copies are short.
PIN_FROM = 64 << 10


def pinned_bytes(size: int) -> Bytes:
    """Memory that GPUs reach, not initialised."""
    if not size:
        return numpy.empty(0, dtype=numpy.uint8)
    memory: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


class HostPins:
    """What one process has pinned for one GPU. Where the driver refuses, memory stays as it is: copies are slower then."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._known: weakref.WeakSet[Segment] = weakref.WeakSet()

    def pin(self, buffer: Bytes) -> None:
        """Pin a buffer of this process, until it is dropped."""
        if buffer.nbytes >= PIN_FROM:
            self._pin(buffer, address_of(buffer), buffer.nbytes)

    def pin_borrowed(self, buffer: Bytes) -> None:
        """Pin the segment of another process in which a buffer lies, once for all its buffers; any other buffer is left."""
        segment = buffer.segment if isinstance(buffer, Borrowed) else None
        if segment is not None and segment not in self._known:
            self._known.add(segment)
            self._pin(segment, segment.address, segment.size)

    def _pin(self, owner: object, address: int, nbytes: int) -> None:
        with suppress(DriverError):
            self._driver.pin(address, nbytes)
            weakref.finalize(owner, self._unpin, address).atexit = False

    def _unpin(self, address: int) -> None:
        with suppress(DriverError):  # the process ends, and the driver with it
            self._driver.unpin(address)

"""A pool of buffers that are used again.

A fresh buffer of many megabytes costs a page fault for each 4 KB of it, which takes longer than copying into it. So buffers
come from here and go back when they have been used up; of each size at most as many are kept as were ever out at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy

from polytempo.transport.channel import Bytes
from polytempo.transport.shared_memory import SHARE_FROM, Borrowed, SharedMemoryRegistry

#: Smaller ones are not worth keeping.
KEEP_FROM = 64 << 10


class Pool:
    """Takes and gives buffers. Its methods may be called by several threads: lists append and pop at once."""

    def __init__(self, registry: SharedMemoryRegistry | None = None) -> None:
        self.registry = registry  #: what this process shares with others of its host; None where it shares nothing
        #: Makes a buffer of a size; another where GPUs shall reach buffers.
        self.make: Callable[[int], Bytes] = lambda size: numpy.empty(size, dtype=numpy.uint8)
        self._free: dict[int, list[Bytes]] = {}

    @property
    def pins(self) -> bool:
        """May memory to keep be allocated elsewhere, pinned? Not where it is shared: it is pinned where it lies."""
        return self.registry is None

    def allocate(self, size: int) -> Bytes:
        """Memory to keep, zeroed, from which buffers will be sent: shared where that is possible."""
        return self.registry.allocate(size) if self.registry is not None else numpy.zeros(size, dtype=numpy.uint8)

    def take(self, size: int) -> Bytes:
        """A buffer of this size, not initialised."""
        free = self._free.get(size)
        if free:
            try:
                return free.pop()
            except IndexError:
                pass
        return self.make(size)

    def clear(self) -> None:
        self._free.clear()

    def give(self, buffer: Bytes) -> None:
        if buffer.nbytes >= KEEP_FROM and not isinstance(buffer, Borrowed):
            self._free.setdefault(buffer.nbytes, []).append(buffer)


class Arena:
    """Blocks of memory to send rows from, shared where that is possible: their sizes are powers of two, to fit again.

    The owner of a block gives it back when it is not read any more. Its methods may be called by several threads.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._free: dict[int, list[Bytes]] = {}

    def take(self, nbytes: int) -> Bytes:
        """A block of at least this size, not initialised."""
        size = 1 << max(nbytes - 1, SHARE_FROM).bit_length()
        try:
            return self._free.setdefault(size, []).pop()
        except IndexError:
            return self._pool.allocate(size)

    def give(self, blocks: Iterable[Bytes]) -> None:
        for block in blocks:
            self._free[block.nbytes].append(block)

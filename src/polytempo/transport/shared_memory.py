"""Memory that processes of one host share: sealed anonymous files (segments), and leases on parts of them.

A *segment* is a memfd, handed over through a Unix socket. It has no name, so it ends with the last process that maps it,
however that process ends, and it does not count against a container's small /dev/shm. It is sealed: no process can shrink it
under another that reads it.

A *lease* says whether another process still reads a part of a segment: one byte of shared memory, set by the owner when it
refers to the part in a message, cleared by the reader when its last view is gone. One process writes the byte at a time, so
a lease needs neither lock nor message. Where ranks proceed in rounds (`collectives/shared_buffer.py`), the number of the
round takes the place of the byte.

    SharedMemoryRegistry   the segments of this process; leases on any buffer in them, to any reader (server connections)
    LeasedBlocks           blocks for one reader, each with its lease, reused when that is free (stages of a pipeline)
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy

from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes, OnSent

#: Smaller memory is not worth sharing: its bytes travel in the message.
SHARE_FROM = 16 << 10
#: Leases that a registry can have granted at once; a further message carries bytes.
LEASES = 4096
#: Where in a block its lease is: behind the fixed head of a message.
BLOCK_LEASE = 63
#: A new segment of blocks is at most 1/SPARE larger than the blocks there are.
SPARE = 4

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0

_numbers = count()


class Borrowed(numpy.ndarray[Any, numpy.dtype[numpy.uint8]]):
    """Bytes in a segment of another process: they are not returned to this process's pool."""

    segment: Segment | None = None  #: the one they were received from, unless this is a part of such bytes


class Segment:
    """One mapped memfd."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.descriptor = descriptor
        self.map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.map))
        self.number = next(_numbers)
        weakref.finalize(self, os.close, descriptor).atexit = False

    def view(self, offset: int, length: int, back: Callable[..., Any] | None = None, *arguments: Any) -> Bytes:
        """A part of it; `back` is called when this view and all views made from it are gone."""
        block: Any = (ctypes.c_ubyte * length).from_buffer(self.map, offset)
        if back is not None:
            weakref.finalize(block, back, *arguments).atexit = False
        result: Bytes = numpy.frombuffer(block, dtype=numpy.uint8)
        return result


class Lease:
    """The state of a part of a segment that one process owns and another reads.

    Args:
        segment: The segment that holds the byte.
        word: Where in the segment the byte is.
    """

    __slots__ = ("segment", "word")

    def __init__(self, segment: Segment, word: int) -> None:
        self.segment, self.word = segment, word

    def grant(self) -> None:
        """The owner, before it sends a reference: the part does not change until the lease is free."""
        self.segment.map[self.word] = 1

    @property
    def free(self) -> bool:
        """Whether the reader has dropped its last view."""
        return not self.segment.map[self.word]

    def held_by(self, views: int) -> OnSent:
        """The reader: what each of its views calls at its end (`Segment.view`); the last one frees the lease."""
        left, reader, segment, word = [None] * views, os.getpid(), self.segment, self.word

        def dropped() -> None:
            left.pop()
            if not left and os.getpid() == reader:  # a forked child has the views too, and its parent may still read
                segment.map[word] = 0

        return dropped


def address_of(buffer: Bytes) -> int:
    """The address of a buffer in this process."""
    return int(buffer.__array_interface__["data"][0])


def make_segment(size: int) -> Segment:
    """A new segment, zeroed.

    Raises:
        OSError, MemoryError: There is no room for it.
    """
    if not _SEALS or not hasattr(os, "memfd_create"):
        raise OSError("this system has no sealed anonymous files")
    descriptor = os.memfd_create("polytempo", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)  # now, with an error; not later, with a signal
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return Segment(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


def open_segment(descriptor: int) -> Segment:
    """A segment that another process has handed over.

    Raises:
        PeerError: It is not sealed, or cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise PeerError("received memfd lacks F_SEAL_SHRINK: its sender could truncate it; refused")
        return Segment(descriptor, os.fstat(descriptor).st_size)
    except (OSError, ValueError, OverflowError) as error:
        os.close(descriptor)
        raise PeerError(f"shared memory cannot be used: {error}") from None
    except PeerError:
        os.close(descriptor)
        raise


class SharedMemoryRegistry:
    """The segments that this process shares, and the leases on them. Its methods may be called by several threads."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []  # by address
        self._addresses: list[int] = []
        self._lock = threading.RLock()  # a view may end, and call `_remove`, anywhere
        self._words: Segment | None = None  # one byte for each lease
        self._free = list(range(LEASES))
        self._granted: dict[int, tuple[Lease, OnSent]] = {}  # by word
        self._warned = False

    def allocate(self, size: int) -> Bytes:
        """Zeroed memory, shared if it is large enough to matter and there is room; a lack of room is reported once."""
        if size >= SHARE_FROM:
            try:
                segment = make_segment(size)
                with self._lock:
                    index = bisect.bisect(self._addresses, segment.address)
                    self._addresses.insert(index, segment.address)
                    self._segments.insert(index, segment)
                return segment.view(0, size, self._remove, segment.number)
            except (OSError, MemoryError) as error:
                self._warn(size, error)
        return numpy.zeros(size, dtype=numpy.uint8)

    def _remove(self, number: int) -> None:
        with self._lock:
            index = next(i for i, segment in enumerate(self._segments) if segment.number == number)
            del self._segments[index], self._addresses[index]

    def _warn(self, size: int, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warn_unshared(f"process {os.getpid()} cannot share {size} bytes of memory", error)

    def find(self, buffer: Bytes) -> tuple[Segment, int] | None:
        """The segment of this process in which a buffer lies, and its offset there."""
        if buffer.nbytes < SHARE_FROM or isinstance(buffer, Borrowed):
            return None
        address = address_of(buffer)
        with self._lock:
            index = bisect.bisect(self._addresses, address) - 1
            if index < 0:
                return None
            segment = self._segments[index]
        offset = address - segment.address
        return (segment, offset) if offset + buffer.nbytes <= segment.size else None

    def lease(self, returned: OnSent) -> Lease | None:
        """Grant a lease; None when too many are granted. `returned` is called by `collect` once it is free."""
        self.collect()
        with self._lock:
            if self._words is None:
                try:
                    self._words = make_segment(LEASES)
                except (OSError, MemoryError) as error:
                    self._warn(LEASES, error)
                    return None
            if not self._free:
                return None
            lease = Lease(self._words, self._free.pop())
            lease.grant()
            self._granted[lease.word] = lease, returned
            return lease

    def collect(self) -> None:
        if not self._granted:
            return
        with self._lock:
            free = [word for word, (lease, _) in self._granted.items() if lease.free]
            finished = [self._granted.pop(word)[1] for word in free]
            self._free += free
        for returned in finished:
            returned()

    def expire(self, lease: Lease) -> None:
        """The reader is gone. Its byte is not used again: an earlier connection of a living process may still clear it."""
        with self._lock:
            if self._granted.get(lease.word, (None,))[0] is not lease:
                return  # it was free before
            returned = self._granted.pop(lease.word)[1]
        returned()


@dataclass(slots=True, eq=False)
class LeasedBlock:
    """Room for one message, as its owner sees it. `number` and `offset` tell the reader where it is."""

    number: int
    offset: int
    room: Bytes
    lease: Lease


class LeasedBlocks:
    """The blocks in which one rank writes for one other. Blocks of one size share segments, so that open files stay few."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[LeasedBlock]] = {}  # by size
        self._numbers = count()

    def take(self, size: int) -> tuple[LeasedBlock, Segment | None]:
        """A free block, its lease granted; and its segment, when that is new and must be handed over.

        Raises:
            OSError, MemoryError: There is no room for a new segment.
        """
        room = rounded(size)
        blocks = self._blocks.setdefault(room, [])
        made = None
        block = next((block for block in blocks if block.lease.free), None)
        if block is None:
            more = max(1, len(blocks) // SPARE)
            made = make_segment(more * room)
            number = next(self._numbers)
            for offset in reversed(range(0, more * room, room)):
                block = LeasedBlock(number, offset, made.view(offset, room), Lease(made, offset + BLOCK_LEASE))
                blocks.insert(0, block)
            block = blocks[0]
        block.lease.grant()
        return block, made


def rounded(size: int) -> int:
    """The size of a block for this many bytes: few different sizes, none much larger than what is asked for."""
    unit = 1 << max(12, size.bit_length() - 3)
    return -(-size // unit) * unit


def read_block(segment: Segment, offset: int, size: int) -> Bytes:
    """The reader's view of a block; its lease is free again when the view is gone."""
    return segment.view(offset, size, Lease(segment, offset + BLOCK_LEASE).held_by(1))


def warn_unshared(what: str, error: Exception) -> None:
    """Report on stderr that memory cannot be shared."""
    why = getattr(error, "strerror", None) or str(error)
    sys.stderr.write(f"polytempo: {what} ({why}); its bytes travel through sockets instead, which is slower\n")
    sys.stderr.flush()

"""Memory that processes of one host share: anonymous files, handed over through Unix sockets.

A *segment* is a memfd: it has no name, so it ends with the last process that holds it, however that ends, and it does not
count against a container's small /dev/shm. It is sealed, so that nobody can shrink it under somebody who reads it.

A *shelf* is what one process offers to others: it makes segments, knows which segment a piece of memory lies in, and keeps
account of *loans*. A loan is a byte in shared memory: set by the lender before it sends, cleared by the borrower when its
last view of the memory is gone. One writes it at a time, so it needs no lock and no system call.
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
from itertools import count
from typing import Any

import numpy

from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes, OnSent

#: Smaller memory is not worth sharing: its bytes travel in the message.
SHARE_FROM = 16 << 10
#: So many loans can be out at once; a further message carries bytes.
LOANS = 4096

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0

_numbers = count()


class Borrowed(numpy.ndarray[Any, numpy.dtype[numpy.uint8]]):
    """Bytes that lie in another process's segment. Not ours to use again."""


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
        """A part of it; `back` is called when nobody can read through this view, or views of it, any more."""
        block: Any = (ctypes.c_ubyte * length).from_buffer(self.map, offset)
        if back is not None:
            weakref.finalize(block, back, *arguments).atexit = False
        result: Bytes = numpy.frombuffer(block, dtype=numpy.uint8)
        return result


def address_of(buffer: Bytes) -> int:
    """Where a buffer lies in this process."""
    return int(buffer.__array_interface__["data"][0])


def make_segment(size: int) -> Segment:
    """A new segment, zero all over. `OSError` or `MemoryError` when there is no room for it."""
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
    """A segment somebody handed over."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise PeerError("memory that can be taken away again was offered, and refused")
        return Segment(descriptor, os.fstat(descriptor).st_size)
    except (OSError, ValueError, OverflowError) as error:
        os.close(descriptor)
        raise PeerError(f"shared memory cannot be used: {error}") from None
    except PeerError:
        os.close(descriptor)
        raise


class SharedMemoryRegistry:
    """What this process shares. Its methods may be called by several threads."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []  # by address
        self._addresses: list[int] = []
        self._lock = threading.RLock()  # a view may end, and call `_remove`, anywhere
        self._words: tuple[Segment, Bytes] | None = None
        self._free = list(range(LOANS))
        self._out: dict[int, OnSent] = {}
        self._said = False

    def allocate(self, size: int) -> Bytes:
        """Zeroed memory, shared if it is large enough to matter and there is room; said once when there is none."""
        if size >= SHARE_FROM:
            try:
                segment = self._add(make_segment(size))
                return segment.view(0, size, self._remove, segment.number)
            except (OSError, MemoryError) as error:
                self._say(size, error)
        return numpy.zeros(size, dtype=numpy.uint8)

    def _add(self, segment: Segment) -> Segment:
        with self._lock:
            index = bisect.bisect(self._addresses, segment.address)
            self._addresses.insert(index, segment.address)
            self._segments.insert(index, segment)
        return segment

    def _remove(self, number: int) -> None:
        with self._lock:
            index = next(i for i, segment in enumerate(self._segments) if segment.number == number)
            del self._segments[index], self._addresses[index]

    def _say(self, size: int, error: Exception) -> None:
        if not self._said:
            self._said = True
            why = getattr(error, "strerror", None) or str(error)
            sys.stderr.write(
                f"polytempo: process {os.getpid()} cannot share {size} bytes of memory ({why}); "
                "its bytes travel through sockets instead, which is slower\n"
            )
            sys.stderr.flush()

    def find(self, buffer: Bytes) -> tuple[Segment, int] | None:
        """The segment of ours in which a buffer lies, and where."""
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

    # Loans.

    def lend(self, done: OnSent) -> tuple[Segment, int] | None:
        """The word of a new loan; None when too many are out. `done` is called by `collect` when it is back."""
        self.collect()
        with self._lock:
            if self._words is None and not self._make_words():
                return None
            assert self._words is not None
            if not self._free:
                return None
            word = self._free.pop()
            self._words[1][word] = 1
            self._out[word] = done
            return self._words[0], word

    def _make_words(self) -> bool:
        try:
            segment = make_segment(LOANS)
        except (OSError, MemoryError) as error:
            self._say(LOANS, error)
            return False
        self._words = segment, segment.view(0, LOANS)
        return True

    def collect(self) -> None:
        """Notice what came back."""
        if not self._out:
            return
        with self._lock:
            back = [word for word in self._out if self._words is not None and not self._words[1][word]]
            finished = [self._out.pop(word) for word in back]
            self._free += back
        for done in finished:
            done()

    def write_off(self, word: int) -> None:
        """The borrower is gone. The word is not used again: an earlier connection of a living process may still clear it."""
        with self._lock:
            done = self._out.pop(word, None)
        if done is not None:
            done()

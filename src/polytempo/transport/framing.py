"""Messages on a Unix stream socket: how they are put together and taken apart.

A buffer that lies in shared memory (`shared_memory.py`) travels as a reference: which of the sender's segments, offset,
length. A segment is handed over with the first message that refers to it. Where the sender must know when the memory is free
again, the message names a lease.

    "PT02" | header length u32 | buffers u32 | new segments u32 | lease: segment u32, word u32
    | for each buffer: length u64, offset u64, segment u32 | header | bytes of buffers that are not references
"""

from __future__ import annotations

import os
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence

from polytempo.errors import PeerError
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import BUFFER_COUNT_LIMIT, Bytes, OnSent
from polytempo.transport.shared_memory import Borrowed, Lease, Segment, SharedMemoryRegistry, open_segment

MAGIC = b"PT02"
PREFIX = struct.Struct("<4sIIIII")
ENTRY = struct.Struct("<QQI")
NONE = (1 << 32) - 1  # in place of a segment: there is none
#: Segments handed over in one message, at most, and what each counts for in the limit of what a peer may send.
SEGMENT_COUNT_LIMIT = 128
SEGMENT_COST = 1 << 20
ANCILLARY = socket.CMSG_SPACE(SEGMENT_COUNT_LIMIT * 4)
FLAGS_LATER = socket.MSG_CMSG_CLOEXEC
FLAGS = FLAGS_LATER | socket.MSG_DONTWAIT  # a reader does not wait for the beginning of a message
SCRATCH = 32 << 10
#: Buffers as small as this are copied behind their header and sent with it.
JOIN_UP_TO = 64 << 10
#: Buffers of a connection that are known by heart.
REMEMBERED = 64

#: Bytes to send, and segments to hand over with them.
FramePiece = tuple[memoryview, list[Segment]]


def send_piece(sock: socket.socket, piece: FramePiece) -> FramePiece | None:
    """Send what the socket takes; what is left, if anything is."""
    data, segments = piece
    count = socket.send_fds(sock, [data], [segment.descriptor for segment in segments]) if segments else sock.send(data)
    return (data[count:], []) if count < len(data) else None


class FrameWriter:
    """Puts messages together, for one connection: what is written out, what is only referred to."""

    def __init__(self, pool: Pool) -> None:
        self._registry = pool.registry
        self._numbers: dict[int, int] = {}  # a segment's own number -> its number on this connection
        self._leases: set[Lease] = set()  # that this connection's peer holds
        self._places: dict[int, tuple[weakref.ref[Bytes], tuple[Segment, int] | None]] = {}  # of buffers sent before

    def write(self, header: bytes, buffers: Sequence[Bytes], done: OnSent | None) -> tuple[list[FramePiece], OnSent | None]:
        """The pieces to send, and what to call when they are sent; with a lease, `done` is called when that is free."""
        new: list[Segment] = []
        found = [self._place(self._registry, buffer) if self._registry is not None else None for buffer in buffers]
        lease = None
        if len([place for place in found if place]) >= SEGMENT_COUNT_LIMIT:
            found = [None] * len(buffers)  # more could be new than can be handed over at once
        if self._registry is not None and done is not None and any(found):
            lease = self._lease(self._registry, done)
            if lease is None:
                found = [None] * len(buffers)
        entries = [
            ENTRY.pack(buffer.nbytes, *((place[1], self._number(place[0], new)) if place else (0, NONE)))
            for buffer, place in zip(buffers, found, strict=True)
        ]
        leased = (self._number(lease.segment, new), lease.word) if lease else (NONE, 0)
        prefix = PREFIX.pack(MAGIC, len(header), len(buffers), len(new), *leased)
        written = [b.data.cast("B") for b, place in zip(buffers, found, strict=True) if place is None and b.nbytes]
        small = sum(len(data) for data in written) <= JOIN_UP_TO
        first = b"".join((prefix, *entries, header, *(written if small else ())))
        pieces = [(memoryview(first), new), *((data, []) for data in written if not small)]
        return pieces, None if lease else done

    def _place(self, registry: SharedMemoryRegistry, buffer: Bytes) -> tuple[Segment, int] | None:
        """The segment and offset of a buffer; those of the last few buffers are remembered."""
        known = self._places.get(id(buffer))
        if known is not None and known[0]() is buffer:
            return known[1]
        place = registry.find(buffer)
        if len(self._places) >= REMEMBERED:
            self._places.clear()
        self._places[id(buffer)] = weakref.ref(buffer), place
        return place

    def _lease(self, registry: SharedMemoryRegistry, done: OnSent) -> Lease | None:
        lease: Lease | None = None

        def returned() -> None:
            if lease is not None:
                self._leases.discard(lease)
            done()

        lease = registry.lease(returned)
        if lease is not None:
            self._leases.add(lease)
        return lease

    def _number(self, segment: Segment, new: list[Segment]) -> int:
        if segment.number not in self._numbers:
            self._numbers[segment.number] = len(self._numbers)
            new.append(segment)
        return self._numbers[segment.number]

    def close(self) -> None:
        """The connection is gone: its leases expire."""
        for lease in list(self._leases) if self._registry is not None else ():
            self._registry.expire(lease)  # type: ignore[union-attr]


class FrameReader:
    """Reads messages piece by piece, as bytes come; a large buffer directly into the memory it will be used from.

    With `ahead` small pieces are read together, perhaps with the beginning of the next message.
    """

    def __init__(self, pool: Pool, limit: int) -> None:
        self.limit = limit
        self.count = 0  #: of bytes read so far
        self.ahead = False
        self._pool = pool
        self._segments: list[Segment] = []
        self._descriptors: list[int] = []
        self._views: dict[tuple[int, int, int], Bytes] = {}  # the same few are referred to again and again
        self._messages = self._read()
        self._want: memoryview = next(self._messages)
        self._at_start = True
        self._scratch = memoryview(bytearray(SCRATCH))
        self._have = self._scratch[:0]  # read and not yet used
        self._done: tuple[bytes, list[Bytes]] | None = None

    def read(self, sock: socket.socket) -> tuple[bytes, list[Bytes]]:
        """The next message. EOFError at the end. BlockingIOError when nothing is there, or, if the socket does not block,
        when only a part is there, which is kept."""
        while True:
            self._fill(sock)
            if not self._want:
                self._at_start = False
                self._want = next(self._messages)
                if self._done is not None:
                    message, self._done = self._done, None
                    self._at_start = True
                    return message

    def is_ahead(self) -> bool:
        """Was more read than has been asked for?"""
        return bool(self._have)

    def _fill(self, sock: socket.socket) -> None:
        if self._have:
            count = min(len(self._want), len(self._have))
            self._want[:count] = self._have[:count]
            self._have = self._have[count:]
            self._want = self._want[count:]
        elif self.ahead and len(self._want) < SCRATCH:
            self._have = self._scratch[: self._receive(sock, self._scratch)]
        else:
            self._want = self._want[self._receive(sock, self._want) :]

    def _receive(self, sock: socket.socket, target: memoryview) -> int:
        """Descriptors come with the first bytes of a message."""
        if not self.ahead and not self._at_start:
            count = sock.recv_into(target)
        else:
            count, ancillary, _, _ = sock.recvmsg_into([target], ANCILLARY, FLAGS if self._at_start else FLAGS_LATER)
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._descriptors += struct.unpack(f"{len(data) // 4}i", data[: len(data) - len(data) % 4])
        if not count:
            raise EOFError
        self.count += count
        return count

    def _read(self) -> Iterator[memoryview]:
        """Yields where the next bytes belong; all of them are there when it goes on."""
        fixed = bytearray(PREFIX.size)
        while True:
            yield memoryview(fixed)
            magic, header_length, count, new, *lease = PREFIX.unpack(fixed)
            if magic != MAGIC:
                raise PeerError("a connection does not speak polytempo's protocol")
            if count > BUFFER_COUNT_LIMIT or header_length + ENTRY.size * count + new * SEGMENT_COST > self.limit:
                raise PeerError(f"a message with a header of {header_length} bytes and {count} buffers was refused")
            table = bytearray(ENTRY.size * count + header_length)
            if table:
                yield memoryview(table)
            self._open(new)
            entries = list(ENTRY.iter_unpack(memoryview(table)[: ENTRY.size * count]))
            total = sum(entry[0] for entry in entries)
            if total > self.limit:
                raise PeerError(f"a message of {total} bytes was refused; at most {self.limit} are taken")
            buffers = self._buffers(entries, *lease)
            yield from _to_fill(buffers)
            self._done = bytes(memoryview(table)[ENTRY.size * count :]), buffers
            del buffers  # kept here, they could never be given back

    def _open(self, new: int) -> None:
        if new > len(self._descriptors):
            raise PeerError(f"a message hands over {new} segments, and came with {len(self._descriptors)} descriptors")
        for _ in range(new):
            self._segments.append(open_segment(self._descriptors.pop(0)))

    def _buffers(self, entries: Sequence[tuple[int, int, int]], lease_segment: int, word: int) -> list[Bytes]:
        referred = sum(number != NONE for _, _, number in entries)
        dropped = self._held_lease(lease_segment, word, referred) if lease_segment != NONE else None
        result: list[Bytes] = []
        for length, offset, number in entries:
            if number == NONE:
                result.append(self._pool.take(length))
                continue
            if number >= len(self._segments) or offset + length > self._segments[number].size:
                raise PeerError(f"invalid shared-memory reference (segment {number}, offset {offset}, {length} bytes)")
            result.append(self._view(number, offset, length, dropped))
        return result

    def _view(self, number: int, offset: int, length: int, dropped: OnSent | None) -> Bytes:
        if dropped is not None:
            return self._segments[number].view(offset, length, dropped).view(Borrowed)
        key = number, offset, length
        if key not in self._views:
            if len(self._views) >= REMEMBERED:
                self._views.clear()
            self._views[key] = self._segments[number].view(offset, length).view(Borrowed)
        return self._views[key]

    def _held_lease(self, number: int, word: int, views: int) -> OnSent:
        if number >= len(self._segments) or word >= self._segments[number].size:
            raise PeerError(f"invalid lease (segment {number}, byte {word}): that segment was not handed over or is smaller")
        return Lease(self._segments[number], word).held_by(views)

    def close(self) -> None:
        """Close the descriptors that no message has claimed."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._segments.clear()
        self._views.clear()


def _to_fill(buffers: Sequence[Bytes]) -> Iterator[memoryview]:
    """The buffers whose bytes are still to come."""
    for buffer in buffers:
        if buffer.nbytes and not isinstance(buffer, Borrowed):
            yield buffer.data

"""Frames: one head for all that travels between two processes, one queue for what waits to travel.

    head: magic u16 | kind u8 | segments u8 | meta length u32 | buffers u32 | context u32 | tag i64 | length u64
    meta | bytes

On links between ranks (`peer_link.py`) a frame is one link message: kind, context, tag, meta and one payload.

On connections to a server (`channel.py`) a frame of kind `MESSAGE` is a header and any number of buffers. Its meta is a
table with an entry for each buffer, and the header.

    entry: length u64 | offset u64 | segment u32

Over a Unix socket (`stream.py`) a frame is a stretch of the stream. Small pieces are read together, perhaps with the
beginning of the next frame; large buffers directly into the memory they will be used from. Segments of shared memory
(`shared_memory.py`) are handed over with the first bytes of a frame. A buffer that lies in one travels as a reference: which
of the sender's segments, offset, length; the segment comes with the first message that refers to it. Where the sender must
know when the memory is free again, context and tag name a lease (segment, byte).

Over ZeroMQ (`zeromq.py`) head and meta are one of its frames, and the bytes follow in pieces.
"""

from __future__ import annotations

import os
import socket
import struct
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import zmq

from polytempo.errors import PeerError
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import BUFFER_COUNT_LIMIT, IN, OUT, Bytes, OnSent, Poller
from polytempo.transport.shared_memory import Borrowed, Lease, Segment, SharedMemoryRegistry, open_segment

MAGIC_BYTES = b"P3"
MAGIC = int.from_bytes(MAGIC_BYTES, "little")
HEAD = struct.Struct("<HBBIIIqQ")
ENTRY = struct.Struct("<QQI")
#: The kind of a message to or from a server. Smaller kinds are those of links (`peer_link.py`).
MESSAGE = 6
NONE = (1 << 32) - 1  # in place of a segment: there is none
#: Segments handed over in one message, at most, and what each counts for in the limit of what a peer may send.
SEGMENT_COUNT_LIMIT = 128
SEGMENT_COST = 1 << 20
FLAGS_LATER = socket.MSG_CMSG_CLOEXEC
FLAGS = FLAGS_LATER | socket.MSG_DONTWAIT
#: Buffers as small as this are copied behind their header and sent with it.
JOIN_UP_TO = 64 << 10
#: Buffers of a connection whose places are remembered.
REMEMBERED = 64

T = TypeVar("T")
#: Of a buffer: length, offset, segment.
Entry = tuple[int, int, int]
#: Bytes to send, and segments to hand over with them.
FramePiece = tuple[memoryview, Sequence[Segment]]


class FrameHead(NamedTuple):
    """What a frame begins with."""

    magic: int
    kind: int
    segments: int
    meta_length: int
    buffers: int
    context: int
    tag: int
    length: int


def send_piece(sock: socket.socket, piece: FramePiece) -> FramePiece | None:
    """Send what the socket takes; what is left, if anything is."""
    data, segments = piece
    count = socket.send_fds(sock, [data], [segment.descriptor for segment in segments]) if segments else sock.send(data)
    return (data[count:], ()) if count < len(data) else None


class Outbox(Generic[T]):
    """What waits until a connection takes it, with what is to be called then.

    Args:
        watched: What a poller watches of the connection.
        take: Sends an item and returns what is left of it, or raises that nothing is taken now.
    """

    def __init__(self, watched: Any, take: Callable[[T], T | None]) -> None:
        self.writing = False  #: does the poller say when more is taken?
        self._watched, self._take = watched, take
        self._items: deque[tuple[T, Callable[[], object] | None]] = deque()
        self._poller: Poller | None = None

    def __bool__(self) -> bool:
        return bool(self._items)

    def attach(self, poller: Poller) -> None:
        """Have the connection watched from now on."""
        self._poller, self.writing = poller, bool(self._items)
        poller.register(self._watched, IN | OUT if self.writing else IN)

    def detach(self) -> None:
        poller, self._poller = self._poller, None
        if poller is not None:
            poller.unregister(self._watched)

    def append(self, item: T, sent: Callable[[], object] | None = None) -> None:
        self._items.append((item, sent))

    def flush(self) -> None:
        """Send what the connection takes now. `OSError` when the other end is gone."""
        try:
            while self._items:
                item, sent = self._items[0]
                rest = self._take(item)
                if rest is not None:
                    self._items[0] = rest, sent
                    continue
                self._items.popleft()
                if sent:
                    sent()
        except (BlockingIOError, zmq.Again):
            pass
        if self.writing != bool(self._items) and self._poller is not None:
            self.writing = bool(self._items)
            self._poller.register(self._watched, IN | OUT if self.writing else IN)

    def drop(self) -> None:
        """The connection is gone: what waits is not needed any more."""
        while self._items:
            sent = self._items.popleft()[1]
            if sent:
                sent()


class FrameDecoder(ABC, Generic[T]):
    """Takes frames apart, piece by piece, as bytes come."""

    gulp = 32 << 10  #: bytes that are read at once where a head is expected
    ancillary = socket.CMSG_SPACE(SEGMENT_COUNT_LIMIT * 4)
    not_a_frame = "a connection does not speak polytempo's protocol"

    def __init__(self) -> None:
        self.count = 0  #: of bytes read so far
        self.ahead = False  #: whether to read more than the frame that is asked for
        self._have = b""  # read and not yet used
        self._descriptors: list[int] = []
        self._message: T | None = None  # whole but for its targets
        self._targets: list[memoryview] = []  # where the next bytes belong

    @abstractmethod
    def check(self, head: FrameHead) -> None:
        """Refuse a head, before any memory is used for what it announces."""

    @abstractmethod
    def begin(self, head: FrameHead, meta: bytes) -> tuple[T, list[memoryview]]:
        """The message of a head that was checked, and where its bytes belong."""

    def read(self, sock: socket.socket) -> T:
        """The next message. EOFError at the end. BlockingIOError when nothing is there, or, if the socket does not block,
        when only a part is there, which is kept."""
        while self._message is None:
            if missing := self._parse() if self._have else HEAD.size:
                self._receive(sock, missing)
        while self._targets:
            target = self._targets[0]
            count = sock.recv_into(target)
            if not count:
                raise EOFError
            self.count += count
            if count == len(target):
                del self._targets[0]
            else:
                self._targets[0] = target[count:]
        message, self._message = self._message, None
        return message

    def is_ahead(self) -> bool:
        """Whether more was read than has been asked for."""
        return bool(self._have)

    def _receive(self, sock: socket.socket, missing: int) -> None:
        """Read at least a part of what is missing. A reader does not wait for the beginning of a frame."""
        if self.ahead and missing < self.gulp:
            missing = self.gulp
        data, ancillary, _, _ = sock.recvmsg(missing, self.ancillary, FLAGS_LATER if self._have else FLAGS)
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors += struct.unpack(f"{len(value) // 4}i", value[: len(value) - len(value) % 4])
        if not data:
            raise EOFError
        self.count += len(data)
        self._have = self._have + data if self._have else data

    def _parse(self) -> int:
        """Begin the next message; or how many bytes are missing before that is possible."""
        have = self._have
        if len(have) < HEAD.size:
            if not MAGIC_BYTES.startswith(have[:2]):
                raise PeerError(self.not_a_frame)
            return HEAD.size - len(have)
        head = FrameHead._make(HEAD.unpack_from(have))
        if head.magic != MAGIC:
            raise PeerError(self.not_a_frame)
        self.check(head)
        end = HEAD.size + head.meta_length
        if len(have) < end:
            return end - len(have)
        self._message, targets = self.begin(head, have[HEAD.size : end])
        rest = have[end:]
        while targets and rest:
            count = min(len(targets[0]), len(rest))
            targets[0][:count] = rest[:count]
            rest = rest[count:]
            if count == len(targets[0]):
                del targets[0]
            else:
                targets[0] = targets[0][count:]
        self._have, self._targets = rest, targets
        return 0

    def open_segments(self, new: int) -> list[Segment]:
        """The next segments that were handed over."""
        if new > len(self._descriptors):
            raise PeerError(f"a message hands over {new} segments, and came with {len(self._descriptors)} descriptors")
        return [open_segment(self._descriptors.pop(0)) for _ in range(new)]

    def close(self) -> None:
        """Close the descriptors that no message has claimed."""
        while self._descriptors:
            os.close(self._descriptors.pop())


# Messages to and from a server.


def check_message(head: FrameHead, limit: int) -> None:
    """Refuse what is longer than a peer may send."""
    table = ENTRY.size * head.buffers
    if (
        head.buffers > BUFFER_COUNT_LIMIT
        or table > head.meta_length
        or head.meta_length + head.segments * SEGMENT_COST > limit
    ):
        raise PeerError(f"a message with a header of {head.meta_length} bytes and {head.buffers} buffers was refused")


def read_table(head: FrameHead, meta: bytes, limit: int) -> tuple[list[Entry], bytes]:
    """The entries of a message that was checked, and its header."""
    table = ENTRY.size * head.buffers
    entries = list(ENTRY.iter_unpack(memoryview(meta)[:table]))
    total = sum(entry[0] for entry in entries)
    if total > limit or head.length != sum(size for size, _, number in entries if number == NONE):
        raise PeerError(f"a message of {total} bytes was refused: at most {limit} are taken, and lengths must be true")
    return entries, meta[table:]


class FrameWriter:
    """Puts the messages of one connection to a server together: what is written out, what is only referred to."""

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
        written = [b.data.cast("B") for b, place in zip(buffers, found, strict=True) if place is None and b.nbytes]
        length = sum(len(data) for data in written)
        meta_length = ENTRY.size * len(buffers) + len(header)
        head = HEAD.pack(MAGIC, MESSAGE, len(new), meta_length, len(buffers), *leased, length)
        small = length <= JOIN_UP_TO
        first = b"".join((head, *entries, header, *(written if small else ())))
        pieces: list[FramePiece] = [(memoryview(first), new), *((data, ()) for data in written if not small)]
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


class FrameReader(FrameDecoder[tuple[bytes, list[Bytes]]]):
    """Reads the messages of one connection to a server. A peer may send `limit` bytes at once."""

    def __init__(self, pool: Pool, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self._pool = pool
        self._segments: list[Segment] = []
        self._views: dict[tuple[int, int, int], Bytes] = {}  # the same few are referred to again and again

    def check(self, head: FrameHead) -> None:
        if head.kind != MESSAGE:
            raise PeerError(self.not_a_frame)
        check_message(head, self.limit)

    def begin(self, head: FrameHead, meta: bytes) -> tuple[tuple[bytes, list[Bytes]], list[memoryview]]:
        entries, header = read_table(head, meta, self.limit)
        self._segments += self.open_segments(head.segments)
        made = self._buffers(entries, head.context, head.tag)
        targets = [buffer.data for buffer in made if buffer.nbytes and not isinstance(buffer, Borrowed)]
        return (header, made), targets

    def _buffers(self, entries: Sequence[Entry], lease_segment: int, word: int) -> list[Bytes]:
        referred = sum(number != NONE for _, _, number in entries)
        dropped = None
        if lease_segment != NONE:
            if lease_segment >= len(self._segments) or not 0 <= word < self._segments[lease_segment].size:
                where = f"segment {lease_segment}, byte {word}"
                raise PeerError(f"invalid lease ({where}): that segment was not handed over or is smaller")
            dropped = Lease(self._segments[lease_segment], word).held_by(referred)
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
        key = number, offset, length
        if dropped is None and key in self._views:
            return self._views[key]
        segment = self._segments[number]
        result = segment.view(offset, length, dropped).view(Borrowed)
        result.segment = segment
        if dropped is None:
            if len(self._views) >= REMEMBERED:
                self._views.clear()
            self._views[key] = result
        return result

    def close(self) -> None:
        super().close()
        self._segments.clear()
        self._views.clear()

"""Shared memory in which one rank hands parcels to another of its host, which reads them where they lie: no copy is made
but the one into it, and only a place travels through the socket.

A *slot* has room for one parcel. A byte of it says whether somebody still reads: set by the sender before it sends, cleared
by the receiver when its last tensor of it is gone. One writes it at a time, so it needs neither lock nor message. Segments
have several slots where many are under way, so that open files stay few.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from polytempo.transport.channel import Bytes
from polytempo.transport.shared_memory import Segment, make_segment

#: Which segment, and where in it: what travels.
PLACE = struct.Struct("<qq")
#: Where in a slot the byte is that says it is read: behind a parcel's head.
READ = 63
#: A new segment is larger than its slots need by at most one part in so many.
SPARE = 4


@dataclass(slots=True, eq=False)
class MessageSlot:
    """Room for one parcel, as its owner sees it."""

    number: int
    offset: int
    room: Bytes

    @property
    def place(self) -> bytes:
        """What the receiver must know."""
        return PLACE.pack(self.number, self.offset)


class MessageSlots:
    """The slots in which one rank writes for one other."""

    def __init__(self) -> None:
        self._slots: dict[int, list[MessageSlot]] = {}  # by size
        self._numbers = count()

    def take(self, size: int) -> tuple[MessageSlot, Segment | None]:
        """A slot that nobody reads, marked as read; and its segment, when it is new and must be handed over.
        `OSError` or `MemoryError` when there is no room."""
        rounded = _rounded(size)
        slots = self._slots.setdefault(rounded, [])
        made = None
        slot = next((slot for slot in slots if not slot.room[READ]), None)
        if slot is None:
            more = max(1, len(slots) // SPARE)
            made = make_segment(more * rounded)
            slots[:0] = _cut(made, next(self._numbers), more, rounded)
            slot = slots[0]
        slot.room[READ] = 1
        return slot, made


def _cut(segment: Segment, number: int, parts: int, size: int) -> Iterator[MessageSlot]:
    for offset in range(0, parts * size, size):
        yield MessageSlot(number, offset, segment.view(offset, size))


def _rounded(size: int) -> int:
    """Few different sizes, none much larger than what is asked for."""
    unit = 1 << max(12, size.bit_length() - 3)
    return -(-size // unit) * unit


def read(segment: Segment, offset: int, size: int) -> Bytes:
    """A parcel that somebody has put there; the slot is free again when nobody holds the bytes any more."""
    return segment.view(offset, size, _clear, segment, offset)


def _clear(segment: Segment, offset: int) -> None:
    segment.map[offset + READ] = 0

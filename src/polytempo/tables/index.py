"""The index of a table, from the id of a row to its slot; and the memory of rows.

A bounded table needs no map: row `id` of shard `id % shards` is in slot `id // shards`. An unbounded one has an open
addressing map (double hashing over a power of two, no deletions) whose slots are numbered in the order in which rows came.
All ids of a call are looked up at once: those that met another id's key go on to their next place together.

Rows lie in pages that cost nothing until a row is written: those of an anonymous mapping are zero and exist only once they
are written to. `torch.zeros` writes all of them, and NumPy asks for huge pages, of which every scattered row would claim a
whole one. So huge pages are switched off, except for small tables, which are soon filled, and whose rows are found twice as
fast in huge pages. Many rows are copied as blocks of bytes, which NumPy does faster than torch; for few torch is faster.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy
import numpy.typing
import torch

from polytempo.errors import UsageError
from polytempo.tables.initializers import mix

#: Bytes up to which a table may be committed as a whole.
SMALL = 128 << 20
#: Do not set memory aside for pages that may never be written.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)


def lazy_zeros(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of which the system holds only the pages that were written."""
    nbytes = rows * width * dtype.itemsize
    if not nbytes:
        return torch.zeros((rows, width), dtype=dtype)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except OSError as error:
        raise UsageError(f"{nbytes >> 30} GB for {rows} rows cannot be had ({error.strerror}); use rows=None") from None
    with suppress(OSError):  # a system that has no huge pages
        pages.madvise(mmap.MADV_HUGEPAGE if nbytes <= SMALL else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=rows * width).view(rows, width)


def grown(rows: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
    """The first `used` rows in room for `capacity`; the same tensor where it has that room."""
    if capacity <= rows.shape[0]:
        return rows
    larger = lazy_zeros(capacity, rows.shape[1], rows.dtype)
    larger[:used] = rows[:used]
    return larger


MANY = 4096
#: Rows of these sizes are plain numbers to NumPy; others are blocks.
NUMBERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def _items(rows: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """Each row of a contiguous tensor as one item."""
    size = rows.shape[1] * rows.element_size()
    items: numpy.ndarray[Any, Any] = rows.view(torch.uint8).numpy().view(NUMBERS.get(size, f"V{size}")).reshape(-1)
    return items


def gathered(whole: torch.Tensor, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The rows of these slots, which must be of the table."""
    if slots.numel() < MANY:
        return torch.index_select(whole, 0, slots, out=out)
    result = torch.empty((slots.numel(), whole.shape[1]), dtype=whole.dtype) if out is None else out
    numpy.take(_items(whole), slots.numpy(), out=_items(result), mode="clip")  # else `out` would be buffered
    return result


def scatter(whole: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows to slots, each of which stands once."""
    if slots.numel() < MANY:
        whole.index_copy_(0, slots, rows.to(whole.dtype))
    else:
        numpy.put(_items(whole), slots.numpy(), _items(rows.to(whole.dtype).contiguous()))


Int64s = numpy.typing.NDArray[numpy.int64]

#: Part of a map's places that may be taken.
LOAD = 0.6
FREE = -1


class RangeIndex:
    """The index of a bounded table: arithmetic, and a byte for each row that says whether it exists."""

    def __init__(self, rows: int, shard: int, shards: int) -> None:
        self.shard, self.shards = shard, shards
        self.capacity = max(0, -((shard - rows) // shards))
        self.count = 0
        self._exists = lazy_zeros(self.capacity, 1, torch.uint8).view(-1)

    def slots(self, ids: torch.Tensor) -> torch.Tensor:
        """Where these rows are, whether they exist or not."""
        return ids if self.shards == 1 else ids // self.shards

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        slots = self.slots(ids)
        return torch.where(self._exists.index_select(0, slots) != 0, slots, FREE)

    def touch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.slots(ids)
        fresh = self._exists.index_select(0, slots) == 0
        if bool(fresh.any()):
            new = slots[fresh].unique()
            self._exists[new] = 1
            self.count += new.numel()
        return slots, fresh

    def touch_slots(self, slots: slice) -> torch.Tensor:
        """Touch a run of slots; which of them came into being."""
        fresh: torch.Tensor = self._exists[slots] == 0
        self._exists[slots] = 1
        self.count += int(fresh.sum())
        return fresh

    def ids_of(self, slots: torch.Tensor) -> torch.Tensor:
        return slots * self.shards + self.shard

    def touched(self) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self._exists.nonzero().squeeze(1)
        return self.ids_of(slots), slots


class HashIndex:
    """The index of an unbounded table."""

    def __init__(self, shard: int, shards: int) -> None:
        self.shard, self.shards = shard, shards
        self.count = 0
        self._ids: Int64s = numpy.empty(64, dtype=numpy.int64)  # of each slot
        self._make_map(128)

    @property
    def capacity(self) -> int:
        """Slots that values should have room for."""
        return len(self._ids)

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._find(ids.numpy()))

    def touch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wanted: Int64s = ids.numpy()
        slots = self._find(wanted)
        fresh = slots == FREE
        if fresh.any():
            unknown = wanted[fresh]
            unique, firsts, back = numpy.unique(unknown, return_index=True, return_inverse=True)
            order = numpy.argsort(firsts)  # numbered in the order of their first mention
            numbers = numpy.empty(len(unique), dtype=numpy.int64)
            numbers[order] = numpy.arange(self.count, self.count + len(unique))
            self._append(unique[order])
            slots[fresh] = numbers[back]
        return torch.from_numpy(slots), torch.from_numpy(fresh)

    def ids_of(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._ids).index_select(0, slots)

    def touched(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids, slots = torch.from_numpy(self._ids[: self.count]).sort()
        return ids, slots

    def _append(self, ids: Int64s) -> None:
        """Give new ids the next slots."""
        start, end = self.count, self.count + len(ids)
        if end > len(self._ids):
            larger = numpy.empty(max(end, len(self._ids) * 3 // 2), dtype=numpy.int64)
            larger[:start] = self._ids[:start]
            self._ids = larger
        self._ids[start:end] = ids
        self.count = end
        if end > LOAD * len(self._keys):
            self._make_map(1 << int(end / LOAD).bit_length())
            start = 0
        self._insert(self._ids[start:end], numpy.arange(start, end))

    def _make_map(self, size: int) -> None:
        self._keys: Int64s = numpy.full(size, FREE, dtype=numpy.int64)
        self._slots: Int64s = numpy.empty(size, dtype=numpy.int64)

    def _paths(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """The place at which the search for each id begins, and its stride: odd, so that it meets every place."""
        words = mix(ids.astype(numpy.uint64))
        strides = (words >> numpy.uint64(32)) | numpy.uint64(1)
        return (words & numpy.uint64(len(self._keys) - 1)).astype(numpy.int64), strides.astype(numpy.int64)

    def _find(self, ids: Int64s) -> Int64s:
        found: Int64s = numpy.full(len(ids), FREE, dtype=numpy.int64)
        places, strides = self._paths(ids)
        rest = numpy.arange(len(ids))
        while len(rest):
            keys = self._keys[places]
            hit = keys == ids[rest]
            found[rest[hit]] = self._slots[places[hit]]
            on = ~hit & (keys != FREE)
            rest, strides = rest[on], strides[on]
            places = (places[on] + strides) & (len(self._keys) - 1)
        return found

    def _insert(self, ids: Int64s, slots: Int64s) -> None:
        """Enter ids that are not there yet, each once. Where several want one free place, the last written has it."""
        places, strides = self._paths(ids)
        while len(ids):
            free = self._keys[places] == FREE
            self._keys[places[free]] = ids[free]
            won = self._keys[places] == ids
            self._slots[places[won]] = slots[won]
            ids, slots, strides = ids[~won], slots[~won], strides[~won]
            places = (places[~won] + strides) & (len(self._keys) - 1)

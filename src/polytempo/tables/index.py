"""The index of a table: from the id of a row to its slot.

A bounded table needs no map: row `id` of shard `id % shards` is in slot `id // shards`. An unbounded one has an open
addressing map (double hashing over a power of two, no deletions) whose slots are numbered in the order in which rows came.
All ids of a call are looked up at once: those that met another id's key go on to their next place together.
"""

from __future__ import annotations

import numpy
import numpy.typing
import torch

from polytempo.tables.initializers import mix
from polytempo.tables.row_memory import lazy_zeros

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

    @property
    def nbytes(self) -> int:
        return self.capacity

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

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes + self._keys.nbytes + self._slots.nbytes

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

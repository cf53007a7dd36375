"""One shard of a table: its rows and their optimizer state in slots; pulls, updates, and checkpoints.

    ids  ->  slots (index)  ->  gathered rows  ->  rule  ->  scattered back

Reading never writes: a row without a push has no slot yet, and a pull computes its initial values. So a table of any size
costs the memory of the rows that were pushed to, and a checkpoint holds those alone. Rules compute in float32 at least; rows
of fewer bits are rounded once in each update.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from polytempo.errors import PeerError, UsageError
from polytempo.protocol.values import TableInfo
from polytempo.tables.index import HashIndex, RangeIndex, gathered, grown, lazy_zeros, scatter
from polytempo.tables.initializers import start_values
from polytempo.tables.routing import range_ids, range_slots
from polytempo.tables.row_batches import RowBatch, combined, squeezed
from polytempo.tables.row_batches import RowPush as RowPush
from polytempo.tables.row_optimizers import checked_hyper, rule
from polytempo.tables.validation import DTYPES, Checks

#: Clocks of a table without a bound have one key for all rows.
ONE_KEY = 1
NEWEST = 0  # the only "worker" of the clock of versions
Slots: TypeAlias = torch.Tensor | slice


class RowStore:
    """The rows of a shard in slots, with their optimizer state and, in a mirrored table, their versions."""

    def __init__(self, info: TableInfo, shard: int, shards: int, dtype: torch.dtype, wide: torch.dtype) -> None:
        self._info, self._shard, self._shards, self._wide = info, shard, shards, wide
        self.index = RangeIndex(info.rows, shard, shards) if info.rows > 0 else HashIndex(shard, shards)
        self.values = lazy_zeros(self.index.capacity, info.dim, dtype)
        self.state: dict[str, torch.Tensor] = {}  # made when a rule first needs it
        self.versions = lazy_zeros(self.index.capacity if info.mirrored else 0, 1, torch.int64)

    def columns(self) -> dict[str, torch.Tensor]:
        """All that is kept of a row, by its name in a checkpoint."""
        state = {f"state.{name}": rows for name, rows in self.state.items()}
        return {"values": self.values, **state, **({"versions": self.versions} if self._info.mirrored else {})}

    def initial(self, ids: torch.Tensor) -> torch.Tensor:
        """The initial values of these rows."""
        return start_values(self._info.start, self._info.seed, ids, self._info.dim, self.values.dtype)

    def touch(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots of these rows, which exist from now on."""
        before = self.index.count
        slots, fresh = self.index.touch(ids)
        capacity = self.index.capacity
        self.values = grown(self.values, before, capacity)
        self.state = {name: grown(rows, before, capacity) for name, rows in self.state.items()}
        if self._info.mirrored:
            self.versions = grown(self.versions, before, capacity)
        if self._info.start != "zeros" and bool(fresh.any()):
            self.values[slots[fresh]] = self.initial(ids[fresh])
        return slots

    def touch_span(self, start: int, stop: int) -> slice:
        """The same for a range of ids of a bounded table."""
        assert isinstance(self.index, RangeIndex)
        slots = range_slots(start, stop, self._shard, self._shards)
        fresh = self.index.touch_slots(slots)
        if self._info.start != "zeros" and bool(fresh.any()):
            ids = range_ids(start, stop, self._shard, self._shards)
            self.values[slots][fresh] = self.initial(ids[fresh])
        return slots

    def state_of(self, name: str, width: int) -> torch.Tensor:
        """One entry of the optimizer state, for all rows."""
        if name not in self.state:
            self.state[name] = lazy_zeros(self.index.capacity, width, self._wide)
        return self.state[name]


class TableShard:
    """The rows of `info` that live on one shard."""

    def __init__(self, info: TableInfo, shard: int, shards: int) -> None:
        self.checks = Checks(info, shard, shards)
        self.info, self.shard, self.shards = info, shard, shards
        self.rule, self.dtype = rule(info.rule), DTYPES[info.dtype]
        self.wide = torch.float32 if self.dtype.itemsize == 2 else self.dtype  #: in which rules compute
        self._clear()

    def _clear(self) -> None:
        self._store = RowStore(self.info, self.shard, self.shards, self.dtype, self.wide)
        self._changes = Changes()
        self._clocks, self._newest = (RangeClocks(self.info.rows or ONE_KEY) for _ in range(2))
        self.steps = 0  #: updates so far, with and without rows

    @property
    def count(self) -> int:
        """Rows that exist: those that were pushed to, filled or loaded."""
        return self._store.index.count

    # Reading.

    def pull(self, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The rows of these ids, in their order, in memory of their own or in `out`."""
        self.checks.ids(ids)
        store = self._store
        if isinstance(store.index, RangeIndex) and self.info.start == "zeros":
            return gathered(store.values, store.index.slots(ids), out)
        slots = store.index.find(ids)
        missing = slots < 0
        if not bool(missing.any()):
            return gathered(store.values, slots, out)
        result = torch.empty((ids.numel(), self.info.dim), dtype=self.dtype) if out is None else out
        result[~missing] = store.values[slots[~missing]]
        result[missing] = store.initial(ids[missing])
        return result

    def pull_range(self, start: int, stop: int) -> torch.Tensor:
        """This shard's rows of a range of ids, ascending."""
        self.checks.span(start, stop)
        if self.info.start == "zeros":
            return self._store.values[range_slots(start, stop, self.shard, self.shards)].clone()
        return self.pull(range_ids(start, stop, self.shard, self.shards))

    def changed_since(self, version: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids, ascending, and rows of a mirrored table that were changed after `version`; -1: all rows that exist."""
        if not self.info.mirrored:
            raise UsageError(f"table {self.info.name!r} is not mirrored and does not track changed rows; pull by id")
        slots = self._changes.since(version)
        if slots is None:
            slots = self._store.index.touched()[1]
            slots = slots[self._store.versions.view(-1).index_select(0, slots) > version]
        ids, order = self._store.index.ids_of(slots).sort()
        return ids, gathered(self._store.values, slots[order])

    def version_of(self, start: int, stop: int) -> int:
        """The newest version in which a push covered any of these ids; -1 for none."""
        self.checks.span(start, stop)
        return self._newest.highest(start, stop).get(NEWEST, -1)

    def clock(self, start: int, stop: int) -> dict[int, int]:
        """For each worker the step whose push has reached all these ids."""
        self.checks.span(start, stop)
        return self._clocks.lowest(start, stop)

    # Writing.

    def fill(self, ids: torch.Tensor, values: torch.Tensor, version: int = 0) -> None:
        """Set these rows; their optimizer state stays."""
        self.checks.rows(ids, values)
        rows = squeezed(ids, values, 1.0, "last")  # of several under one id the last
        self._set(self._store.touch(rows.ids), rows.values, version)

    def update(self, pushes: Sequence[RowPush], hyper: Mapping[str, float], rate: float, version: int) -> None:
        """One update with these pushes, whose rows the rule combines. Nothing is changed where one is refused.

        Each update counts as a step of the table: give also those that have no rows on this shard.
        """
        options = self._checked(pushes, hyper)
        if not pushes:
            return
        self.steps += 1
        spans = {push.span for push in pushes}
        total = combined([self._rows(push) for push in pushes], self.rule.combine)
        span = pushes[0].span if len(spans) == 1 else None
        slots = self._store.touch_span(*span) if span else self._store.touch(total.ids)
        self._apply(slots, total.values, {**options, "step": float(self.steps)}, rate, version)
        for push in pushes:
            if push.worker >= 0:  # a range stamps its ids; a list of ids stamps them all
                start, stop = push.span or (0, self._clocks.keys)
                self._clocks.set(push.worker, start, stop, push.step)
                self._newest.set(NEWEST, start, stop, version)

    def _checked(self, pushes: Sequence[RowPush], hyper: Mapping[str, float]) -> dict[str, float]:
        for push in pushes:
            self.checks.push(push)
        if pushes and sum(push.weight for push in pushes) <= 0:
            raise PeerError(f"table {self.info.name!r}: expected pushes of which one has a weight above 0, got none")
        try:
            return checked_hyper(self.info.rule, hyper)
        except UsageError as error:
            raise PeerError(f"table {self.info.name!r}: {error}") from None

    def _rows(self, push: RowPush) -> RowBatch:
        values = push.values.to(self.wide)
        if push.span is not None:
            return RowBatch(range_ids(*push.span, self.shard, self.shards), values, push.weight)
        assert push.ids is not None
        return squeezed(push.ids, values, push.weight, self.rule.combine)

    def _apply(self, slots: Slots, pushed: torch.Tensor, hyper: dict[str, float], rate: float, version: int) -> None:
        rows = _taken(self._store.values, slots).to(self.wide)
        kept = {name: self._store.state_of(name, width) for name, width in self.rule.state(self.info.dim, hyper).items()}
        state = {name: _taken(whole, slots) for name, whole in kept.items()}
        self.rule.apply(rows, state, pushed, hyper, rate)
        for name, whole in kept.items():
            _put(whole, slots, state[name])
        self._set(slots, rows, version)

    def _set(self, slots: Slots, rows: torch.Tensor, version: int) -> None:
        _put(self._store.values, slots, rows)
        if self.info.mirrored:
            self._store.versions[slots] = version
            self._changes.add(version, slots, self.count)

    # Checkpoints.

    def saved(self) -> dict[str, torch.Tensor]:
        """The rows that exist: their ids, ascending, values and optimizer state; and the count of updates."""
        ids, slots = self._store.index.touched()
        rows = {name: gathered(whole, slots) for name, whole in self._store.columns().items()}
        return {"ids": ids, "steps": torch.tensor([self.steps]), **rows}

    def saved_clocks(self) -> dict[str, Any]:
        """The clocks of all workers, as plain data."""
        return {"clocks": self._clocks.saved(), "versions": self._newest.saved()}

    def load(self, saved: Sequence[Mapping[str, torch.Tensor]], clocks: Mapping[str, Any] | None = None) -> None:
        """Load what any number of shards have saved, as far as it belongs to this shard; `clocks` is of any one of them."""
        parts = [self._own(part) for part in saved]
        self._clear()
        for part in parts:
            slots = self._store.touch(part["ids"])
            self._set(slots, part["values"], 0)
            for name in part:
                if name.startswith("state."):
                    _put(self._store.state_of(name.removeprefix("state."), part[name].shape[1]), slots, part[name])
            if self.info.mirrored:
                self._store.versions[slots] = part["versions"]
            self.steps = max(self.steps, int(part["steps"]))
        versions = self._store.versions
        self._changes.forget(int(versions.max()) if versions.numel() else -1)
        if clocks is not None:
            self._clocks.load(clocks["clocks"])
            self._newest.load(clocks["versions"])

    def set_state(self, ids: torch.Tensor, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Set the optimizer state of the rows that belong to this shard, and the count of updates."""
        own = (ids % self.shards == self.shard).nonzero().squeeze(1)
        self.checks.ids(ids[own])
        widths = {name: rows.shape[1] for name, rows in state.items() if rows.dim() == 2 and len(rows) == len(ids)}
        wanted = self.rule.state(self.info.dim, checked_hyper(self.info.rule, {}))
        if any(wanted.get(name) != widths.get(name) for name in state):
            raise PeerError(f"table {self.info.name!r}: expected state of widths {wanted}, got {widths}")
        slots = self._store.touch(ids[own])
        for name, rows in state.items():
            _put(self._store.state_of(name, rows.shape[1]), slots, rows[own])
        self.steps = steps

    def _own(self, part: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        needed = ("ids", "steps", "values", *(("versions",) if self.info.mirrored else ()))
        missing = [name for name in needed if name not in part]
        if missing:
            raise PeerError(f"table {self.info.name!r}: expected saved rows to have {missing[0]!r}, got {', '.join(part)}")
        own = (part["ids"] % self.shards == self.shard).nonzero().squeeze(1)
        rows = {name: whole if name == "steps" else whole.index_select(0, own) for name, whole in part.items()}
        self.checks.rows(rows["ids"], rows["values"])
        return rows


def _put(whole: torch.Tensor, slots: Slots, rows: torch.Tensor) -> None:
    """Write rows back; those of a run of slots may be the table's own memory, and need no copy."""
    if isinstance(slots, torch.Tensor):
        scatter(whole, slots, rows)
    elif whole[slots].data_ptr() != rows.data_ptr():
        whole[slots] = rows


def _taken(whole: torch.Tensor, slots: Slots) -> torch.Tensor:
    """A copy of these rows; of a run of slots the table's own memory."""
    return whole[slots] if isinstance(slots, slice) else gathered(whole, slots)


# Versions and clocks of a table: which rows changed since a version, and which step of each worker has reached which keys.
#
# `Changes`. A version for each slot would be enough, but reading it takes a pass over all rows. So the slots of the last
# updates are kept as lists too, for workers that lag by little; others are answered from the versions.
#
# `RangeClocks` are vector clocks for ranges of keys instead of single keys, after Li et al. (OSDI 2014):
#
#     keys      0        10        25          100
#     worker 0  |   7    |    9    |     7     |      set(0, 10, 25, 9) has cut one segment into three
#     worker 1  |            4                 |
#
# A push stamps its range; segments at its ends are split, those inside vanish. Memory grows with the number of distinct
# ranges, not of keys. Departs from the paper: neighbours with equal stamps are merged again.

#: Slots that are kept as lists, if a table is small; of a large one a part of its rows.
FEW = 1 << 16
PART = 8


class Changes:
    """The slots of the last updates, newest last."""

    def __init__(self) -> None:
        self._updates: deque[tuple[int, torch.Tensor]] = deque()
        self._kept = 0
        self._lost = -1  # lists are complete for what came after this version

    def add(self, version: int, slots: torch.Tensor | slice, rows: int) -> None:
        """These slots have changed, of a table of `rows` rows. Versions do not decrease."""
        limit = max(FEW, rows // PART)
        if isinstance(slots, slice):
            whole = slots.stop - slots.start > limit
            slots = torch.arange(0) if whole else torch.arange(slots.start, slots.stop)
            self._lost = version if whole else self._lost
        self._updates.append((version, slots.clone()))  # they may be the memory of a push
        self._kept += slots.numel()
        while self._updates and (self._kept > limit or self._updates[0][0] <= self._lost):
            self._lost, gone = max(self._lost, self._updates[0][0]), self._updates.popleft()[1]
            self._kept -= gone.numel()

    def forget(self, version: int) -> None:
        """Rows were changed up to this version in ways that are not listed here."""
        self._updates.clear()
        self._kept, self._lost = 0, version

    def since(self, version: int) -> torch.Tensor | None:
        """The slots that changed after a version, each once; nothing where it is too long ago to know."""
        if version < self._lost:
            return None
        later = [slots for at, slots in self._updates if at > version]
        return torch.cat(later).unique() if later else torch.arange(0)


#: The step of a worker that has never pushed there.
NEVER = -1


class RangeClocks:
    """For each worker a step for each of the keys from 0 to `keys`, as segments."""

    def __init__(self, keys: int) -> None:
        if keys < 1:
            raise UsageError(f"expected at least 1 key, got {keys}")
        self.keys = keys
        self._marks: dict[int, tuple[list[int], list[int]]] = {}  # where segments begin, and their steps

    def set(self, worker: int, start: int, stop: int, step: int) -> None:
        """This worker's `step` has reached the keys from `start` to `stop`."""
        self._check(start, stop)
        if start == stop:
            return
        starts, steps = self._marks.setdefault(worker, ([0], [NEVER]))
        first, last = bisect_left(starts, start), bisect_left(starts, stop)
        after = steps[last - 1]  # goes on where the stamp ends
        new = [(start, step)]
        if stop < self.keys and (last == len(starts) or starts[last] != stop):
            new.append((stop, after))
        starts[first:last] = [place for place, _ in new]
        steps[first:last] = [value for _, value in new]
        for place in range(min(first + len(new), len(starts) - 1), max(first, 1) - 1, -1):
            if steps[place] == steps[place - 1]:
                del starts[place], steps[place]

    def lowest(self, start: int, stop: int) -> dict[int, int]:
        """For each worker the step that has reached all these keys."""
        return {worker: min(steps) for worker, steps in self._within(start, stop).items()}

    def highest(self, start: int, stop: int) -> dict[int, int]:
        """For each worker the newest step that has reached any of these keys."""
        return {worker: max(steps) for worker, steps in self._within(start, stop).items()}

    def segments(self, worker: int) -> list[tuple[int, int, int]]:
        """Its segments in order: start, stop, step. They cover all keys."""
        starts, steps = self._marks.get(worker, ([0], [NEVER]))
        return list(zip(starts, [*starts[1:], self.keys], steps, strict=True))

    def saved(self) -> list[list[int]]:
        """As plain data: worker, start, stop, step, for all segments that were reached."""
        return [
            [worker, *segment] for worker in sorted(self._marks) for segment in self.segments(worker) if segment[2] != NEVER
        ]

    def load(self, saved: Sequence[Sequence[int]]) -> None:
        """Load what `saved` returned."""
        self._marks.clear()
        for worker, start, stop, step in saved:
            self.set(worker, start, stop, step)

    def _within(self, start: int, stop: int) -> dict[int, list[int]]:
        self._check(start, stop)
        if start == stop:
            return {}
        return {
            worker: steps[bisect_right(starts, start) - 1 : bisect_left(starts, stop)]
            for worker, (starts, steps) in self._marks.items()
        }

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.keys:
            raise UsageError(f"expected a range inside 0 to {self.keys}, got {start} to {stop}")

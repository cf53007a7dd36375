"""One shard of a table: its rows and their optimizer state in slots; pulls, updates, and checkpoints.

    ids  ->  slots (index)  ->  gathered rows  ->  rule  ->  scattered back

Reading never writes: a row without a push has no slot yet, and a pull computes its initial values. So a table of any size
costs the memory of the rows that were pushed to, and a checkpoint holds those alone. Rules compute in float32 at least; rows
of fewer bits are rounded once in each update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from polytempo.errors import PeerError, UsageError
from polytempo.protocol.values import TableInfo
from polytempo.tables.clocks import Changes, RangeClocks
from polytempo.tables.index import HashIndex, RangeIndex
from polytempo.tables.initializers import start_values
from polytempo.tables.routing import range_ids, range_slots
from polytempo.tables.row_batches import RowBatch, combined, squeezed
from polytempo.tables.row_batches import RowPush as RowPush
from polytempo.tables.row_memory import gathered, grown, lazy_zeros, scatter
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

    @property
    def nbytes(self) -> int:
        """Memory of the rows that exist and of the index; the system holds more, by parts of pages."""
        width = sum(int(rows.shape[1]) * int(rows.element_size()) for rows in self.columns().values())
        return self.index.nbytes + self.index.count * width

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
        self._grow(before)
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

    def _grow(self, used: int) -> None:
        capacity = self.index.capacity
        self.values = grown(self.values, used, capacity)
        self.state = {name: grown(rows, used, capacity) for name, rows in self.state.items()}
        if self._info.mirrored:
            self.versions = grown(self.versions, used, capacity)


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

    @property
    def nbytes(self) -> int:
        """Memory of the rows that exist and of the index."""
        return self._store.nbytes

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
        return self._newest.highest(*self._keys(start, stop)).get(NEWEST, -1)

    def clock(self, start: int, stop: int) -> dict[int, int]:
        """For each worker the step whose push has reached all these ids."""
        return self._clocks.lowest(*self._keys(start, stop))

    # Writing.

    def fill(self, ids: torch.Tensor, values: torch.Tensor, version: int = 0) -> None:
        """Set these rows; their optimizer state stays."""
        self.checks.rows(ids, values)
        unique, rows = squeezed_last(ids, values)
        self._set(self._store.touch(unique), rows, version)

    def update(self, pushes: Sequence[RowPush], hyper: Mapping[str, float], rate: float, version: int) -> None:
        """One update with these pushes, whose rows the rule combines. Nothing is changed where one is refused.

        Each update counts as a step of the table: give also those that have no rows on this shard.
        """
        options = self._checked(pushes, hyper)
        if not pushes:
            return
        self.steps += 1
        how = self.rule.combine
        spans = {push.span for push in pushes}
        total = combined([self._rows(push, how) for push in pushes], how)
        span = pushes[0].span if len(spans) == 1 else None
        slots = self._store.touch_span(*span) if span else self._store.touch(total.ids)
        self._apply(slots, total.values, {**options, "step": float(self.steps)}, rate, version)
        for push in pushes:
            self._stamp(push, version)

    def _checked(self, pushes: Sequence[RowPush], hyper: Mapping[str, float]) -> dict[str, float]:
        for push in pushes:
            self.checks.push(push)
        if pushes and sum(push.weight for push in pushes) <= 0:
            raise PeerError(f"table {self.info.name!r}: expected pushes of which one has a weight above 0, got none")
        try:
            return checked_hyper(self.info.rule, hyper)
        except UsageError as error:
            raise PeerError(f"table {self.info.name!r}: {error}") from None

    def _rows(self, push: RowPush, how: str) -> RowBatch:
        values = push.values.to(self.wide)
        if push.span is not None:
            return RowBatch(range_ids(*push.span, self.shard, self.shards), values, push.weight)
        assert push.ids is not None
        return squeezed(push.ids, values, push.weight, how)

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

    # Clocks.

    def _keys(self, start: int, stop: int) -> tuple[int, int]:
        self.checks.span(start, stop)
        return start, stop

    def _stamp(self, push: RowPush, version: int) -> None:
        """A range stamps its ids; a list of ids stamps them all."""
        if push.worker < 0:
            return
        start, stop = push.span or (0, self._clocks.keys)
        self._clocks.set(push.worker, start, stop, push.step)
        self._newest.set(NEWEST, start, stop, version)

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
        """The rows of a saved part that belong to this shard."""
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


def squeezed_last(ids: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each id once; of several rows the last."""
    rows = squeezed(ids, values, 1.0, "last")
    return rows.ids, rows.values

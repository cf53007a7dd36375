"""Versions and clocks of a table: which rows changed since a version, and which step of each worker has reached which keys.

`Changes`. A version for each slot would be enough, but reading it takes a pass over all rows. So the slots of the last
updates are kept as lists too, for workers that lag by little; others are answered from the versions.

`RangeClocks` are vector clocks for ranges of keys instead of single keys, after Li et al. (OSDI 2014):

    keys      0        10        25          100
    worker 0  |   7    |    9    |     7     |      set(0, 10, 25, 9) has cut one segment into three
    worker 1  |            4                 |

A push stamps its range; segments at its ends are split, those inside vanish. Memory grows with the number of distinct
ranges, not of keys. Departs from the paper: neighbours with equal stamps are merged again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence

import torch

from polytempo.errors import UsageError

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

    def get(self, worker: int, key: int) -> int:
        """The step that has reached this key, or -1."""
        self._check(key, key + 1)
        starts, steps = self._marks.get(worker, ([0], [NEVER]))
        return steps[bisect_right(starts, key) - 1]

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

"""The queue of an epoch's samples, from which workers take as many as they manage.

Places in the epoch's order are leased in ranges, lowest first. What a worker has trained on (an applied push says which
places) is done; what was abandoned, discarded or held by a worker that left returns to the queue and is leased again first.
So in an epoch every place is done exactly once, however uneven the workers are, and what a checkpoint has not done is leased
after a resume.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

#: Places from start to stop, without stop.
Range = tuple[int, int]


class SampleQueue:
    """One epoch of one sampler."""

    def __init__(self, length: int, done: Iterable[Range] = ()) -> None:
        self.length = length
        self.done: list[Range] = merged(done)
        self._free: list[Range] = without([(0, length)], self.done)
        self._leased: dict[int, list[Range]] = {}

    def take(self, worker: int, count: int) -> list[Range]:
        """Lease up to this many places to a worker; none where all are leased or done."""
        taken: list[Range] = []
        while count and self._free:
            start, stop = self._free[0]
            end = min(stop, start + count)
            self._free[0:1] = [(end, stop)] if end < stop else []
            taken.append((start, end))
            count -= end - start
        if taken:
            self._leased[worker] = merged([*self._leased.get(worker, ()), *taken])
        return taken

    def finish(self, worker: int, ranges: Iterable[Range]) -> None:
        """A worker has trained on these places of its lease."""
        ranges = list(ranges)
        self._leased[worker] = without(self._leased.get(worker, []), ranges)
        self.done = merged([*self.done, *ranges])

    def held(self, worker: int, among: Iterable[Range] | None = None) -> list[Range]:
        """The places that a worker has leased; `among`: of these only."""
        leased = self._leased.get(worker, [])
        return leased if among is None else without(leased, without(leased, among))

    def give_back(self, worker: int, ranges: Iterable[Range] | None = None) -> None:
        """A worker will not train on these places of its lease, or on any of it: they are leased again."""
        back = self.held(worker, ranges)
        self._leased[worker] = without(self._leased.get(worker, []), back)
        for each in back:
            insort(self._free, each)
        self._free = merged(self._free)

    @property
    def left(self) -> int:
        """The number of places that can be leased, for now."""
        return sum(stop - start for start, stop in self._free)

    @property
    def is_done(self) -> bool:
        """Are all places done?"""
        return self.done == [(0, self.length)]

    @property
    def is_empty(self) -> bool:
        """Is there nothing to lease, for now?"""
        return not self._free


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same places as few ranges, ascending."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        elif start < stop:
            result.append((start, stop))
    return result


def without(ranges: Iterable[Range], removed: Iterable[Range]) -> list[Range]:
    """The places of the first that are not in the second."""
    result, gone = [], merged(removed)
    for start, stop in merged(ranges):
        for first, last in gone:
            if last <= start or first >= stop:
                continue
            if first > start:
                result.append((start, first))
            start = max(start, last)
        if start < stop:
            result.append((start, stop))
    return result

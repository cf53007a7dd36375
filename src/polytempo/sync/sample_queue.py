"""The queue of an epoch's samples, from which workers take as many as they manage.

Places in the epoch's order are leased in ranges, lowest first. What a worker has trained on (an applied push says which
places) is done; what was abandoned, discarded or held by a worker that left returns to the queue and is leased again first.
So in an epoch every place is done exactly once, however uneven the workers are, and what a checkpoint has not done is leased
after a resume.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable
from typing import TypeVar

#: Places from start to stop, without stop.
Range = tuple[int, int]
Key = TypeVar("Key", bound=Hashable)


class SampleQueue:
    """One epoch of one sampler."""

    def __init__(self, length: int, done: Iterable[Range] = ()) -> None:
        self.length = length
        self.done: list[Range] = merged(done)
        self._free: list[Range] = without([(0, length)], self.done)
        self._leased: dict[int, list[Range]] = {}

    def take(self, worker: int, count: int) -> list[Range]:
        """Lease up to this many places to a worker; none where all are leased or done."""
        taken, self._free = split(self._free, count)
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
        return size_of(self._free)

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


def split(ranges: list[Range], count: int) -> tuple[list[Range], list[Range]]:
    """The first places of these ranges, up to `count`, and the rest."""
    for index, (start, stop) in enumerate(ranges):
        if stop - start > count:
            first = [*ranges[:index], (start, start + count)] if count else ranges[:index]
            return first, [(start + count, stop), *ranges[index + 1 :]]
        count -= stop - start
    return ranges, []


def size_of(ranges: Iterable[Range]) -> int:
    """The number of places."""
    return sum(stop - start for start, stop in ranges)


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


def gathered(places: Iterable[tuple[Key, Iterable[Range]]]) -> dict[Key, list[Range]]:
    """The places under each key."""
    found: dict[Key, list[Range]] = {}
    for key, ranges in places:
        found.setdefault(key, []).extend(ranges)
    return {key: merged(ranges) for key, ranges in found.items()}

"""Shares of a joint batch by speed: how fast each worker is, which share that gives it, and how a batch is cut by shares.

    speed       of a worker: the median of `work / computed` over its last rounds, so that one stall does not move it
    weights     the shares that make all workers finish at the same time, relative to an even share, within bounds
    cut         whole samples (or micro-batches) by weights: largest remainder, at least one each
    cut by cost samples of unequal cost (sequences of unequal length): each worker gets cost in proportion to its weight

Pure and exact: all workers compute the same cut from the same weights, without a message.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

#: (rank, share relative to an even one), in order of rank.
ShareWeights = tuple[tuple[int, float], ...]

#: Rounds over which the median of a worker's speed is taken: a new speed shows after three.
ROUNDS = 5
#: Digits of a weight: finer differences are noise.
DIGITS = 3


class WorkerSpeeds:
    """The speed of each worker, from what it did in its last rounds."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}

    def add(self, worker: int, work: float | None, computed: float | None) -> None:
        """A worker did this work in these seconds of its own."""
        if work and computed and computed > 0:
            self._seen.setdefault(worker, deque(maxlen=ROUNDS)).append(work / computed)

    def forget(self, members: Collection[int]) -> None:
        """Only these workers are there."""
        self._seen = {worker: seen for worker, seen in self._seen.items() if worker in members}

    def of(self, members: Iterable[int]) -> dict[int, float] | None:
        """The speed of each of these, or None while one is unknown."""
        speeds = {worker: median(self._seen[worker]) for worker in members if worker in self._seen}
        return speeds if len(speeds) == len(list(members)) else None


def weights_by_speed(speeds: Mapping[int, float], least: float, most: float) -> ShareWeights:
    """Shares in proportion to speed, each between `least` and `most` even shares; they are 1 on average."""
    count = len(speeds)
    fixed: dict[int, float] = {}
    free = dict(speeds)
    while free:  # those at a bound are taken out, and the rest is shared anew
        left = count - sum(fixed.values())
        total = sum(free.values())
        shares = {worker: left * speed / total for worker, speed in free.items()}
        beyond = {worker: most for worker, share in shares.items() if share > most}
        beyond = beyond or {worker: least for worker, share in shares.items() if share < least}
        if not beyond:
            fixed |= shares
            break
        fixed |= beyond
        free = {worker: speed for worker, speed in free.items() if worker not in beyond}
    return tuple((worker, round(fixed[worker], DIGITS)) for worker in sorted(fixed))


def round_time(weights: ShareWeights, speeds: Mapping[int, float]) -> float:
    """How long a round takes with these weights, relative to an even share at speed 1: as long as its slowest worker."""
    return max(weight / speeds[worker] for worker, weight in weights if worker in speeds)


def cut(total: int, weights: ShareWeights) -> dict[int, int]:
    """Cut a number of samples by weights: whole numbers that add up to it (largest remainder, lower ranks first), and at
    least one for each worker where there are enough."""
    whole = sum(weight for _, weight in weights)
    spare = min(total, len(weights))  # one for each comes first
    exact = {worker: (total - spare) * weight / whole for worker, weight in weights}
    parts = {worker: int(share) for worker, share in exact.items()}
    missing = total - spare - sum(parts.values())
    for worker in sorted(exact, key=lambda worker: (parts[worker] - exact[worker], worker))[:missing]:
        parts[worker] += 1
    for worker, _ in weights[:spare]:
        parts[worker] += 1
    return parts


def cut_by_cost(costs: Sequence[float], weights: ShareWeights) -> dict[int, list[int]]:
    """Deal out samples so that each worker's cost is in proportion to its weight: the most expensive first, each to the
    worker that would have finished it first. The places of each worker's samples, ascending; at least one each."""
    heap = [(0.0, worker, weight) for worker, weight in weights]
    dealt: dict[int, list[int]] = {worker: [] for worker, _ in weights}
    order = sorted(range(len(costs)), key=lambda place: (-costs[place], place))
    for place in order:
        finish = min(heap, key=lambda entry: (entry[0] + costs[place] / entry[2], entry[1]))
        heap.remove(finish)
        taken, worker, weight = finish
        heapq.heappush(heap, (taken + costs[place] / weight, worker, weight))
        dealt[worker].append(place)
    for worker in [worker for worker, places in dealt.items() if not places]:
        richest = max(dealt, key=lambda other: (len(dealt[other]), -other))
        if len(dealt[richest]) > 1:
            dealt[worker].append(dealt[richest].pop())  # the cheapest of its samples
    return {worker: sorted(places) for worker, places in dealt.items()}

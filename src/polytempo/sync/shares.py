"""Shares of a joint batch by speed: how fast each worker is, which share that gives it, and how a batch is cut by shares.

    speed       of a worker: the median of `work / computed` over its last rounds, so that one stall does not move it
    weights     the shares that make all workers finish at the same time, relative to an even share, within bounds
    cut         whole samples (or micro-batches) by weights: largest remainder, at least one each
    cut by cost samples of unequal cost (sequences of unequal length): each worker gets cost in proportion to its weight

Pure and exact: all workers compute the same cut from the same weights, without a message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

from polytempo.summation import in_order

#: (rank, share relative to an even one), in order of rank.
ShareWeights = tuple[tuple[int, float], ...]

#: Rounds over which the median of a worker's speed is taken: a new speed shows after three.
ROUNDS = 5
#: Digits of a weight: finer differences are noise.
DIGITS = 3


def even(members: Iterable[int]) -> ShareWeights:
    """The same share for each of these."""
    return tuple((worker, 1.0) for worker in sorted(members))


class WorkerSpeeds:
    """The speed of each worker, from what it did in its last rounds."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}

    def add(self, worker: int, work: float | None, computed: float | None) -> None:
        """A worker did this work in these seconds of its own. Nothing, or no number of seconds, says nothing."""
        if work and computed and 0 < work < math.inf and 0 < computed < math.inf:
            self._seen.setdefault(worker, deque(maxlen=ROUNDS)).append(work / computed)

    def forget(self, members: Collection[int]) -> None:
        """Only these workers are there."""
        for worker in [worker for worker in self._seen if worker not in members]:
            del self._seen[worker]

    def of(self, members: Iterable[int]) -> dict[int, float]:
        """The speed of each of these. One that is unknown is taken to be as fast as the others are on average; where all are
        unknown, there is none."""
        known = {worker: median(self._seen[worker]) for worker in members if worker in self._seen}
        if not known:
            return {}
        average = in_order(known.values()) / len(known)
        return {worker: known.get(worker, average) for worker in members}


def weights_by_speed(speeds: Mapping[int, float], least: float, most: float) -> ShareWeights:
    """Shares in proportion to speed, each between `least` and `most` even shares; they are 1 on average.

    A share is `factor * speed`, within the bounds. As the factor grows from 0 on, each share comes off the lower bound at
    one moment and is at the upper one from a later moment on. Between two such moments the sum of all shares grows evenly,
    so the factor at which it is right is found by going through them in order.
    """
    count = len(speeds)
    off_lower = [(least / speed, speed) for speed in speeds.values()]
    at_upper = [(most / speed, -speed) for speed in speeds.values()]
    factor, total, growth = 0.0, least * count, 0.0
    for moment, change in sorted([*off_lower, *at_upper]):
        if growth > 0 and total + growth * (moment - factor) >= count:
            break
        factor, total, growth = moment, total + growth * (moment - factor), growth + change
    factor += max(count - total, 0.0) / growth if growth > 0 else 0.0
    return tuple((worker, round(min(max(factor * speeds[worker], least), most), DIGITS)) for worker in sorted(speeds))


def round_time(weights: ShareWeights, speeds: Mapping[int, float]) -> float:
    """How long a round takes with these weights, relative to an even share at speed 1: as long as its slowest worker."""
    return max(weight / speeds[worker] for worker, weight in weights)


def cut(total: int, weights: ShareWeights) -> dict[int, int]:
    """Whole parts of `total` in proportion to the weights, by largest remainder; they add up to it.

    At least one for each worker where there are enough: the workers that pay for it are those with the most above their
    proportion. So every part is within one of its proportion, but for those.
    """
    whole = in_order(weight for _, weight in weights)
    exact = {worker: total * weight / whole for worker, weight in weights}
    enough = total >= len(weights)
    parts = {worker: max(int(share), 1) if enough else int(share) for worker, share in exact.items()}
    missing = total - sum(parts.values())
    for worker in sorted(exact, key=lambda worker: (parts[worker] - exact[worker], worker))[: max(missing, 0)]:
        parts[worker] += 1
    for _ in range(-missing):
        several = [worker for worker in parts if parts[worker] > 1]
        parts[max(several, key=lambda worker: (parts[worker] - exact[worker], worker))] -= 1
    return parts


def cut_by_cost(costs: Sequence[float], weights: ShareWeights) -> dict[int, list[int]]:
    """Deal out samples so that each worker's cost is in proportion to its weight: the most expensive first, each to the
    worker that will have finished it first (LPT; Gonzalez, Ibarra and Sahni 1977: at most 2P/(P+1) of the best possible).

    At least one each, where there are enough: a worker without any takes the cheapest sample of the worker that has the
    most samples. The time is that of samples times workers: which of two workers finishes a sample first depends on its
    cost, so that no order of the workers holds from one sample to the next.

    Returns:
        The places of each worker's samples, ascending.
    """
    ranks, speeds = [worker for worker, _ in weights], [weight for _, weight in weights]
    everyone = range(len(ranks))
    busy = [0.0] * len(ranks)
    dealt: list[list[int]] = [[] for _ in ranks]
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        cost, first, soonest = costs[place], 0, math.inf
        for index in everyone:
            finish = busy[index] + cost / speeds[index]
            if finish < soonest:
                first, soonest = index, finish
        busy[first] = soonest
        dealt[first].append(place)
    for places in dealt if len(costs) >= len(ranks) else ():
        if not places:
            places.append(max(dealt, key=len).pop())
    return {worker: sorted(places) for worker, places in zip(ranks, dealt, strict=True)}

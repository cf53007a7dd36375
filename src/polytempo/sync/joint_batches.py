"""How an epoch is cut in joint batches, and each of them in shares, whatever the shares of the workers are.

    batches         joint batch k of the epoch is cut in shares, one for each worker, by samples or by predicted cost
    micro-batches   the epoch is cut in micro-batches of equal size, and a joint batch is a number of these; a share is one
                    micro-batch after the other. In an epoch only the last may be short, and it is the last of its worker

Joint batch k has units k * B to (k + 1) * B. In each of them every worker gets at least one, so that no loader meets an
empty batch: a rest that is smaller than the number of workers goes with the joint batch before it. Where an epoch, or what
is left of one, has fewer units than workers, they are used twice: `unit % count`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from polytempo.errors import UsageError
from polytempo.sync.sample_queue import Range, merged, size_of
from polytempo.sync.shares import ShareWeights, cut, cut_by_cost

#: The cost of a sample, by its index in the data set.
SampleCost = Callable[[int], float]
#: A batch of one worker: places of the epoch's order, and what they are expected to cost.
DealtPlaces = tuple[tuple[Range, ...], float]


def checked_cost(cost: SampleCost) -> SampleCost:
    """The same, asked once for each sample; `UsageError` where it gives no number from 0 on."""

    @cache
    def of(index: int) -> float:
        known = float(cost(index))
        if not 0 <= known < math.inf:
            raise UsageError(f"expected cost(index) to return a number from 0 on, got {known} for sample {index}")
        return known

    return of


@dataclass(frozen=True)
class BatchShape:
    """How a sampler cuts batches."""

    each: int  #: samples of a micro-batch, or of a worker's mean batch; 0: a loader makes micro-batches of single samples
    micro: int  #: micro-batches of a worker in a joint batch, on average; 0: a share is one batch
    drop_last: bool

    def units(self, length: int) -> int:
        """What joint batches are cut of: samples or micro-batches."""
        if not self.micro:
            return length
        return length // self.each if self.drop_last else math.ceil(length / self.each)

    def joint_batches(self, length: int, workers: int) -> list[Range]:
        """The joint batches of an epoch, in units; beyond the last only where there are fewer units than workers."""
        count, joint = self.units(length), (self.micro or self.each) * workers
        whole, rest = divmod(count, joint)
        batches = [(number * joint, (number + 1) * joint) for number in range(whole)]
        if not rest or (self.drop_last and not self.micro):
            return batches
        if rest >= workers:
            return [*batches, (whole * joint, count)]
        if batches:
            return [*batches[:-1], (batches[-1][0], count)]
        return [] if self.drop_last else [(0, workers)]


class EpochCut:
    """What is left of an epoch's order, as it is cut. Without `costs` a sample costs 1."""

    def __init__(self, order: Sequence[int], shape: BatchShape, costs: SampleCost | None = None) -> None:
        self.order, self.shape, self._costs = order, shape, costs
        self._joint: list[Range] | None = None

    @property
    def leasable(self) -> int:
        """The places that are leased, where workers take as many as they manage."""
        each, length = self.shape.each, len(self.order)
        return length // each * each if self.shape.drop_last and each else length

    def share(self, number: int, rank: int, workers: int, weights: ShareWeights) -> list[DealtPlaces]:
        """A worker's share of a joint batch, by weights of all that are there; none at the end of the epoch."""
        if self._joint is None:
            self._joint = self.shape.joint_batches(len(self.order), workers) if self.order else []
        if number >= len(self._joint):
            return []
        start, stop = self._joint[number]
        own: Iterable[int]
        if self._costs is not None:
            costs = [self.cost([self._span(unit)]) for unit in range(start, stop)]
            own = (start + unit for unit in cut_by_cost(costs, weights).get(rank, []))
        else:
            counts = cut(stop - start, weights)
            before = start + sum(counts[worker] for worker, _ in weights if worker < rank)
            own = range(before, before + counts.get(rank, 0))
        spans = [self._span(unit) for unit in own]
        batches = [(span,) for span in spans] if self.shape.micro else [tuple(merged(spans))] if spans else []
        return [(places, self.cost(places)) for places in batches]

    def _span(self, unit: int) -> Range:
        """The places of a sample or of a micro-batch."""
        each = self.shape.each if self.shape.micro else 1
        start = unit % self.shape.units(len(self.order)) * each
        return start, min(start + each, len(self.order))

    def cost(self, places: Iterable[Range]) -> float:
        """What these places cost."""
        if self._costs is None:
            return float(size_of(places))
        return sum(self._costs(self.order[place]) for start, stop in places for place in range(start, stop))

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

from polytempo.errors import UsageError
from polytempo.sync.sample_queue import Range, merged, size_of
from polytempo.sync.shares import ShareWeights, cut, cut_by_cost

#: The cost of a sample, by its index in the data set.
SampleCost = Callable[[int], float]
#: A batch of one worker: places of the epoch's order, and what they are expected to cost.
Batch = tuple[tuple[Range, ...], float]


def joint_batches(count: int, joint: int, workers: int, drop_last: bool = False) -> list[Range]:
    """Cut units, samples or micro-batches, into joint batches.

    Args:
        count: How many there are.
        joint: Those of a joint batch.
        workers: Each of them gets at least one in each.
        drop_last: Leave out a last joint batch that is smaller than the others.

    Returns:
        From where to where each goes; beyond `count` only where there are fewer units than workers.
    """
    whole, rest = divmod(count, joint)
    batches = [(number * joint, (number + 1) * joint) for number in range(whole)]
    if not rest or drop_last:
        return batches
    if rest >= workers:
        return [*batches, (whole * joint, count)]
    if batches:
        return [*batches[:-1], (batches[-1][0], count)]
    return [(0, workers)]


class CostTable:
    """What samples are expected to cost, asked once for each."""

    def __init__(self, cost: SampleCost) -> None:
        self._cost, self._known = cost, dict[int, float]()

    def of(self, index: int) -> float:
        """The cost of a sample; `UsageError` where it is no number from 0 on."""
        known = self._known.get(index)
        if known is None:
            known = float(self._cost(index))
            if not 0 <= known < math.inf:
                raise UsageError(f"expected cost(index) to return a number from 0 on, got {known} for sample {index}")
            self._known[index] = known
        return known


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
        """The joint batches of an epoch, in samples or micro-batches."""
        count = self.units(length)
        if not self.micro:
            return joint_batches(count, self.each * workers, workers, self.drop_last)
        return [] if self.drop_last and count < workers else joint_batches(count, self.micro * workers, workers)


class EpochCut:
    """What is left of an epoch's order, as it is cut.

    Args:
        order: The samples, in the order of the epoch.
        shape: How batches are cut.
        costs: What samples cost; None: 1 each.
    """

    def __init__(self, order: Sequence[int], shape: BatchShape, costs: CostTable | None = None) -> None:
        self.order, self.shape, self._costs = order, shape, costs
        self._joint: list[Range] | None = None

    @property
    def leasable(self) -> int:
        """The places that are leased, where workers take as many as they manage."""
        each, length = self.shape.each, len(self.order)
        return length // each * each if self.shape.drop_last and each else length

    def share(self, number: int, rank: int, workers: int, weights: ShareWeights) -> list[Batch]:
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
        return sum(self._costs.of(self.order[place]) for start, stop in places for place in range(start, stop))

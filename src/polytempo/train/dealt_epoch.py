"""One pass of a sampler whose batches are dealt: cut from the joint batch by weights, or leased (`session/dealing.py`).

batches         joint batch k of the epoch is cut in shares, one for each worker, by samples or by predicted cost
micro-batches   the epoch is cut in micro-batches of equal size, and a joint batch is a number of these; a share is one
                micro-batch after the other. In an epoch only the last may be short, and it is the last of its worker
leases          micro-batches of places that the sequencer leases, until none are left
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from polytempo.errors import UsageError
from polytempo.session.dealing import Dealing, DealtBatch
from polytempo.sync.joint_batches import joint_batches, ranges_of
from polytempo.sync.sample_queue import Range
from polytempo.sync.shares import ShareWeights, cut, cut_by_cost
from polytempo.train.epoch_order import EpochOrder

#: The cost of a sample, by its index in the data set.
SampleCost = Callable[[int], float]


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

    def places(self, length: int) -> int:
        """What joint batches are cut of: samples or micro-batches."""
        if not self.micro:
            return length
        return length // self.each if self.drop_last else math.ceil(length / self.each)

    def joint_batches(self, length: int, workers: int) -> list[Range]:
        """The joint batches of an epoch, in samples or micro-batches."""
        count = self.places(length)
        if not self.micro:
            return joint_batches(count, self.each * workers, workers, self.drop_last)
        return [] if self.drop_last and count < workers else joint_batches(count, self.micro * workers, workers)


class DealtEpoch:
    """What is left of an epoch, as this worker goes through it once.

    Args:
        dealing: The worker's.
        order: The samples, in the order of the epoch.
        shape: How batches are cut.
        costs: What samples cost; None: 1 each.
        orders: Knows the orders of other epochs, for places that return too late for theirs.
    """

    def __init__(
        self,
        dealing: Dealing,
        order: Sequence[int],
        shape: BatchShape,
        costs: CostTable | None,
        orders: EpochOrder | None = None,
    ) -> None:
        self._dealing, self._order, self._shape, self._costs, self._orders = dealing, order, shape, costs, orders
        self._before: dict[int, Sequence[int]] = {}  # the orders of earlier epochs
        self._joint = shape.joint_batches(len(order), dealing.size) if order and dealing.take is None else []

    def batches(
        self,
        sampler: str,
        epoch: int,
        trains: Callable[[], bool],
        ended: Callable[[int, Callable[[], bool]], None],
        as_stream: bool = False,
    ) -> Iterator[list[int]]:
        """The indices of each batch.

        Args:
            sampler: Its name.
            epoch: The epoch.
            trains: Are steps made of what is drawn now?
            ended: Called at the end of a whole pass with the epoch, and a function that tells whether it was trained on.
            as_stream: A loader makes batches of single indices again. Where places are not leased, one that is short is
                the last.
        """
        holders: list[weakref.ref[Iterator[list[int]]]] = []
        found = self._drawn(sampler, epoch, trains, ended, as_stream, holders)
        holders.append(weakref.ref(found))
        return found

    def _drawn(
        self,
        sampler: str,
        epoch: int,
        trains: Callable[[], bool],
        ended: Callable[[int, Callable[[], bool]], None],
        as_stream: bool,
        holders: Sequence[weakref.ref[Iterator[list[int]]]],
    ) -> Iterator[list[int]]:
        dealing, leases = self._dealing, self._dealing.take is not None and trains()
        one, complete = dealing.begin(sampler, epoch, self._length if leases else len(self._order)), False
        one.held_by = holders[0]
        if leases:
            one.singles, one.fixed = as_stream or not self._shape.each, self._shape.each > 0
            one.each = self._shape.each or one.each
            one.earlier.extend((old, len(order)) for old, order in self._earlier(sampler, epoch).items())
        try:
            while True:
                if leases:
                    batch = dealing.lease(one, self._shape.each, self._cost_of)
                else:
                    batch = dealing.draw(one, self._share, trains())
                if batch is None:
                    break
                if self._orders is not None and trains():
                    self._orders.drawing()
                order = self._order if batch.epoch is None else self._before[batch.epoch]
                yield [order[place] for start, stop in batch.places for place in range(start, stop)]
                if as_stream and not leases and batch.samples < self._shape.each:
                    break
            complete = True
            ended(epoch, lambda: one.trained > 0 or not self._order)
        finally:
            dealing.end(one, complete)

    @property
    def _length(self) -> int:
        """The places that are leased."""
        each, length = self._shape.each, len(self._order)
        return length // each * each if self._shape.drop_last and each else length

    def _earlier(self, sampler: str, epoch: int) -> dict[int, Sequence[int]]:
        """Earlier epochs of which places have returned since, or which a checkpoint has not done in full: their orders."""
        dealing, orders = self._dealing, self._orders
        if dealing.earlier is None or orders is None:
            return {}
        epochs = {*dealing.earlier(sampler, epoch, self._length), *orders.unfinished()}
        self._before = {old: orders.rest_of(old) for old in sorted(epochs)}
        return self._before

    def _share(self, number: int, weights: ShareWeights) -> Sequence[DealtBatch]:
        """This worker's share of a joint batch."""
        if number >= len(self._joint):
            return []
        start, stop = self._joint[number]
        count = self._shape.places(len(self._order))
        own = [place % count for place in self._own(start, stop, weights)]
        if not own:
            return []
        if not self._shape.micro:
            return [self._batch(own)]
        each, length = self._shape.each, len(self._order)
        batches = [self._batch(range(place * each, min((place + 1) * each, length))) for place in own]
        ends = DealtBatch(batches[-1].places, batches[-1].samples, batches[-1].cost)
        return [*(DealtBatch(one.places, one.samples, one.cost, False) for one in batches[:-1]), ends]

    def _own(self, start: int, stop: int, weights: ShareWeights) -> Sequence[int]:
        rank = self._dealing.rank
        if self._costs is not None:
            costs = [self._cost_of_place(place) for place in range(start, stop)]
            return [start + place for place in cut_by_cost(costs, weights).get(rank, [])]
        counts = cut(stop - start, weights)
        before = start + sum(counts[worker] for worker, _ in weights if worker < rank)
        return range(before, before + counts.get(rank, 0))

    def _cost_of_place(self, place: int) -> float:
        """Of a sample, or of a micro-batch."""
        each, length = self._shape.each, len(self._order)
        place %= self._shape.places(length)
        if not self._shape.micro:
            return self._cost_of([(place, place + 1)])
        return self._cost_of([(place * each, min((place + 1) * each, length))])

    def _batch(self, places: Sequence[int]) -> DealtBatch:
        ranges = ranges_of(places)
        return DealtBatch(ranges, len(places), self._cost_of(ranges))

    def _cost_of(self, ranges: Sequence[Range]) -> float:
        if self._costs is None:
            return float(sum(stop - start for start, stop in ranges))
        return sum(self._costs.of(self._order[place]) for start, stop in ranges for place in range(start, stop))

"""Which samples a simulated worker takes, in modes that deal them out: places in the orders of the epochs.

Each epoch has a queue (`sync/sample_queue.py`). Places are taken from the first epoch that has any left, so what was given
back of an epoch that has ended otherwise is taken before the next one goes on. What is taken at once is of one epoch: the
last batch of an epoch may be short.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from polytempo.sync.sample_queue import SampleQueue

#: Epoch, and places in its order from start to stop, without stop.
EpochRange = tuple[int, int, int]


class MicroBatch(NamedTuple):
    """Samples that a worker computes in one go, on one version of the weights."""

    samples: int
    places: tuple[EpochRange, ...] = ()  #: of the data, where there is any
    version: int = 0
    seconds: float = 0.0
    late: bool = False  #: finished after the deadline of the round it was begun in, and counted in a later one


class EpochDealer:
    """Deals out the samples of a training set, epoch after epoch."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._queues: dict[int, SampleQueue] = {}
        self._next = 0  # the epoch that is opened next

    def left(self) -> int:
        """How many places can be taken at once."""
        return self._first()[1].left

    def take(self, worker: int, count: int) -> tuple[EpochRange, ...]:
        """Lease places to a worker: this number, or as many as the epoch has left."""
        epoch, queue = self._first()
        return tuple((epoch, start, stop) for start, stop in queue.take(worker, count))

    def finish(self, worker: int, places: Iterable[EpochRange]) -> None:
        """An update was made of these."""
        for epoch, start, stop in places:
            queue = self._queues[epoch]
            queue.finish(worker, [(start, stop)])
            if queue.is_done:
                del self._queues[epoch]

    def give_back(self, worker: int, places: Iterable[EpochRange]) -> None:
        """They are dealt out again."""
        for epoch, start, stop in places:
            self._queues[epoch].give_back(worker, [(start, stop)])

    def _first(self) -> tuple[int, SampleQueue]:
        for epoch, queue in self._queues.items():
            if not queue.is_empty:
                return epoch, queue
        queue = self._queues[self._next] = SampleQueue(self._length)
        self._next += 1
        return self._next - 1, queue


class DealtSamples:
    """The samples of a job. Without data only numbers of samples are dealt.

    Args:
        length: The number of training samples; 0 or None: no data.
    """

    def __init__(self, length: int | None) -> None:
        self._dealer = EpochDealer(length) if length else None

    def left(self, wanted: int) -> int:
        """How many of the wanted samples can be taken at once."""
        return wanted if self._dealer is None else min(wanted, self._dealer.left())

    def take(self, worker: int, count: int, version: int = 0) -> MicroBatch:
        """A micro-batch of this number of samples, or of as many as the epoch has left."""
        if self._dealer is None:
            return MicroBatch(count, (), version)
        places = self._dealer.take(worker, count)
        return MicroBatch(sum(stop - start for _, start, stop in places), places, version)

    def give_back(self, worker: int, made_of: Iterable[MicroBatch]) -> None:
        """These are not used."""
        if self._dealer is not None:
            for batch in made_of:
                self._dealer.give_back(worker, batch.places)

    def finish(self, worker: int, made_of: Iterable[MicroBatch]) -> None:
        """An update was made of these."""
        if self._dealer is not None:
            for batch in made_of:
                self._dealer.finish(worker, batch.places)

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
    late: bool = False  #: finished after the deadline of the round it was begun in, and counted in a later one


class DealtSamples:
    """The samples of a job, epoch after epoch. Without data only numbers of samples are dealt.

    Args:
        length: The number of training samples; 0 or None: no data.
    """

    def __init__(self, length: int | None) -> None:
        self._length = length or 0
        self._queues: dict[int, SampleQueue] = {}
        self._next = 0  # the epoch that is opened next

    def left(self, wanted: int) -> int:
        """How many of the wanted samples can be taken at once."""
        return min(wanted, self._first()[1].left) if self._length else wanted

    def take(self, worker: int, count: int, version: int = 0) -> MicroBatch:
        """A micro-batch of this number of samples, or of as many as the epoch has left."""
        if not self._length:
            return MicroBatch(count, (), version)
        epoch, queue = self._first()
        places = tuple((epoch, start, stop) for start, stop in queue.take(worker, count))
        return MicroBatch(sum(stop - start for _, start, stop in places), places, version)

    def give_back(self, worker: int, made_of: Iterable[MicroBatch]) -> None:
        """These are not used: their places are dealt out again."""
        for epoch, start, stop in (place for batch in made_of for place in batch.places):
            self._queues[epoch].give_back(worker, [(start, stop)])

    def finish(self, worker: int, made_of: Iterable[MicroBatch]) -> None:
        """An update was made of these."""
        for epoch, start, stop in (place for batch in made_of for place in batch.places):
            queue = self._queues[epoch]
            queue.finish(worker, [(start, stop)])
            if queue.is_done:
                del self._queues[epoch]

    def _first(self) -> tuple[int, SampleQueue]:
        for epoch, queue in self._queues.items():
            if not queue.is_empty:
                return epoch, queue
        queue = self._queues[self._next] = SampleQueue(self._length)
        self._next += 1
        return self._next - 1, queue

"""One simulated worker: its machine, its activity and its totals. It is one small object, for the engine's speed.

Where a mode deals samples out, they are places in the orders of the epochs. Each epoch has a queue (`sync/sample_queue.py`).
Places are taken from the first epoch that has any left, so what was given back of an epoch that has ended otherwise is taken
before the next one goes on. What is taken at once is of one epoch: the last batch of an epoch may be short.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from polytempo.simulate.cluster import Cluster
from polytempo.sync.sample_queue import SampleQueue

NOT_HELD = -1.0
NO_WEIGHTS = -1

#: A rank's life, whichever it is; and the one it has now.
ANY_LIFE, NOW = -1, -2

#: The number of step times drawn at once.
BLOCK = 64

#: Epoch, and places in its order from start to stop, without stop.
EpochRange = tuple[int, int, int]


class MicroBatch(NamedTuple):
    """Samples that a worker computes in one go, on one version of the weights."""

    samples: int
    places: tuple[EpochRange, ...] = ()  #: of the data, where there is any
    version: int = 0
    late: bool = False  #: finished after the deadline of the round it was begun in, and counted in a later one


@dataclass(slots=True, eq=False)
class Worker:
    """A rank. It may leave and come back: each time is a new life."""

    cluster: Cluster
    rank: int
    seed: int
    batch: int = field(init=False)
    fixed: float = field(init=False)  #: seconds of each (micro-)step; a slow machine is slow in this, too
    stalls: list[tuple[float, float]] = field(init=False)
    step_times: array[float] = field(default_factory=lambda: array("d"))  #: of the steps to come, the next one last
    hiccups: array[float] | None = None  #: their random stalls, where a mode wants these apart
    drawn: int = 0
    micro: int = 0  #: micro-batches of a whole step, where it takes whole ones
    unit: int = 0  #: samples of one
    left: int = 0  #: of the present step, those to come
    step: tuple[float, float] = (0.0, 0.0)  #: seconds of that, and of its stall
    stall_at: int = 0
    # State.
    machine: Any = None  #: of its mode: the engine asks for what the machines of this mode have
    cargo: Any = None  #: a `Cargo`, where pushes bring more than the gradient of a step
    life: int = 0
    alive: bool = False
    busy: bool = False
    leaving: bool = False
    flying: int = 0  #: pushes in flight
    weights: int = NO_WEIGHTS  #: the version it holds; in downpour the number of updates of others in it
    reading: int = NO_WEIGHTS  #: the version of the step that was computed last
    used: int = 0  #: the version of the push that arrived last
    since: float = 0.0  #: start of the present step, or of the present idleness
    spent: float = 0.0  #: seconds of the step computed last
    exchanged: float = 0.0  #: seconds of the last exchange for which no mode made it wait
    held: bool = False  #: does the policy hold it, while it still computes?
    held_since: float = NOT_HELD
    held_for: float = 0.0  #: of the present idleness, the part the policy held it
    joined_at: float = 0.0
    left_at: float = 0.0  #: when the last byte for a neighbour has left
    # Totals.
    steps: int = 0
    samples: int | None = None  #: where they are not the steps times the batch
    discarded: int = 0
    messages: int = 0
    present: float = 0.0
    waiting: float = 0.0
    communicating: float = 0.0
    wasted: float = 0.0  #: computing whose push was not applied
    staleness_sum: int = 0
    staleness_max: int = 0

    def __post_init__(self) -> None:
        cluster, rank = self.cluster, self.rank
        self.batch = cluster.batches.get(rank, cluster.batch)
        self.fixed = cluster.fixed_times.get(rank, cluster.fixed_time) * cluster.slow.get(rank, 1.0)
        self.stalls = sorted((s.at, s.at + s.seconds) for s in cluster.stalls if s.worker == rank)

    def load(self, parts: int, deals: bool, micro: int) -> None:
        """Its pushes bring more than the gradient of a step; `deals`: samples are dealt to it, in these micro-batches."""
        self.cargo = Cargo(parts)
        if deals:
            self.hiccups, self.samples = array("d"), 0
            self.micro, self.unit = micro, max(1, round(self.batch / max(micro, 1)))

    def draw(self) -> None:
        """Draw the times of the next steps. Each block has a generator of its own: every mode has the same times."""
        cluster, rank = self.cluster, self.rank
        random = Random(f"{self.seed}/{rank}/{self.drawn}")
        factor = cluster.slow.get(rank, 1.0)
        times = [factor * seconds for seconds in cluster.duration(rank).draw(random, self.drawn, BLOCK)]
        if cluster.hiccup is not None:
            hiccup = cluster.hiccup
            stalls = [hiccup.seconds if random.random() < hiccup.probability else 0.0 for _ in times]
            if self.hiccups is None:
                times = [seconds + stall for seconds, stall in zip(times, stalls, strict=True)]
            else:
                self.hiccups.extend(reversed(stalls))
        self.drawn += BLOCK
        self.step_times.extend(reversed(times))

    def next_step(self) -> tuple[float, float]:
        """The seconds of the next step, and of its stall where a mode wants it apart."""
        if not self.step_times:
            self.draw()
        return self.step_times.pop(), self.hiccups.pop() if self.hiccups else 0.0

    def seconds_for(self, samples: int, step: float, count: int = 1) -> float:
        """What a part of a batch takes, in `count` (micro-)steps, where a step of the whole takes `step` seconds."""
        fixed = min(self.fixed, step)
        return count * fixed + (step - fixed) * samples / self.batch

    def micro_batch_seconds(self, samples: int) -> float:
        """What the next micro-batch takes, which has this number of samples; one of a step has its stall."""
        if not self.left:
            self.left, self.step = self.micro, self.next_step()
            if self.step[1]:
                number = self.drawn - len(self.step_times)
                self.stall_at = Random(f"{self.seed}/{self.rank}/{number}/stall").randrange(self.micro)
        self.left -= 1
        step, stall = self.step
        seconds = self.seconds_for(samples, step)
        return seconds + stall if stall and self.left == self.stall_at else seconds

    def join(self, now: float, machine: Any) -> None:
        self.life += 1
        self.machine, self.alive, self.leaving, self.held = machine, True, False, False
        self.since = self.joined_at = now
        self.weights = NO_WEIGHTS
        if self.cargo is not None:
            self.cargo = Cargo(self.cargo.parts, self.cargo.made, self.cargo.merged)

    def end_life(self, now: float, routed: bool) -> None:
        """End this life; its messages in flight are lost."""
        self.settle(now, routed)
        self.life += 1
        self.alive = self.busy = False
        self.flying = 0
        self.held_for = 0.0

    def settle(self, now: float, routed: bool) -> None:
        """Account for the time up to now, in the middle of a step or wait; `routed`: bytes take time."""
        self.present += now - self.joined_at
        if self.busy:
            self.wasted += now - self.since
            return
        self.end_hold(now)
        if routed:
            self.communicating += now - self.since - self.held_for

    def end_hold(self, now: float) -> None:
        if self.held_since != NOT_HELD:
            self.held_for = now - self.held_since
            self.waiting += self.held_for
            self.held_since = NOT_HELD

    def add_staleness(self, updates: int, times: int = 1) -> None:
        """An update is made of this number of its (local) steps, which are this stale."""
        self.staleness_sum += updates * times
        self.staleness_max = max(self.staleness_max, updates)

    @property
    def computing(self) -> float:
        """Seconds it computed: all that it neither waited nor communicated."""
        return self.present - self.waiting - self.communicating


@dataclass(slots=True, eq=False)
class Cargo:
    """What the next push of a worker is made of, and what its pushes under way bring."""

    parts: int
    made: int = 0  #: local steps over all lives
    merged: int = 0  #: steps in updates, times the number of fragments
    # In this life.
    flights: list[Any] = field(default_factory=list)
    seconds: float = 0  #: that steps took; where pushes bring no values, since the last push
    sendings: list[float] = field(init=False)  #: at the last sending of each fragment
    #: The version of the values it last took of each; without fragments, of those at the first step of the next push.
    bases: list[int] = field(init=False)
    applied: int = 0  #: own pushes that were applied
    fetched: int = NO_WEIGHTS  #: in downpour the updates of others in the weights that were requested
    fresh: bool = False  #: are its first weights still to be sent?
    made_of: list[MicroBatch] = field(default_factory=list)  #: of samples that are dealt: the next push
    unfinished: tuple[MicroBatch, ...] = ()  #: the micro-batch that was not done at the deadline
    begun_at: float = 0.0  #: when that was begun
    until: float = 0.0  #: and when it is done
    abandoned: tuple[float, float] | None = None  #: work and seconds of one that was abandoned since the last push

    def __post_init__(self) -> None:
        self.sendings, self.bases = [0] * self.parts, [NO_WEIGHTS] * self.parts


class DealtSamples:
    """The samples of a job, epoch after epoch. Without data only numbers of samples are dealt.

    Args:
        length: The number of training samples; 0: no data.
        drop: Called with the version that a late micro-batch has read, when it is not needed any more.
    """

    def __init__(self, length: int, drop: Callable[[int], object]) -> None:
        self._length, self._drop = length, drop
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
        for epoch, start, stop in self._places(made_of):
            self._queues[epoch].give_back(worker, [(start, stop)])

    def finish(self, worker: int, made_of: Iterable[MicroBatch]) -> None:
        """An update was made of these."""
        for epoch, start, stop in self._places(made_of):
            queue = self._queues[epoch]
            queue.finish(worker, [(start, stop)])
            if queue.is_done:
                del self._queues[epoch]

    def _places(self, made_of: Iterable[MicroBatch]) -> Iterator[EpochRange]:
        for batch in made_of:
            if batch.late:
                self._drop(batch.version)
            yield from batch.places

    def _first(self) -> tuple[int, SampleQueue]:
        for epoch, queue in self._queues.items():
            if not queue.is_empty:
                return epoch, queue
        queue = self._queues[self._next] = SampleQueue(self._length)
        self._next += 1
        return self._next - 1, queue

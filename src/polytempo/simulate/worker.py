"""One simulated worker: its activity and its totals; and the interface of a trainer beside the run.

A worker is one small object, for the engine's speed. A `Trainer` computes real gradients beside a simulated run; versions
of the weights are numbered 0, 1, 2, ... by update.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random
from typing import Protocol

from polytempo.simulate.cluster import Cluster
from polytempo.simulate.dealing import MicroBatch
from polytempo.sync.directives import Mixing
from polytempo.sync.events import Pushed

NOT_HELD = -1.0
NO_WEIGHTS = -1

#: The number of step times drawn at once.
BLOCK = 64


class Worker:
    """A rank. It may leave and come back: each time is a new life."""

    __slots__ = (
        "alive",
        "allowed",
        "batch",
        "busy",
        "cluster",
        "communicating",
        "discarded",
        "drawn",
        "exchanged",
        "fixed",
        "flying",
        "held_for",
        "held_since",
        "hiccups",
        "joined_at",
        "leaving",
        "life",
        "messages",
        "next_step",
        "present",
        "rank",
        "resuming",
        "samples",
        "seed",
        "since",
        "spent",
        "staleness_max",
        "staleness_sum",
        "stalls",
        "step_times",
        "steps",
        "used",
        "waiting",
        "wasted",
        "weights",
    )

    def __init__(self, cluster: Cluster, rank: int, seed: int) -> None:
        self.rank = rank
        self.batch = cluster.batches.get(rank, cluster.batch)
        # Of each (micro-)step; a slow machine is slow in this, too.
        self.fixed = cluster.fixed_times.get(rank, cluster.fixed_time) * cluster.slow.get(rank, 1.0)
        self.cluster = cluster
        self.seed = seed
        self.step_times = array("d")  # of the steps to come, the next one last
        self.hiccups: array[float] | None = None  # their random stalls, where an engine wants these apart
        self.drawn = 0
        self.stalls = sorted((s.at, s.at + s.seconds) for s in cluster.stalls if s.worker == rank)
        # State.
        self.life = 0
        self.alive = False
        self.busy = False
        self.leaving = False
        self.resuming = False  # its last push was not applied: it continues at the step it is released for
        self.flying = 0  # pushes in flight
        self.next_step = 0
        self.allowed = -1  # the last step that was released
        self.weights = NO_WEIGHTS  # the version it holds
        self.used = 0  # the version of the push that arrived last
        self.since = 0.0  # start of the present step, or of the present idleness
        self.spent = 0.0  # seconds of the step computed last
        self.exchanged = 0.0  # seconds of the last exchange for which no mode made it wait
        self.held_since = NOT_HELD
        self.held_for = 0.0  # of the present idleness, the part the policy held it
        self.joined_at = 0.0
        # Totals.
        self.steps = 0
        self.samples: int | None = None  # where they are not the steps times the batch
        self.discarded = 0
        self.messages = 0
        self.present = 0.0
        self.waiting = 0.0
        self.communicating = 0.0
        self.wasted = 0.0  # computing whose push was not applied
        self.staleness_sum = 0
        self.staleness_max = 0

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

    def seconds_for(self, samples: int, step: float, count: int = 1) -> float:
        """What part of a batch takes where a step of the whole batch takes `step` seconds.

        Args:
            samples: Of the part.
            step: Seconds of a whole step, the fixed time among them.
            count: (Micro-)steps that the part is computed in: each has the fixed time.
        """
        fixed = min(self.fixed, step)
        return count * fixed + (step - fixed) * samples / self.batch

    def join(self, now: float) -> None:
        """Begin a life."""
        self.life += 1
        self.alive, self.leaving, self.resuming = True, False, False
        self.since = self.joined_at = now

    def end_life(self, now: float, routed: bool) -> None:
        """End this life; its messages in flight are lost."""
        self.settle(now, routed)
        self.life += 1
        self.alive = self.busy = False
        self.flying = 0
        self.allowed = -1
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
        """The policy does not hold it any more."""
        if self.held_since != NOT_HELD:
            self.held_for = now - self.held_since
            self.waiting += self.held_for
            self.held_since = NOT_HELD

    @property
    def computing(self) -> float:
        """Seconds it computed: all that it neither waited nor communicated."""
        return self.present - self.waiting - self.communicating


class Trainer(Protocol):
    """Computes real gradients, on the versions of the weights that workers would have held."""

    def keep(self, version: int) -> None:
        """One reader of this version more; it is the newest, or has readers already."""

    def drop(self, version: int) -> None:
        """One reader of this version less."""

    def apply(self, pushes: tuple[Pushed, ...], versions: list[int], rate: float) -> None:
        """Make the next version from gradients taken at these versions; each of them has then one reader less."""

    def lose(self, worker: int, step: int, version: int) -> None:
        """A push, taken at this version, is not applied; the version has one reader less."""

    def end(self, worker: int, finished: bool) -> None:
        """A worker has left, with all its steps made or not; what it alone had is dropped."""

    def observe(self, now: float) -> None:
        """Evaluate."""


class DealtTrainer(Trainer, Protocol):
    """The same where workers are dealt samples: a push names the places of the data that it was made of."""

    @property
    def length(self) -> int:
        """The number of training samples."""

    def apply_dealt(
        self, pushes: tuple[Pushed, ...], made_of: list[list[MicroBatch]], versions: list[int], rate: float, divisor: float
    ) -> None:
        """Make the next version; as `apply`, from these micro-batches of each push. A divisor of 0: their samples."""


class LocalTrainer(Trainer, Protocol):
    """The same with local steps: each worker has weights of its own, and versions have no readers."""

    def begin(self, worker: int) -> None:
        """A worker is given the newest weights."""

    def fetch(self, worker: int) -> None:
        """A worker requests the newest weights, as of now."""

    def install(self, worker: int) -> None:
        """The fetched weights have arrived: the worker continues from them, with its own steps that they lack."""

    def step(self, worker: int, step: int) -> None:
        """A local step, this one of the worker's data."""

    def send(self, worker: int) -> None:
        """The gradients since the last push are in flight."""


class SentBlock(Protocol):
    """The values of a block of local steps that a worker has sent."""

    loss: float | None  #: the mean of its steps
    lr: float | None  #: the learning rate of the last


class BlockTrainer(Protocol):
    """Models of workers that average them: each has values and an optimizer of its own."""

    def drop(self, version: int) -> None:
        """An answer to a worker that is gone: nothing to do."""

    def observe(self, now: float) -> None:
        """Evaluate."""

    def begin(self, worker: int) -> None:
        """A worker is given the newest values."""

    def step(self, worker: int, step: int) -> None:
        """A local step, this one of the worker's data."""

    def send(self, worker: int, fragment: int) -> SentBlock:
        """A fragment of a worker's model is sent, as it is now."""

    def merge(self, fragment: int, blocks: Sequence[SentBlock], weights: tuple[float, ...]) -> None:
        """Make the next values of a fragment from these."""

    def fetch(self, worker: int, fragment: int) -> None:
        """The newest values of a fragment are sent to a worker."""

    def install(self, worker: int, fragment: int) -> None:
        """They have arrived: the worker goes on from them, with what it has changed since it sent its own."""

    def close(self) -> None:
        """The run has ended."""

    def end(self, worker: int, finished: bool) -> None:
        """A worker has left; its state is dropped."""


class GossipTrainer(Protocol):
    """Models of workers that mix them with those of neighbours: each has values, a push-sum weight and an optimizer."""

    def keep(self, version: int) -> None:
        """Nothing to do."""

    def drop(self, version: int) -> None:
        """Nothing to do."""

    def apply(self, pushes: tuple[Pushed, ...], versions: list[int], rate: float) -> None:
        """A push has come: nothing to do."""

    def lose(self, worker: int, step: int, version: int) -> None:
        """A push is not applied: nothing to do."""

    def observe(self, now: float) -> None:
        """Evaluate the mean of all models."""

    def begin(self, worker: int, empty: bool) -> None:
        """A worker starts, with the initial values, or with nothing."""

    def has_model(self, worker: int) -> bool:
        """Has a worker any weight?"""

    def step(self, worker: int, step: int) -> None:
        """A local step on this batch of the worker's data; where values are kept apart, it is not added to them yet."""

    def send(self, worker: int, step: int) -> None:
        """A worker sends its values to its out-neighbours of this step."""

    def mix(self, worker: int, step: int, mixing: Mixing, lost: tuple[int, ...]) -> None:
        """A worker has what its in-neighbours of this step sent."""

    def forget(self, step: int) -> None:
        """Nothing that was sent in this step is needed any more."""

    def average(self, asker: int, answerer: int) -> None:
        """Two workers take the mean of both."""

    def finish(self, worker: int) -> None:
        """The local step is added to a worker's values."""

    def end(self, worker: int, finished: bool) -> None:
        """A worker has left; one that has finished is still looked at."""

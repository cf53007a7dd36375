"""One simulated worker: its machine, its activity and its totals. It is one small object, for the engine's speed."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

from polytempo.simulate.cluster import Cluster
from polytempo.simulate.dealing import MicroBatch

NOT_HELD = -1.0
NO_WEIGHTS = -1

#: The number of step times drawn at once.
BLOCK = 64


class Worker:
    """A rank. It may leave and come back: each time is a new life."""

    __slots__ = (
        "alive",
        "batch",
        "busy",
        "cargo",
        "cluster",
        "communicating",
        "discarded",
        "drawn",
        "exchanged",
        "fixed",
        "flying",
        "held",
        "held_for",
        "held_since",
        "hiccups",
        "joined_at",
        "leaving",
        "left_at",
        "life",
        "machine",
        "messages",
        "present",
        "rank",
        "reading",
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

    machine: Any  #: of its mode: the engine asks for what the machines of this mode have
    cargo: Any  #: a `Cargo`, where pushes bring more than the gradient of a step

    def __init__(self, cluster: Cluster, rank: int, seed: int) -> None:
        self.rank = rank
        self.batch = cluster.batches.get(rank, cluster.batch)
        # Of each (micro-)step; a slow machine is slow in this, too.
        self.fixed = cluster.fixed_times.get(rank, cluster.fixed_time) * cluster.slow.get(rank, 1.0)
        self.cluster = cluster
        self.seed = seed
        self.step_times = array("d")  # of the steps to come, the next one last
        self.hiccups: array[float] | None = None  # their random stalls, where a mode wants these apart
        self.drawn = 0
        self.stalls = sorted((s.at, s.at + s.seconds) for s in cluster.stalls if s.worker == rank)
        # State.
        self.life = 0
        self.machine = None
        self.cargo = None
        self.alive = False
        self.busy = False
        self.leaving = False
        self.flying = 0  # pushes in flight
        self.weights = NO_WEIGHTS  # the version it holds; in downpour the number of updates of others in it
        self.reading = NO_WEIGHTS  # the version of the step that was computed last
        self.used = 0  # the version of the push that arrived last
        self.since = 0.0  # start of the present step, or of the present idleness
        self.spent = 0.0  # seconds of the step computed last
        self.exchanged = 0.0  # seconds of the last exchange for which no mode made it wait
        self.held = False  # does the policy hold it, while it still computes?
        self.held_since = NOT_HELD
        self.held_for = 0.0  # of the present idleness, the part the policy held it
        self.joined_at = 0.0
        self.left_at = 0.0  # when the last byte for a neighbour has left
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

    def load(self, parts: int, deals: bool, micro: int) -> None:
        """Its pushes bring more than the gradient of a step; `deals`: samples are dealt to it, in these micro-batches."""
        self.cargo = Cargo(parts, MicroBatchTimes(self, micro) if deals and micro else None)
        if deals:
            self.hiccups, self.samples = array("d"), 0

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

    def share_seconds(self, samples: int, count: int) -> float:
        """What a share of the joint batch takes, in this number of micro-batches; a stall takes what it takes."""
        if not self.step_times:
            self.draw()
        stall = self.hiccups.pop() if self.hiccups else 0.0
        return self.seconds_for(samples, self.step_times.pop(), count) + stall

    def join(self, now: float, machine: Any) -> None:
        """Begin a life, with this machine."""
        self.life += 1
        self.machine, self.alive, self.leaving, self.held = machine, True, False, False
        self.since = self.joined_at = now
        self.weights = NO_WEIGHTS
        if self.cargo is not None:
            self.cargo.begin()

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
        """The policy does not hold it any more."""
        if self.held_since != NOT_HELD:
            self.held_for = now - self.held_since
            self.waiting += self.held_for
            self.held_since = NOT_HELD

    @property
    def computing(self) -> float:
        """Seconds it computed: all that it neither waited nor communicated."""
        return self.present - self.waiting - self.communicating


class Cargo:
    """What the next push of a worker is made of, and what its pushes under way bring."""

    __slots__ = (
        "abandoned",
        "applied",
        "bases",
        "begun_at",
        "fetched",
        "flights",
        "fresh",
        "made",
        "made_of",
        "merged",
        "seconds",
        "sendings",
        "started",
        "times",
        "unfinished",
        "until",
    )

    def __init__(self, parts: int, times: MicroBatchTimes | None) -> None:
        self.made = 0  # local steps over all lives
        self.merged = 0  # steps in updates, times the number of fragments
        self.times = times
        self.sendings, self.bases = [0.0] * parts, [NO_WEIGHTS] * parts
        self.begin()

    def begin(self) -> None:
        """A life begins: what was left of the one before is lost."""
        self.flights: list[Any] = []
        # Of local steps: seconds computed in this life (downpour: since the last push), at the last sending of each
        # fragment, and the version of the values it last took of each.
        self.seconds = 0.0
        self.sendings, self.bases = [0.0] * len(self.sendings), [NO_WEIGHTS] * len(self.bases)
        # Of downpour: own pushes that were applied; updates of others in the weights at the start of the next push, and in
        # those that were requested; are its first weights still to be sent?
        self.applied = self.started = 0
        self.fetched = NO_WEIGHTS
        self.fresh = False
        # Of dealt samples: what the next push is made of; of micro-batches the one that was not done at the deadline, when
        # it was begun, when it is done, and work and seconds of one that was abandoned since the last push.
        self.made_of: list[MicroBatch] = []
        self.unfinished: MicroBatch | None = None
        self.begun_at = self.until = 0.0
        self.abandoned: tuple[float, float] | None = None


class MicroBatchTimes:
    """The times of a worker's micro-batches, from those of its steps."""

    __slots__ = ("_left", "_micro", "_stall", "_stall_at", "_step", "_worker", "size")

    def __init__(self, worker: Worker, micro: int) -> None:
        self.size = max(1, round(worker.batch / micro))
        self._worker, self._micro = worker, micro
        self._left = 0  # micro-batches of the present step
        self._step = self._stall = 0.0  # seconds of the whole step, and of its stall
        self._stall_at = 0

    def next(self, samples: int) -> float:
        """The seconds of the next one, which has this number of samples."""
        worker = self._worker
        if not self._left:
            if not worker.step_times:
                worker.draw()
            self._left, self._step = self._micro, worker.step_times.pop()
            self._stall = worker.hiccups.pop() if worker.hiccups else 0.0
            if self._stall:
                number = worker.drawn - len(worker.step_times)
                self._stall_at = Random(f"{worker.seed}/{worker.rank}/{number}/stall").randrange(self._micro)
        self._left -= 1
        seconds = worker.seconds_for(samples, self._step)
        return seconds + self._stall if self._stall and self._left == self._stall_at else seconds

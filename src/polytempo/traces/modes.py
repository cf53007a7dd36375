"""Other synchronisation modes on a recorded job: a replica is a worker, its own critical path the time of its step.

    bsp             the job as recorded
    bsp+balance     the mode's policy deals the micro-batches of each recorded step: shares by speed, whole micro-batches; or
                    by cost, where the cost of each is known; every replica's pipeline runs what it is dealt
    anytime         the mode's policy sets deadlines; a replica takes as many of its micro-batches as its machine orders
    all others      in virtual time (`simulate/`), with the time of each replica's step as recorded

A micro-batch that moves to another replica costs that replica what it costs machines of that slowness (`causes.py`). Of
every mode the time for one joint batch is given, so that modes whose rounds differ in size can be compared. What the
replicas do together at the end of a step takes its recorded time in every mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

from polytempo.simulate.cluster import Cluster, Trace
from polytempo.simulate.run import simulate_job
from polytempo.sync.actions import Action, Release
from polytempo.sync.events import Joined, Measured, Pushed
from polytempo.sync.machine import Abandon, Computed, Orders, SendPush, TimeUp
from polytempo.sync.shares import ShareWeights, cut, cut_by_cost
from polytempo.sync.spec import Spec, spec_of
from polytempo.traces.causes import Factors
from polytempo.traces.job import (
    BatchSeconds,
    JobTrace,
    RecordedStep,
    joint_seconds,
    replica_ends,
    replica_seconds,
    step_seconds,
)

#: Modes in virtual time run through the trace this often: what is under way at the end counts less.
REPEATS = 4

#: In the name of a mode whose shares are cut by cost.
BY_COST = "by cost"
#: And whose replicas take their micro-batches in an order of cost, which the mode itself does not do.
IN_ORDER = "in order"

#: Where a micro-batch of a step was recorded: replica, number.
BatchPlace = tuple[int, int]
#: What each replica takes of a step (its index), by the shares' weights.
Dealer = Callable[[int, ShareWeights], list[list[BatchPlace]]]


@dataclass(frozen=True)
class ModePrediction:
    """One mode on the recorded job."""

    mode: str
    step_seconds: float  #: for one joint batch
    waiting: float  #: the share of the replicas' time in which they wait for others
    staleness_mean: float = 0.0
    staleness_max: int = 0
    shares: tuple[float, ...] = ()  #: micro-batches of each replica at the end, where they are not as recorded


def predict(job: JobTrace, factors: Factors, sync: str, seed: int = 0) -> list[ModePrediction]:
    """A mode on this job; where its shares follow speed, also with shares cut by cost, where costs are known."""
    spec = spec_of(sync)
    if spec.capabilities.averages or not spec.capabilities.reduces:
        return [_in_virtual_time(job, spec, seed)]
    if spec.machine(0).brings != "share":
        return [_Rounds(job, factors, spec, lambda index, weights: _recorded(job.steps[index])).prediction(spec.text)]

    def at_speed(index: int, weights: ShareWeights) -> list[list[BatchPlace]]:
        return by_speed(job.steps[index], weights)

    def at_cost(index: int, weights: ShareWeights) -> list[list[BatchPlace]]:
        return by_cost(job.steps[index], factors.costs[index], weights)

    def ordered(index: int, weights: ShareWeights) -> list[list[BatchPlace]]:
        return [in_order(mine, factors.costs[index]) for mine in at_cost(index, weights)]

    predictions = [_Rounds(job, factors, spec, at_speed).prediction(spec.text)]
    if job.divided and not job.steps[0].costs:
        return predictions
    by = f"{spec.text} {BY_COST}"
    dealers = ((by, at_cost), (f"{by}, {IN_ORDER}", ordered))
    for name, dealer in dealers if job.stages > 1 else dealers[:1]:
        predictions.append(_Rounds(job, factors, spec, dealer, counts_cost=True).prediction(name))
    return predictions


# Which replica takes which micro-batch.


def _recorded(step: RecordedStep) -> list[list[BatchPlace]]:
    return [[(replica, number) for number in range(len(batches))] for replica, batches in enumerate(step.replicas)]


def by_speed(step: RecordedStep, weights: ShareWeights) -> list[list[BatchPlace]]:
    """The micro-batches in the order of the joint batch, cut by weights."""
    places = [place for mine in _recorded(step) for place in mine]
    parts, at, dealt = cut(len(places), weights), 0, []
    for worker, _ in weights:
        dealt.append(places[at : at + parts[worker]])
        at += parts[worker]
    return dealt


def by_cost(step: RecordedStep, costs: Sequence[Sequence[float]], weights: ShareWeights) -> list[list[BatchPlace]]:
    """The micro-batches so that the cost of each replica is in proportion to its weight."""
    places = [place for mine in _recorded(step) for place in mine]
    dealt = cut_by_cost([costs[replica][number] for replica, number in places], weights)
    return [[places[place] for place in dealt[worker]] for worker, _ in weights]


def in_order(places: Sequence[BatchPlace], costs: Sequence[Sequence[float]]) -> list[BatchPlace]:
    """A replica's micro-batches: the cheapest first, so that later stages start soon, then from the most expensive to a
    cheap one, so that the first stages end soon after the last."""
    falling = sorted(places, key=lambda place: (-costs[place[0]][place[1]], place))
    return falling[-1:] + falling[:-1]


class _Work(NamedTuple):
    """What a replica did for its push."""

    ends: list[float]  #: when each stage was ready, since the round began
    batches: int
    work: float
    computed: float


class _Rounds:
    """A job in rounds: the mode's policy and the machines of its replicas, whose orders are performed on the recorded steps.

    Args:
        job: The recorded one.
        factors: What a micro-batch takes at another replica.
        spec: The mode.
        dealer: Who takes which micro-batches of a step, where a push is made of those that are dealt.
        counts_cost: Work is cost, not a number of micro-batches.
    """

    def __init__(self, job: JobTrace, factors: Factors, spec: Spec, dealer: Dealer, counts_cost: bool = False) -> None:
        self.job, self.factors, self.dealer, self.counts_cost = job, factors, dealer, counts_cost
        self.policy = spec.policy(job.replicas)
        self.machines: list[Any] = [spec.machine(replica) for replica in range(job.replicas)]
        self.brings = self.machines[0].brings
        self.now = self.waited = 0.0
        self.samples = 0  # micro-batches of all rounds
        self.released: dict[int, Release] = {}
        # Where a replica takes as many as it manages: its micro-batches, one recorded step after the other and again from
        # the first; and of the one that was not done at a deadline, when the one before it was, and when it is.
        self.streams = [cycle([b for step in job.steps for b in step.replicas[replica]]) for replica in range(job.replicas)]
        self.late: dict[int, tuple[float, float]] = {}
        for replica in range(job.replicas):
            self._hear(self.policy.handle(Joined(replica), 0.0))

    def prediction(self, name: str) -> ModePrediction:
        """As many rounds as steps are recorded."""
        works: list[_Work] = []
        for index, step in enumerate(self.job.steps):
            if self.brings == "batches":
                works = [self._until_push(index, replica, machine) for replica, machine in enumerate(self.machines)]
            else:
                works = self._shares(index)
            times = [max(work.ends) for work in works]
            for worker in sorted(range(len(works)), key=times.__getitem__):
                _, count, work, computed = works[worker]
                push = Pushed(worker, index, count, count=count, measured=Measured(work=work, computed=computed))
                self._hear(self.policy.handle(push, self.now + times[worker]))
            self.waited += sum(max(times) - time for time in times)
            self.samples += sum(work.batches for work in works)
            self.now += step_seconds(step.sync, [work.ends for work in works])
        joint = self.samples / self.job.microbatches  # joint batches
        shares = () if self.brings == "gradient" else tuple(float(work.batches) for work in works)
        each = self.now / joint if joint else math.inf  # no deadline was long enough for a micro-batch
        return ModePrediction(name, each, self.waited / (self.now * self.job.replicas), shares=shares)

    def _hear(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Release):
                self.released[action.worker] = action

    def _shares(self, index: int) -> list[_Work]:
        """Every replica computes what it is dealt of this step, and pushes."""
        step, costs = self.job.steps[index], self.factors.costs[index]
        orders = [machine.handle(self.released[worker], self.now)[0] for worker, machine in enumerate(self.machines)]
        works = []
        for worker, mine in enumerate(self.dealer(index, orders[0].weights)):  # the same for all
            batches = [self.factors.moved(step.replicas[replica][number], replica, worker) for replica, number in mine]
            ends = replica_ends(self.job, batches, step.sync)
            self.machines[worker].handle(Computed(max(ends)), self.now + max(ends))
            work = sum(costs[replica][number] for replica, number in mine) if self.counts_cost else len(mine)
            works.append(_Work(ends, len(mine), work, max(ends)))
        return works

    def _until_push(self, index: int, replica: int, machine: Any) -> _Work:
        """A replica computes as many of its own micro-batches as its machine orders, and pushes."""
        sync, stages = self.job.steps[index].sync, self.job.stages
        begun, end = self.late.pop(replica, (self.now, self.now))
        computed = self._done(machine, begun, end)[1] if begun < end <= self.now else 0.0
        orders = machine.handle(self.released[replica], self.now)
        busy = end > self.now
        begun, end = (begun, end) if busy else (self.now, self.now)
        start, taken, ends = end, list[BatchSeconds](), [0.0] * stages
        while True:
            if busy and end > machine.ends_at:  # it goes on with this one while what is done is pushed
                self.late[replica] = begun, end
                orders, ends = machine.handle(TimeUp(machine.step), machine.ends_at), [machine.ends_at - self.now] * stages
            elif busy:
                orders, seconds = self._done(machine, begun, end)
                begun, computed = end, computed + seconds
            if push := next((order for order in orders if isinstance(order, SendPush)), None):
                return _Work(ends, push.count, push.count, computed)
            taken.append(next(self.streams[replica]))
            ends = [start - self.now + stage for stage in replica_ends(self.job, taken, sync)]
            busy, end = True, self.now + max(ends)

    def _done(self, machine: Any, begun: float, end: float) -> tuple[Orders, float]:
        """A micro-batch is computed: what its replica does now, and the seconds that count."""
        orders = machine.handle(Computed(end - begun), end)
        return orders, 0.0 if Abandon() in orders else end - begun


def _in_virtual_time(job: JobTrace, spec: Spec, seed: int) -> ModePrediction:
    seconds = [
        tuple(replica_seconds(job, step.replicas[replica], step.sync) + joint_seconds(step.sync) for step in job.steps)
        for replica in range(job.replicas)
    ]
    batch = max(1, round(job.microbatches / job.replicas))
    cluster = Cluster(job.replicas, step_times={rank: Trace(times) for rank, times in enumerate(seconds)}, batch=batch)
    samples = REPEATS * len(job.steps) * batch * job.replicas
    outcome = simulate_job(cluster, spec.text, seed=seed, samples=samples)
    joint = outcome.samples / (batch * job.replicas)
    return ModePrediction(spec.text, outcome.seconds / joint, outcome.waiting, outcome.staleness_mean, outcome.staleness_max)

"""Other synchronisation modes on a recorded job: a replica is a worker, its own critical path the time of its step.

    bsp             the job as recorded
    bsp+balance     the mode's policy deals the micro-batches of each recorded step: shares by speed, whole micro-batches; or
                    by cost, where the cost of each is known; every replica's pipeline runs what it is dealt
    anytime         the mode's policy sets deadlines; a replica takes as many of its micro-batches as end by then
    all others      in virtual time (`simulate/`), with the time of each replica's step as recorded

A micro-batch that moves to another replica costs that replica what it costs machines of that slowness (`causes.py`). Of
every mode the time for one joint batch is given, so that modes whose rounds differ in size can be compared. What the
replicas do together at the end of a step takes its recorded time in every mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from polytempo.simulate.cluster import Cluster
from polytempo.simulate.durations import Trace
from polytempo.simulate.run import simulate_job
from polytempo.sync.actions import Release
from polytempo.sync.anytime import ANYTIME
from polytempo.sync.balance import BALANCE
from polytempo.sync.barrier import BSP
from polytempo.sync.directives import NextDeadline, NextShares
from polytempo.sync.events import Joined, Measured, Pushed
from polytempo.sync.shares import ShareWeights, cut, cut_by_cost
from polytempo.sync.spec import Spec, parse_spec
from polytempo.traces.causes import Factors
from polytempo.traces.job import BatchSeconds, JobTrace, RecordedStep
from polytempo.traces.resimulate import joint_seconds, replica_ends, replica_seconds, step_seconds

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
    """A mode on this job; `bsp+balance` also with its shares cut by cost, where costs are known."""
    spec = parse_spec(sync)
    if spec.averaging is None and spec.gossip is None and spec.mode in (BSP, BALANCE, ANYTIME):
        return list(_in_rounds(job, factors, spec))
    return [_in_virtual_time(job, spec, seed)]


def _in_rounds(job: JobTrace, factors: Factors, spec: Spec) -> Iterator[ModePrediction]:
    if spec.mode is ANYTIME:
        yield _Rounds(job, factors, spec).until_deadlines()
        return
    rounds = _Rounds(job, factors, spec)
    if spec.mode is BSP:
        yield rounds.deal(spec.text, lambda index, weights: _recorded(job.steps[index]))
        return
    yield rounds.deal(spec.text, lambda index, weights: by_speed(job.steps[index], weights))
    if job.divided and not job.steps[0].costs:
        return
    costs = factors.costs
    by = f"{spec.text} {BY_COST}"
    rounds = _Rounds(job, factors, spec)
    yield rounds.deal(by, lambda index, weights: by_cost(job.steps[index], costs[index], weights), counts_cost=True)
    if job.stages > 1:
        rounds = _Rounds(job, factors, spec)
        yield rounds.deal(
            f"{by}, {IN_ORDER}",
            lambda index, weights: [
                in_order(mine, costs[index]) for mine in by_cost(job.steps[index], costs[index], weights)
            ],
            counts_cost=True,
        )


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


class _Rounds:
    """A job in rounds: the mode's own policy is fed with what each replica pushes, and its releases are obeyed."""

    def __init__(self, job: JobTrace, factors: Factors, spec: Spec) -> None:
        self.job, self.factors, self.spec = job, factors, spec
        self.policy = spec.policy(job.replicas)
        self.now = self.waited = 0.0
        self.samples = 0  # micro-batches of all rounds
        self.weights: ShareWeights = ()
        self.deadline = 0.0
        for replica in range(job.replicas):
            self._obey(self.policy.handle(Joined(replica), 0.0))

    def deal(self, name: str, dealer: Dealer, counts_cost: bool = False) -> ModePrediction:
        """All recorded steps, their micro-batches dealt anew; `counts_cost`: work is cost, not a number of micro-batches."""
        dealt: list[list[BatchPlace]] = []
        for index, step in enumerate(self.job.steps):
            dealt = dealer(index, self.weights)
            own = [[self._moved(index, place, worker) for place in mine] for worker, mine in enumerate(dealt)]
            costs = self.factors.costs[index]
            work = [sum(costs[replica][number] for replica, number in mine) if counts_cost else len(mine) for mine in dealt]
            ends = [replica_ends(self.job, batches, step.sync) for batches in own]
            counts, times = [len(mine) for mine in dealt], [max(stages) for stages in ends]
            self._round(index, times, counts, work, step_seconds(step.sync, ends))
        shares = () if self.spec.mode is BSP else tuple(float(len(mine)) for mine in dealt)
        return self._prediction(name, shares)

    def until_deadlines(self) -> ModePrediction:
        """As many rounds as steps are recorded; each replica takes as many of its micro-batches as end by the deadline."""
        micro = self.spec.anytime.micro if self.spec.anytime else 1
        streams = [_Stream(self.job, replica, micro) for replica in range(self.job.replicas)]
        counts: list[int] = []
        for index, step in enumerate(self.job.steps):
            taken = [stream.until(self.deadline, index) for stream in streams]
            counts, times = [count for count, _ in taken], [seconds for _, seconds in taken]
            self._round(index, times, counts, counts, max(times) + joint_seconds(step.sync))
        return self._prediction(self.spec.text, tuple(map(float, counts)))

    def _moved(self, index: int, place: BatchPlace, worker: int) -> BatchSeconds:
        replica, number = place
        return self.factors.moved(self.job.steps[index].replicas[replica][number], replica, worker)

    def _round(
        self, index: int, times: Sequence[float], counts: Sequence[int], work: Sequence[float], seconds: float
    ) -> None:
        """Every replica has pushed after its own time; the round lasts for `seconds`."""
        for worker in sorted(range(len(times)), key=lambda worker: (times[worker], worker)):
            count = counts[worker]
            measured = Measured(work=work[worker], computed=times[worker])
            push = Pushed(worker, index, count, count=count, measured=measured)
            self._obey(self.policy.handle(push, self.now + times[worker]))
        self.waited += sum(max(times) - time for time in times)
        self.samples += sum(counts)
        self.now += seconds

    def _obey(self, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case Release(directive=NextShares(weights)) if weights:
                    self.weights = weights
                case Release(directive=NextDeadline(seconds)):
                    self.deadline = seconds

    def _prediction(self, name: str, shares: tuple[float, ...]) -> ModePrediction:
        joint = self.samples / self.job.microbatches  # joint batches
        return ModePrediction(name, self.now / joint, self.waited / (self.now * self.job.replicas), shares=shares)


class _Stream:
    """The micro-batches of a replica, one recorded step after the other, and again from the first."""

    def __init__(self, job: JobTrace, replica: int, count: int) -> None:
        self.job = job
        self.batches = [batch for step in job.steps for batch in step.replicas[replica]]
        self.at = 0
        self.count = count  # of the last round

    def until(self, deadline: float, index: int) -> tuple[int, float]:
        """Take micro-batches that end by a deadline, or as many as ever: their number, and when they end."""
        if deadline:
            self.count = self._fitting(deadline, index)
        seconds = self._seconds(self.count, index)
        self.at += self.count
        return self.count, seconds

    def _fitting(self, deadline: float, index: int) -> int:
        count = self.count
        while count and self._seconds(count, index) > deadline:
            count -= 1
        while self._seconds(count + 1, index) <= deadline:
            count += 1
        return count

    def _seconds(self, count: int, index: int) -> float:
        batches = [self.batches[(self.at + number) % len(self.batches)] for number in range(count)]
        return replica_seconds(self.job, batches, self.job.steps[index].sync)


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

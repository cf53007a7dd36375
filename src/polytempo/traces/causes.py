"""Why a recorded job is slower than it could be: what-if runs in which one kind of unevenness at a time is evened out.

The seconds of a computation are taken apart into factors, each a median, so that a passing stall does not move it:

    usual       of this kind of computation at this stage
    slowness    of this worker (a stage of a replica) against the same stage of the other replicas
    cost        of this micro-batch against others, over all its computations, or as the trace says
    stalls      single computations that took STALL times that or more

A cause is worth the time by which the step becomes shorter without it. Slowness is judged against cost, so a replica that
was given long sequences is not slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median, median_low

from polytempo.traces.job import BatchSeconds, JobTrace, job_seconds

#: Differences of slowness below this are noise.
SAME = 0.05
#: And differences below this number of standard errors: a replica that happened to be dealt more work is not slow.
CERTAIN = 3.5
#: Standard deviations of a normal distribution: in a median deviation, and (over the root of the count) of a median.
OF_DEVIATION, OF_MEDIAN = 1.4826, 1.2533
#: A computation that takes this many times what it should is a stall.
STALL = 1.5
#: A worker is named as slow from this factor on.
SLOW = 1.1

#: The cost of each micro-batch: by step, replica and number.
JobCosts = tuple[tuple[tuple[float, ...], ...], ...]
#: (forward, backward) of each replica and stage.
WorkerFactors = tuple[tuple[tuple[float, float], ...], ...]

#: What the seconds of a computation become: step, replica, micro-batch, stage, way, seconds.
Change = Callable[[int, int, int, int, int, float], float]

CAUSES = ("worker", "cost", "stage", "stalls")


@dataclass(frozen=True)
class Factors:
    """What the seconds of a job's computations are made of; a pair is (forward, backward)."""

    usual: tuple[tuple[float, float], ...]  #: of each stage
    slowness: WorkerFactors
    costs: JobCosts  #: 1 on average

    def worker(self, replica: int, stage: int) -> float:
        """The slowness of a worker over forward and backward."""
        seconds = self.usual[stage]
        slow = sum(factor * usual for factor, usual in zip(self.slowness[replica][stage], seconds, strict=True))
        return slow / (sum(seconds) or 1.0)

    def moved(self, batch: BatchSeconds, origin: int, to: int) -> BatchSeconds:
        """What a micro-batch recorded at one replica would cost another."""
        if origin == to:
            return batch
        ours, theirs = self.slowness[origin], self.slowness[to]
        return tuple(
            (seconds[0] * there[0] / here[0], seconds[1] * there[1] / here[1])
            for seconds, here, there in zip(batch, ours, theirs, strict=True)
        )


def factors_of(job: JobTrace) -> Factors:
    """Take the seconds of a job apart."""
    known = all(step.costs for step in job.steps)
    ones = [tuple((1.0,) * len(batches) for batches in step.replicas) for step in job.steps]
    costs = _scaled([step.costs for step in job.steps] if known else ones)
    usual, slowness = _machines(job, costs)
    if not known and not job.divided:
        costs = _scaled(
            [
                tuple(
                    tuple(_cost(batch, usual, slowness[replica]) for batch in batches)
                    for replica, batches in enumerate(step.replicas)
                )
                for step in job.steps
            ]
        )
        usual, slowness = _machines(job, costs)
    return Factors(usual, slowness, costs)


def _scaled(costs: Sequence[tuple[tuple[float, ...], ...]]) -> JobCosts:
    """Costs that are 1 on average."""
    every = [cost for step in costs for batches in step for cost in batches]
    mean = sum(every) / len(every)
    return tuple(tuple(tuple(cost / mean for cost in batches) for batches in step) for step in costs)


def _machines(job: JobTrace, costs: JobCosts) -> tuple[tuple[tuple[float, float], ...], WorkerFactors]:
    """The usual seconds of each stage, and the slowness of each worker, from seconds at a cost of 1."""
    each = [
        [[_typical(job, costs, replica, stage, way) for way in (0, 1)] for stage in range(job.stages)]
        for replica in range(job.replicas)
    ]
    middle = [[median_low([row[stage][way][0] for row in each]) for way in (0, 1)] for stage in range(job.stages)]
    slowness = tuple(
        tuple(
            (_factor(*row[stage][0], middle[stage][0]), _factor(*row[stage][1], middle[stage][1]))
            for stage in range(job.stages)
        )
        for row in each
    )
    return tuple((forward, backward) for forward, backward in middle), slowness


def _typical(job: JobTrace, costs: JobCosts, replica: int, stage: int, way: int) -> tuple[float, float]:
    """Seconds of a worker at a cost of 1: their median, and the standard error of that."""
    some = slice(0, 1 if job.divided else None)  # equal parts of a step are one measurement
    seconds = [
        batch[stage][way] / cost
        for step, row in zip(job.steps, costs, strict=True)
        for batch, cost in zip(step.replicas[replica][some], row[replica][some], strict=True)
    ]
    middle = median(seconds)
    spread = median(abs(one - middle) for one in seconds) * OF_DEVIATION
    return middle, spread * OF_MEDIAN / sqrt(len(seconds))


def _factor(seconds: float, error: float, usual: float) -> float:
    """The slowness of a worker; 1 where the difference may be noise."""
    if not usual or abs(seconds - usual) <= max(SAME * usual, CERTAIN * error):
        return 1.0
    return seconds / usual


def _cost(batch: BatchSeconds, usual: Sequence[tuple[float, float]], slowness: Sequence[tuple[float, float]]) -> float:
    """Of a micro-batch: the median over its computations."""
    return median(
        batch[stage][way] / (usual[stage][way] * slowness[stage][way])
        for stage in range(len(usual))
        for way in (0, 1)
        if usual[stage][way]
    )


def what_if(job: JobTrace, factors: Factors) -> dict[str, float]:
    """The step time if one cause were not there, for each of `CAUSES`."""
    mean = [sum(stage[way] for stage in factors.usual) / job.stages for way in (0, 1)]

    def without_stalls(step: int, replica: int, batch: int, stage: int, way: int, seconds: float) -> float:
        usual = factors.usual[stage][way] * factors.slowness[replica][stage][way] * factors.costs[step][replica][batch]
        return seconds if seconds < STALL * usual else usual

    evened: dict[str, Change] = {
        "worker": lambda step, replica, batch, stage, way, seconds: seconds / factors.slowness[replica][stage][way],
        "cost": lambda step, replica, batch, stage, way, seconds: seconds / factors.costs[step][replica][batch],
        "stage": lambda step, replica, batch, stage, way, seconds: seconds * mean[way] / (factors.usual[stage][way] or 1.0),
        "stalls": without_stalls,
    }
    return {cause: job_seconds(_changed(job, evened[cause])) for cause in CAUSES}


def _changed(job: JobTrace, change: Change) -> JobTrace:

    def batches(step: int, replica: int, recorded: Iterable[BatchSeconds]) -> tuple[BatchSeconds, ...]:
        return tuple(
            tuple(
                (change(step, replica, number, stage, 0, forward), change(step, replica, number, stage, 1, backward))
                for stage, (forward, backward) in enumerate(batch)
            )
            for number, batch in enumerate(recorded)
        )

    steps = tuple(
        replace(step, replicas=tuple(batches(index, replica, recorded) for replica, recorded in enumerate(step.replicas)))
        for index, step in enumerate(job.steps)
    )
    return replace(job, steps=steps)

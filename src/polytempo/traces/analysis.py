"""What a trace says: actual and ideal step time, the modes on it, the cause of its stragglers, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polytempo.traces.causes import CAUSES, SLOW, Factors, factors_of, what_if
from polytempo.traces.job import JobTrace, ideal_seconds, job_seconds
from polytempo.traces.modes import BY_COST, IN_ORDER, ModePrediction, predict

#: A cause is named, and a mode recommended, from this gain on.
WORTH = 1.05
#: Of modes whose times differ by less than this, the simpler one is recommended.
ALIKE = 1.03
#: Slow workers that are named.
NAMED = 4


@dataclass(frozen=True)
class SlowWorker:
    """A stage of a replica that is slow against the same stage of the other replicas."""

    replica: int
    stage: int
    factor: float


@dataclass(frozen=True)
class TraceAnalysis:
    """Everything a trace says. Seconds are those of a step."""

    stages: int
    replicas: int
    steps: int
    schedule: str
    microbatches: float
    actual: float  #: made again from compute durations and schedule
    ideal: float  #: if every computation took the mean of its kind
    without: dict[str, float]  #: if one cause were not there
    causes: tuple[str, ...]  #: those of `CAUSES` that are worth naming, the most expensive first
    slow: tuple[SlowWorker, ...]
    heaviest_stage: int
    heaviest_factor: float  #: against the mean of the other stages
    dearest_factor: float  #: the most expensive micro-batches (1 in 20) against the mean
    modes: tuple[ModePrediction, ...]

    @property
    def slowdown(self) -> float:
        """Actual over ideal."""
        return self.actual / self.ideal

    def best(self) -> ModePrediction:
        """The first mode without stale gradients that is about as fast as the fastest of them."""
        fresh = [mode for mode in self.modes if not mode.staleness_max]
        fastest = min(mode.step_seconds for mode in fresh)
        return next(mode for mode in fresh if mode.step_seconds <= ALIKE * fastest)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"slowdown": self.slowdown, "verdict": verdict(self)}


def default_modes(job: JobTrace) -> tuple[str, ...]:
    """The modes that are compared unless told."""
    each = max(1, round(job.microbatches / job.replicas))
    return ("bsp", "bsp+balance", f"anytime:auto,micro={each}", "ssp:3", "dssp:3..15", "asp")


def analyse(
    job: JobTrace, modes: Sequence[str] = (), seed: int = 0, progress: Callable[[float], None] | None = None
) -> TraceAnalysis:
    """Re-simulate a job, look for the cause of its stragglers, and predict modes on it; `bsp` is always among them."""
    factors = factors_of(job)
    actual, ideal = job_seconds(job), ideal_seconds(job)
    without = what_if(job, factors)
    specs = tuple(dict.fromkeys(("bsp", *(modes or default_modes(job)))))
    predictions: list[ModePrediction] = []
    for done, spec in enumerate(specs):
        predictions += predict(job, factors, spec, seed)
        if progress:
            progress((done + 1) / len(specs))
    causes = sorted((name for name in CAUSES if actual > WORTH * without[name]), key=lambda name: without[name])
    stage, factor = _heaviest(factors)
    return TraceAnalysis(
        job.stages,
        job.replicas,
        len(job.steps),
        job.schedule if job.stages > 1 else "",
        job.microbatches,
        actual,
        ideal,
        without,
        tuple(causes),
        _slow_workers(job, factors),
        stage,
        factor,
        _dearest(factors),
        tuple(predictions),
    )


def _slow_workers(job: JobTrace, factors: Factors) -> tuple[SlowWorker, ...]:
    found = [
        SlowWorker(replica, stage, factors.worker(replica, stage))
        for replica in range(job.replicas)
        for stage in range(job.stages)
    ]
    return tuple(sorted((one for one in found if one.factor >= SLOW), key=lambda one: -one.factor))


def _heaviest(factors: Factors) -> tuple[int, float]:
    seconds = [sum(pair) for pair in factors.usual]
    stage = max(range(len(seconds)), key=seconds.__getitem__)
    others = [time for other, time in enumerate(seconds) if other != stage]
    return stage, seconds[stage] * len(others) / sum(others) if sum(others) else 1.0


def _dearest(factors: Factors) -> float:
    """The cost that 19 of 20 micro-batches stay below; the mean is 1."""
    costs = sorted(cost for step in factors.costs for batches in step for cost in batches)
    return costs[(19 * len(costs)) // 20]


def verdict(found: TraceAnalysis) -> list[str]:
    """The causes, and what to do, in a line each."""
    causes = [f"{'also' if later else 'cause'}: {_cause(found, cause)}" for later, cause in enumerate(found.causes)]
    return [*(causes or [f"cause: none is worth {100 * (WORTH - 1):.0f} % of a step"]), f"advice: {_advice(found)}"]


def _cause(found: TraceAnalysis, cause: str) -> str:
    others, part = ("replicas", "micro-batch") if found.stages > 1 else ("workers", "step")
    costs = f"costs {found.actual - found.without[cause]:.2f} s of {found.actual:.2f} s a step"
    if cause == "worker":
        staged = found.stages > 1
        places = [f"stage {one.stage} of replica {one.replica}" if staged else f"worker {one.replica}" for one in found.slow]
        names = [f"{place} ({one.factor:.2f}x)" for place, one in zip(places, found.slow[:NAMED], strict=False)]
        more = f" and {len(found.slow) - NAMED} more" if len(found.slow) > NAMED else ""
        return f"slow against the other {others} at the same work: {', '.join(names)}{more}; {costs}"
    if cause == "cost":
        return f"uneven work: 1 {part} in 20 costs {found.dearest_factor:.1f}x the mean or more, on any worker; {costs}"
    if cause == "stage":
        heavy = f"stage {found.heaviest_stage} takes {found.heaviest_factor:.2f}x the mean of the other stages"
        return f"an uneven partition: {heavy}, in every replica; {costs}"
    return f"passing stalls, now of one worker, now of another; {costs}"


def _advice(found: TraceAnalysis) -> str:
    best, fastest = found.best(), min(found.modes, key=lambda mode: mode.step_seconds)
    gain = found.actual / best.step_seconds
    if found.actual < WORTH * fastest.step_seconds:
        text = f"no mode of the data axis helps: the fastest, {fastest.mode}, takes {fastest.step_seconds:.2f} s a step"
        if found.causes[:1] == ("stage",):
            even = "cut the model into more even stages (polytempo plan SCRIPT)"
            return f"{text}; the slow stage is the same in every replica: {even}"
        return text
    if gain < WORTH:
        return f"only modes with stale gradients help: {fastest.mode}, {fastest.step_seconds:.2f} s for a joint batch"
    text = f"{best.mode}, {best.step_seconds:.2f} s for a joint batch, {gain:.2f}x faster, without stale gradients"
    if BY_COST in best.mode:
        text += "; give the sampler its cost= (pt.DistributedBatchSampler)"
    if IN_ORDER in best.mode:
        text += "; the order within a replica is the script's: the cheapest first, then from the most expensive down"
    return f"{text}; and more even stages (polytempo plan SCRIPT)" if "stage" in found.causes else text

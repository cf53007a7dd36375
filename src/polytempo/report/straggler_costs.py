"""What a straggler costs a job, and what other modes would make of the same machines: by the simulator, on recorded times.

The own times of each worker's steps become a trace, its exchanges a delay, and the recorded mode runs on them in virtual
time: once as it was, once without the trouble. The difference is the cost. The other modes run on the trace as it was. Only
the ratios are used, on the throughput that was measured, so what is left out (servers, the start of a job) matters little.

It is throughput that is predicted. Modes with stale gradients need more samples to the same loss; how many, a trace of times
does not say (`polytempo simulate --train` does, for a small task).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from polytempo.errors import PolytempoError
from polytempo.records.paces import JobPaces, PacedStep, WorkerPace
from polytempo.records.stragglers import Straggler
from polytempo.simulate.cluster import Cluster, Link, Trace
from polytempo.simulate.run import simulate_job
from polytempo.sync.capabilities import PushedWork
from polytempo.sync.spec import Spec, compared, parse_spec

#: Of the modes that advice compares, those that a trace of times alone can predict: no bytes are known.
MODES = tuple(
    mode for mode in compared() if not parse_spec(mode).capabilities.averages and mode not in ("bsp+backup:1", "dssp:3..15")
)
#: Simulated steps of a worker, and of all; a batch that shares can be cut from.
STEPS, STEPS_IN_ALL, BATCH = 400, 40_000, 64
#: Stalls beside another trouble are said from this share of the time on: behind it most of them do not show.
WORTH_SAYING = 0.10
#: The shortest step in a trace, as a share of a typical one.
LEAST = 1e-3
#: What modes that follow the workers' speed ask of a script.
DEALT = "with pt.prepare or pt.DistributedBatchSampler"
#: The mode for slow links.
LOCAL = "local:8"


@dataclass(frozen=True)
class PredictedMode:
    """A mode on the machines of a record."""

    sync: str
    gain: float  #: its throughput over that of the recorded mode, minus 1
    stale: bool  #: are its gradients stale?
    change: str = ""  #: what beside the mode must change

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"sync": self.sync, "gain": self.gain, "stale": self.stale, "change": self.change}


@dataclass(frozen=True)
class CostOfStraggler:
    """A finding, what it costs the job, and what would help."""

    straggler: Straggler
    seconds: float  #: of the part of the run that is judged
    share: float  #: of the same
    gain: float  #: in throughput, of the recorded mode without it
    modes: tuple[PredictedMode, ...]  #: the best first

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        cost = {"seconds": self.seconds, "share": self.share, "gain_without": self.gain}
        return {**self.straggler.as_dict(), "cost": cost, "modes": [mode.as_dict() for mode in self.modes]}


def costs_of(
    stragglers: list[Straggler], paces: JobPaces, sync: str, refused: Collection[str] = ()
) -> list[CostOfStraggler]:
    """The cost of each finding, and the modes that would fit.

    Args:
        stragglers: The findings.
        paces: What steps took.
        sync: The recorded mode.
        refused: Modes that the job could not use: they are not named.
    """
    if not stragglers:
        return []
    spec = parse_spec(sync)
    before = _throughput(spec, paces)
    modes = [] if len(paces.workers) < 2 else _modes(spec, paces, before, refused)
    found = []
    for one in stragglers:
        after = _throughput(spec, paces, one)
        share = min(max(1 - before / after, 0.0), 1.0) if after else 0.0
        more = [mode for mode in _changes(one, spec, paces, before) if mode.sync not in refused]
        plain = [mode for mode in modes if mode.sync not in [change.sync for change in more]]
        best = sorted([*more, *plain], key=lambda mode: (mode.stale, -mode.gain))
        gain = after / before - 1 if before else 0.0
        found.append(CostOfStraggler(one, share * paces.seconds, share, max(gain, 0.0), tuple(best)))
    return [cost for cost in found if len(found) == 1 or cost.straggler.cause != "stalls" or cost.share >= WORTH_SAYING]


def _modes(spec: Spec, paces: JobPaces, before: float, refused: Collection[str]) -> list[PredictedMode]:
    """Other modes on the same machines; a mode that the simulator cannot run on them is left out."""
    found = []
    for sync in (mode for mode in MODES if mode not in refused):
        other = parse_spec(sync)
        if other.mode == spec.mode or not before:
            continue
        rate = _throughput(other, paces)
        if rate:
            change = DEALT if other.capabilities.by_speed and not spec.capabilities.by_speed else ""
            found.append(PredictedMode(sync, rate / before - 1, stale=not other.capabilities.rounds, change=change))
    return found


def _changes(one: Straggler, spec: Spec, paces: JobPaces, before: float) -> list[PredictedMode]:
    """What helps beside another mode: shares by cost for uneven work, blocks of local steps for slow links."""
    if not before or len(paces.workers) < 2:
        return []
    barrier = parse_spec("bsp")
    if one.cause == "uneven" and not spec.capabilities.by_speed:
        gain = _throughput(barrier, paces, one) / before - 1
        return [PredictedMode("bsp+balance", gain, stale=False, change="with cost= of the sampler")]
    if one.cause == "network" and not spec.capabilities.averages:
        gain = _throughput(barrier, paces, network=1 / parse_spec(LOCAL).period) / before - 1
        return [PredictedMode(LOCAL, gain, stale=False, change="(models are averaged: may cost accuracy)")]
    return []


def _throughput(spec: Spec, paces: JobPaces, without: Straggler | None = None, network: float = 1.0) -> float:
    """Steps a second of a mode on the recorded machines; 0 where the simulator cannot run it.

    Args:
        spec: The mode.
        paces: What steps took.
        without: A trouble that is left out.
        network: A factor for the time of all exchanges.
    """
    count = len(paces.workers)
    steps = min(STEPS, max(STEPS_IN_ALL // count, 1))
    local = spec.capabilities.work is PushedWork.LOCAL or spec.capabilities.neighbours
    times, links = {}, {}
    for rank, pace in enumerate(paces.workers):
        removed = _removed(pace, paces, without) if without is not None else {}
        away = network * fmean(step.network for step in pace.steps)
        if without is not None and without.cause == "network":
            away, removed = max(away - sum(removed.values()) / len(pace.steps), 0.0), {}
        links[rank] = Link(latency=0.0 if local else away / 2)
        kept = range(0, len(pace.steps), max(1, -(-len(pace.steps) // steps)))
        seconds = [_seconds(pace.steps[i], paces) - removed.get(i, 0.0) + away * local for i in kept]
        divided = [value / pace.steps[i].steps if local else value for value, i in zip(seconds, kept, strict=True)]
        times[rank] = Trace(tuple(max(value, LEAST * paces.typical) for value in divided))
    fixed = {rank: paces.fixed.get(pace.worker, 0.0) for rank, pace in enumerate(paces.workers)}
    cluster = Cluster(workers=count, step_times=times, batch=BATCH, links=links, fixed_times=fixed)
    most = min(max(len(trace.seconds) for trace in times.values()), steps)
    try:
        return simulate_job(cluster, spec.text, steps=most * count).samples_per_second / BATCH
    except PolytempoError:
        return 0.0


def _seconds(step: PacedStep, paces: JobPaces) -> float:
    """The seconds of one step of an even share, without its exchange."""
    return step.total - step.network if paces.dealt else step.own - step.network


def _removed(pace: WorkerPace, paces: JobPaces, one: Straggler) -> Mapping[int, float]:
    """By how much each step of a worker would be shorter without a trouble."""
    if one.worker not in (None, pace.worker):
        return {}
    steps = enumerate(pace.steps)
    if one.cause == "stalls":
        return dict(zip(pace.stalled, pace.excess, strict=True))
    if one.cause == "uneven":
        usual = median(step.raw for step in pace.steps)
        return {i: step.raw - (step.computing if paces.known_work else usual) for i, step in steps}
    if one.worker is None:
        return {i: getattr(step, one.cause) for i, step in steps}
    begin, end = one.since + paces.start, (one.until if one.until is not None else paces.seconds) + paces.start
    inside = [i for i, step in steps if begin <= step.t <= end]
    mean = sum(getattr(pace.steps[i], one.cause) for i in inside) / max(len(inside), 1)
    rest = max(1 - one.excess / mean, 0.0) if mean else 0.0
    return {i: (1 - rest) * getattr(pace.steps[i], one.cause) for i in inside}

"""What a straggler costs a job, and what other modes would make of the same machines: by the simulator, on recorded times.

The own times of each worker's steps become a trace, and the recorded mode runs on it in virtual time: once as it was, once
without the trouble. The difference is the cost. The other modes run on the trace as it was. Only the ratios are used, on the
throughput that was measured, so what the traces leave out (servers, the start of a job) matters little.

It is throughput that is predicted. Modes with stale gradients need more samples to the same loss; how many, a trace of times
does not say (`polytempo simulate --train` does, for a small task).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from polytempo.errors import PolytempoError
from polytempo.records.paces import JobPaces, PacedStep, WorkerPace
from polytempo.records.stragglers import Straggler
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.durations import Trace
from polytempo.simulate.run import simulate_job
from polytempo.sync.spec import Spec, parse_spec

#: The modes that are compared: none is stale but ssp and asp.
MODES = ("bsp", "bsp+balance", "anytime:auto", "ssp:3", "asp")
#: Simulated steps of a worker, and of all; a batch that shares can be cut from.
STEPS, STEPS_IN_ALL, BATCH = 400, 40_000, 64
#: The shortest step in a trace, as a share of a typical one.
LEAST = 1e-3
#: Steps between two averages of the advice for slow links.
BLOCK = 8

#: A worker's steps in seconds, by worker.
Traces = dict[int, list[float]]


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


def costs_of(stragglers: list[Straggler], paces: JobPaces, sync: str) -> list[CostOfStraggler]:
    """The cost of each finding, and the modes that would fit."""
    if not stragglers:
        return []
    spec = parse_spec(sync)
    before = _throughput(spec.text, _traces(paces, spec))
    modes = _modes(spec, paces, before)
    found = []
    for one in stragglers:
        after = _throughput(spec.text, _traces(paces, spec, one))
        share = min(max(1 - before / after, 0.0), 1.0) if after else 0.0
        more = _changes(one, spec, paces, before)
        best = sorted([*more, *modes], key=lambda mode: (mode.stale, -mode.gain))
        gain = after / before - 1 if before else 0.0
        found.append(CostOfStraggler(one, share * paces.seconds, share, max(gain, 0.0), tuple(best)))
    return found


def _modes(spec: Spec, paces: JobPaces, before: float) -> list[PredictedMode]:
    """Other modes on the same machines; a mode that the simulator cannot run on them is left out."""
    found = []
    for sync in MODES:
        other = parse_spec(sync)
        if other.mode == spec.mode or not before:
            continue
        rate = _throughput(sync, _traces(paces, other))
        if rate:
            found.append(PredictedMode(sync, rate / before - 1, stale=not other.mode.barrier))
    return found


def _changes(one: Straggler, spec: Spec, paces: JobPaces, before: float) -> list[PredictedMode]:
    """What helps beside another mode: shares by cost for uneven work, blocks of local steps for slow links."""
    if not before:
        return []
    if one.cause == "uneven" and not spec.measured:
        rate = _throughput("bsp", _traces(paces, parse_spec("bsp"), one))
        return [PredictedMode("bsp+balance", rate / before - 1, stale=False, change="with cost= of the sampler")]
    if one.cause == "network" and spec.averaging is None:
        traces = _traces(paces, spec, scale=lambda step: step.own - step.network * (1 - 1 / BLOCK))
        return [PredictedMode(f"local:{BLOCK}", _throughput("bsp", traces) / before - 1, stale=False)]
    return []


def _throughput(sync: str, traces: Traces) -> float:
    """Steps a second on these traces; 0 where the simulator cannot run the mode."""
    count = len(traces)
    steps = min(max(map(len, traces.values())), STEPS, max(STEPS_IN_ALL // count, 1))
    times = {rank: Trace(tuple(seconds)) for rank, seconds in enumerate(traces.values())}
    try:
        outcome = simulate_job(Cluster(workers=count, step_times=times, batch=BATCH), sync, steps=steps * count)
    except PolytempoError:
        return 0.0
    return outcome.samples_per_second / BATCH


def _traces(
    paces: JobPaces, spec: Spec, without: Straggler | None = None, scale: Callable[[PacedStep], float] | None = None
) -> Traces:
    """The own times of all workers' steps, thinned out to what is simulated; without a trouble, where one is given."""
    most = min(STEPS, max(STEPS_IN_ALL // len(paces.workers), 1))
    found: Traces = {}
    for pace in paces.workers:
        removed = _removed(pace, paces, without) if without is not None else {}
        kept = range(0, len(pace.steps), max(1, -(-len(pace.steps) // most)))
        found[pace.worker] = [
            max(_seconds(pace.steps[i], paces, spec, scale) - removed.get(i, 0.0), LEAST * paces.typical) for i in kept
        ]
    return found


def _seconds(step: PacedStep, paces: JobPaces, spec: Spec, scale: Callable[[PacedStep], float] | None) -> float:
    """The seconds of one step of an even share."""
    own = scale(step) if scale is not None else step.total if paces.dealt else step.own
    return own / step.steps if spec.averaging is not None or spec.local is not None else own


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

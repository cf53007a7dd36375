"""The straggler report: what a straggler costs a job and what other modes would make of the same machines, by the simulator
on recorded times; in words, as a line at the end of a run, and all of it for `polytempo explain`.

The own times of each worker's steps become a trace, its exchanges a delay, and the recorded mode runs on them in virtual
time: once as it was, once without the trouble. The difference is the cost. The other modes run on the trace as it was. Only
the ratios are used, on the throughput that was measured, so what is left out (servers, the start of a job) matters little.

It is throughput that is predicted. Modes with stale gradients need more samples to the same loss; how many, a trace of times
does not say (`polytempo simulate --train` does, for a small task).
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from polytempo.errors import PolytempoError, counted
from polytempo.records.step_figures import WARM_UP, StepFigures
from polytempo.records.stragglers import (
    LEAST_STEPS,
    Doubt,
    JobPaces,
    Straggler,
    Unsure,
    WorkerPace,
    doubts_in,
    paces_of,
    stragglers_in,
)
from polytempo.report.advice import WORTH, WORTH_SECONDS, choose
from polytempo.report.summary import percentages
from polytempo.report.table import TextTable
from polytempo.simulate.cluster import Cluster, Link, Trace
from polytempo.simulate.run import simulate_job
from polytempo.sync.capabilities import Caution, PushedWork
from polytempo.sync.spec import Spec, compared_specs
from polytempo.units import plain_number

#: The modes that advice compares; and of these, the ones that a trace of times alone can predict: no bytes are known.
COMPARED = compared_specs()
MODES = [
    spec for mode, spec in COMPARED.items() if not spec.capabilities.averages and mode not in ("bsp+backup:1", "dssp:3..15")
]
#: Simulated steps of a worker, and of all; a batch that shares can be cut from.
STEPS, STEPS_IN_ALL, BATCH = 400, 40_000, 64
#: Stalls beside another trouble are said from this share of the time on: behind it most of them do not show.
WORTH_SAYING = 0.10
#: The shortest step in a trace, as a share of a typical one.
LEAST = 1e-3
#: What modes that follow the workers' speed ask of a script.
DEALT = "with pt.prepare or pt.DistributedBatchSampler"
#: A factor that is shown as one.
WHOLE = 10.0

#: What can be done about a cause beside another mode.
ADVICE = {
    "computing": "look at the host: other processes on it, fewer cores or a slower GPU, heat",
    "input": "give the loader more workers (num_workers=), or the data a faster place",
    "network": "send less (compression=), or use a faster link",
    "stalls": "look for what runs now and then: evaluation, checkpoints, garbage collection, other jobs on the host",
    "uneven": "make batches of like cost, such as by sorting long sequences together",
}

#: Why a worker that the table shows to be slower is no finding.
UNSURE = {
    Unsure.SINGLE_STEPS: "single long steps make most of the difference",
    Unsure.CHANCE: "steps vary so much here that this may be chance; a longer run would tell",
    Unsure.CHANGING: "it is slow now and then, not steadily",
    Unsure.PASSING: "that is so in a short part of the run only",
}

CAVEAT = (
    "Throughput is not convergence: modes with stale gradients need more samples to the same loss. "
    "polytempo simulate --train digits compares time to an accuracy."
)


@dataclass(frozen=True)
class PredictedMode:
    """A mode on the machines of a record."""

    spec: Spec
    gain: float  #: its throughput over that of the recorded mode, minus 1
    change: str = ""  #: what beside the mode must change

    @property
    def stale(self) -> bool:
        """Are its gradients stale?"""
        return not self.spec.capabilities.rounds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"sync": self.spec.text, "gain": self.gain, "stale": self.stale, "change": self.change}


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
        return {**asdict(self.straggler), "cost": cost, "modes": [mode.as_dict() for mode in self.modes]}


@dataclass(frozen=True)
class StragglerReport:
    """What was found in a job."""

    spec: Spec
    paces: JobPaces | None
    costs: tuple[CostOfStraggler, ...] = ()
    doubts: tuple[Doubt, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        workers = [{"worker": pace.worker, **pace.split()} for pace in self.paces.workers] if self.paces else []
        judged = {"seconds": self.paces.seconds, "typical_step_s": self.paces.typical} if self.paces else None
        found = [cost.as_dict() for cost in self.costs]
        doubts = [asdict(doubt) for doubt in self.doubts]
        return {"sync": self.spec.text, "judged": judged, "workers": workers, "stragglers": found, "doubts": doubts}


def straggler_report(figures: Iterable[StepFigures], spec: Spec, refused: Collection[str] = ()) -> StragglerReport:
    """Judge a job by what its steps took.

    Args:
        figures: In the order of their moments.
        spec: The job's mode.
        refused: Modes that the job could not use: they are not named.
    """
    can = spec.capabilities
    paces = paces_of(figures, dealt=can.by_speed, deadlines=can.work is PushedWork.DEADLINE)
    if paces is None:
        return StragglerReport(spec, None)
    costs = _costs(stragglers_in(paces), paces, spec, refused)
    doubts = doubts_in(paces, [cost.straggler for cost in costs])
    return StragglerReport(spec, paces, tuple(costs), tuple(doubts))


# What a finding costs, and which modes would fit.


def _costs(found: list[Straggler], paces: JobPaces, spec: Spec, refused: Collection[str]) -> list[CostOfStraggler]:
    if not found:
        return []
    before = _throughput(spec, paces)
    modes = [] if len(paces.workers) < 2 else _modes(spec, paces, before, refused)
    costs = []
    for one in found:
        after = _throughput(spec, paces, one)
        share = min(max(1 - before / after, 0.0), 1.0) if after else 0.0
        more = [mode for mode in _changes(one, spec, paces, before) if mode.spec.text not in refused]
        plain = [mode for mode in modes if mode.spec not in [change.spec for change in more]]
        best = sorted([*more, *plain], key=lambda mode: (mode.stale, -mode.gain))
        gain = after / before - 1 if before else 0.0
        costs.append(CostOfStraggler(one, share * paces.seconds, share, max(gain, 0.0), tuple(best)))
    return [cost for cost in costs if len(costs) == 1 or cost.straggler.cause != "stalls" or cost.share >= WORTH_SAYING]


def _modes(spec: Spec, paces: JobPaces, before: float, refused: Collection[str]) -> list[PredictedMode]:
    """Other modes on the same machines; a mode that the simulator cannot run on them is left out."""
    found = []
    for other in MODES:
        if other.text in refused or other.mode == spec.mode or not before:
            continue
        if rate := _throughput(other, paces):
            change = DEALT if other.capabilities.by_speed and not spec.capabilities.by_speed else ""
            found.append(PredictedMode(other, rate / before - 1, change))
    return found


def _changes(one: Straggler, spec: Spec, paces: JobPaces, before: float) -> list[PredictedMode]:
    """What helps beside another mode: shares by cost for uneven work, blocks of local steps for slow links."""
    if not before or len(paces.workers) < 2:
        return []
    barrier, local = COMPARED["bsp"], COMPARED["local:8"]
    if one.cause == "uneven" and not spec.capabilities.by_speed:
        gain = _throughput(barrier, paces, one) / before - 1
        return [PredictedMode(COMPARED["bsp+balance"], gain, "with cost= of the sampler")]
    if one.cause == "network" and not spec.capabilities.averages:
        gain = _throughput(barrier, paces, network=1 / local.period) / before - 1
        return [PredictedMode(local, gain, "(models are averaged: may cost accuracy)")]
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
        steps_of = [pace.steps[i] for i in kept]
        # of a step of an even share, without its exchange
        own = [(step.total if paces.dealt else step.own) - step.network for step in steps_of]
        seconds = [value - removed.get(i, 0.0) + away * local for i, value in zip(kept, own, strict=True)]
        each = local or not paces.dealt  # a recorded push may hold local steps; what was dealt holds micro-batches of one
        divided = [value / step.steps if each else value for value, step in zip(seconds, steps_of, strict=True)]
        times[rank] = Trace(tuple(max(value, LEAST * paces.typical) for value in divided))
    fixed = {rank: paces.fixed.get(pace.worker, 0.0) for rank, pace in enumerate(paces.workers)}
    cluster = Cluster(workers=count, step_times=times, batch=BATCH, links=links, fixed_times=fixed)
    most = min(max(len(trace.seconds) for trace in times.values()), steps)
    try:
        return simulate_job(cluster, spec.text, steps=most * count).samples_per_second / BATCH
    except PolytempoError:
        return 0.0


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


# The end of a run.


def closing_line(report: StragglerReport, record: str = "", modes: str = "") -> str:
    """What is said at the end of a run: its most expensive finding and what would help; empty where that is worth nothing.

    Args:
        report: The findings.
        record: Where more can be read of them.
        modes: The file of the job's mode, which reading the record needs; empty where it is one of ours.
    """
    told = [cost for cost in report.costs if _worth(cost.share, cost.seconds)]
    if not told:
        return ""
    cost = max(told, key=lambda one: one.share)  # the first of those that are alike
    words = f"{found_in_words(cost.straggler)}; {_cost(cost)}{_remedy(cost, report)}"
    more = counted(len(told) - 1, "more finding") if len(told) > 1 else "more" if record else ""
    explain = shlex.join(["polytempo", "explain", record, *(["--mode", modes] if modes else [])])
    return f"{words} ({more}{f': {explain}' if record else ''})" if more else words


def _worth(share: float, seconds: float) -> bool:
    return share >= WORTH and seconds >= WORTH_SECONDS


def _remedy(cost: CostOfStraggler, report: StragglerReport) -> str:
    best = best_mode(cost, report.spec)
    seconds = report.paces.seconds if report.paces is not None else 0.0
    if best is None or not _worth(best.gain, seconds * (1 - 1 / (1 + best.gain))):
        return f"; {ADVICE[cost.straggler.cause]}"
    others = [mode for mode in cost.modes if mode is not best and not mode.stale]
    alike = [mode.spec.text for mode in others if abs((1 + mode.gain) / (1 + best.gain) - 1) < WORTH]
    doubt = f"{alike[0]} about as much; " if alike else ""
    return f"; {_named(best)} would bring {_gain(best.gain)} ({doubt}predicted)"


def best_mode(cost: CostOfStraggler, spec: Spec) -> PredictedMode | None:
    """The mode that would fit, chosen as `polytempo advise` does among those without stale gradients and the recorded one;
    None where that gains too little over the recorded one. For slow input no mode helps."""
    fresh = [mode for mode in cost.modes if not mode.stale]
    if cost.straggler.cause == "input" or not fresh:
        return None
    recorded = [PredictedMode(spec, 0.0)] if spec.capabilities.caution < Caution.STALE else []
    best = choose([*fresh, *recorded], lambda mode: 1 + mode.gain)
    return best if best.gain >= WORTH else None


def found_in_words(one: Straggler) -> str:
    """Who is slow, why and since when."""
    if one.cause == "uneven":
        why = f"work explains {100 * one.share:.0f} % of it" if one.share else "their work is not known to Polytempo"
        return f"steps are uneven: a long one takes {_times(one.factor)} as long as a typical one, on all workers ({why})"
    if one.cause == "stalls":
        who, whose = ("all workers stall", "their") if one.worker is None else (f"worker {one.worker} stalls", "its")
        often = f"{100 * one.share:.0f} % of {whose} steps"
        return f"{who}: {often} take about {_times(one.factor)} as long as a typical one"
    if one.worker is None:
        doing = "wait for data" if one.cause == "input" else "exchange gradients"
        return f"all workers {doing} for {100 * one.share:.0f} % of their own time"
    when = f"from {one.since:.0f} s on" if one.since else "since the start"
    if one.until is not None:
        when = f"from {one.since:.0f} s to {one.until:.0f} s"
    why = {
        "computing": "computing the same work takes it",
        "input": "it waits for its data, and a step takes it",
        "network": "its exchanges take long, and a step takes it",
    }[one.cause]
    return f"worker {one.worker} is slow: {why} {_times(one.factor)} as long as the others, {when}"


def _times(factor: float) -> str:
    return f"{factor:.0f}x" if factor >= WHOLE else f"{factor:.1f}x"


def _cost(cost: CostOfStraggler) -> str:
    if cost.share < 0.01:
        return "it costs this mode next to nothing"
    seconds = f"{cost.seconds:.0f} s" if cost.seconds >= WHOLE else f"{cost.seconds:.1f} s"
    return f"it costs about {100 * cost.share:.0f} % of the time ({seconds})"


def _gain(gain: float) -> str:
    return f"{plain_number(gain + 1, 2)}x the throughput" if gain >= 1 else f"{100 * gain:+.0f} % throughput"


def _named(mode: PredictedMode) -> str:
    return f"--sync {mode.spec.text}" + (f" {mode.change}" if mode.change else "")


# All of it.


def full_report(report: StragglerReport, job: Mapping[str, Any], width: int = 100) -> str:
    """What `polytempo explain` prints.

    Args:
        report: The findings.
        job: The job's figures in meta.json.
        width: Columns of the terminal.
    """
    paces = report.paces
    if paces is None:
        least = LEAST_STEPS + WARM_UP
        return f"{report.spec.text}: too few steps to judge; expected {least} of a worker at least, of a longer run"
    notes = []
    if not any(step.input for pace in paces.workers for step in pace.steps):
        notes.append(
            "No worker told how long it waited for data, so input counts as computing: give the model to "
            "DistributedOptimizer(optimizer, model), or use pt.prepare."
        )
    if paces.absent:
        ranks = ", ".join(map(str, paces.absent[:8]))
        notes.append(f"Not judged, with fewer than {LEAST_STEPS + WARM_UP} steps: worker {ranks}.")
    parts = [_headline(report, paces, job), _table(paces).text(width), *(textwrap.fill(note, width) for note in notes)]
    doubts = [textwrap.fill(f"In doubt: {_doubted(doubt)}.", width, subsequent_indent="   ") for doubt in report.doubts]
    if not report.costs:
        parts += doubts or ["Nothing is wrong: no worker is slow beyond a tenth of a step and beyond chance."]
        return "\n\n".join(parts)
    parts += [_finding(number, cost, report.spec, width) for number, cost in enumerate(report.costs, 1)]
    return "\n\n".join([*parts, *doubts, textwrap.fill(CAVEAT, width)])


def _headline(report: StragglerReport, paces: JobPaces, job: Mapping[str, Any]) -> str:
    rate = f", {plain_number(job['samples_per_second'])} samples/s" if job.get("samples_per_second") else ""
    split = {name: sum(pace.split()[name] for pace in paces.workers) for name in ("computing", "input", "network", "stalls")}
    total = sum(split.values()) or 1.0
    shares = percentages({name: value / total for name, value in split.items()})
    shares.pop("other", None)
    told = ", ".join(f"{name} {share} %" for name, share in shares.items())
    head = f"{report.spec.text}: {counted(len(paces.workers), 'worker')}, {paces.seconds:.1f} s judged{rate}"
    return f"{head}\nOf the workers' own time: {told}"


def _table(paces: JobPaces) -> TextTable:
    rows = []
    for pace in paces.workers:
        split = pace.split()
        cells = [split[name] for name in ("computing", "input", "network", "stalls")]
        rows.append((str(pace.worker), *(_milliseconds(value) for value in (*cells, sum(cells))), str(len(pace.steps))))
    heads = ("worker", "computing\nms", "input\nms", "network\nms", "stalls\nms", "own time\nms", "steps")
    title = "A step of typical work; time spent waiting for other workers is not in it:"
    return TextTable(title, heads, tuple(rows))


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _finding(number: int, cost: CostOfStraggler, spec: Spec, width: int) -> str:
    one = cost.straggler
    prose = [
        f"{_cost(cost).capitalize()}; without it {spec.text} itself would bring {_gain(cost.gain)}.",
        f"What to do: {ADVICE[one.cause]}.",
    ]
    lines = [textwrap.fill(f"{number}. {found_in_words(one)}.", width, subsequent_indent="   ")]
    lines += [textwrap.fill(text, width, initial_indent="   ", subsequent_indent="   ") for text in prose]
    if cost.modes:
        lines.append("   Other modes on these machines, as the simulator predicts them from the recorded times:")
        wide, stale = max(len(_named(mode)) for mode in cost.modes), "  (stale gradients)"
        lines += [f"     {_named(mode).ljust(wide)}  {_gain(mode.gain)}{stale * mode.stale}" for mode in cost.modes]
    best = best_mode(cost, spec)
    if best is not None:
        lines.append(f"   The best fit without stale gradients: {_named(best)}.")
    return "\n".join(lines)


def _doubted(doubt: Doubt) -> str:
    figures = f"{_milliseconds(doubt.seconds)} against {_milliseconds(doubt.usual)} ms of {doubt.compared}"
    return (
        f"worker {doubt.worker} takes {_times(doubt.factor)} as long as the others on average ({figures}, most of the "
        f"difference {doubt.part}), but {UNSURE[doubt.why]}"
    )

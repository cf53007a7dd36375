"""The straggler report in words: a line at the end of a run, and all of it for `polytempo explain`."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polytempo.errors import counted
from polytempo.records.paces import LEAST_STEPS, JobPaces, paces_of
from polytempo.records.step_cost import WARM_UP
from polytempo.records.step_figures import StepFigures
from polytempo.records.stragglers import Doubt, Straggler, Unsure, doubts_in, stragglers_in
from polytempo.report.advice import WORTH, WORTH_SECONDS, caution_of, choose
from polytempo.report.straggler_costs import CostOfStraggler, PredictedMode, costs_of
from polytempo.report.summary import percentages
from polytempo.report.table import TextTable
from polytempo.sync.capabilities import Caution, PushedWork
from polytempo.sync.spec import parse_spec
from polytempo.units import plain_number

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
class StragglerReport:
    """What was found in a job."""

    sync: str
    paces: JobPaces | None
    costs: tuple[CostOfStraggler, ...]
    doubts: tuple[Doubt, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        workers = [{"worker": pace.worker, **pace.split()} for pace in self.paces.workers] if self.paces else []
        judged = {"seconds": self.paces.seconds, "typical_step_s": self.paces.typical} if self.paces else None
        found = [cost.as_dict() for cost in self.costs]
        doubts = [doubt.as_dict() for doubt in self.doubts]
        return {"sync": self.sync, "judged": judged, "workers": workers, "stragglers": found, "doubts": doubts}


def straggler_report(figures: Iterable[StepFigures], sync: str, refused: Collection[str] = ()) -> StragglerReport:
    """Judge a job by what its steps took; `refused`: modes that it could not use, which are not named."""
    spec = parse_spec(sync)
    paces = paces_of(figures, dealt=spec.capabilities.by_speed, deadlines=spec.capabilities.work is PushedWork.DEADLINE)
    if paces is None:
        return StragglerReport(spec.text, None, ())
    costs = costs_of(stragglers_in(paces), paces, spec.text, refused)
    doubts = doubts_in(paces, [cost.straggler for cost in costs])
    return StragglerReport(spec.text, paces, tuple(costs), tuple(doubts))


# The end of a run.


def closing_line(report: StragglerReport, record: str = "") -> str:
    """What is said at the end of a run: its most expensive finding and what would help; empty where that is worth nothing.

    Args:
        report: The findings.
        record: Where more can be read of them.
    """
    told = [cost for cost in report.costs if _worth(cost.share, cost.seconds)]
    if not told:
        return ""
    cost = max(told, key=lambda one: one.share)  # the first of those that are alike
    words = f"{found_in_words(cost.straggler)}; {_cost(cost)}{_remedy(cost, report)}"
    more = counted(len(told) - 1, "more finding") if len(told) > 1 else "more" if record else ""
    return f"{words} ({more}{f': polytempo explain {shlex.quote(record)}' if record else ''})" if more else words


def _worth(share: float, seconds: float) -> bool:
    """Is a gain large enough to be named, as a share and in seconds?"""
    return share >= WORTH and seconds >= WORTH_SECONDS


def _remedy(cost: CostOfStraggler, report: StragglerReport) -> str:
    best = best_mode(cost, report.sync)
    seconds = report.paces.seconds if report.paces is not None else 0.0
    if best is None or not _worth(best.gain, seconds * (1 - 1 / (1 + best.gain))):
        return f"; {ADVICE[cost.straggler.cause]}"
    alike = [mode.sync for mode in cost.modes if mode.sync != best.sync and not mode.stale and _alike(mode, best)]
    doubt = f"{alike[0]} about as much; " if alike else ""
    return f"; {_named(best)} would bring {_gain(best.gain)} ({doubt}predicted)"


def _alike(one: PredictedMode, other: PredictedMode) -> bool:
    return abs((1 + one.gain) / (1 + other.gain) - 1) < WORTH


def best_mode(cost: CostOfStraggler, sync: str) -> PredictedMode | None:
    """The mode that would fit, chosen as `polytempo advise` does among those without stale gradients and the recorded one;
    None where that gains too little over the recorded one. For slow input no mode helps."""
    if cost.straggler.cause == "input":
        return None
    fresh = {mode.sync: mode for mode in cost.modes if not mode.stale}
    rates = {found: 1 + mode.gain for found, mode in fresh.items()}
    best = fresh.get(choose({**rates, sync: 1.0} if _is_fresh(sync) else rates)) if rates else None
    return best if best is not None and best.gain >= WORTH else None


def _is_fresh(sync: str) -> bool:
    return caution_of(sync) < Caution.STALE


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
    why = {
        "computing": "computing the same work takes it",
        "input": "it waits for its data, and a step takes it",
        "network": "its exchanges take long, and a step takes it",
    }[one.cause]
    return f"worker {one.worker} is slow: {why} {_times(one.factor)} as long as the others, {_when(one)}"


def _when(one: Straggler) -> str:
    if one.until is not None:
        return f"from {one.since:.0f} s to {one.until:.0f} s"
    return f"from {one.since:.0f} s on" if one.since else "since the start"


def _times(factor: float) -> str:
    return f"{factor:.0f}x" if factor >= WHOLE else f"{factor:.1f}x"


def _cost(cost: CostOfStraggler) -> str:
    if cost.share < 0.01:
        return "it costs this mode next to nothing"
    return f"it costs about {100 * cost.share:.0f} % of the time ({_seconds(cost.seconds)})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= WHOLE else f"{seconds:.1f} s"


def _gain(gain: float) -> str:
    return f"{plain_number(gain + 1, 2)}x the throughput" if gain >= 1 else f"{100 * gain:+.0f} % throughput"


def _named(mode: PredictedMode) -> str:
    return f"--sync {mode.sync}" + (f" {mode.change}" if mode.change else "")


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
        return f"{report.sync}: too few steps to judge; expected {least} of a worker at least, of a longer run"
    notes = [textwrap.fill(note, width) for note in _notes(paces)]
    parts = [_headline(report, paces, job), _table(paces).text(width), *notes]
    doubts = [textwrap.fill(f"In doubt: {_doubted(doubt)}.", width, subsequent_indent="   ") for doubt in report.doubts]
    if not report.costs:
        parts += doubts or ["Nothing is wrong: no worker is slow beyond a tenth of a step and beyond chance."]
        return "\n\n".join(parts)
    parts += [_finding(number, cost, report.sync, width) for number, cost in enumerate(report.costs, 1)]
    return "\n\n".join([*parts, *doubts, textwrap.fill(CAVEAT, width)])


def _headline(report: StragglerReport, paces: JobPaces, job: Mapping[str, Any]) -> str:
    rate = f", {plain_number(job['samples_per_second'])} samples/s" if job.get("samples_per_second") else ""
    split = {name: sum(pace.split()[name] for pace in paces.workers) for name in ("computing", "input", "network", "stalls")}
    total = sum(split.values()) or 1.0
    shares = percentages({name: value / total for name, value in split.items()})
    shares.pop("other", None)
    told = ", ".join(f"{name} {share} %" for name, share in shares.items())
    head = f"{report.sync}: {counted(len(paces.workers), 'worker')}, {paces.seconds:.1f} s judged{rate}"
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


def _notes(paces: JobPaces) -> list[str]:
    notes = []
    if not any(step.input for pace in paces.workers for step in pace.steps):
        notes.append(
            "No worker told how long it waited for data, so input counts as computing: give the model to "
            "DistributedOptimizer(optimizer, model), or use pt.prepare."
        )
    if paces.absent:
        ranks = ", ".join(map(str, paces.absent[:8]))
        notes.append(f"Not judged, with fewer than {LEAST_STEPS + WARM_UP} steps: worker {ranks}.")
    return notes


def _finding(number: int, cost: CostOfStraggler, sync: str, width: int) -> str:
    one = cost.straggler
    prose = [
        f"{_cost(cost).capitalize()}; without it {sync} itself would bring {_gain(cost.gain)}.",
        f"What to do: {ADVICE[one.cause]}.",
    ]
    lines = [textwrap.fill(f"{number}. {found_in_words(one)}.", width, subsequent_indent="   ")]
    lines += [textwrap.fill(text, width, initial_indent="   ", subsequent_indent="   ") for text in prose]
    if cost.modes:
        lines.append("   Other modes on these machines, as the simulator predicts them from the recorded times:")
        wide, stale = max(len(_named(mode)) for mode in cost.modes), "  (stale gradients)"
        lines += [f"     {_named(mode).ljust(wide)}  {_gain(mode.gain)}{stale * mode.stale}" for mode in cost.modes]
    best = best_mode(cost, sync)
    if best is not None:
        lines.append(f"   The best fit without stale gradients: {_named(best)}.")
    return "\n".join(lines)


def _doubted(doubt: Doubt) -> str:
    figures = f"{_milliseconds(doubt.seconds)} against {_milliseconds(doubt.usual)} ms of {doubt.compared}"
    return (
        f"worker {doubt.worker} takes {_times(doubt.factor)} as long as the others on average ({figures}, most of the "
        f"difference {doubt.part}), but {UNSURE[doubt.why]}"
    )

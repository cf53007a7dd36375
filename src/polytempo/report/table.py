"""Outcomes side by side, as rows of text for a terminal or a Markdown file, and what follows from them in a sentence.

Does a mode end at the accuracy of bsp? A mode that is fast and does not learn as well is not faster. A mode falls short
where its end lies below that of bsp by more than a point, and by more than twice the standard error of their difference.
What chance does is seen among the runs of a mode, where there are several; of a single run among the looks at its end, from
one to the next: there a curve that still rises counts as one that may yet arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Protocol

from polytempo.report.live import LiveRun, RepeatedRun
from polytempo.report.scaling import Series
from polytempo.simulate.outcome import Outcome
from polytempo.units import plain_number

#: A difference of this share is none.
POINT = 0.01
#: Standard errors of a difference that chance does not make.
SURE = 2.0
#: The end of a run: this share of its looks, and at least this number.
LAST, LEAST = 0.25, 3

#: What was seen in a run, look by look; at least once.
Looks = Sequence[float]


class Trained(Protocol):
    """A run that also has an accuracy."""

    @property
    def outcome(self) -> Outcome: ...
    @property
    def accuracy(self) -> float | None:
        """At the end; None where the run logged none."""

    @property
    def curve(self) -> tuple[tuple[float, float], ...]: ...
    def time_to(self, target: float) -> float | None:
        """The first second at which the target was seen."""


@dataclass(frozen=True)
class TextTable:
    """A title, column heads (of two lines) and rows; the first column is a name, the others are numbers."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As a Markdown table."""
        heads = [head.replace("\n", " ").strip() for head in self.heads]
        align = ("---", *("---:" for _ in self.heads[1:]))
        lines = [heads, align, *self.rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"

    def put_into(self, page: str) -> str:
        """A Markdown page, with this table between `<!-- its title -->` and `<!-- end of its title -->`."""
        start, end = f"<!-- {self.title} -->\n", f"<!-- end of {self.title} -->"
        before, rest = page.split(start)
        _, after = rest.split(end)
        return f"{before}{start}{self.markdown()}{end}{after}"

    def text(self, width: int) -> str:
        """For a terminal of `width` columns; table columns that do not fit are left out, the last first, with a note."""
        heads = [head.rpartition("\n")[::2] for head in self.heads]
        columns = [[*lines, *cells] for lines, *cells in zip(heads, *self.rows, strict=True)]
        wide = [max(map(len, column)) for column in columns]
        fit = len(wide)
        while fit > 2 and sum(wide[:fit]) + 2 * (fit - 1) > width:
            fit -= 1
        lines = [
            "  ".join(
                cell.rjust(w) if n else cell.ljust(w) for n, (cell, w) in enumerate(zip(cells, wide, strict=True)) if n < fit
            )
            for cells in zip(*columns, strict=True)
        ]
        lines.insert(2, "-" * len(lines[0]))
        left_out = [head.replace("\n", " ").strip() for head in self.heads[fit:]]
        more = [f"(a wider terminal, or --json, also has: {', '.join(left_out)})"] if left_out else []
        return "\n".join([self.title, "", *(line.rstrip() for line in lines), *more])


def percent(share: float) -> str:
    """With one digit behind the point."""
    return f"{100 * share:.1f}"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else plain_number(value)


_COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "time\n(s)": lambda o: _seconds(o.seconds),
    "samples\n/s": lambda o: plain_number(o.samples_per_second),
    "efficient\n(%)": lambda o: percent(o.efficiency),
    "waiting\n(%)": lambda o: percent(o.waiting),
    "sending\n(%)": lambda o: percent(o.communicating),
    "discarded\npushes": lambda o: f"{o.discarded}",
    "stale\nmean": lambda o: f"{o.staleness_mean:.2f}",
    "\nmax": lambda o: f"{o.staleness_max}",
    "lead\nmax": lambda o: f"{o.max_lead}",
}

#: Columns that are left out when they are zero in every row.
_MAY_BE_LEFT_OUT = {"sending\n(%)": "0.0", "discarded\npushes": "0"}


def mode_name(outcome: Outcome) -> str:
    """The mode, and the way its bytes travel where that is not the server."""
    return outcome.sync if outcome.via == "ps" else f"{outcome.sync} ({outcome.via})"


def comparison(outcomes: Sequence[Outcome], title: str) -> TextTable:
    """Timing alone."""
    cells = {head: [show(o) for o in outcomes] for head, show in _COLUMNS.items()}
    shown = {head: column for head, column in cells.items() if set(column) != {_MAY_BE_LEFT_OUT.get(head)}}
    names = [mode_name(o) for o in outcomes]
    return TextTable(title, ("mode", *shown), tuple(zip(names, *shown.values(), strict=True)))


def trained_comparison(runs: Sequence[Trained], target: float, title: str, metric: str = "accuracy") -> TextTable:
    """Timing, and the metric."""
    timing = comparison([run.outcome for run in runs], title)
    heads = (timing.heads[0], f"{100 * target:g} % at\n(s)", f"final\n{metric} (%)", *timing.heads[1:])
    rows = tuple(
        (row[0], _time_to(run, target), "-" if run.accuracy is None else percent(run.accuracy), *row[1:])
        for row, run in zip(timing.rows, runs, strict=True)
    )
    return TextTable(title, heads, rows)


def speed_comparison(runs: Sequence[LiveRun], title: str) -> TextTable:
    """Timing of runs that did not log the metric, and what they logged last."""
    timing = comparison([run.outcome for run in runs], title)
    names = sorted({name for run in runs for name in run.logged})
    heads = (timing.heads[0], "steps", *timing.heads[1:], *(f"last\n{name}" for name in names))
    rows = tuple(
        (row[0], f"{run.outcome.steps}", *row[1:], *(plain_number(run.logged[n]) if n in run.logged else "-" for n in names))
        for row, run in zip(timing.rows, runs, strict=True)
    )
    return TextTable(title, heads, rows)


def _time_to(run: Trained, target: float) -> str:
    if not run.curve:
        return "-"
    time = run.time_to(target)
    shown = _not_by(run.outcome.seconds) if time is None else _seconds(time)
    if not isinstance(run, RepeatedRun) or len(run.runs) == 1:
        return shown
    missed = [one.outcome.seconds for one in run.runs if one.time_to(target) is None]
    reached = [time for one in run.runs if (time := one.time_to(target)) is not None]
    if not reached:
        return shown
    return f"{shown} ({_seconds(min(reached))} to {_not_by(min(missed)) if missed else _seconds(max(reached))})"


def _not_by(horizon: float) -> str:
    """A target that was not seen: when the run ended, and not that it would never have been."""
    return f"not by {_seconds(horizon)}"


def scaling_table(series: Sequence[Series], title: str) -> TextTable:
    """Throughput (and efficiency) at powers of two, and at the end."""
    known = [{point.workers: point for point in one.points} for one in series]
    last = max(known[0])
    sizes = sorted(n for n in {1, 2, 4, 8, 16, 32, 64, 128, last} if n in known[0])
    rows = tuple(
        (one.name, *(f"{plain_number(points[n].samples_per_second)} ({100 * points[n].efficiency:.0f} %)" for n in sizes))
        for one, points in zip(series, known, strict=True)
    )
    return TextTable(title, ("samples/s\n(efficiency)", *(f"n = {n}" for n in sizes)), rows)


def verdict(runs: Sequence[Trained], target: float) -> str:
    """The mode that reached the target first, in a sentence."""
    times = {mode_name(run.outcome): run.time_to(target) for run in runs}
    there = sorted((time, name) for name, time in times.items() if time is not None)
    if not there:
        best = max(runs, key=lambda run: run.accuracy or 0.0)
        ends = f"ends at {percent(best.accuracy or 0.0)} %"
        return f"none reaches {100 * target:g} %; the best, {mode_name(best.outcome)}, {ends}"
    first, name = there[0]
    others = [f"{other} takes {time / first:.2f}x as long" for time, other in there[1:]]
    missed = []
    for run in runs:
        if run.time_to(target) is None:
            name_of, end = mode_name(run.outcome), _seconds(run.outcome.seconds)
            missed.append(f"{name_of} does not by {end} s" if run.curve else f"of {name_of} nothing was logged")
    return "; ".join([f"{name} reaches {100 * target:g} % first, after {_seconds(first)} s", *others, *missed])


def speed_verdict(outcomes: Sequence[Outcome]) -> str:
    """The mode with the most samples a second, in a sentence."""
    first, *others = sorted(outcomes, key=lambda outcome: -outcome.samples_per_second)
    if not first.steps:
        return "no step was pushed, so there is nothing to compare"
    what = "samples" if first.samples != first.steps else "steps"
    slower = [
        f"{mode_name(other)} takes {first.samples_per_second / other.samples_per_second:.2f}x as long for as many"
        for other in others
        if other.samples_per_second
    ]
    return "; ".join([f"{mode_name(first)} is the fastest, with {plain_number(first.samples_per_second)} {what}/s", *slower])


def falls_short(runs: Sequence[Looks], of: Sequence[Looks]) -> bool:
    """Do the runs of one mode end below those of another?"""
    gap = fmean(looks[-1] for looks in of) - fmean(looks[-1] for looks in runs)
    error = math.sqrt(_variance(runs) / len(runs) + _variance(of) / len(of))
    return not gap <= max(POINT, SURE * error)  # what is not a number has not arrived


def _variance(runs: Sequence[Looks]) -> float:
    if len(runs) > 1:
        return stdev(looks[-1] for looks in runs) ** 2
    last = runs[0][-max(LEAST, round(LAST * len(runs[0]))) :]
    changes = [(after - before) ** 2 for before, after in pairwise(last)]
    return fmean(changes) / 2 if changes else 0.0


def short_of_bsp(runs: Sequence[Trained], metric: str = "accuracy") -> str:
    """The modes that do not end at the accuracy of bsp, in a line; empty where there are none, or no bsp."""
    seen = [(run, looks) for run in runs if (looks := _looks_of(run))]
    base = next((looks for run, looks in seen if run.outcome.sync == "bsp"), None)
    if base is None or not all(math.isfinite(looks[-1]) for looks in base):
        return ""
    short = [f"{mode_name(run.outcome)} ({_end(looks)} %)" for run, looks in seen if falls_short(looks, base)]
    if not short:
        return ""
    return f"below the {metric} of bsp ({_end(base)} %) by more than a point and more than it varies: {', '.join(short)}"


def _looks_of(run: Trained) -> list[Looks]:
    curves = [one.curve for one in run.runs] if isinstance(run, RepeatedRun) else [run.curve]
    return [[value for _, value in curve] for curve in curves if curve]


def _end(runs: Sequence[Looks]) -> str:
    return percent(fmean(looks[-1] for looks in runs))

"""Outcomes side by side, as rows of text for a terminal or a Markdown file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from polytempo.simulate.outcome import Outcome
from polytempo.simulate.scaling import Series


class Trained(Protocol):
    """A run that also has an accuracy."""

    @property
    def outcome(self) -> Outcome: ...
    @property
    def accuracy(self) -> float: ...
    @property
    def curve(self) -> tuple[tuple[float, float], ...]: ...
    def time_to(self, target: float) -> float | None:
        """The first second at which the target was seen."""


@dataclass(frozen=True)
class Table:
    """A title, column heads and rows; the first column is a name, the others are numbers."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As a Markdown table."""
        align = ("---", *("---:" for _ in self.heads[1:]))
        lines = [self.heads, align, *self.rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g} s"


_COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "simulated time": lambda o: _seconds(o.seconds),
    "samples/s": lambda o: f"{o.samples_per_second:.4g}",
    "efficiency": lambda o: _percent(o.efficiency),
    "waiting": lambda o: _percent(o.waiting),
    "sending": lambda o: _percent(o.communicating),
    "staleness mean": lambda o: f"{o.staleness_mean:.2f}",
    "max": lambda o: f"{o.staleness_max}",
    "largest lead": lambda o: f"{o.max_lead}",
}


def mode_name(outcome: Outcome) -> str:
    """The mode, and the way its bytes travel where that is not the server."""
    return outcome.sync if outcome.via == "ps" else f"{outcome.sync} ({outcome.via})"


def comparison(outcomes: Sequence[Outcome], title: str) -> Table:
    """Timing alone."""
    columns = dict(_COLUMNS)
    if any(o.discarded for o in outcomes):
        columns["discarded"] = lambda o: f"{o.discarded}"
    rows = tuple((mode_name(o), *(show(o) for show in columns.values())) for o in outcomes)
    return Table(title, ("mode", *columns), rows)


def trained_comparison(runs: Sequence[Trained], target: float, title: str) -> Table:
    """Timing, and what it was worth."""
    timing = comparison([run.outcome for run in runs], title)
    heads = (timing.heads[0], f"time to {100 * target:g} %", "accuracy", *timing.heads[1:])
    rows = tuple(
        (row[0], _seconds(run.time_to(target)), _percent(run.accuracy), *row[1:])
        for row, run in zip(timing.rows, runs, strict=True)
    )
    return Table(title, heads, rows)


def scaling_table(series: Sequence[Series], title: str) -> Table:
    """Throughput (and efficiency) at powers of two, and at the end."""
    last = len(series[0].points)
    sizes = sorted({n for n in (1, 2, 4, 8, 16, 32, 64, 128, last) if n <= last})
    rows = tuple(
        (one.name, *(_cell(one.points[n - 1].samples_per_second, one.points[n - 1].efficiency) for n in sizes))
        for one in series
    )
    return Table(title, ("samples/s (efficiency)", *(f"n = {n}" for n in sizes)), rows)


def _cell(throughput: float, efficiency: float) -> str:
    return f"{throughput:.4g} ({100 * efficiency:.0f} %)"


def verdict(runs: Sequence[Trained], target: float) -> str:
    """Which mode got there first, in a sentence."""
    times = {mode_name(run.outcome): run.time_to(target) for run in runs}
    there = sorted((time, name) for name, time in times.items() if time is not None)
    if not there:
        best = max(runs, key=lambda run: run.accuracy)
        return f"none reaches {100 * target:g} %; the best, {mode_name(best.outcome)}, ends at {_percent(best.accuracy)}"
    first, name = there[0]
    others = [f"{other} takes {time / first:.2f}x as long" for time, other in there[1:]]
    never = [f"{other} does not get there" for other, time in times.items() if time is None]
    return "; ".join([f"{name} reaches {100 * target:g} % first, after {_seconds(first)}", *others, *never])

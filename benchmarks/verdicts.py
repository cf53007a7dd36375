"""From figures to a table: medians with their spread, ratios, bars, and whether they are met. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cases import Bar, Case, Cell, Ratio
from polytempo.report.table import TextTable

UNITS = {"ms": 1e3, "s": 1.0, "%": 100.0}
RATES = {"M rows/s": 1e-6}  #: where a cost is seconds a row
NOTHING = "-"


@dataclass
class Measured:
    """One cell: what each subject took, repeat by repeat, in seconds, or why there is nothing."""

    cell: Cell
    costs: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(costs) for name, costs in self.costs.items()}

    def spread(self, name: str) -> float:
        """Half the range between the best and the worst repeat, over the median."""
        costs, median = self.costs[name], self.medians[name]
        return (max(costs) - min(costs)) / 2 / median if median else 0.0


@dataclass(frozen=True)
class Verdict:
    """One bar in one place; `met` is None where something was not measured."""

    bar: Bar
    value: float | None

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.bar.holds(self.value)


@dataclass(frozen=True)
class Judged:
    """A row with bars: a cell, or the geometric mean of some."""

    name: str
    verdicts: tuple[Verdict, ...]

    @property
    def met(self) -> bool | None:
        """One miss is a miss; what was not measured counts only when nothing else was."""
        known = [verdict.met for verdict in self.verdicts if verdict.met is not None]
        return all(known) if known else None

    @property
    def text(self) -> str:
        if not self.verdicts:
            return ""
        if self.met is None:
            return "not measured"
        missing = [verdict.bar.ratio.label for verdict in self.verdicts if verdict.met is None]
        return ("yes" if self.met else "NO") + (f" ({', '.join(missing)} not measured)" if missing else "")


def ratio_of(ratio: Ratio, medians: Mapping[str, float]) -> float | None:
    """None where a side has no figure."""
    over = [medians[name] for name in ratio.over if name in medians]
    under = [medians[name] for name in ratio.under if name in medians] if ratio.under else [1.0]
    return min(over) / min(under) if over and under else None


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """Of all of them: a mean that leaves some out would be another figure."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return math.exp(statistics.fmean(map(math.log, known)))


def judge(case: Case, rows: Sequence[Measured]) -> list[Judged]:
    """Every cell, in order, then the means."""
    judged = []
    for row in rows:
        bars = [bar for bar in case.bars if row.cell.name in bar.cells and not bar.mean]
        judged.append(Judged(row.cell.name, tuple(Verdict(bar, ratio_of(bar.ratio, row.medians)) for bar in bars)))
    for bar in case.bars:
        if bar.mean:
            values = [ratio_of(bar.ratio, row.medians) for row in rows if row.cell.name in bar.cells]
            name = f"geometric mean of {len(values)} cells"
            judged.append(Judged(name, (Verdict(bar, geometric_mean(values)),)))
    return judged


def table(case: Case, rows: Sequence[Measured]) -> TextTable:
    judged = judge(case, rows)
    heads = (
        case.name,
        *(f"{subject.name} ({case.unit})" for subject in case.subjects),
        *(ratio.label for ratio in case.ratios),
        "bar",
        "met",
    )
    lines = [(*_figures(case, row), _bars(mark), mark.text) for row, mark in zip(rows, judged, strict=False)]
    for mark in judged[len(rows) :]:
        (verdict,) = mark.verdicts
        shown = [_ratio(verdict.value) if ratio == verdict.bar.ratio else "" for ratio in case.ratios]
        lines.append((mark.name, *("" for _ in case.subjects), *shown, _bars(mark), mark.text))
    return TextTable(case.title, heads, tuple(lines))


def _figures(case: Case, row: Measured) -> tuple[str, ...]:
    costs = (_cost(case, row, subject.name) for subject in case.subjects)
    return (row.cell.name, *costs, *(_ratio(ratio_of(ratio, row.medians)) for ratio in case.ratios))


def _bars(mark: Judged) -> str:
    return "; ".join(str(verdict.bar) for verdict in mark.verdicts)


def _cost(case: Case, row: Measured, name: str) -> str:
    if name in row.reasons:
        return " ".join(row.reasons[name].replace("|", "/").split())[:100]
    if name not in row.costs:
        return NOTHING
    median = row.medians[name]
    value = RATES[case.unit] / median if case.unit in RATES else median * UNITS[case.unit]
    if case.unit == "s":
        return f"{value:.2f}"
    shown = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return f"{shown} ±{100 * row.spread(name):.0f} %"


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def as_data(case: Case, rows: Sequence[Measured]) -> dict[str, Any]:
    """For the JSON file: every repeat, so that other questions can be asked later."""
    judged = judge(case, rows)
    cells = [
        {
            "cell": row.cell.name,
            "workers": row.cell.workers,
            "servers": row.cell.servers,
            "seconds": row.costs,
            "median_s": row.medians,
            "spread": {name: row.spread(name) for name in row.costs},
            "reasons": row.reasons,
            "ratios": {ratio.label: ratio_of(ratio, row.medians) for ratio in case.ratios},
        }
        for row in rows
    ]
    bars = [
        {"where": mark.name, "bar": str(verdict.bar), "value": verdict.value, "met": verdict.met}
        for mark in judged
        for verdict in mark.verdicts
    ]
    return {"case": case.name, "title": case.title, "cells": cells, "bars": bars}


def last_line(judged: Mapping[str, Sequence[Judged]]) -> str:
    """How many cells, of all cases, meet their bars; and which do not."""
    marks = [(f"{case} / {mark.name}", mark) for case, of_case in judged.items() for mark in of_case if mark.verdicts]
    missed = [f"{where} ({_why(mark)})" for where, mark in marks if mark.met is False]
    unknown = [where for where, mark in marks if mark.met is None]
    line = f"bars: {sum(mark.met is True for _, mark in marks)} met, {len(missed)} missed, {len(unknown)} not measured"
    line += f"; missed: {', '.join(missed)}" if missed else ""
    return line + (f"; not measured: {', '.join(unknown)}" if unknown else "")


def _why(mark: Judged) -> str:
    return "; ".join(f"{verdict.value:.2f}, bar {verdict.bar}" for verdict in mark.verdicts if verdict.met is False)

"""What the runs of `asynchronous.py` say: differences from `bsp` over paired seeds, bars, tables, and a summary as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polytempo.errors import counted
from polytempo.report.table import TextTable

#: Of the t distribution with 1, 2, ... degrees of freedom: 95 % lie between minus this and this.
T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
#: How the old way of a mode is called: momentum on the servers, pushes at 1/n.
BEFORE = " before"
POINTS, RUN_POINTS, PERCENT = 0.5, 5.0, 0.5  #: the bars
CLUSTERS = {"even": "even", "slow": "one 3x slower"}
#: The part of the GPT at the rate that the example has.
OWN_RATE = "gpt own rate"
NAMES = {
    "digits": "Digits, perceptron",
    "twice": "Digits at twice the rate",
    "cnn": "Fashion-MNIST, CNN with BatchNorm",
    "gpt": "examples/gpt.py",
    OWN_RATE: "examples/gpt.py at its own rate",
    "live digits": "Digits, live",
    "live cnn": "Fashion-MNIST CNN, live",
}
WHAT = dict.fromkeys(NAMES, f"accuracy of bsp in %, and points from it; bar: {-POINTS:g}") | {
    "twice": f"accuracy of bsp in %, points from it, and of the worst run; bar on the worst: {-RUN_POINTS:g}",
    **dict.fromkeys(("gpt", OWN_RATE), f"validation loss of bsp, and % above it; bar: {PERCENT:g}"),
}


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean; of one value, none."""
    if len(values) < 2:
        return math.nan
    return T95[min(len(values) - 1, len(T95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Judged:
    """A mode on a cluster: what it ends with, beside `bsp` with the same seeds, which makes the same updates everywhere."""

    part: str
    workers: int
    cluster: str
    mode: str
    sync: str  #: with what it leaves to the optimizer written out
    rate: float
    momentum: float
    samples: int
    seeds: tuple[int, ...]
    ends: tuple[float, ...]  #: accuracy in %, or loss
    bsp: tuple[float, ...]

    @property
    def of_losses(self) -> bool:
        return self.part in ("gpt", OWN_RATE)

    @property
    def differences(self) -> list[float]:
        """In points; of the GPT's losses in per cent."""
        if self.of_losses:
            return [100 * (ours / base - 1) for ours, base in zip(self.ends, self.bsp, strict=True)]
        return [ours - base for ours, base in zip(self.ends, self.bsp, strict=True)]

    @property
    def mean(self) -> float:
        return statistics.mean(self.differences)

    @property
    def met(self) -> bool | None:
        """Is the bar met? None: there is none."""
        if self.mode == "bsp" or self.mode.endswith(BEFORE):
            return None
        if self.of_losses:
            return self.mean <= PERCENT
        if self.part == "twice":
            return all(one >= -RUN_POINTS for one in self.differences)
        return self.mean >= -POINTS

    @property
    def text(self) -> str:
        """For a table."""
        if self.mode == "bsp":
            return f"{statistics.mean(self.ends):.{4 if self.of_losses else 2}f}"
        half = interval(self.differences)
        shown = f"{self.mean:+.2f}" + ("" if math.isnan(half) else f" ±{half:.2f}")
        shown += f", worst {min(self.differences):+.1f}" if self.part == "twice" else ""
        return shown + {True: " ok", False: " MISSED", None: ""}[self.met]


def tables(judged: Sequence[Judged]) -> dict[str, TextTable]:
    """A table for each part, by its name."""
    return {part: _table(part, of) for part in NAMES if (of := [one for one in judged if one.part == part])}


def _table(part: str, judged: Sequence[Judged]) -> TextTable:
    columns = sorted({(one.workers, one.cluster) for one in judged})
    cells = {(one.mode, one.workers, one.cluster): one for one in judged}
    rows = []
    for mode in dict.fromkeys(one.mode for one in judged):
        of = [cells.get((mode, workers, "even" if mode == "bsp" else cluster)) for workers, cluster in columns]
        rows.append((mode, *("-" if one is None else one.text for one in of)))
    first = judged[0]
    counts = [len(one.seeds) for one in judged]
    seeds = counted(counts[0], "seed") if min(counts) == max(counts) else f"{min(counts)} to {max(counts)} seeds"
    settings = f"rate {first.rate:g}, momentum {first.momentum:g}, {first.samples:,} samples, {seeds}"
    title = f"{NAMES[part]} ({settings}): {WHAT[part]}"
    heads = [f"{workers} workers,\n{CLUSTERS[cluster]}" for workers, cluster in columns]
    return TextTable(title, ("mode", *heads), tuple(rows))


def short_table(judged: Sequence[Judged]) -> TextTable:
    """README's: what each mode ends with on even workers, in virtual time."""
    names = {
        "digits": "digits, accuracy in %",
        "cnn": "Fashion-MNIST CNN, accuracy in %",
        "gpt": "GPT, loss",
        OWN_RATE: "GPT at the example's rate, loss",
    }
    shown = [one for part in names for one in judged if (one.part, one.cluster) == (part, "even")]
    modes = [*dict.fromkeys(one.mode for one in shown if not one.mode.endswith(BEFORE)), f"asp{BEFORE}"]
    rows = []
    sizes = [(part, n) for part in names for n in sorted({one.workers for one in shown if one.part == part})]
    for part, workers in sizes:
        found = [one for one in shown if (one.part, one.workers) == (part, workers)]
        ends, after = {one.mode: one.ends for one in found}, 3 if found[0].of_losses else 1
        of = [f"{statistics.mean(ends[mode]):.{after}f}" if mode in ends else "" for mode in modes]
        rows.append((f"{names[part]}, {workers} workers", *of))
    return TextTable("The rate and the momentum of bsp in every mode", ("", *modes), tuple(rows))


def bars_line(judged: Sequence[Judged], missing: int) -> str:
    """The count of bars, and those that were missed."""
    marks = [one for one in judged if one.met is not None]
    missed = [one for one in marks if not one.met]
    line = f"bars: {len(marks) - len(missed)} met, {len(missed)} missed"
    line += f"; {missing} runs are missing" if missing else ""
    where = [f"{one.part}, {one.workers} workers, {CLUSTERS[one.cluster]}, {one.mode} ({one.text})" for one in missed]
    return line + "".join(f"\n  missed: {text}" for text in where)


def summary(judged: Sequence[Judged], grids: dict[str, Any]) -> dict[str, Any]:
    """What the pages' tables are made of."""
    cells = [{**asdict(one), "mean": one.mean, "half": interval(one.differences), "met": one.met} for one in judged]
    return {"grids": grids, "cells": [{k: None if v != v else v for k, v in cell.items()} for cell in cells]}


def read_summary(file: Path) -> list[Judged]:
    """The cells of a summary."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    made = {"mean", "half", "met"}
    return [Judged(**{k: tuple(v) if isinstance(v, list) else v for k, v in one.items() if k not in made}) for one in cells]

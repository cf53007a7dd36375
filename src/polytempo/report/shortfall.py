"""Does a mode end at the accuracy of bsp? A mode that is fast and does not learn as well is not faster.

A mode falls short where its end lies below that of bsp by more than a point, and by more than twice the standard error of
their difference. What chance does is seen among the runs of a mode, where there are several; of a single run among the looks
at its end, from one to the next: there a curve that still rises counts as one that may yet arrive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev

from polytempo.report.live import RepeatedRun
from polytempo.report.table import Trained, mode_name, percent

#: A difference of this share is none.
POINT = 0.01
#: Standard errors of a difference that chance does not make.
SURE = 2.0
#: The end of a run: this share of its looks, and at least this number.
LAST, LEAST = 0.25, 3

#: What was seen in a run, look by look; at least once.
Looks = Sequence[float]


def falls_short(runs: Sequence[Looks], of: Sequence[Looks]) -> bool:
    """Do the runs of one mode end below those of another?"""
    gap = fmean(looks[-1] for looks in of) - fmean(looks[-1] for looks in runs)
    error = math.sqrt(_variance(runs) / len(runs) + _variance(of) / len(of))
    return not gap <= max(POINT, SURE * error)  # what is not a number has not arrived


def _variance(runs: Sequence[Looks]) -> float:
    """Of the end of a run, by chance."""
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
    """Of each of its runs that has seen anything."""
    curves = [one.curve for one in run.runs] if isinstance(run, RepeatedRun) else [run.curve]
    return [[value for _, value in curve] for curve in curves if curve]


def _end(runs: Sequence[Looks]) -> str:
    return percent(fmean(looks[-1] for looks in runs))

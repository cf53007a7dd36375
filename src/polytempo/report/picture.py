"""Outcomes as pictures. Needs matplotlib (the extra `plots`); draws without a screen."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polytempo.errors import UsageError
from polytempo.report.table import Trained, mode_name
from polytempo.simulate.outcome import Outcome
from polytempo.simulate.run import Series
from polytempo.units import plain_number

#: Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#999999", "#000000", "#F0E442")

#: The shares of worker-seconds, and their colours.
SHARES = (("computing", "#009E73"), ("sending", "#56B4E9"), ("waiting", "#D55E00"), ("wasted", "#999999"))


#: The file types of pictures.
FORMATS = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Refuse, before any work, a picture that could not be drawn."""
    if path.suffix not in FORMATS:
        raise UsageError(f"expected a picture ending with {', '.join(FORMATS)}, got {path}")
    if find_spec("matplotlib") is None:
        raise UsageError("pictures need matplotlib; pip install 'polytempo[plots]'")


def draw_comparison(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Throughput, and where the workers' time went."""
    figure = _figure(title, 1.2 + 0.45 * len(outcomes))
    speed, shares = figure.subplots(1, 2, sharey=True)
    names = [mode_name(outcome) for outcome in outcomes]
    bars = speed.barh(names, [o.samples_per_second for o in outcomes], color=COLOURS[0])
    speed.bar_label(bars, fmt=plain_number, padding=3)
    speed.set_xlabel("samples a second")
    speed.margins(x=0.15)
    speed.invert_yaxis()
    _draw_shares(shares, outcomes, names)
    _save(figure, path)


def draw_training(
    runs: Sequence[Trained], target: float, path: Path, title: str, seconds_are: str = "simulated seconds"
) -> None:
    """Accuracy against seconds, and where the workers' time went."""
    figure = _figure(title, 4.6)
    curves, shares = figure.subplots(1, 2, gridspec_kw={"width_ratios": [3, 2]})
    for run, colour in zip(runs, COLOURS * len(runs), strict=False):
        if not run.curve:
            continue
        seconds, accuracy = zip(*run.curve, strict=True)
        curves.plot(seconds, [100 * a for a in accuracy], color=colour, label=mode_name(run.outcome), linewidth=1.6)
        reached = run.time_to(target)
        if reached is not None:
            curves.plot([reached], [100 * target], "o", color=colour, markersize=6, clip_on=False)
    curves.axhline(100 * target, color="#999999", linewidth=0.8, linestyle="--")
    place = {"xycoords": ("axes fraction", "data"), "ha": "left", "va": "bottom"}
    curves.annotate(f"target {100 * target:g} %", (0.01, 100 * target), **place)
    low = sorted(a for run in runs for _, a in run.curve)
    curves.set_ylim(100 * low[len(low) // 10] - 1, 100 * low[-1] + 1)
    curves.set_xlabel(seconds_are)
    curves.set_ylabel("accuracy on test data, %")
    curves.legend(loc="lower right", frameon=False)
    _draw_shares(shares, [run.outcome for run in runs], [mode_name(run.outcome) for run in runs])
    shares.invert_yaxis()
    _save(figure, path)


def draw_scaling(series: Sequence[Series], path: Path, title: str) -> None:
    """Throughput and efficiency against the number of workers."""
    figure = _figure(title, 4.6)
    speed, efficiency = figure.subplots(1, 2)
    first = series[0].points[0]
    ideal = first.samples_per_second / (first.efficiency or 1) / first.workers
    sizes = [point.workers for point in series[0].points]
    speed.plot(sizes, [n * ideal for n in sizes], color="#999999", linestyle="--", linewidth=0.8, label="ideal")
    for one, colour in zip(series, COLOURS * len(series), strict=False):
        speed.plot(sizes, [point.samples_per_second for point in one.points], color=colour, label=one.name)
        efficiency.plot(sizes, [100 * point.efficiency for point in one.points], color=colour, label=one.name)
    speed.set_ylabel("samples a second")
    speed.set_ylim(0, 1.1 * max(point.samples_per_second for one in series for point in one.points))
    efficiency.set_ylabel("efficiency, %")
    efficiency.set_ylim(0, 102)
    for axes in (speed, efficiency):
        axes.set_xlabel("workers")
        axes.legend(frameon=False)
    _save(figure, path)


def _draw_shares(axes: Any, outcomes: Sequence[Outcome], names: list[str]) -> None:
    left = [0.0] * len(outcomes)
    for name, colour in SHARES:
        values = [_share(outcome, name) for outcome in outcomes]
        if any(value > 0.5 for value in values):
            axes.barh(names, values, left=left, color=colour, label=name)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the workers' time, %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=4, frameon=False, columnspacing=1, handlelength=1)


def _share(outcome: Outcome, name: str) -> float:
    lost = 1 - outcome.efficiency - outcome.waiting - outcome.communicating
    shares = {"computing": outcome.efficiency, "sending": outcome.communicating, "waiting": outcome.waiting, "wasted": lost}
    return 100 * max(shares[name], 0.0)


def _figure(title: str, height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    figure.suptitle(drawable(title))
    return figure


def drawable(text: str) -> str:
    """Text without surrogates, which matplotlib cannot draw: a name of a file may have some."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None} if path.suffix == ".png" else None)

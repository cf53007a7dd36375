"""Outcomes as pictures. Needs matplotlib (the extra `plots`); draws without a screen."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from polytempo.errors import UsageError
from polytempo.report.scaling import Series
from polytempo.report.table import Trained, mode_name
from polytempo.simulate.outcome import Outcome
from polytempo.units import plain_number

#: Okabe and Ito's colours, which colour-blind readers can distinguish, but for yellow, which is hard to see on white. Grey
#: is for what is no run: targets, ideals.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
GREY = "#999999"
#: Width of pictures in inches, and of a legend's letters and samples.
WIDTH, LETTER, SAMPLE, LEGEND_LINE = 11.0, 0.09, 0.6, 0.22

#: The shares of worker-seconds, and their colours.
SHARES = (("computing", "#009E73"), ("sending", "#56B4E9"), ("waiting", "#D55E00"), ("wasted", "#999999"))


class CurveStyle(NamedTuple):
    """The look of a curve."""

    color: str
    linestyle: tuple[int, tuple[int, ...] | None]  #: where a pattern of dashes begins, and the pattern; None: a plain line


def curve_styles(count: int) -> list[CurveStyle]:
    """That many looks, no two of them alike: all colours as plain lines, then as dashes, then with a dot, with two, ..."""
    dashes = [(5, 2) + (1, 2) * dots for dots in range(count // len(COLOURS))]
    return [CurveStyle(colour, (0, pattern)) for pattern in (None, *dashes) for colour in COLOURS][:count]


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
    speed.bar_label(bars, [plain_number(o.samples_per_second) for o in outcomes], padding=3)
    speed.set_xlabel("samples a second")
    speed.margins(x=0.15)
    speed.invert_yaxis()
    _draw_shares(shares, outcomes, names)
    _save(figure, path)


def draw_training(
    runs: Sequence[Trained], target: float, path: Path, title: str, seconds_are: str = "simulated seconds"
) -> None:
    """Accuracy against seconds, and where the workers' time went."""
    names = [mode_name(run.outcome) for run in runs]
    figure = _figure(title, max(4.6, 1.4 + 0.25 * len(runs)), [*names, "target"])
    curves, shares = figure.subplots(1, 2, gridspec_kw={"width_ratios": [3, 2]})
    for run, name, style in zip(runs, names, curve_styles(len(runs)), strict=True):
        if not run.curve:
            continue
        seconds, accuracy = zip(*run.curve, strict=True)
        curves.plot(seconds, [100 * a for a in accuracy], **style._asdict(), label=name, linewidth=1.6)
        reached = run.time_to(target)
        if reached is not None:
            curves.plot([reached], [100 * target], "o", color=style.color, markersize=6, clip_on=False)
    curves.axhline(100 * target, color=GREY, linewidth=0.8, linestyle="--", label=f"target {100 * target:g} %")
    low = sorted(a for run in runs for _, a in run.curve)
    curves.set_ylim(100 * low[len(low) // 10] - 1, 100 * low[-1] + 1)
    curves.set_xlabel(seconds_are)
    curves.set_ylabel("accuracy on test data, %")
    _legend_below(figure, curves)
    _draw_shares(shares, [run.outcome for run in runs], names)
    shares.invert_yaxis()
    _save(figure, path)


def draw_scaling(series: Sequence[Series], path: Path, title: str) -> None:
    """Throughput and efficiency against the number of workers."""
    figure = _figure(title, 4.6, ["ideal", *(one.name for one in series)])
    speed, efficiency = figure.subplots(1, 2)
    first = series[0].points[0]
    ideal = first.samples_per_second / (first.efficiency or 1) / first.workers
    sizes = [point.workers for point in series[0].points]
    speed.plot(sizes, [n * ideal for n in sizes], color=GREY, linestyle="--", linewidth=0.8, label="ideal")
    for one, style in zip(series, curve_styles(len(series)), strict=True):
        speed.plot(sizes, [point.samples_per_second for point in one.points], **style._asdict(), label=one.name)
        efficiency.plot(sizes, [100 * point.efficiency for point in one.points], **style._asdict(), label=one.name)
    speed.set_ylabel("samples a second")
    speed.set_ylim(0, 1.1 * max(point.samples_per_second for one in series for point in one.points))
    efficiency.set_ylabel("efficiency, %")
    efficiency.set_ylim(0, 102)
    for axes in (speed, efficiency):
        axes.set_xlabel("workers")
    _legend_below(figure, speed)
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
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, columnspacing=1, handlelength=1)


def _share(outcome: Outcome, name: str) -> float:
    lost = 1 - outcome.efficiency - outcome.waiting - outcome.communicating
    shares = {"computing": outcome.efficiency, "sending": outcome.communicating, "waiting": outcome.waiting, "wasted": lost}
    return 100 * max(shares[name], 0.0)


def _figure(title: str, height: float, names: Sequence[str] = ()) -> Any:
    """An empty picture with room below for a legend of these names."""
    from matplotlib.figure import Figure

    rows = -(-len(names) // _columns(names)) if names else 0
    figure = Figure(figsize=(WIDTH, height + LEGEND_LINE * rows), layout="constrained")
    figure.suptitle(drawable(title))
    return figure


def _legend_below(figure: Any, axes: Any) -> None:
    """Names of curves outside of the axes, where they cover nothing and nothing covers them."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=_columns(names), frameon=False, handlelength=3)


def _columns(names: Sequence[str]) -> int:
    return max(1, min(len(names), int(WIDTH / (LETTER * max(map(len, names)) + SAMPLE))))


def drawable(text: str) -> str:
    """Text without surrogates, which matplotlib cannot draw: a name of a file may have some."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None} if path.suffix == ".png" else None)

"""Outcomes and pipelines as pictures. Needs matplotlib (the extra `plots`); draws without a screen.

A pipeline has one row for each replica of a stage, one bar for each action, time to the right: from the lines of a timeline
(`Timeline.as_lines()`) or of a run (`read_traces()`). Forwards are dark, backwards light, deferred weight gradients a little
darker, updates black and waiting grey with stripes: they can be distinguished by colour-blind readers and in print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
        values = []
        for o in outcomes:
            lost = 1 - o.efficiency - o.waiting - o.communicating
            parts = {"computing": o.efficiency, "sending": o.communicating, "waiting": o.waiting, "wasted": lost}
            values.append(100 * max(parts[name], 0.0))
        if any(value > 0.5 for value in values):
            axes.barh(names, values, left=left, color=colour, label=name)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the workers' time, %")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, columnspacing=1, handlelength=1)


def _figure(title: str, height: float, names: Sequence[str] = ()) -> Any:
    from matplotlib.figure import Figure

    rows = -(-len(names) // _columns(names)) if names else 0
    figure = Figure(figsize=(WIDTH, height + LEGEND_LINE * rows), layout="constrained")
    figure.suptitle(title.encode("utf-8", "backslashreplace").decode("utf-8"))  # a name of a file may have surrogates
    return figure


def _legend_below(figure: Any, axes: Any) -> None:
    """Names of curves outside of the axes, where they cover nothing and nothing covers them."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=_columns(names), frameon=False, handlelength=3)


def _columns(names: Sequence[str]) -> int:
    return max(1, min(len(names), int(WIDTH / (LETTER * max(map(len, names)) + SAMPLE))))


def _save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None} if path.suffix == ".png" else None)


# Pipelines.

Row = tuple[int, int]
Between = tuple[float, float]


class Bar(NamedTuple):
    """An action of one row; `label` is the microbatch's number, empty for an update."""

    row: Row
    kind: str
    label: str
    start: float
    end: float


class PictureStyle(NamedTuple):
    """How a kind of action is drawn."""

    name: str
    fill: str
    text: str


#: From Okabe and Ito's colours, a dark one and a light one; the rest is black.
LOOKS = {
    "F": PictureStyle("forward", "#0072B2", "#FFFFFF"),
    "B": PictureStyle("backward", "#F0C75E", "#000000"),
    "W": PictureStyle("weight gradients (deferred)", "#D98E04", "#000000"),
    "U": PictureStyle("update", "#000000", "#FFFFFF"),
}
WAITING = "#EEEEEE"
STRIPES = "#BBBBBB"

#: Inches: of the axes (about), of one digit; bars that are too narrow for their number have none.
INNER, DIGIT = 10.2, 0.07


def bars_of(lines: Iterable[Mapping[str, Any]]) -> list[Bar]:
    """Lines of a timeline or of a run; the first action starts at 0."""
    bars = []
    for line in lines:  # a timeline has `action`, a run has `kind` and `microbatch`
        missing = {"stage", "replica", "start", "end"} - line.keys()
        word = str(line.get("action") or f"{line.get('kind', '')}{line.get('microbatch', '')}")
        kind, number = word[:1], word[1:]
        if missing or kind not in LOOKS:
            wrong = (
                f"one without {', '.join(sorted(missing))}" if missing else f"the action {word!r}, which is not F, B, W or U"
            )
            raise UsageError(f"expected lines of Timeline.as_lines() or of read_traces(), got {wrong}")
        label, row = "" if kind == "U" else number, (line["stage"], line["replica"])
        bars.append(Bar(row, kind, label, float(line["start"]), float(line["end"])))
    if not bars:
        raise UsageError("expected an action or more to draw, got none; let the pipeline make a step first")
    begin = min(bar.start for bar in bars)
    return [bar._replace(start=bar.start - begin, end=bar.end - begin) for bar in bars]


def clipped(bars: Sequence[Bar], between: Between) -> list[Bar]:
    """The part between two times, of which the first becomes 0."""
    begin, end = between
    inside = [bar for bar in bars if bar.start < end and bar.end > begin]
    if not begin < end or not inside:
        last = max(bar.end for bar in bars)
        raise UsageError(
            f"expected two moments with actions between them, from 0 to {plain_number(last)}; got {begin:g} and {end:g}"
        )
    return [bar._replace(start=max(bar.start, begin) - begin, end=min(bar.end, end) - begin) for bar in inside]


def last_updates(lines: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The lines of a run that belong to the last `count` updates of each replica of a stage."""
    rows: dict[Row, list[Mapping[str, Any]]] = {}
    for line in lines:
        rows.setdefault((line["stage"], line["replica"]), []).append(line)
    found: list[Mapping[str, Any]] = []
    for mine in rows.values():
        ends = [index for index, line in enumerate(mine) if line["kind"] == "U"]
        found += mine[ends[-count - 1] + 1 :] if len(ends) > count else mine
    return found


def bubble_of(bars: Sequence[Bar], total: float, rows: int) -> float:
    """The share of the time from 0 to `total` in which a row is idle, on average over the rows."""
    busy = math.fsum(bar.end - bar.start for bar in bars)
    return max(0.0, 1.0 - busy / (total * rows)) if total else 0.0


def draw_pipeline(lines: Iterable[Mapping[str, Any]], path: Path, title: str, between: Between | None = None) -> float:
    """Draw what each stage did when, all of it or what lies between two moments (seconds from the first action); the
    bubble, which is also in the title."""
    check_picture(path)
    bars = bars_of(lines)
    rows = sorted({bar.row for bar in bars})
    bars = clipped(bars, between) if between else bars
    total = between[1] - between[0] if between else max(bar.end for bar in bars)
    bubble = bubble_of(bars, total, len(rows))
    shown = f"{1000 * total:.0f} ms" if total < 1 else f"{plain_number(total, 3)} s"
    figure = _figure(f"{title} ({shown}, bubble {100 * bubble:.0f} %)", 1.5 + 0.42 * len(rows))
    axes = figure.subplots()
    _draw_bars(axes, rows, bars, total)
    _dress(axes, rows, total)
    _save(figure, path)
    return bubble


def _draw_bars(axes: Any, rows: Sequence[Row], bars: Sequence[Bar], total: float) -> None:
    place = {row: number for number, row in enumerate(rows)}
    waiting = {"height": 0.84, "color": WAITING, "edgecolor": STRIPES, "hatch": "////", "linewidth": 0}
    axes.barh(range(len(rows)), [total] * len(rows), label="waiting", zorder=1, **waiting)
    for kind, look in LOOKS.items():
        mine = [bar for bar in bars if bar.kind == kind]
        if kind == "W" and not mine:
            continue
        starts, widths = [bar.start for bar in mine], [bar.end - bar.start for bar in mine]
        edge = {"height": 0.84, "edgecolor": "#FFFFFF" if kind != "U" else look.fill, "linewidth": 0.6, "zorder": 2}
        axes.barh([place[bar.row] for bar in mine], widths, left=starts, color=look.fill, label=look.name, **edge)
    for bar in bars:
        if (bar.end - bar.start) / total * INNER > DIGIT * (len(bar.label) + 0.3):
            middle = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 3, "clip_on": True}
            axes.text((bar.start + bar.end) / 2, place[bar.row], bar.label, color=LOOKS[bar.kind].text, **middle)


def _dress(axes: Any, rows: Sequence[Row], total: float) -> None:
    shared = {stage for stage, replica in rows if replica}
    axes.set_yticks(range(len(rows)), [f"stage {s}.{r}" if s in shared else f"stage {s}" for s, r in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, total)
    axes.set_xlabel("seconds")
    handles, names = axes.get_legend_handles_labels()
    order = sorted(
        range(len(names)), key=lambda index: [*(look.name for look in LOOKS.values()), "waiting"].index(names[index])
    )
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 5, "frameon": False}
    axes.legend([handles[index] for index in order], [names[index] for index in order], **place)
    axes.spines["left"].set_visible(False)

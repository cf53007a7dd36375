"""A pipeline as a picture: one row for each replica of a stage, one bar for each action, time to the right.

Takes the lines of a timeline (`Timeline.as_lines()`) or of a run (`read_traces()`). Forwards are dark, backwards light,
deferred weight gradients a little darker, updates black and waiting grey with stripes: they can be distinguished by
colour-blind readers and in print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polytempo.errors import UsageError
from polytempo.report.picture import check_picture, drawable
from polytempo.units import plain_number

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

#: Inches: of the picture, of its axes (about), of one digit; bars that are too narrow for their number have none.
WIDTH, INNER, DIGIT = 11.0, 10.2, 0.07


def bars_of(lines: Iterable[Mapping[str, Any]]) -> list[Bar]:
    """Lines of a timeline or of a run; the first action starts at 0."""
    bars = [_bar(line) for line in lines]
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
    figure = _figure(f"{title} ({_seconds(total)}, bubble {100 * bubble:.0f} %)", rows)
    axes = figure.subplots()
    _draw_bars(axes, rows, bars, total)
    _dress(axes, rows, total)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None} if path.suffix == ".png" else None)
    return bubble


def _bar(line: Mapping[str, Any]) -> Bar:
    """A timeline has `action`, a run has `kind` and `microbatch`."""
    missing = {"stage", "replica", "start", "end"} - line.keys()
    word = str(line.get("action") or f"{line.get('kind', '')}{line.get('microbatch', '')}")
    kind, number = word[:1], word[1:]
    if missing or kind not in LOOKS:
        wrong = f"one without {', '.join(sorted(missing))}" if missing else f"the action {word!r}, which is not F, B, W or U"
        raise UsageError(f"expected lines of Timeline.as_lines() or of read_traces(), got {wrong}")
    label = "" if kind == "U" else number
    return Bar((line["stage"], line["replica"]), kind, label, float(line["start"]), float(line["end"]))


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
    axes.spines[["top", "right", "left"]].set_visible(False)


def _figure(title: str, rows: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 1.5 + 0.42 * len(rows)), layout="constrained")
    figure.suptitle(drawable(title))
    return figure


def _seconds(total: float) -> str:
    return f"{1000 * total:.0f} ms" if total < 1 else f"{plain_number(total, 3)} s"

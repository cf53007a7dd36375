"""Pipelines as pictures: what is drawn, from a clock's lines and from a run's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.pipeline.schedules import SCHEDULES, make
from polytempo.pipeline.timeline import run
from polytempo.report.picture import LOOKS, STRIPES, WAITING, Bar, bars_of, bubble_of, clipped, draw_pipeline


def recorded(lines: list[dict[str, Any]], shift: float) -> list[dict[str, Any]]:
    """The same, as a run writes it: kind and microbatch apart, on a clock that began at some time."""
    return [
        {
            "stage": line["stage"],
            "replica": line["replica"],
            "kind": line["action"][0],
            "microbatch": int(line["action"][1:] or -1),
            "start": line["start"] + shift,
            "end": line["end"] + shift,
        }
        for line in lines
    ]


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from([*SCHEDULES]),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 8),
    update=st.sampled_from([0.0, 0.5]),
)
def test_a_run_is_drawn_as_its_clock_and_the_bubble_is_the_clocks(
    name: str, stages: int, microbatches: int, update: float
) -> None:
    timeline = run(make(name, stages, microbatches), [1.0] * stages, [2.0] * stages, update=[update] * stages)
    lines = timeline.as_lines()
    bars = bars_of(lines)
    assert bars == bars_of(recorded(lines, 4096.0))
    assert len(bars) == sum(len(line) for stage in timeline.spans for line in stage)
    assert bubble_of(bars, timeline.total, stages) == pytest.approx(timeline.bubble())


@settings(max_examples=50, deadline=None)
@given(begin=st.floats(0, 20), length=st.floats(0.5, 20))
def test_what_lies_between_two_moments_keeps_its_time(begin: float, length: float) -> None:
    bars = bars_of(run(make("gpipe", 3, 5), [1.0] * 3, [2.0] * 3).as_lines())
    if begin >= max(bar.end for bar in bars):
        return
    inside = clipped(bars, (begin, begin + length))
    assert all(0 <= bar.start <= bar.end <= length + 1e-9 for bar in inside)
    busy = sum(max(0.0, min(bar.end, begin + length) - max(bar.start, begin)) for bar in bars)
    assert sum(bar.end - bar.start for bar in inside) == pytest.approx(busy)


def test_labels_are_the_numbers_of_microbatches() -> None:
    bars = bars_of(run(make("1f1b", 2, 2), [1.0, 1.0], [1.0, 1.0], update=[1.0, 1.0]).as_lines())
    first = [bar for bar in bars if bar.row == (0, 0)]
    assert [bar.kind + bar.label for bar in first] == ["F0", "F1", "B0", "B1", "U"]
    assert first[0] == Bar((0, 0), "F", "0", 0.0, 1.0)


def lightness(colour: str) -> float:
    """Of a printer without colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


def test_everything_stays_apart_without_colour() -> None:
    shades = sorted(lightness(colour) for colour in [*(look.fill for look in LOOKS.values()), WAITING])
    assert all(after - before > 0.1 for before, after in pairwise(shades))
    assert lightness(WAITING) - lightness(STRIPES) > 0.1
    assert all(abs(lightness(look.fill) - lightness(look.text)) > 0.5 for look in LOOKS.values())


class Seen:
    """The figure that was drawn."""

    figure: Any = None


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    drawing = pytest.importorskip("matplotlib.figure", reason="pictures need it: pip install polytempo[plots]")
    kept, write = Seen(), drawing.Figure.savefig

    def keep(figure: Any, *arguments: Any, **options: Any) -> None:
        kept.figure = figure
        write(figure, *arguments, **options)

    monkeypatch.setattr(drawing.Figure, "savefig", keep)
    return kept


@pytest.mark.long
def test_a_picture_says_all(seen: Seen, tmp_path: Path) -> None:
    timeline = run(make("1f1b", 3, 4, replicas=(1, 2, 1)), [1.0] * 3, [2.0] * 3, update=[0.5] * 3)
    bubble = draw_pipeline(timeline.as_lines(), tmp_path / "new" / "a.png", "mine")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    assert bubble == pytest.approx(timeline.bubble())
    assert seen.figure._suptitle.get_text() == f"mine ({timeline.total:.3g} s, bubble {100 * bubble:.0f} %)"
    axes = seen.figure.axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["stage 0", "stage 1.0", "stage 1.1", "stage 2"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "backward", "update", "waiting"]
    drawn = [text.get_text() for text in axes.texts if text.get_text()]
    assert sorted(drawn) == sorted(str(number) for number in range(4) for _ in range(6))
    assert axes.get_xlim() == (0, timeline.total)


@pytest.mark.long
def test_a_number_without_room_is_left_out(seen: Seen, tmp_path: Path) -> None:
    lines = run(make("sequential", 4, 200), [1.0] * 4, [2.0] * 4).as_lines()
    draw_pipeline(lines, tmp_path / "a.svg", "many")
    assert not [text for text in seen.figure.axes[0].texts if text.get_text()]


def test_a_window_is_drawn_alone_and_rows_stay(seen: Seen, tmp_path: Path) -> None:
    lines = run(make("gpipe", 3, 4), [1.0] * 3, [1.0] * 3).as_lines()
    bubble = draw_pipeline(lines, tmp_path / "a.png", "first", between=(0.0, 1.0))
    assert len(seen.figure.axes[0].get_yticks()) == 3
    assert bubble == pytest.approx(2 / 3), "in the first second only the first of three stages works"


@pytest.mark.parametrize(
    ("lines", "between", "text"),
    [
        ([], None, "expected an action or more to draw, got none"),
        ([{"stage": 0, "replica": 0, "action": "F0", "start": 0.0}], None, "got one without end"),
        (
            [{"stage": 0, "replica": 0, "action": "X0", "start": 0, "end": 1}],
            None,
            "the action 'X0', which is not F, B, W or U",
        ),
        ([{"stage": 0, "replica": 0, "start": 0.0, "end": 1.0}], None, "the action '', which is not F, B, W or U"),
        ([{"stage": 0, "replica": 0, "action": "F0", "start": 0, "end": 1}], (2.0, 3.0), "from 0 to 1; got 2 and 3"),
        ([{"stage": 0, "replica": 0, "action": "F0", "start": 0, "end": 1}], (1.0, 0.0), "got 1 and 0"),
    ],
)
def test_what_cannot_be_drawn(lines: Any, between: Any, text: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need it: pip install polytempo[plots]")
    with pytest.raises(UsageError, match="expected") as caught:
        draw_pipeline(lines, tmp_path / "a.png", "none", between)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.png").exists()


def test_no_picture_without_a_known_ending() -> None:
    with pytest.raises(UsageError, match=r"ending with \.png"):
        draw_pipeline([], Path("x.docx"), "none")

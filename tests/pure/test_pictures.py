"""Pictures with curves: each curve has a look of its own, and no label is covered, however many there are."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polytempo.report import picture
from polytempo.report.picture import curve_styles, draw_comparison, draw_scaling, draw_training
from polytempo.report.scaling import scaling
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.outcome import Outcome
from polytempo.simulate.run import simulate_job
from polytempo.sync.spec import MODES, parse_spec

pytest.importorskip("matplotlib", reason="pictures need it: pip install polytempo[plots]")

ROOT = Path(__file__).parents[2]
ALL = [mode.example for mode in MODES.values()]
SOME = replace(simulate_job(Cluster(workers=2), "bsp", steps=20), efficiency=0.5, waiting=0.2, communicating=0.2)


@dataclass(frozen=True)
class Run:
    """One that has reached every accuracy, along a curve of its own."""

    outcome: Outcome
    speed: float

    @property
    def accuracy(self) -> float:
        return self.curve[-1][1]

    @property
    def curve(self) -> tuple[tuple[float, float], ...]:
        return tuple((5.0 * step, 0.9 - 0.8 / (1 + self.speed * step)) for step in range(60))

    def time_to(self, target: float) -> float | None:
        return next((t for t, a in self.curve if a >= target), None)


def runs(count: int) -> list[Run]:
    names = (ALL * 2)[:count]
    return [Run(replace(SOME, sync=sync), 0.2 + 0.13 * number) for number, sync in enumerate(names)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved meanwhile, laid out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figures: list[Any] = []

    def keep(figure: Any, *_: Any, **__: Any) -> None:
        FigureCanvasAgg(figure).draw()
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def checked(drawn: list[Any]) -> Any:
    """The one figure that was drawn, whose curves differ and whose labels are free."""
    (figure,) = drawn
    curves_differ(figure)
    labels_are_free(figure)
    return figure


def curves_differ(figure: Any) -> None:
    """Of each pair that has a name in one panel: by colour, or by the pattern of the line; and no yellow on white."""
    for axes in figure.axes:
        looks = [(line.get_color(), line._dash_pattern) for line in axes.get_lines() if not line.get_label().startswith("_")]
        assert len({str(look) for look in looks}) == len(looks)


def labels_are_free(figure: Any) -> None:
    """Legends, notes, titles and tick labels lie on no curve, on no other label, and inside the picture."""
    labels = labels_of(figure)
    whole = figure.bbox
    for name, box in labels.items():
        assert box.x0 >= whole.x0 - 1, name
        assert box.x1 <= whole.x1 + 1, name
        assert box.y0 >= whole.y0 - 1, name
        assert box.y1 <= whole.y1 + 1, name
        for axes in figure.axes:
            for line in axes.get_lines():
                if line.get_visible() and axes.bbox.overlaps(box):
                    path = line.get_transform().transform_path(line.get_path())
                    shown = path.clip_to_bbox(axes.bbox)
                    assert not shown.intersects_bbox(box, filled=False), f"{line.get_label()} runs through {name}"
    for (name, box), (other, second) in combinations(labels.items(), 2):
        assert not box.padded(-1).overlaps(second.padded(-1)), f"{name} lies on {other}"


def labels_of(figure: Any) -> dict[str, Any]:
    found = [(f"legend {number}", legend) for number, legend in enumerate(figure.legends)]
    found += [("title", figure._suptitle)] if figure._suptitle is not None else []
    for number, axes in enumerate(figure.axes):
        legend = axes.get_legend()
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *ticks(axes.yaxis), *ticks(axes.xaxis)]
        found += [(f"{number}: {text.get_text()} {place}", text) for place, text in enumerate(texts)]
        found += [(f"{number}: legend", legend)] if legend is not None else []
    return {name: one.get_window_extent() for name, one in found if not hasattr(one, "get_text") or one.get_text()}


def ticks(axis: Any) -> list[Any]:
    low, high = sorted(axis.get_view_interval())
    labels = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [label for label in labels if label.get_visible()]


@pytest.mark.parametrize("count", [1, 7, 8, 17, 40, 200])
def test_any_number_of_curves_differ_and_the_first_ones_are_plain(count: int) -> None:
    styles = curve_styles(count)
    assert len({str(style) for style in styles}) == count
    assert {style.linestyle for style in styles[: len(picture.COLOURS)]} == {(0, None)}
    assert "#F0E442" not in picture.COLOURS  # yellow on white can hardly be seen


@pytest.mark.parametrize("count", [1, 2, 5, 10, len(ALL), 2 * len(ALL)])
def test_accuracy_against_time(count: int, drawn: list[Any]) -> None:
    draw_training(runs(count), 0.85, Path("a.png"), "digits: 4 workers, slower: 3:3", "seconds")
    figure = checked(drawn)
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == [*(run.outcome.sync for run in runs(count)), "target 85 %"]


@pytest.mark.parametrize("count", [1, 3, len(ALL)])
def test_throughput_and_shares(count: int, drawn: list[Any]) -> None:
    outcomes = [replace(one.outcome, samples_per_second=31890.0 / (1 + n)) for n, one in enumerate(runs(count))]
    draw_comparison(outcomes, Path("a.png"), "4 workers")
    figure = checked(drawn)
    assert figure.axes[0].texts[0].get_text() == "31890"


@pytest.mark.parametrize("shards", [(1,), (1, 2, 4, 8), tuple(range(1, 13))])
def test_scaling(shards: tuple[int, ...], drawn: list[Any]) -> None:
    cluster = Cluster(workers=1, step_time=0.25, model_bytes=1e8)
    draw_scaling(scaling(cluster, parse_spec("bsp"), most=8, shards=shards), Path("a.png"), "bsp over shards")
    assert len(checked(drawn).axes[1].get_lines()) >= len(shards)


def figures_of(name: str) -> ModuleType:
    """A file of docs/figures."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs/figures" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bounds() -> None:
    figures_of("bounds").draw()


def local_steps() -> None:
    module = figures_of("local_steps")
    curves = {
        sync: [(0.5 * step, 2.3 / (1 + 0.02 * (1 + n) * step)) for step in range(1, 400)]
        for n, (sync, _) in enumerate(module.MODES)
    }
    module.draw({name: curves for name, _ in module.SPEEDS})


def uneven() -> None:
    module = figures_of("uneven")
    module.draw(json.loads((module.HERE / "uneven.json").read_text()))


def stable_rates() -> None:
    figures_of("stable_rates").draw()


@pytest.mark.parametrize("draw", [bounds, local_steps, stable_rates, uneven])
def test_the_pictures_of_the_docs(draw: Callable[[], None], drawn: list[Any]) -> None:
    draw()
    checked(drawn)

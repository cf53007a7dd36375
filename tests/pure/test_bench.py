"""The benchmark's tables: medians, ratios, bars, and what is said where something was not measured."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from cases import Bar, Case, Cell, Ratio, Subject, bytes_of
from rigs import Rig
from verdicts import Measured, as_data, geometric_mean, judge, last_line, ratio_of, table


def start(rig: Rig, workers: int, servers: int) -> None:
    raise AssertionError("a table starts nothing")


GAIN = Ratio("peer / ours", ("peer",), ("ours", "ours, other way"))
SMALL, LARGE = Cell("small", "1 KB"), Cell("large", "1 MB")
CASE = Case(
    name="demo",
    title="Demo",
    cells=(SMALL, LARGE),
    subjects=tuple(Subject(name, start) for name in ("ours", "ours, other way", "peer", "extra")),
    ratios=(GAIN,),
    bars=(Bar(GAIN, ("small", "large"), least=2), Bar(GAIN, ("small", "large"), least=3, mean=True)),
)


def measured(small: float, large: float) -> list[Measured]:
    """Ours takes 1 ms, the peer `small` or `large` times as long."""
    return [
        Measured(cell, {"ours": [0.001] * 3, "peer": [0.001 * times] * 3}, {"ours, other way": "not | there"})
        for cell, times in ((SMALL, small), (LARGE, large))
    ]


def test_sizes_are_whole_numbers_of_float32() -> None:
    assert bytes_of("4 KB") == 4096
    assert bytes_of("0.1 MB") == 104856


def test_a_ratio_takes_the_best_of_each_side() -> None:
    assert ratio_of(GAIN, {"peer": 6.0, "ours": 3.0, "ours, other way": 2.0}) == 3.0
    assert ratio_of(GAIN, {"peer": 6.0, "ours": 3.0}) == 2.0
    assert ratio_of(GAIN, {"ours": 3.0}) is None
    assert ratio_of(Ratio("ours", ("ours",)), {"ours": 0.0}) == 0.0


def test_a_geometric_mean_is_of_all_cells_or_of_none() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([2.0, None]) is None
    assert geometric_mean([]) is None


@pytest.mark.parametrize(
    ("small", "large", "met"),
    [(2.0, 8.0, [True, True, True]), (1.9, 8.0, [False, True, True]), (2.0, 2.0, [True, True, False])],
)
def test_bars_on_cells_and_on_their_mean(small: float, large: float, met: list[bool]) -> None:
    assert [mark.met for mark in judge(CASE, measured(small, large))] == met


def test_a_bar_from_above_and_one_on_the_figure_itself() -> None:
    none = Bar(Ratio("CPU seconds", ("server",)), ("idle",), most=0.0)
    assert none.holds(0.0)
    assert not none.holds(0.01)
    assert str(none) == "CPU seconds ≤ 0"


def test_what_is_missing_is_said_and_is_no_miss() -> None:
    rows = measured(4.0, 4.0)
    rows[0].costs.pop("peer")
    rows[0].reasons["peer"] = "not installed"
    shown = table(CASE, rows)
    assert shown.heads == ("demo", *(f"{s.name} (ms)" for s in CASE.subjects), "peer / ours", "bar", "met")
    assert shown.rows[0] == (
        "small", "1 ±0 %", "not / there", "not installed", "-", "-", "peer / ours ≥ 2", "not measured",
    )  # fmt: skip
    assert shown.rows[1][3:] == ("4 ±0 %", "-", "4.00", "peer / ours ≥ 2", "yes")
    assert shown.rows[2] == ("geometric mean of 2 cells", "", "", "", "", "-", "peer / ours ≥ 3", "not measured")


def test_a_cell_with_two_bars_of_which_one_was_not_measured() -> None:
    extra = Ratio("extra / ours", ("extra",), ("ours",))
    case = Case("demo", "Demo", CASE.cells, CASE.subjects, (GAIN, extra), (CASE.bars[0], Bar(extra, ("small",), least=6)))
    small, large = judge(case, measured(3.0, 1.0))
    assert small.text == "yes (extra / ours not measured)"
    assert large.text == "NO"


def test_spread_is_half_the_range_over_the_median() -> None:
    row = Measured(SMALL, {"ours": [1.0, 2.0, 4.0], "idle": [0.0, 0.0]})
    assert row.medians == {"ours": 2.0, "idle": 0.0}
    assert row.spread("ours") == 0.75
    assert row.spread("idle") == 0.0


def test_the_last_line_counts_and_names_what_was_missed() -> None:
    line = last_line({"demo": judge(CASE, measured(1.5, 8.0))})
    assert line == "bars: 2 met, 1 missed, 0 not measured; missed: demo / small (1.50, bar peer / ours ≥ 2)"


def test_the_data_keep_every_repeat() -> None:
    data = as_data(CASE, measured(2.0, 8.0))
    assert data["cells"][0]["seconds"]["peer"] == [0.002] * 3
    assert data["cells"][1]["ratios"] == {"peer / ours": pytest.approx(8.0)}
    assert [bar["met"] for bar in data["bars"]] == [True, True, True]


def test_servers_of_benchmarks_are_configured_as_those_of_the_launcher() -> None:
    root = Path(__file__).parents[2]
    program = (root / "src/polytempo/launcher/server_process.py").read_text(encoding="utf-8")
    read = set(re.findall(r'config\["(\w+)"\]', program)) | {"checkpoint", "resume"}
    given = (root / "benchmarks/jobs.py").read_text(encoding="utf-8").partition("def _server_config")[2]
    assert {name for name in read if f'"{name}"' not in given.partition("def _start_server")[0]} == set()

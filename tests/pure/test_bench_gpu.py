"""The table of `make bench-gpu`: bars, ratios, what was not measured, and the page that shows it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu import PAGE, ROWS, Bar, Results, Turn, line, verdict, ways

ROW = {row.name: row for row in ROWS}


def results(**seconds: float) -> Results:
    """One repeat of each column of a row: "one_plain=0.03"."""
    found = Results()
    for key, value in seconds.items():
        name, column = key.split("_")
        found.seconds[ROW[name].turn(column)] = [value]
    return found


@pytest.mark.parametrize(
    ("row", "plain", "device", "met"),
    [
        ("one", 0.0300, 0.0310, True),
        ("one", 0.0300, 0.0320, False),
        ("mlp", 0.0018, 0.0021, True),
        ("mlp", 0.0018, 0.0022, False),
        ("large", 0.010, 0.0109, True),
        ("large", 0.010, 0.0112, False),
    ],
)
def test_bars_of_the_issue(row: str, plain: float, device: float, met: bool) -> None:
    found = results(**{f"{row}_plain": plain, f"{row}_device": device})
    assert verdict(ROW[row], ROW[row].bars[0], found).startswith("yes" if met else "NO")


def test_images_a_second_are_those_of_all_workers() -> None:
    shown = line(ROW["asp2"], results(asp2_plain=0.036, asp2_device=0.036))
    assert shown[1] == f"{2 * 64 / 0.036:.0f} ±0 %"
    assert shown[5] == "1.000"


def test_a_way_that_failed_is_shown_with_its_reason() -> None:
    found = results(asp4_plain=0.07)
    found.reasons["device-asp4"] = "a rank has | ended"
    shown = line(ROW["asp4"], found)
    assert shown[3] == "a rank has / ended"
    assert shown[-1] == "not measured"


def test_each_way_of_a_row_exists_and_has_the_workers_that_its_name_says() -> None:
    known = ways()
    for row in ROWS:
        for way in row.columns.values():
            assert way == "-" or known[way].workers == int(way[-1]), (row.name, way)
    assert Turn("plain2", "resnet50", 64) == ROW["bsp2"].turn("plain") == ROW["ddp2"].turn("plain"), "measured once"


def test_the_page_has_a_place_for_each_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->\n" in text for name in ("bench-gpu", "asup"))


def test_a_difference_is_in_milliseconds() -> None:
    assert Bar("more", 0.3).value(0.0025, 0.002) == pytest.approx(0.5)

"""The last line of a job: plain numbers, shares that add up, no word of failure after success."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import polytempo
from polytempo.report.summary import percentages, summary_line
from polytempo.units import plain_number, written_rate

FIGURES: dict[str, Any] = {
    "steps": 600,
    "samples": 1800.0,
    "seconds": 5.44,
    "samples_per_second": 66070.4,
    "computing": 0.698,
    "waiting": 0.034,
    "communicating": 0.101,
    "staleness_mean": 0.0,
    "staleness_max": 0,
    "discarded": 0,
    "nonfinite": 0,
    "spread": 1.7,
    "workers": [{"worker": 0, "steps": 300}, {"worker": 1, "steps": 300}],
}
STEPS = "600 steps of 2 workers in 5.4 s, 300 each"
SHARES = "of the workers' time computing 70 %, waiting 3 %, sending 10 %, other 17 %"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, f"bsp: {STEPS}; 66070 samples/s; {SHARES}"),
        ({"samples": 600.0}, f"bsp: {STEPS}; 110.3 steps/s together; {SHARES}"),
        (
            {"staleness_mean": 0.5, "staleness_max": 1, "discarded": 1, "nonfinite": 2},
            f"bsp: {STEPS}; 66070 samples/s; {SHARES}; gradients 0.5 updates stale on average, at most 1 update; "
            "1 step discarded; 2 gradients not finite",
        ),
        (
            {"workers": [{"steps": 290}, {"steps": 310}, {"steps": 0}]},
            f"bsp: 600 steps of 2 workers in 5.4 s, 290 to 310 each; 66070 samples/s; {SHARES}",
        ),
        ({"workers": [{"steps": 600}]}, f"bsp: 600 steps in 5.4 s; 66070 samples/s; {SHARES}"),
        ({"steps": 1, "samples": 1.0, "workers": [{"steps": 1}]}, f"bsp: 1 step in 5.4 s; 0.1838 steps/s; {SHARES}"),
        ({"steps": 0}, "2 workers finished after 7.3 s"),
        (
            {"diverged": {"update": 83, "recovered": False}},
            f"bsp: diverged at update 83; {STEPS}; 66070 samples/s; {SHARES}",
        ),
        (
            {"steps": 0, "diverged": {"update": 83, "recovered": False}},
            "2 workers finished after 7.3 s; diverged at update 83",
        ),
    ],
)
def test_the_last_line(changes: dict[str, Any], text: str) -> None:
    assert summary_line("bsp", FIGURES | changes, 2, 2, 7.31) == text


def test_those_that_died_are_counted() -> None:
    assert summary_line("asp", {}, 1, 2, 3.0) == "1 of 2 workers finished after 3.0 s"
    assert summary_line("asp", {}, 1, 1, 3.0) == "1 worker finished after 3.0 s"


@given(st.lists(st.floats(-0.1, 2.0), min_size=1, max_size=5))
def test_shares_add_up_to_a_hundred(shares: list[float]) -> None:
    whole = percentages({str(number): share for number, share in enumerate(shares)})
    assert sum(whole.values()) == 100
    assert min(whole.values()) >= 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((66070.4, "66070"), (1234567.0, "1234567"), (512.34, "512.3"), (4.0, "4"), (0.0, "0"), (0.00001, "0.00001")),
        *((0.000123456, "0.0001235"), (3.189e4, "31890"), (3.189e-9, "0.000000003189"), (-0.00002, "-0.00002")),
        *((99999.6, "100000"), (float("nan"), "nan"), (float("inf"), "inf"), (3.2e30, "3.2e+30")),
    ],
)
def test_numbers_have_no_powers_of_ten(value: float, text: str) -> None:
    assert plain_number(value) == text


def test_numbers_of_few_figures_and_rates() -> None:
    assert [plain_number(value, 2) for value in (150.0, 1.26, 0.0123, 99.9)] == ["150", "1.3", "0.012", "100"]
    rates = (1.25e8, 1.25e7, 2.5e9, 125.0, 0.5)
    assert [written_rate(rate) for rate in rates] == ["1 Gb/s", "100 Mb/s", "20 Gb/s", "1 kb/s", "4 b/s"]


def test_no_number_for_a_reader_is_formatted_past_the_one_formatter() -> None:
    """`:.3g` of a large number is 3.19e+04; `:g` alone is for what a user gave, such as a time-out."""
    source = Path(polytempo.__file__).parent
    allowed = {
        "units.py",
        "collectives/cost.py",
        "optim/asup.py",
    }  # the formatter; a sort by rounded numbers; an eps to type
    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"[:%]\.[0-9]+[ge][}\"']", path.read_text(encoding="utf-8"))
    }
    assert found == allowed

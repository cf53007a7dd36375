"""The proofs' arithmetic: intervals over paired seeds, bars, tables and runs that are kept."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import uneven
from asynchronous_verdicts import BEFORE, OWN_RATE, T95, Judged, bars_line, interval, read_summary, summary, tables
from kept_runs import kept_runs, make_runs

SEEDS = (0, 1, 2)


def judged(part: str = "digits", mode: str = "asp", *ends: float) -> Judged:
    """A mode beside a bsp that ends with 97, 96 and 98 (a loss: with 2)."""
    bsp = (2.0, 2.0, 2.0) if part in ("gpt", OWN_RATE) else (97.0, 96.0, 98.0)
    return Judged(part, 4, "even", mode, f"{mode},momentum=lookahead", 0.4, 0.9, 30720, SEEDS, ends or bsp, bsp)


def test_the_quantiles_of_t_leave_a_twentieth_outside() -> None:
    """By the density itself, summed up from 0 to the quantile."""
    count = 2000
    for degrees, quantile in enumerate(T95, 1):
        scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
        places = ((number + 0.5) * quantile / count for number in range(count))
        height = sum((1 + x * x / degrees) ** (-(degrees + 1) / 2) for x in places)
        assert 2 * scale * height * quantile / count == pytest.approx(0.95, abs=5e-5), degrees
    assert len(T95) == 30


def test_the_interval_of_a_mean() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert interval([2.0, 2.0]) == 0.0
    assert math.isnan(interval([1.0]))
    assert interval([0.0, 1.0] * 50) == pytest.approx(2.042 * 0.50252 / 10, rel=1e-3)  # of more seeds: that of 31, too wide


@pytest.mark.parametrize(
    ("part", "ends", "met"),
    [
        ("digits", (96.5, 95.5, 97.5), True),
        ("digits", (96.5, 95.4, 97.5), False),
        ("cnn", (90.0, 99.0, 101.0), True),  # the mean counts, not a run
        ("live cnn", (96.0, 95.0, 97.0), False),
        ("twice", (92.0, 91.0, 93.0), True),
        ("twice", (99.0, 99.0, 92.9), False),  # here the worst run counts
        ("gpt", (2.01, 2.01, 2.01), True),
        (OWN_RATE, (2.012, 2.01, 2.01), False),
        ("gpt", (1.5, 1.5, 1.5), True),
        ("digits", (float("nan"), 99.0, 99.0), False),
        ("twice", (99.0, float("nan"), 99.0), False),
    ],
)
def test_a_bar_is_on_the_difference_from_bsp(part: str, ends: tuple[float, ...], met: bool) -> None:
    assert judged(part, "asp", *ends).met is met


def test_bsp_itself_and_what_modes_did_before_have_no_bar() -> None:
    assert judged("digits", "bsp").met is None
    assert judged("digits", f"asp{BEFORE}", 10.0, 10.0, 10.0).met is None


def test_a_table_has_means_with_intervals_and_the_last_line_what_was_missed() -> None:
    good, bad = judged("digits", "asp", 97.0, 96.5, 98.0), judged("digits", "ssp:3", 96.0, 95.0, 97.0)
    slow = replace(good, cluster="slow")
    shown = tables([judged("digits", "bsp"), good, slow, bad])
    assert list(shown) == ["digits"]
    assert shown["digits"].rows == (
        ("bsp", "97.00", "97.00"),  # on every cluster the same
        ("asp", "+0.17 ±0.72 ok", "+0.17 ±0.72 ok"),
        ("ssp:3", "-1.00 ±0.00 MISSED", "-"),
    )
    assert bars_line([good, slow, bad], missing=7) == (
        "bars: 2 met, 1 missed; 7 runs are missing\n  missed: digits, 4 workers, even, ssp:3 (-1.00 ±0.00 MISSED)"
    )


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    of = [judged("digits", "bsp"), judged("twice", "asp", 97.0, 96.5, 98.0)]
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(summary(of, {})))
    assert read_summary(file) == of


@dataclass(frozen=True)
class Try:
    """A run that comes to its number, squared."""

    sync: str
    number: int


def squared(job: Try) -> int:
    if job.number < 0:
        raise AssertionError("it was to be kept")
    return job.number**2


def test_runs_are_kept_by_all_their_settings(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text('{"sync": "asp", "number": -1, "ended": 7}\n{"cluster": "of another kind", "ended": 8}\n')
    wanted = [Try("asp", -1), Try("asp,momentum=lookahead", 3), Try("asp", 4)]
    assert make_runs(wanted, squared, file, "ended", seconds=0) == {wanted[0]: 7}  # no time to start any
    assert make_runs(wanted, squared, file, "ended") == {wanted[0]: 7, wanted[1]: 9, wanted[2]: 16}
    assert kept_runs(file, Try, "ended") == {wanted[0]: 7, wanted[1]: 9, wanted[2]: 16}
    assert len(file.read_text().splitlines()) == 4


def test_a_mode_is_kept_as_its_optimizer_settles_it() -> None:
    """So lines of the old way are not taken for those of the new."""
    assert uneven.settled("asp") == "asp,momentum=lookahead,spike=1.5"
    assert [uneven.settled(mode) for mode in ("bsp", "anytime:auto", "bsp+balance")] == [
        "bsp",
        "anytime:auto",
        "bsp+balance",
    ]


def cells(**times: list[float | None]) -> uneven.Cells:
    """The same times on all clusters; of modes that are not named 1,000."""
    of = {
        mode: uneven.Cell(times.get(mode.partition(":")[0].replace("+", "_"), [1000.0] * 3), [0.9] * 3)
        for mode in uneven.MODES
    }
    return dict.fromkeys(uneven.CLUSTERS, of)


def test_the_bars_on_time_are_ratios_of_medians() -> None:
    met = uneven.bars(cells(asp=[1100.0, 1.0, 1200.0], dssp=[None, None, 900.0], bsp_balance=[950.0] * 3))
    assert [(bar.text, round(bar.ratio, 3), bar.met) for bar in met] == [
        ("anytime:auto / bsp, at most 1.05", 1.0, True),
        ("asp / bsp, at most 1.1", 1.1, True),
        ("dssp:3..15 / bsp, at most 1.1", 2.4, False),  # two of three count as the horizon
        ("asp / bsp+balance, at most 1.15", 1.158, False),
    ]


def test_a_target_that_was_not_seen_was_not_seen_by_the_horizon() -> None:
    assert uneven.Cell([None, None], [0.86, 0.85]).text == "not by 2,400 (0.855)"
    assert uneven.Cell([None, None, 900.0], [0.86, 0.85, 0.87]).text == "2 of 3 not by 2,400"
    assert uneven.Cell([None, 800.0, 900.0], [0.86, 0.87, 0.87]).text == "900, 1 not by 2,400"
    assert uneven.cell_of([[(100.0, 0.8), (200.0, 0.87)], [(100.0, 0.85)]]) == uneven.Cell([200.0, None], [0.87, 0.85])


def test_bsp_takes_the_rate_at_which_it_is_soonest() -> None:
    slow, soon, far = (uneven.Cell([at], [best]) for at, best in ((950.0, 0.87), (None, 0.86), (None, 0.865)))
    assert uneven.best_rate({0.02: slow, 0.05: soon, 0.1: far}) == 0.02
    assert uneven.best_rate({0.05: soon, 0.1: far}) == 0.1

"""Tables and sentences: they fit, and they say what happened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from clusters import STRAGGLER

from polytempo.cli.compare import _which
from polytempo.errors import UsageError
from polytempo.report.live import LiveRun, RepeatedRun, live_run, repeated
from polytempo.report.picture import check_picture, draw_comparison, draw_training
from polytempo.report.table import (
    comparison,
    scaling_table,
    speed_comparison,
    speed_verdict,
    trained_comparison,
    verdict,
)
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.outcome import Outcome, WorkerOutcome
from polytempo.simulate.run import scaling, simulate_job

OUTCOMES = [simulate_job(STRAGGLER, sync, steps=200) for sync in ("bsp", "bsp+backup:1", "ssp:3", "asp")]


@dataclass(frozen=True)
class Run:
    outcome: Outcome
    curve: tuple[tuple[float, float], ...]

    @property
    def accuracy(self) -> float:
        return self.curve[-1][1]

    def time_to(self, target: float) -> float | None:
        return next((t for t, a in self.curve if a >= target), None)


RUNS = [
    Run(OUTCOMES[0], ((0.0, 0.1), (10.0, 0.9))),
    Run(OUTCOMES[2], ((0.0, 0.1), (4.0, 0.9))),
    Run(OUTCOMES[3], ((0.0, 0.1), (2.0, 0.5))),
]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_a_table_fits_its_terminal_and_says_what_it_left_out(width: int) -> None:
    table = comparison(OUTCOMES, "four workers")
    lines = table.text(width).splitlines()
    grid = [line for line in lines if not line.startswith("(")]
    assert max(map(len, grid)) <= width
    assert ("(a wider terminal" in lines[-1]) == (width < 80)
    assert [line.split()[0] for line in grid[-4:]] == ["bsp", "bsp+backup:1", "ssp:3", "asp"]


def test_columns_that_say_nothing_are_left_out() -> None:
    assert "sending (%)" not in comparison(OUTCOMES, "").markdown()
    assert "discarded pushes" in comparison(OUTCOMES, "").markdown()
    assert "discarded pushes" not in comparison(OUTCOMES[2:], "").markdown()


def test_markdown_has_one_row_a_mode() -> None:
    lines = comparison(OUTCOMES, "").markdown().splitlines()
    assert len(lines) == 2 + len(OUTCOMES)
    assert len({line.count("|") for line in lines}) == 1


def test_the_verdict_names_the_first_and_those_who_never_get_there() -> None:
    assert verdict(RUNS, 0.9) == "ssp:3 reaches 90 % first, after 4 s; bsp takes 2.50x as long; asp does not get there"
    assert verdict(RUNS, 0.95) == "none reaches 95 %; the best, bsp, ends at 90.0 %"
    rows = trained_comparison(RUNS, 0.9, "").rows
    assert [row[:3] for row in rows] == [("bsp", "10", "90.0"), ("ssp:3", "4", "90.0"), ("asp", "-", "50.0")]


def logging(sync: str, curve: tuple[tuple[float, float], ...] = (), **logged: float) -> RepeatedRun:
    outcome = simulate_job(STRAGGLER, sync, steps=200)
    return repeated([LiveRun(outcome, curve, logged)], 0.9)


def test_runs_without_the_metric_are_compared_by_speed_and_by_what_they_logged() -> None:
    runs = [logging("bsp", loss=0.25), logging("asp", loss=0.5, norm=3.0)]
    table = speed_comparison(runs, "")
    assert (table.heads[:2], table.heads[-2:]) == (("mode", "steps"), ("last\nloss", "last\nnorm"))
    assert [(row[0], row[1], *row[-2:]) for row in table.rows] == [("bsp", "200", "0.25", "-"), ("asp", "200", "0.5", "3")]
    outcomes = [run.outcome for run in runs]
    ratio = outcomes[1].samples_per_second / outcomes[0].samples_per_second
    rate = f"{outcomes[1].samples_per_second:.4g}"
    assert (
        speed_verdict(outcomes) == f"asp is the fastest, with {rate} samples/s; bsp takes {ratio:.2f}x as long for as many"
    )


def test_of_a_record_only_numbers_are_metrics() -> None:
    worker = dict.fromkeys(WorkerOutcome.__dataclass_fields__, 1.0)
    job = dict.fromkeys(
        (
            *("seconds", "steps", "samples", "discarded", "updates", "samples_per_second", "efficiency", "waiting"),
            *("staleness_mean", "staleness_max"),
        ),
        1.0,
    )
    meta = {"spec": "bsp", "workers": [worker], "job": job, "options": {"via": "allreduce"}}
    release = {"t": 2.0, "kind": "release", "worker": 0, "step": 3, "slowest": 1}
    logged = ({"accuracy": 0.5, "note": "warm"}, {"accuracy": "NaN"}, {"accuracy": "none"}, {"loss": 3})
    lines = [{"t": 3.0 + place, "kind": "metric", "worker": 0, **values} for place, values in enumerate(logged)]
    run = live_run([release, *lines], meta)
    assert (run.curve[0], len(run.curve), run.logged["loss"], "note" in run.logged) == ((1.0, 0.5), 2, 3.0, False)
    assert (run.outcome.via, run.outcome.max_lead) == ("allreduce", 2)


def test_of_runs_of_which_one_logged_the_metric_the_others_cells_are_empty() -> None:
    runs = [logging("bsp"), logging("asp", ((0.0, 0.1), (2.0, 0.95)))]
    rows = trained_comparison(runs, 0.9, "").rows
    assert [row[:3] for row in rows] == [("bsp", "-", "-"), ("asp", "2", "95.0")]
    assert verdict(runs, 0.9) == "asp reaches 90 % first, after 2 s; bsp does not get there"
    assert verdict(runs, 0.99) == "none reaches 99 %; the best, asp, ends at 95.0 %"


def test_runs_without_the_metric_are_in_order_of_the_time_they_took() -> None:
    runs = [LiveRun(replace(OUTCOMES[0], seconds=seconds), ()) for seconds in (7.0, 2.0, 4.0)]
    assert repeated(runs, 0.9).outcome.seconds == 4.0


def test_pictures_of_runs_of_which_one_has_no_curve_and_with_a_name_that_is_no_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [logging("bsp"), logging("asp", ((0.0, 0.1), (2.0, 0.95)))]
    draw_training(runs, 0.9, tmp_path / "training.png", "tr\udce4in.py")
    draw_comparison([run.outcome for run in runs], tmp_path / "speed.png", "tr\udce4in.py")
    assert [path.read_bytes()[:4] for path in sorted(tmp_path.iterdir())] == [b"\x89PNG", b"\x89PNG"]


def test_scaling_shows_powers_of_two() -> None:
    table = scaling_table(scaling(Cluster(), most=20, shards=(1,), steps_each=2), "")
    assert table.heads[1:] == ("n = 1", "n = 2", "n = 4", "n = 8", "n = 16", "n = 20")
    assert [row[0] for row in table.rows] == ["1 shard", "ring"]


def test_pictures_that_cannot_be_drawn_are_refused_first() -> None:
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        check_picture(Path("x.docx"))


def repeats(*times: float | None) -> RepeatedRun:
    curves = [((0.0, 0.1), (9.0, 0.5)) if time is None else ((0.0, 0.1), (time, 0.9)) for time in times]
    return repeated([LiveRun(OUTCOMES[0], curve) for curve in curves], 0.9)


@pytest.mark.parametrize(
    ("times", "shown"),
    [
        ((4.0,), "4"),
        ((4.0, 2.0, 7.0), "4 (2 to 7)"),
        ((4.0, 2.0), "2 (2 to 4)"),
        ((4.0, None, 2.0), "4 (2 to never)"),
        ((None, None, 2.0), "- (2 to never)"),
    ],
)
def test_of_several_runs_the_middle_one_is_shown_with_the_range(times: tuple[float | None, ...], shown: str) -> None:
    assert trained_comparison([repeats(*times)], 0.9, "").rows[0][1] == shown


def test_a_comparison_says_which_mode_of_how_many_it_runs() -> None:
    assert [_which(number, 2, (number - 1) // 2, 1) for number in (1, 2)] == ["mode 1 of 2", "mode 2 of 2"]
    told = [_which(number, 2, (number - 1) // 2, 3) for number in (2, 3)]
    assert told == ["mode 2 of 2, run 1 of 3", "mode 1 of 2, run 2 of 3"]

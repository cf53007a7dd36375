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
from polytempo.report.scaling import scaling
from polytempo.report.table import (
    comparison,
    falls_short,
    scaling_table,
    short_of_bsp,
    speed_comparison,
    speed_verdict,
    trained_comparison,
    verdict,
)
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.outcome import Outcome, WorkerOutcome
from polytempo.simulate.run import simulate_job
from polytempo.sync.spec import parse_spec

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
    end = f"{OUTCOMES[3].seconds:g}"
    first = "ssp:3 reaches 90 % first, after 4 s; bsp takes 2.50x as long"
    assert verdict(RUNS, 0.9) == f"{first}; asp does not by {end} s"
    assert verdict(RUNS, 0.95) == "none reaches 95 %; the best, bsp, ends at 90.0 %"
    rows = trained_comparison(RUNS, 0.9, "").rows
    assert [row[:3] for row in rows] == [("bsp", "10", "90.0"), ("ssp:3", "4", "90.0"), ("asp", f"not by {end}", "50.0")]


def test_a_long_time_is_written_as_people_do() -> None:
    runs = [Run(replace(OUTCOMES[0], seconds=2400.0), curve) for curve in (((1080.0, 0.9),), ((2400.0, 0.8),))]
    table = trained_comparison(runs, 0.87, "", "f1")
    assert table.heads[1:4] == ("87 % at\n(s)", "final\nf1 (%)", "time\n(s)")
    assert [row[1:4] for row in table.rows] == [("1,080", "90.0", "2,400"), ("not by 2,400", "80.0", "2,400")]


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
    assert (run.outcome.sync, run.outcome.via, run.outcome.max_lead) == ("bsp", "allreduce", 2)
    settled = {"optimizers": {"0": "asp,momentum=lookahead", "1": "asp"}}
    assert live_run([release], meta | {"job": job | settled}).outcome.sync == "asp,momentum=lookahead"


def test_of_runs_of_which_one_logged_the_metric_the_others_cells_are_empty() -> None:
    runs = [logging("bsp"), logging("asp", ((0.0, 0.1), (2.0, 0.95)))]
    rows = trained_comparison(runs, 0.9, "").rows
    assert [row[:3] for row in rows] == [("bsp", "-", "-"), ("asp", "2", "95.0")]
    assert verdict(runs, 0.9) == "asp reaches 90 % first, after 2 s; of bsp nothing was logged"
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
    table = scaling_table(scaling(Cluster(), parse_spec("bsp"), most=20, shards=(1,), steps_each=2), "")
    assert table.heads[1:] == ("n = 1", "n = 2", "n = 4", "n = 8", "n = 16", "n = 20")
    assert [row[0] for row in table.rows] == ["1 shard", "ring"]


def test_pictures_that_cannot_be_drawn_are_refused_first() -> None:
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        check_picture(Path("x.docx"))


def rising(*values: float) -> tuple[tuple[float, float], ...]:
    return tuple((float(place), value) for place, value in enumerate(values))


FLAT = [0.5, 0.9, *[0.97, 0.968, 0.972, 0.97] * 3]


@pytest.mark.parametrize(
    ("looks", "short"),
    [
        ([*FLAT[:-1], 0.1], True),
        ([*FLAT[:-1], 0.962], False),  # within a point
        ([*[value - 0.02 for value in FLAT[:-1]], 0.957], True),  # a point and more, and the curve is flat
        ([0.5, 0.6, 0.7, 0.8, 0.9], False),  # it still rises
        ([0.5, 0.6, 0.7, 0.8, 0.99], False),
        ([*FLAT[:-1], float("nan")], True),
        ([0.961], False),
        ([0.95], True),  # one look says nothing of chance
    ],
)
def test_a_single_run_falls_short_by_more_than_a_point_and_more_than_it_moves(looks: list[float], short: bool) -> None:
    assert falls_short([looks], [FLAT]) is short


def test_several_runs_fall_short_by_more_than_they_differ() -> None:
    base = [[0.5, 0.97], [0.5, 0.96], [0.5, 0.98]]
    assert falls_short([[0.1, 0.95], [0.1, 0.94], [0.1, 0.945]], base)
    assert not falls_short([[0.1, 0.99], [0.1, 0.90], [0.1, 0.945]], base)
    assert not falls_short([[0.1, 0.962], [0.1, 0.961], [0.1, 0.9615]], base)


def test_modes_below_bsp_are_named_in_one_line() -> None:
    below = "below the accuracy of bsp (97.0 %) by more than a point and more than it varies"
    bsp = Run(replace(OUTCOMES[0], via="ring"), rising(*FLAT))
    asp, ssp = (Run(OUTCOMES[place], rising(*[value / 2 for value in FLAT])) for place in (3, 2))
    assert short_of_bsp([bsp, asp, ssp]) == f"{below}: asp (48.5 %), ssp:3 (48.5 %)"
    assert short_of_bsp([asp, bsp], "f1") == f"{below.replace('accuracy', 'f1')}: asp (48.5 %)"
    assert short_of_bsp([bsp, Run(OUTCOMES[3], rising(*FLAT))]) == ""
    assert short_of_bsp([asp, ssp]) == ""
    assert short_of_bsp([bsp, Run(OUTCOMES[3], ())]) == ""
    assert short_of_bsp([Run(OUTCOMES[0], rising(float("nan"))), asp]) == ""


def test_the_ends_of_repeated_runs_are_their_means() -> None:
    def of(sync: str, *ends: float) -> RepeatedRun:
        outcome = replace(OUTCOMES[0], sync=sync)
        return repeated([LiveRun(outcome, rising(0.1, end)) for end in ends], 0.9)

    runs = [of("bsp", 0.97, 0.96, 0.98), of("asp", 0.2, 0.1, 0.3), of("ssp:3", 0.97, 0.96, 0.97)]
    assert short_of_bsp(runs).endswith("bsp (97.0 %) by more than a point and more than it varies: asp (20.0 %)")


def repeats(*times: float | None) -> RepeatedRun:
    curves = [((0.0, 0.1), (9.0, 0.5)) if time is None else ((0.0, 0.1), (time, 0.9)) for time in times]
    return repeated([LiveRun(replace(OUTCOMES[0], seconds=60.0), curve) for curve in curves], 0.9)


@pytest.mark.parametrize(
    ("times", "shown"),
    [
        ((4.0,), "4"),
        ((4.0, 2.0, 7.0), "4 (2 to 7)"),
        ((4.0, 2.0), "2 (2 to 4)"),
        ((4.0, None, 2.0), "4 (2 to not by 60)"),
        ((None, None, 2.0), "not by 60 (2 to not by 60)"),
        ((None, None), "not by 60"),
    ],
)
def test_of_several_runs_the_middle_one_is_shown_with_the_range(times: tuple[float | None, ...], shown: str) -> None:
    assert trained_comparison([repeats(*times)], 0.9, "").rows[0][1] == shown


def test_a_comparison_says_which_mode_of_how_many_it_runs() -> None:
    assert [_which(number, 2, (number - 1) // 2, 1) for number in (1, 2)] == ["mode 1 of 2", "mode 2 of 2"]
    told = [_which(number, 2, (number - 1) // 2, 3) for number in (2, 3)]
    assert told == ["mode 2 of 2, run 1 of 3", "mode 1 of 2, run 2 of 3"]

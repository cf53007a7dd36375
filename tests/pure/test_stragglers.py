"""The straggler report: who is slow and why, on jobs in virtual time whose trouble is known."""

from __future__ import annotations

from dataclasses import asdict, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from straggling import TROUBLES, Drawn, draw_job

from polytempo.records.step_figures import WARM_UP, StepFigures, figures_of
from polytempo.records.stragglers import LEAST_STEPS, Straggler, Unsure, doubts_in, paces_of, stragglers_in
from polytempo.report.straggler_report import (
    ADVICE,
    StragglerReport,
    best_mode,
    closing_line,
    found_in_words,
    full_report,
    straggler_report,
)
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.run import simulate_job
from polytempo.sync.spec import parse_spec

#: False alarms in virtual jobs, causes that are named, and jobs with a doubt about a healthy worker.
FALSE_ALARMS, NAMED, DOUBTED = 0.02, 0.95, 0.02


def found_in(job: Drawn) -> list[Straggler]:
    """What `polytempo explain` says."""
    return [cost.straggler for cost in straggler_report(figures_of(job.lines), parse_spec(job.sync)).costs]


def steps(seconds: dict[int, list[float]], work: dict[int, list[float]] | None = None) -> list[StepFigures]:
    """Pushes of workers that compute for these seconds, one step after another."""
    found = []
    for worker, times in seconds.items():
        now = 0.0
        for step, computed in enumerate(times):
            now += computed
            cost = work[worker][step] if work else 0.0
            found.append(StepFigures(worker, step, now, 32, work=cost, computed=computed))
    return sorted(found, key=lambda one: one.t)


@pytest.mark.parametrize("seed", range(2 * len(TROUBLES)))
def test_the_trouble_of_a_virtual_job_is_named(seed):
    job = draw_job(seed)
    named = {(one.cause, one.worker) for one in found_in(job)}
    assert named == (set() if job.cause == "none" else {(job.cause, job.worker)})


@pytest.mark.proof
def test_500_virtual_jobs():
    """Seeds 0 to 499; the rules were tuned on seeds from 1000 on."""
    wrong, named, troubled, doubted = [], 0, 0, 0
    for seed in range(500):
        job = draw_job(seed)
        report = straggler_report(figures_of(job.lines), parse_spec(job.sync))
        found = {(cost.straggler.cause, cost.straggler.worker) for cost in report.costs}
        doubted += any(doubt.worker != job.worker for doubt in report.doubts)
        right = set() if job.cause == "none" else {(job.cause, job.worker)}
        wrong += [(seed, job.sync, job.cause, found - right)] if found - right else []
        troubled += bool(right)
        named += bool(right & found)
    print(f"500 virtual jobs: {len(wrong)} with a false alarm; {named} of {troubled} troubles named; {wrong}")
    print(f"{doubted} with a doubt about a healthy worker")
    assert len(wrong) <= FALSE_ALARMS * 500
    assert doubted <= DOUBTED * 500
    assert named >= NAMED * troubled


def test_workers_that_wait_are_not_accused():
    lines = []
    simulate_job(Cluster(workers=4, slow={3: 3.0}), "bsp", record=lines.append, figures=True, steps=200)
    report = straggler_report(figures_of(lines), parse_spec("bsp"))
    (cost,) = report.costs
    assert (cost.straggler.cause, cost.straggler.worker) == ("computing", 3)
    assert cost.straggler.factor == pytest.approx(3.0)
    assert cost.share == pytest.approx(2 / 3, abs=0.01)  # a round takes 3 s, of which 1 s would do
    assert cost.gain == pytest.approx(2.0, abs=0.05)
    best = best_mode(cost, parse_spec("bsp"))
    assert best is not None
    assert best.spec.text == "bsp+balance"


def test_a_record_of_local_steps_predicts_barriers_by_the_step_and_not_by_the_block():
    """A push of `local:4` holds four steps; a step of `bsp` takes a quarter of its time."""
    rows = [
        StepFigures(worker, step, 0.12 * step, 128.0, 4, 128.0, 0.12 if worker == 3 else 0.04, 0.0, 0.0001)
        for step in range(40)
        for worker in range(4)
    ]
    (cost,) = straggler_report(rows, parse_spec("local:4")).costs
    gains = {mode.spec.text: mode.gain for mode in cost.modes}
    assert gains["bsp"] == pytest.approx(0.0, abs=0.1)


def loaded(seed: int, workers: int, count: int, factor: float, load: float) -> list[StepFigures]:
    """Steps of 4 ms on a host with other processes, which take the core for slices in between; worker 1 is slower."""
    dice = Random(f"loaded {seed}")
    seconds: dict[int, list[float]] = {worker: [] for worker in range(workers)}
    for _ in range(count):
        for worker, row in seconds.items():
            took = left = 0.004 * (factor if worker == 1 else 1.0) * dice.uniform(0.9, 1.1)
            while (left := left - dice.expovariate(1 / 0.006)) > 0:
                took += dice.choice((0.004, 0.008, 0.024)) * dice.random() * load
            row.append(took)
    return steps(seconds)


@pytest.mark.parametrize("count", [30, 60, 120])
@pytest.mark.parametrize("load", [1.0, 3.0, 6.0])
def test_what_the_table_shows_on_a_loaded_host_is_named_with_the_doubt(count, load):
    """Short steps and slices of other processes: no test of chance is passed, but 28 ms beside 8 ms are said."""
    doubts = 0
    for seed in range(12):
        report = straggler_report(loaded(seed, 2 + seed % 3, count, 3.5, load), parse_spec("bsp"))
        assert report.paces is not None
        doubted = [doubt for doubt in report.doubts if doubt.worker == 1]
        assert doubted or any(cost.straggler.worker == 1 for cost in report.costs)
        for doubt in doubted:
            doubts += 1
            own = [sum(pace.split().values()) for pace in report.paces.workers]
            shown = [f"{1e3 * seconds:.1f}" for seconds in own]
            text = " ".join(full_report(report, {}).split())
            assert f"worker 1 takes {doubt.factor:.1f}x as long as the others on average ({shown[1]} against " in text
            assert "Nothing is wrong" not in text
            assert "no host is slow" not in text
            assert (doubt.compared, doubt.seconds) == ("own time", own[1])
            assert asdict(doubt) in report.as_dict()["doubts"]
            assert closing_line(report) == closing_line(replace(report, doubts=()))  # no cost, no advice
    assert doubts or count == 120


def test_each_doubt_has_its_reason():
    def doubt(slow: list[float], others: float = 1.0) -> list[tuple[int, str, Unsure]]:
        dice = Random(7)
        even = {worker: [others * dice.uniform(0.99, 1.01) for _ in slow] for worker in (0, 2)}
        paces = paces_of(steps({**even, 1: slow}))
        assert paces is not None
        return [(one.worker, one.part, one.why) for one in doubts_in(paces, stragglers_in(paces))]

    count = range(198)
    assert doubt([1.0 + 3.0 * (step % 4 == 0) for step in count]) == [(1, "computing", Unsure.SINGLE_STEPS)]
    assert doubt([1.0 + 3.0 * (step // 12 % 2) for step in count]) == [(1, "computing", Unsure.CHANCE)]
    assert doubt([1.0 + (step // 12 % 3 < 2) for step in count]) == [(1, "computing", Unsure.CHANGING)]
    assert doubt([1.0] * 18 + [6.0] * 6) == [(1, "computing", Unsure.PASSING)]
    assert doubt([80.0 if step in (80, 120) else 1.0 for step in count]) == [(1, "stalls", Unsure.SINGLE_STEPS)]
    assert doubt([2.0 for _ in count]) == []  # a finding, so no doubt
    assert doubt([1.4 for _ in count]) == []
    assert doubt([0.0009 for _ in count], 0.0005) == []  # less than half a millisecond is noise of a host


def test_slow_exchanges_of_the_others_do_not_hide_a_slow_worker():
    """By own time all are alike: who waits in its exchange for the slow one's turn is not faster."""
    dice = Random(1)
    figures = []
    for step in range(30):
        for worker, (computed, away) in enumerate([(0.008, 0.020), (0.0285, 0.001), (0.008, 0.020)]):
            noise = dice.lognormvariate(0, 0.6)
            figures.append(StepFigures(worker, step, 0.05 * step, 32, computed=computed * noise, exchanged=away))
    (doubt,) = straggler_report(figures, parse_spec("bsp")).doubts
    assert (doubt.worker, doubt.compared) == (1, "computing and stalls")
    assert doubt.factor > 2


def test_since_when_and_until_when():
    even = {worker: [1.0 + 0.01 * (step % 3) for step in range(200)] for worker in range(3)}
    slow = [2.0 if step >= 100 else 1.0 for step in range(200)]
    (found,) = stragglers_in(paces_of(steps({**even, 3: slow})))
    assert found.worker == 3
    assert found.since == pytest.approx(100, rel=0.15)
    assert found.until is None
    passing = [2.0 if 60 <= step < 120 else 1.0 for step in range(200)]
    (found,) = stragglers_in(paces_of(steps({**even, 3: passing})))
    assert found.until is not None
    assert found.since < found.until < 200


def test_a_worker_with_more_work_is_not_slow():
    lengths = {worker: [float(100 + 37 * (step * (worker + 3) % 11)) for step in range(100)] for worker in range(4)}
    lengths[2] = [3 * length for length in lengths[2]]  # it reads the long documents
    seconds = {worker: [length / 1000 for length in row] for worker, row in lengths.items()}
    assert [(one.cause, one.worker) for one in stragglers_in(paces_of(steps(seconds, lengths)))] == [("uneven", None)]
    assert any(one.worker == 2 for one in stragglers_in(paces_of(steps(seconds))))  # as no push says what it was made of


@pytest.mark.parametrize("sync", ["bsp+balance", "anytime:auto"])
def test_shares_by_speed_do_not_hide_a_slow_worker_and_are_not_recommended_again(sync):
    lines = []
    simulate_job(Cluster(workers=4, slow={1: 2.5}, batch=64), sync, record=lines.append, figures=True, steps=400)
    report = straggler_report(figures_of(lines), parse_spec(sync))
    (cost,) = report.costs
    assert (cost.straggler.cause, cost.straggler.worker) == ("computing", 1)
    assert cost.straggler.factor == pytest.approx(2.5, rel=0.15)
    assert sync not in [mode.spec.text for mode in cost.modes]


def test_nothing_is_said_where_nothing_is_wrong_and_of_short_runs():
    even = steps({worker: [1.0 + 0.02 * ((step * 7 + worker) % 5) for step in range(60)] for worker in range(4)})
    report = straggler_report(even, parse_spec("bsp"))
    assert closing_line(report) == ""
    assert "Nothing is wrong" in full_report(report, {})
    least = LEAST_STEPS + WARM_UP
    short = steps({worker: [1.0] * (least - 1) for worker in range(4)})
    assert straggler_report(short, parse_spec("bsp")).paces is None
    assert "too few steps" in full_report(straggler_report(short, parse_spec("bsp")), {})
    assert straggler_report([], parse_spec("bsp")).paces is None


def test_what_is_said_fits_in_one_line_and_names_each_cause():
    seconds = {worker: [1.0] * 60 for worker in range(7)} | {7: [1.4] * 60, 8: [4.0] * 60}
    report = straggler_report(steps(seconds), parse_spec("bsp"))
    assert len(report.costs) == 2
    line = closing_line(report, "out/job")
    assert line.startswith("worker 8 is slow")
    assert line.endswith(" (more: polytempo explain out/job)")  # the other one costs nothing behind it
    assert "\n" not in line
    for cause in ADVICE:
        for worker in (None, 3):
            assert found_in_words(Straggler(cause, worker, 2.5, 1.0, 0.4, 10.0, 20.0))


some_seconds = st.floats(0, 1e3, allow_nan=False)
some_steps = st.builds(
    StepFigures,
    st.integers(0, 3),
    st.integers(0, 100),
    some_seconds,
    st.floats(0, 1e6),
    st.integers(0, 9),
    work=st.floats(0, 1e9),
    computed=some_seconds,
    input=some_seconds,
    exchanged=some_seconds,
    elapsed=some_seconds,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(some_steps, min_size=0, max_size=200), st.sampled_from(["bsp", "anytime:auto", "bsp+balance", "local:4"]))
def test_any_figures_can_be_judged(figures, sync):
    report = straggler_report(sorted(figures, key=lambda one: one.t), parse_spec(sync))
    assert isinstance(report, StragglerReport)
    assert "\n" not in closing_line(report)
    assert full_report(report, {"samples_per_second": 1.0})
    assert report.as_dict()["sync"] == sync

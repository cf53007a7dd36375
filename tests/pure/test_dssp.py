"""Dynamic bounded staleness: the forecast against brute force, whom it is asked about, and what comes of it in time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from driving import Job
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import Cluster, Constant, Duration, Lognormal
from polytempo.simulate.outcome import Outcome
from polytempo.simulate.run import simulate_job
from polytempo.sync.actions import Hold, Release
from polytempo.sync.asynchronous import AsynchronousPolicy
from polytempo.sync.dssp import OVERDUE, DynamicBound, extra_steps

# The forecast.

MOMENTS = st.integers(-100, 100)
INTERVALS = st.integers(1, 60)
MOST = st.integers(0, 15)
often = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def brute_force(last: int, interval: int, slow_last: int, slow_interval: int, most: int) -> int:
    """All pairs of a stop of the worker and a push of the slowest; of the nearest, the one with the fewest steps."""
    pairs = [
        (abs(slow_last + (push + 1) * slow_interval - (last + extra * interval)), extra)
        for extra in range(most + 1)
        for push in range(most + 1)
    ]
    return min(pairs)[1]


@pytest.mark.parametrize(
    ("pushes", "slow_pushes", "extra"),
    [((10, 9), (8, 4), 2), ((10, 8), (9, 4), 2), ((100, 99), (99.5, 90), 9), ((7, 6), (6.5, 4.5), 1)],
)
def test_worked_examples(pushes: tuple[float, float], slow_pushes: tuple[float, float], extra: int) -> None:
    (last, before), (slow_last, slow_before) = pushes, slow_pushes
    assert extra_steps(last, last - before, slow_last, slow_last - slow_before, 12) == extra


@given(MOMENTS, INTERVALS, MOMENTS, INTERVALS, MOST)
@often
def test_the_forecast_is_the_best_of_all(last: int, interval: int, slow_last: int, slow_interval: int, most: int) -> None:
    expected = brute_force(last, interval, slow_last, slow_interval, most)
    assert extra_steps(last, interval, slow_last, slow_interval, most) == expected


@given(MOMENTS, INTERVALS, MOMENTS, INTERVALS, MOST, st.integers(-(10**6), 10**6))
@often
def test_the_forecast_does_not_depend_on_when_time_began(
    last: int, interval: int, slow_last: int, slow_interval: int, most: int, shift: int
) -> None:
    shifted = extra_steps(last + shift, interval, slow_last + shift, slow_interval, most)
    assert shifted == extra_steps(last, interval, slow_last, slow_interval, most)


@given(MOMENTS, INTERVALS, MOMENTS, INTERVALS, MOST, st.integers(-30, 30))
@often
def test_the_forecast_does_not_depend_on_the_unit_of_time(
    last: int, interval: int, slow_last: int, slow_interval: int, most: int, power: int
) -> None:
    scaled = [2.0**power * moment for moment in (last, interval, slow_last, slow_interval)]
    assert extra_steps(*scaled, most) == extra_steps(last, interval, slow_last, slow_interval, most)


@given(*[st.floats(-1e6, 1e6), st.floats(1e-6, 1e6)] * 2, MOST)
@often
def test_the_forecast_stays_within_its_range(
    last: float, interval: float, slow_last: float, slow_interval: float, most: int
) -> None:
    assert 0 <= extra_steps(last, interval, slow_last, slow_interval, most) <= most


def test_a_tie_but_for_the_noise_of_floating_point_is_a_tie() -> None:
    """Stops at 0.7 and 1.4 s are equally far from 1.05 s, though 1.4 - 1.05 comes out smaller than 1.05 - 0.7."""
    assert 1.4 - 1.05 < 1.05 - 0.7
    assert extra_steps(0.0, 0.7, 0.0, 1.05, 2) == 1


# Who is asked about whom.


@dataclass
class Spy:
    """A forecast that always says the same and remembers what it was asked."""

    answer: int
    asked: list[tuple[float, float, float, float, int]] = field(default_factory=list)

    def __call__(self, last: float, interval: float, slow_last: float, slow_interval: float, most: int) -> int:
        self.asked.append((last, interval, slow_last, slow_interval, most))
        return self.answer


def strict(workers: int, lower: int, upper: int, spy: Spy) -> Job:
    return Job(AsynchronousPolicy(workers, DynamicBound(lower, upper, forecast=spy)), workers).start()


def releases_of(worker: int, job: Job) -> list[int]:
    return [line["step"] for line in job.lines if line["kind"] == "release" and line["worker"] == worker]


def test_nobody_is_asked_about_up_to_the_lower_bound() -> None:
    spy = Spy(answer=0)
    job = strict(2, 2, 5, spy)
    for now in (10.0, 20.0):
        job.push(1, now)
    for now in (21.0, 22.0, 23.0, 24.0):
        job.push(0, now)
    assert job.steps == {0: 4, 1: 2}
    assert spy.asked == []
    job.push(0, now=25.0)
    assert len(spy.asked) == 1


def test_an_unknown_interval_holds() -> None:
    spy = Spy(answer=3)
    job = strict(2, 0, 3, spy)
    assert isinstance(job.push(0, now=1.0)[-1], Hold)  # worker 1 has never pushed
    assert spy.asked == []


@pytest.mark.parametrize("sync", ["dssp:0..9", "dssp-paper:0..9"])
def test_an_interval_of_nothing_holds(sync: str) -> None:
    """Pushes at one and the same moment say nothing of a worker's speed."""
    job = Job(sync, 2).start()
    for _ in range(3):
        assert isinstance(job.push(0, now=1.0)[-1], Hold)
        job.push(1, now=1.0)


def test_the_printed_one_needs_two_pushes_of_both() -> None:
    job = Job("dssp-paper:0..12", 2).start()
    job.push(1, now=4.0)
    job.push(0, now=4.5)
    assert isinstance(job.push(0, now=5.0)[-1], Hold)  # two of its own, one of the slowest


@pytest.mark.parametrize(("late", "kind"), [(0.0, Release), (0.001, Hold)])
def test_an_overdue_slowest_holds(late: float, kind: type) -> None:
    job = strict(2, 0, 3, Spy(answer=1))
    job.push(0, now=1.0)
    job.push(1, now=2.0)  # a step of 2 s
    assert isinstance(job.push(0, now=2.0 + OVERDUE * 2.0 + late)[-1], kind)


def test_intervals_are_measured_from_release_to_push() -> None:
    spy = Spy(answer=0)
    job = strict(2, 0, 3, spy)
    job.push(0, now=1.0)  # held until 4: that is not its slowness
    job.push(1, now=4.0)
    job.push(0, now=5.0)
    assert spy.asked == [(5.0, 1.0, 4.0, 4.0, 3)]


def test_a_grant_of_so_many_is_so_many_steps() -> None:
    spy = Spy(answer=2)
    job = strict(2, 0, 9, spy)
    job.push(0, now=1.0)
    job.push(1, now=4.0)
    for now in (5.0, 6.0):
        assert isinstance(job.push(0, now)[-1], Release)
    assert len(spy.asked) == 1
    spy.answer = 0
    assert isinstance(job.push(0, now=7.0)[-1], Hold)
    assert len(spy.asked) == 2


def test_the_printed_one_grants_a_step_more_and_asks_nobody_about_it() -> None:
    job = Job("dssp-paper:0..12", 2).start()
    for worker, now in [(0, 1.0), (1, 4.0), (0, 5.0), (1, 8.0)]:
        job.push(worker, now)
    assert extra_steps(9.0, 4.0, 8.0, 4.0, 12) == 1
    assert isinstance(job.push(0, now=9.0)[-1], Release)  # granted 1
    assert isinstance(job.push(0, now=30.0)[-1], Release)  # and 1, although the slowest is long overdue
    assert isinstance(job.push(0, now=31.0)[-1], Hold)


@pytest.mark.parametrize(("fastest_dies", "kind"), [(False, Hold), (True, Release)])
def test_as_printed_only_the_fastest_of_those_alive_may_ask(fastest_dies: bool, kind: type) -> None:
    job = Job("dssp-paper:0..12", 3).start()
    for worker, now in [(0, 1.0), (1, 2.0), (2, 4.0), (0, 5.0), (1, 6.0), (2, 8.0), (0, 8.2), (0, 8.4)]:
        job.push(worker, now)
    assert job.steps == {0: 4, 1: 2, 2: 2}
    if fastest_dies:
        job.leave(0, "lost", now=8.5)
    assert extra_steps(9.0, 3.0, 8.0, 4.0, 12) == 1
    assert isinstance(job.push(1, now=9.0)[-1], kind)


@pytest.mark.parametrize("answer", [1, 2, 3, 99])
def test_no_credit_leads_beyond_the_upper_bound(answer: int) -> None:
    job = strict(2, 1, 4, Spy(answer))
    job.push(0, now=1.0)
    job.push(1, now=100.0)
    while 0 in job.computing():
        job.push(0, job.now + 1)
    assert max(releases_of(0, job)) - job.slowest() == 4
    assert job.steps[0] - job.slowest() == 5


def test_leftover_credit_does_not_lead_beyond_the_upper_bound_either() -> None:
    job = strict(2, 1, 4, Spy(answer=99))
    job.push(1, now=100.0)
    for _ in range(3):
        job.push(0, job.now + 1)  # 2 ahead of the slowest at 1: granted 3, used 1
    job.push(1, now=job.now + 1)
    while 0 in job.computing():
        job.push(0, job.now + 1)
    assert max(releases_of(0, job)) - job.slowest() == 4


def test_credit_does_not_outlive_the_upper_bound() -> None:
    """A grant that would lead beyond u is cut, not kept for later."""
    spy = Spy(answer=1)
    job = strict(2, 0, 3, spy)
    job.push(1, now=100.0)
    job.push(0, now=101.0)
    job.push(0, now=102.0)  # 1 ahead: granted 1
    spy.answer = 3
    job.push(0, now=103.0)  # 2 ahead: granted 3, of which 2 are left up to 3 ahead
    job.push(0, now=104.0)
    assert job.held == {}
    job.push(0, now=105.0)
    assert job.held == {0: 5}
    for now in (106.0, 107.0, 108.0, 109.0):
        job.push(1, now)
    spy.asked.clear()
    job.push(0, now=110.0)
    assert len(spy.asked) == 1


def test_credit_used_up_waits_for_the_lower_bound_not_for_the_upper() -> None:
    spy = Spy(answer=2)
    job = strict(2, 0, 4, spy)
    job.push(1, now=10.0)
    for now in (11.0, 12.0, 13.0):
        job.push(0, now)
    spy.answer = 0
    job.push(0, now=14.0)
    assert job.held == {0: 4}
    for now in (15.0, 16.0):
        assert not any(isinstance(action, Release) and action.worker == 0 for action in job.push(1, now))
    assert Release(0, 4, 4) in job.push(1, now=17.0)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_of_equally_slow_ones_the_last_to_be_expected_counts(first: int, second: int) -> None:
    spy = Spy(answer=0)
    job = strict(3, 0, 3, spy)
    job.push(0, now=1.0)
    job.push(first, now=2.0)  # again at 4
    job.push(second, now=3.0)  # again at 6
    job.push(0, now=3.5)
    assert spy.asked == [(3.5, 0.5, 3.0, 3.0, 3)]


@pytest.mark.parametrize(("first", "second", "counts"), [(1, 2, (5.0, 4.0)), (2, 1, (6.0, 3.0))])
def test_of_those_expected_together_the_lowest_rank_counts(first: int, second: int, counts: tuple[float, float]) -> None:
    spy = Spy(answer=0)
    job = strict(3, 1, 3, spy)
    for worker, now in [(0, 0.5), (first, 1.0), (second, 3.0), (0, 3.5), (first, 5.0), (second, 6.0)]:
        job.push(worker, now)  # at the end both are at step 2, and expected at 9: 5 + 4 and 6 + 3
    job.push(0, now=6.5)
    spy.asked.clear()
    job.push(0, now=7.0)
    assert [asked[2:4] for asked in spy.asked] == [counts]


def test_the_fewest_pushes_count_before_the_expected_moment() -> None:
    spy = Spy(answer=0)
    job = strict(3, 1, 3, spy)
    for worker, now in [(1, 1.0), (2, 5.0), (0, 6.0), (2, 9.0), (0, 9.5), (0, 9.75)]:
        job.push(worker, now)  # worker 1 is at step 1 and was expected at 2, worker 2 is at step 2 and expected at 13
    assert spy.asked == []  # worker 1 is long overdue
    job.leave(1, "lost")
    assert job.steps == {0: 3, 2: 2}
    job.push(0, now=10.0)
    assert [asked[2:4] for asked in spy.asked] == [(9.0, 4.0)]


@pytest.mark.parametrize("somebody_asked_before", [False, True])
def test_there_is_no_forecast_while_a_newcomer_is_among_the_slowest(somebody_asked_before: bool) -> None:
    """Nobody knows when it will push, so it is the one expected last."""
    spy = Spy(answer=1)
    job = strict(3, 0, 3, spy)
    for worker in (0, 1, 2):
        job.push(worker, now=1.0)
    if somebody_asked_before:
        job.push(1, now=2.0)
    job.join(3, now=2.0)
    spy.asked.clear()
    assert isinstance(job.push(2, now=2.5)[-1], Hold)
    assert spy.asked == []


def test_a_worker_that_comes_back_is_new_to_the_forecast() -> None:
    spy = Spy(answer=1)
    job = strict(2, 0, 3, spy)
    job.push(0, now=1.0)
    job.push(1, now=2.0)
    job.leave(1, "lost", now=2.1)
    job.join(1, now=2.2)
    assert isinstance(job.push(0, now=2.5)[-1], Hold)
    assert spy.asked == []


# In time: 2000 seconds of constant speeds.

SECONDS = 2000.0


@dataclass
class Run:
    """A simulated job, seen from its record."""

    outcome: Outcome
    gap: int = 0  # the largest between two workers' pushes
    beyond: dict[int, list[float]] = field(default_factory=dict)  # when each was released more than 3 ahead
    leads: list[tuple[float, int]] = field(default_factory=list)  # of worker 0, when it was released

    @property
    def pushes(self) -> list[int]:
        return [worker.steps for worker in self.outcome.workers]


def simulate(sync: str, *step_times: float, spread: float = 0.0, seed: int = 0) -> Run:
    lines: list[RecordLine] = []
    times: dict[int, Duration] = {
        rank: Lognormal(seconds, spread) if spread else Constant(seconds) for rank, seconds in enumerate(step_times)
    }
    cluster = Cluster(workers=len(step_times), step_times=times)
    outcome = simulate_job(cluster, sync, seconds=SECONDS, record=lines.append, seed=seed)
    run = Run(outcome, beyond={rank: [] for rank in times})
    pushed = dict.fromkeys(times, 0)
    for line in lines:
        if line["kind"] == "push":
            pushed[line["worker"]] = line["step"] + 1
            run.gap = max(run.gap, max(pushed.values()) - min(pushed.values()))
        elif line["kind"] == "release" and line["step"] - line["slowest"] > 3:
            run.beyond[line["worker"]].append(line["t"])
    run.leads = [
        (line["t"], line["step"] - line["slowest"]) for line in lines if line["kind"] == "release" and line["worker"] == 0
    ]
    return run


def test_two_workers_as_printed_are_asp() -> None:
    printed, free = simulate("dssp-paper:3..15", 1.0, 2.3), simulate("asp", 1.0, 2.3)
    assert printed.pushes == free.pushes == [2000, 869]
    assert printed.gap == free.gap == 1131
    assert printed.outcome.waiting == 0


@pytest.mark.parametrize("seed", range(4))
def test_where_steps_vary_the_printed_one_waits_until_a_lead_of_hundreds_is_used_up(seed: int) -> None:
    """By 5 %: one forecast of 0, and the fast worker stands still until it is 3 ahead. Neither asp nor a bound of 15."""
    run = simulate("dssp-paper:3..15", 1.0, 2.3, spread=0.05, seed=seed)
    free = simulate("asp", 1.0, 2.3, spread=0.05, seed=seed)
    assert free.pushes[0] == pytest.approx(2000, abs=10)
    assert run.pushes[0] < 0.8 * free.pushes[0]
    assert run.pushes[1] == free.pushes[1]
    assert run.outcome.max_lead > 100
    pauses = [(before, after) for (begin, before), (end, after) in pairwise(run.leads) if end - begin > 20]
    assert pauses
    assert max(before for before, _ in pauses) > 50
    assert {after for _, after in pauses} == {3}


def test_two_workers_strict_keep_the_bound_and_the_slower_ones_pace() -> None:
    run = simulate("dssp:3..15", 1.0, 2.3)
    assert run.pushes == [881, 869]
    assert run.outcome.max_lead == 15
    assert run.gap == 16


def test_a_five_times_slower_worker() -> None:
    printed, run = simulate("dssp-paper:3..15", 1.0, 5.0), simulate("dssp:3..15", 1.0, 5.0)
    assert printed.pushes == [1995, 400]
    assert printed.gap == pytest.approx(1595, abs=1)
    assert run.pushes[1] == 400
    assert run.pushes[0] == pytest.approx(405, abs=1)
    assert run.outcome.max_lead == 15
    slower, faster = simulate("ssp:3", 1.0, 5.0), simulate("ssp:15", 1.0, 5.0)
    assert slower.pushes[0] <= run.pushes[0] <= faster.pushes[0]


FOUR = (1.0, 1.05, 3.7, 3.9)


def test_as_printed_the_second_fastest_starves() -> None:
    """Only the fastest may ask. Once it is away for good, the other is never again let further than 3 ahead."""
    run = simulate("dssp-paper:3..15", *FOUR)
    assert run.pushes == [1997, 516, 515, 512]
    assert run.pushes[1] <= run.pushes[3] + 3 + 1
    assert max(run.beyond[1]) < 100
    assert max(run.beyond[0]) > SECONDS - 10
    assert run.outcome.max_lead > 1000


def test_strict_the_second_fastest_does_not_starve() -> None:
    """Both fast ones have the slowest one's pace in the end, so counting pushes shows little.

    Not to starve is to be let further than 3 ahead as the fastest is: nearly as often, and at every time of the run.
    """
    run = simulate("dssp:3..15", *FOUR)
    assert run.outcome.max_lead == 15
    assert run.pushes[2:] == [515, 512]
    assert abs(run.pushes[0] - run.pushes[1]) <= 15
    assert len(run.beyond[1]) > 0.9 * len(run.beyond[0])
    for start in range(0, int(SECONDS), 100):
        for worker in (0, 1):
            assert any(start <= t < start + 100 for t in run.beyond[worker]), f"worker {worker} from {start} s on"


def test_equal_speeds_never_ask() -> None:
    same, plain = simulate("dssp:3..15", 1.0, 1.0, 1.0), simulate("ssp:3", 1.0, 1.0, 1.0)
    assert same.pushes == plain.pushes == [2000, 2000, 2000]
    assert same.outcome.max_lead <= 1

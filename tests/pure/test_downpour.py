"""Downpour: the warm start by hand, and what its local steps, pushes and fetches take in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clusters import EVENTFUL, INSTANT, random_cluster, speeds
from driving import Job
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.records.check import check_lines
from polytempo.records.lines import RecordLine
from polytempo.records.replay import replay
from polytempo.simulate.cluster import Cluster, Crash, Link
from polytempo.simulate.run import simulate_job
from polytempo.sync.actions import Hold, Release
from polytempo.sync.spec import parse_spec

moderately = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def releases(job: Job) -> list[tuple[int, int]]:
    return [(action.worker, action.step) for action in job.history[-1][2] if isinstance(action, Release)]


def reasons(job: Job) -> set[str]:
    return {hold.reason for hold in job.policy.holds()}


# The policy.


def test_one_push_may_be_under_way_while_the_next_is_accumulated() -> None:
    job = Job("downpour:push=5", 1).start()
    assert releases(job) == [(0, 0), (0, 1)]
    job.push(0)
    assert releases(job) == [(0, 2)]


def test_a_warm_start_lets_one_train_alone_and_says_how_far_it_is() -> None:
    job = Job("downpour:push=5,warm=20", 3).start()
    assert job.held == {1: 0, 2: 0}
    assert reasons(job) == {"warm start: worker 0 has made 0 of 20 steps"}
    for _ in range(3):
        job.push(0)
    assert reasons(job) == {"warm start: worker 0 has made 15 of 20 steps"}
    job.push(0)
    assert releases(job) == [(0, 5), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert not job.held


def test_a_warm_start_ends_with_a_whole_push() -> None:
    job = Job("downpour:push=5,warm=11", 2).start()
    job.push(0)
    job.push(0)
    assert reasons(job) == {"warm start: worker 0 has made 10 of 11 steps"}
    job.push(0)
    assert not job.held


def test_who_takes_over_goes_on_counting() -> None:
    job = Job("downpour:warm=3", 3).start()
    job.push(0)
    job.push(0)
    job.leave(0, "lost")
    assert releases(job) == [(1, 0), (1, 1)]
    assert reasons(job) == {"warm start: worker 1 has made 2 of 3 steps"}
    job.join(0)  # it comes back, and waits like everybody
    assert job.held == {0: 0, 2: 0}
    job.push(1)
    assert releases(job) == [(1, 2), (0, 0), (0, 1), (2, 0), (2, 1)]


def test_when_all_are_gone_the_next_to_come_makes_the_warm_start() -> None:
    job = Job("downpour:warm=2", 2).start()
    job.leave(0, "lost")
    job.leave(1, "lost")
    job.join(5)
    assert releases(job) == [(5, 0), (5, 1)]
    assert isinstance(job.join(6)[-1], Hold)


def test_who_joins_after_the_warm_start_goes_at_once() -> None:
    job = Job("downpour:warm=2", 1).start()
    job.push(0)
    job.push(0)
    job.join(1)
    assert releases(job) == [(1, 2), (1, 3)]


def test_a_job_that_goes_on_from_a_checkpoint_goes_on_with_its_warm_start() -> None:
    policy = parse_spec("downpour:push=2,warm=9").policy(2)
    policy.begin_at(3)
    job = Job(policy, 2).start()
    assert reasons(job) == {"warm start: worker 0 has made 6 of 9 steps"}
    warmed = parse_spec("downpour:push=2,warm=6").policy(2)
    warmed.begin_at(3)
    assert not Job(warmed, 2).start().held


# The simulator.


def test_the_time_of_local_steps_is_that_of_their_sum() -> None:
    outcome = simulate_job(speeds(1.0, 2.0), "downpour:push=5,fetch=5", steps_each=20)
    assert outcome.seconds == 40.0
    assert outcome.updates == 8
    assert [worker.steps for worker in outcome.workers] == [20, 20]
    assert outcome.samples == 2 * 20 * 32
    assert outcome.waiting == outcome.communicating == 0


def test_the_last_push_may_hold_fewer() -> None:
    lines: list[RecordLine] = []
    simulate_job(speeds(1.0), "downpour:push=4", steps_each=10, record=lines.append)
    assert [line["samples"] // 32 for line in lines if line["kind"] == "push"] == [4, 4, 2]


def test_steps_are_local_steps() -> None:
    assert simulate_job(speeds(1.0, 1.0), "downpour:push=5", steps=40).steps == 40
    assert simulate_job(speeds(1.0, 1.0), "downpour:push=5", seconds=10.5).steps == 20


@pytest.mark.parametrize(("latency", "waits"), [(0.0, 0.0), (2.0, 0.0), (2.5, 0.0), (3.0, 1.0), (4.0, 3.0)])
def test_a_worker_waits_only_when_a_push_is_due_and_the_one_before_is_not_answered(latency: float, waits: float) -> None:
    """A push is accumulated in 5 s, a push and its answer take two latencies: what is more is waited, every other time."""
    cluster = replace(speeds(1.0), link=Link(latency=latency))
    outcome = simulate_job(cluster, "downpour:push=5,fetch=100", steps_each=30)
    assert outcome.workers[0].computing_s == pytest.approx(30)
    assert outcome.seconds == pytest.approx(latency + 30 + 2 * waits + 2 * latency)  # first weights, ..., last answer


def test_bytes_of_fetches_load_the_links() -> None:
    """On a medium of 1 MB/s a push of 1 MB takes a second, as a step does; fetches come between."""
    cluster = Cluster(workers=1, link=Link(bandwidth=1e6, shared=True), model_bytes=1e6)
    seldom, often = (simulate_job(cluster, f"downpour:fetch={fetch}", steps_each=100).seconds for fetch in (1000, 1))
    assert seldom == pytest.approx(1 + 100 + 1)  # first weights, steps, last push
    assert 1.4 * seldom < often < 1.6 * seldom  # not twice: what is due while one is under way, waits for it


def test_staleness_is_what_others_did() -> None:
    for push, fetch in ((1, 1), (3, 2), (2, 5)):
        alone = simulate_job(replace(speeds(1.0), link=Link(0.4)), f"downpour:push={push},fetch={fetch}", steps_each=30)
        assert alone.staleness_max == 0
    lines: list[RecordLine] = []
    simulate_job(speeds(1.0, 1.0), "downpour", steps_each=6, record=lines.append)
    # A step is taken on what was fetched before the step before: the other one made 1, then 2 pushes since.
    assert [line["staleness"][0] for line in lines if line["kind"] == "apply"] == [0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("cluster", [EVENTFUL, INSTANT], ids=["network", "instant"])
@pytest.mark.parametrize("drop", [0, 1, 4])
def test_what_is_too_stale_is_discarded_and_everything_goes_on(cluster: Cluster, drop: int) -> None:
    for head in ("asp", "ssp:2", "every:3,wait=1", "delay:2", "downpour:push=2,fetch=3,warm=6", "dssp:1..4"):
        sync, lines = f"{head},drop={drop}", []
        outcome = simulate_job(cluster, sync, steps_each=20, record=lines.append)
        stale = [line["staleness"][0] for line in lines if line["kind"] == "apply"]
        assert max(stale) <= drop
        reasons = [line["reason"] for line in lines if line["kind"] == "discard"]
        assert reasons
        assert all(reason.endswith(f"is above {drop}") for reason in reasons)
        assert len(reasons) == outcome.discarded
        assert outcome.efficiency < 1
        assert check_lines(lines, parse_spec(sync), cluster.workers) == len(lines)
        replay(lines, parse_spec(sync).policy(cluster.workers))


def test_a_drop_that_never_happens_changes_nothing() -> None:
    one = simulate_job(EVENTFUL, "delay:3,drop=1000,decay=1", steps_each=20)
    other = simulate_job(EVENTFUL, "delay:3", steps_each=20)
    assert replace(one, sync="") == replace(other, sync="")


def test_a_crash_takes_the_unsent_and_the_flying_with_it() -> None:
    cluster = replace(speeds(1.0, 1.0), link=Link(0.6), crashes=(Crash(1, 7.0, 0.5),))
    lines: list[RecordLine] = []
    simulate_job(cluster, "downpour:push=3,fetch=2", steps_each=12, record=lines.append)
    pushes = [line for line in lines if line["kind"] == "push" and line["worker"] == 1]
    assert [line["step"] for line in pushes] == [0]  # the second left at 6.6 s and would arrive at 7.2 s
    assert pushes[0]["t"] == pytest.approx(0.6 + 3 + 0.6)


@pytest.mark.parametrize(
    "sync", ["downpour", "downpour:push=3,fetch=2,warm=8", "downpour:push=2,fetch=5,drop=3", "asup,drop=1"]
)
@given(seed=st.integers(0, 10**6))
@moderately
def test_any_cluster(sync: str, seed: int) -> None:
    cluster = random_cluster(seed)
    lines: list[RecordLine] = []
    outcome = simulate_job(cluster, sync, steps_each=12, record=lines.append)
    assert check_lines(lines, parse_spec(sync), cluster.workers) == len(lines)
    replay(lines, parse_spec(sync).policy(cluster.workers))
    for worker in outcome.workers:
        parts = worker.computing_s + worker.waiting_s + worker.communicating_s
        assert parts == pytest.approx(worker.present_s)
        assert min(worker.computing_s, worker.waiting_s, worker.communicating_s) >= -1e-9

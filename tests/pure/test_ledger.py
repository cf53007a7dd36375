"""What each worker did, counted: every second and every push is put down once, under the right name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pushes import push_of

from polytempo.protocol.messages import Push
from polytempo.protocol.values import PushId
from polytempo.server.job_figures import WorkerStatistics, sum_up
from polytempo.server.job_plan import Limits


def push(**fields: Any) -> Push:
    return push_of(PushId("0", 0, 0, 0), **fields)


def running(worker: int = 0, at: float = 0.0) -> WorkerStatistics:
    """A worker that has started."""
    account = WorkerStatistics(worker)
    account.released(0, at)
    return account


# Pushes.


def test_a_push_adds_to_every_figure_of_its_own() -> None:
    account = running()
    account.pushed(push(samples=16.0, computed=2.0, exchanged=0.5, sent=100, received=200))
    account.pushed(push(samples=8.0, computed=1.0, exchanged=0.25, sent=300, received=500, nonfinite=True))
    assert (account.steps, account.samples, account.nonfinite) == (2, 24.0, 1)
    assert (account.computing_s, account.exchanging_s) == (3.0, 0.75)
    assert (account.bytes_sent, account.bytes_received) == (300, 500), "a worker says what it sent in all, not since"


def test_the_display_counts_the_steps_of_a_block_one_by_one() -> None:
    """As the last line of the job does: beside `1200 steps of 2 workers, 600 each` no worker is at step 75."""
    account = running()
    for block in (1, 2, 3):
        account.pushed(push(count=8))
        account.released(block, float(block))
    assert account.status(4.0).step == account.steps == 24
    account.discard(push(count=8).measures)
    assert account.status(4.0).step == 17  # two blocks of 8, and the one that came to nothing


def test_a_push_that_is_taken_back_was_never_counted() -> None:
    account = running()
    account.pushed(push(samples=16.0, computed=2.0, exchanged=0.5, nonfinite=True))
    before = account.as_dict(1.0)
    other = push(samples=4.0, computed=1.0, exchanged=0.25, nonfinite=True)
    account.pushed(other)
    account.pushed(other, -1)
    assert account.as_dict(1.0) == before


def test_a_discarded_push_is_no_step_and_its_computing_was_wasted() -> None:
    account = running()
    account.pushed(push(samples=16.0, computed=2.0))
    late = push(samples=16.0, computed=3.0)
    account.pushed(late)
    account.discard(late.measures)
    assert (account.steps, account.samples, account.discarded, account.wasted_s) == (1, 16.0, 1, 3.0)
    assert account.computing_s == 5.0, "it did compute"
    assert sum_up([account], 10.0, 0.0)["efficiency"] == 0.2


def test_staleness_has_a_mean_over_what_was_applied_and_a_worst() -> None:
    account = running()
    for by in (0, 4, 2):
        account.pushed(push())
        account.stale(by)
    facts = account.as_dict(1.0)
    assert (facts["staleness_mean"], facts["staleness_max"]) == (2.0, 4)


# Time.


def test_waiting_is_from_the_hold_to_the_release() -> None:
    account = running(at=10.0)
    account.held(12.0, (3, 4))
    assert (account.state, account.waiting_for) == ("waiting", (3, 4))
    account.released(1, 15.0)
    assert (account.state, account.step, account.waiting_for) == ("computing", 1, ())
    account.held(20.0, (3,))
    account.released(2, 21.0)
    assert account.waiting_s == 4.0


def test_waiting_for_the_others_to_start_is_not_the_modes_doing() -> None:
    account = WorkerStatistics(0)
    account.held(0.0, (1,))
    account.released(0, 30.0)
    assert account.waiting_s == 0.0
    assert account.present(40.0) == 10.0


def test_the_display_counts_a_wait_while_it_goes_on() -> None:
    account = running(worker=7, at=0.0)
    account.held(1.0, (2,))
    account.released(1, 3.0)
    account.held(10.0, (2, 3))
    status = account.status(14.0)
    assert (status.worker, status.state, status.step, status.waiting_for) == (7, "waiting", 1, (2, 3))
    assert (status.waited_s, status.held_s, status.present_s) == (6.0, 4.0, 14.0)
    assert account.waiting_s == 2.0, "looking changes nothing"


def test_whoever_has_not_started_has_not_been_there() -> None:
    account = WorkerStatistics(1)
    assert account.state == "absent"
    assert account.present(100.0) == 0.0
    assert account.status(100.0).waited_s == 0.0


@pytest.mark.parametrize("reason", ["finished", "failed", "lost"])
def test_a_worker_that_is_gone_is_there_no_longer_and_waits_no_more(reason: str) -> None:
    account = running(at=2.0)
    account.held(5.0, (1,))
    account.left(reason, 9.0)
    assert account.state == reason
    assert account.waiting_s == 4.0
    assert account.present(100.0) == 7.0
    assert account.status(100.0).waited_s == 4.0


def test_one_that_dies_before_the_start_has_waited_for_nothing() -> None:
    account = WorkerStatistics(0)
    account.held(0.0, (1,))
    account.left("lost", 9.0)
    assert (account.waiting_s, account.present(20.0)) == (0.0, 0.0)


def test_a_second_life_adds_to_the_first_without_the_time_between() -> None:
    account = running(at=0.0)
    account.pushed(push(samples=4.0))
    account.left("lost", 10.0)
    account.back(50.0)
    assert account.state == "absent"
    assert account.present(55.0) == 10.0
    account.held(50.0, (1,))
    account.released(3, 60.0)
    account.pushed(push(samples=4.0))
    assert account.present(65.0) == 15.0
    account.left("lost", 70.0)
    account.back(80.0)
    account.released(4, 80.0)
    assert account.present(81.0) == 21.0
    assert (account.steps, account.samples, account.waiting_s) == (2, 8.0, 0.0)


# The whole job.


def test_communicating_is_what_an_exchange_took_beside_waiting() -> None:
    account = running()
    account.pushed(push(exchanged=5.0))
    account.held(1.0, ())
    account.released(1, 4.0)
    assert account.as_dict(10.0)["communicating_s"] == 2.0
    account.held(10.0, ())
    account.released(2, 20.0)  # the worker has not told of this exchange yet
    assert account.as_dict(20.0)["communicating_s"] == 0.0


def test_the_sum_is_that_of_the_workers() -> None:
    fast, slow = running(0, at=1.0), running(1, at=1.0)
    for _ in range(3):
        fast.pushed(push(samples=10.0, computed=1.0))
        fast.stale(2)
    slow.pushed(push(samples=10.0, computed=8.0, nonfinite=True))
    slow.stale(0)
    fast.held(4.0, (1,))
    fast.released(3, 9.0)
    total = sum_up([fast, slow], 11.0, 1.0)
    assert (total["seconds"], total["steps"], total["samples"], total["nonfinite"]) == (10.0, 4, 40.0, 1)
    assert total["samples_per_second"] == 4.0
    assert total["efficiency"] == pytest.approx(11.0 / 20.0)
    assert total["waiting"] == pytest.approx(5.0 / 20.0)
    assert (total["staleness_mean"], total["staleness_max"]) == (1.5, 2)
    assert [worker["worker"] for worker in total["workers"]] == [0, 1]
    assert sum(worker["samples"] for worker in total["workers"]) == total["samples"]


def test_a_job_that_never_started_has_figures_too() -> None:
    total = sum_up([WorkerStatistics(0), WorkerStatistics(1)], 50.0, None)
    assert (total["seconds"], total["samples_per_second"], total["efficiency"], total["waiting"]) == (0.0, 0.0, 0.0, 0.0)
    assert (total["staleness_mean"], total["staleness_max"]) == (0.0, 0)


@pytest.mark.parametrize(
    ("limits", "used"),
    [
        (Limits(), 0.0),
        (Limits(steps=20), 0.5),
        (Limits(samples=400.0), 0.4),
        (Limits(seconds=5.0), 0.6),
        (Limits(steps=20, samples=400.0, seconds=5.0), 0.6),
        (Limits(steps=5, seconds=1e9), 2.0),
    ],
)
def test_the_budget_is_used_by_whatever_is_used_up_first(limits: Limits, used: float) -> None:
    assert math.isclose(limits.used(10, 160.0, 3.0), used, abs_tol=1e-12)

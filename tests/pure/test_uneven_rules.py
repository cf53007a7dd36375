"""The rules of `bsp+balance` and `anytime`: what the shares and the deadline become, on workers that are a few numbers.

A worker is the seconds that its work takes; a round here is what the policy makes of it. Nothing is read from the policy but
its actions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.sync.actions import Action, Apply, Discard, Hold, Release, Wake
from polytempo.sync.anytime import MARGIN, aligned, lost
from polytempo.sync.directives import NextDeadline
from polytempo.sync.events import Joined, Left, Measured, Pushed, Ticked
from polytempo.sync.machine import Abandon, BudgetUsed, Compute, Computed, EndBlock, Fetched, Orders, SendPush, TimeUp
from polytempo.sync.shares import ShareWeights, cut
from polytempo.sync.spec import parse_spec

often = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def only(kind, actions: Iterable[Action]) -> list:
    return [action for action in actions if isinstance(action, kind)]


# bsp+balance.


class Balanced:
    """Workers that cut each joint batch by the weights in force at its number, and read some batches ahead."""

    def __init__(self, workers: int, batch: int, ahead: int = 0, sync: str = "bsp+balance") -> None:
        self.policy, self.batch, self.ahead, self.now, self.round = parse_spec(sync).policy(workers), batch, ahead, 0.0, 0
        self.table: list[tuple[int, ShareWeights]] = []  # (from this batch on, weights)
        self.drawn: dict[int, ShareWeights] = {}  # batches that are drawn keep their cut
        for worker in range(workers):
            self.take(self.policy.handle(Joined(worker), 0.0))

    def take(self, actions: list[Action]) -> None:
        directives = [release.directive for release in only(Release, actions)]
        told = [(one.since, one.weights) for one in directives if one.weights]
        assert len(set(told)) <= 1, "all are told the same"
        for since, weights in told[:1]:
            first = since[1] if since else self.round
            assert first not in self.drawn, "a batch that is drawn was cut anew"
            self.table.append((first, weights))
        for number in range(self.round, self.round + 1 + self.ahead) if self.table else ():
            self.drawn.setdefault(number, [weights for since, weights in self.table if since <= number][-1])

    def step(self, seconds: Callable[[int, int], float]) -> dict[int, float]:
        """One round; `seconds(worker, samples)`. The time of each worker."""
        weights = self.drawn.pop(self.round)
        shares = cut(self.batch, weights)
        assert sum(shares.values()) == self.batch
        times = {worker: seconds(worker, samples) for worker, samples in shares.items()}
        for worker, share in shares.items():
            drawn = (0, self.round + self.ahead)
            push = Pushed(worker, self.round, share, measured=Measured(None, None, share, times[worker], drawn))
            actions = self.policy.handle(push, self.now + times[worker])
        self.now += max(times.values())
        self.round += 1
        self.take(actions)
        return times


def waiting(times: dict[int, float]) -> float:
    """The part of all workers' time that they wait for the slowest."""
    return 1 - sum(times.values()) / (len(times) * max(times.values()))


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_shares_follow_a_worker_that_changes_speed_within_ten_rounds(ahead: int, factor: float) -> None:
    job, rates = Balanced(4, 256, ahead), dict.fromkeys(range(4), 64.0)
    for _ in range(12):
        times = job.step(lambda worker, samples: samples / rates[worker])
    assert waiting(times) < 0.01
    rates[3] /= factor
    for _ in range(10):
        times = job.step(lambda worker, samples: samples / rates[worker])
    assert waiting(times) < 0.05
    assert max(times.values()) == pytest.approx(256 / sum(rates.values()), rel=0.05)


@often
@given(
    rates=st.lists(st.floats(20, 200), min_size=2, max_size=6),
    fixed=st.floats(0, 1.0),
    ahead=st.sampled_from([0, 2]),
)
def test_with_a_fixed_time_of_each_step_shares_settle_where_all_take_the_same_time(
    rates: list[float], fixed: float, ahead: int
) -> None:
    """t = a + b n: the speed that is measured depends on the share."""
    job = Balanced(len(rates), 64 * len(rates), ahead, "bsp+balance,most=8")
    for _ in range(60):
        times = job.step(lambda worker, samples: fixed + samples / rates[worker])
    assert max(times.values()) <= 1.06 * sum(times.values()) / len(times)  # the hysteresis, and whole samples


def test_noise_below_the_hysteresis_and_one_stall_change_nothing() -> None:
    job = Balanced(3, 96)
    for _ in range(6):
        job.step(lambda worker, samples: samples / 32 * (1.0, 1.01, 0.99)[worker])
    assert len(job.table) == 1
    job.step(lambda worker, samples: samples / 32 + (20.0 if worker == 1 else 0.0))
    for _ in range(6):
        job.step(lambda worker, samples: samples / 32)
    assert [weights for _, weights in job.table] == [((0, 1.0), (1, 1.0), (2, 1.0))]


def test_bounds_hold_and_most_is_a_bound() -> None:
    job = Balanced(4, 400, sync="bsp+balance,most=1.5")
    for _ in range(8):
        job.step(lambda worker, samples: samples * (0.01 if worker == 0 else 1.0 if worker < 3 else 100.0))
    (*_, (_, weights)) = job.table
    assert dict(weights)[0] == 1.5
    assert dict(weights)[3] == 0.1


def test_members_that_come_and_go_get_shares_from_what_is_known() -> None:
    job = Balanced(3, 300)
    for _ in range(4):
        job.step(lambda worker, samples: samples / (100, 100, 50)[worker])
    policy, at = job.policy, job.round
    assert [type(action) for action in policy.handle(Joined(3), job.now)][1:] == [Hold], "it starts with the next round"
    for worker in (0, 1):
        policy.handle(Pushed(worker, at, 100, measured=Measured(None, None, 100, 1.0, (0, at + 2))), job.now)
    actions = policy.handle(Left(2, "lost"), job.now)
    releases = only(Release, actions)
    assert sorted(release.worker for release in releases) == [0, 1, 3]
    assert {release.directive.weights for release in releases} == {((0, 1.0), (1, 1.0), (3, 1.0))}, (
        "an unknown one is an average one"
    )
    assert {release.directive.since for release in releases} == {(0, at + 3)}
    assert [release.repeats for release in releases] == [False, True, True]


def test_a_group_of_other_ranks_has_shares_of_its_own() -> None:
    policy = parse_spec("bsp+balance").policy(8, members=(4, 6))
    policy.handle(Joined(6), 0.0)
    releases = only(Release, policy.handle(Joined(4), 0.0))
    assert [release.directive.weights for release in releases] == [((4, 1.0), (6, 1.0))] * 2


def test_initial_workers_that_never_came_have_no_share() -> None:
    policy = parse_spec("bsp+balance").policy(3)
    policy.handle(Joined(0), 0.0)
    policy.handle(Joined(2), 0.0)
    releases = only(Release, policy.handle(Left(1, "lost"), 0.0))
    assert [release.directive.weights for release in releases] == [((0, 1.0), (2, 1.0))] * 2


# anytime.


class Timed:
    """Workers that take micro-batches until the deadline, each by its own seconds; a stuck one finishes none."""

    def __init__(self, workers: int, sync: str = "anytime:auto", size: float = 8.0) -> None:
        self.policy, self.micro, self.size = parse_spec(sync).policy(workers), parse_spec(sync).capabilities.micro, size
        self.members, self.now, self.round, self.deadline = list(range(workers)), 0.0, 0, 0.0
        self.divisors: list[float] = []
        self.deadlines: list[float] = []
        for worker in range(workers):
            self.take(self.policy.handle(Joined(worker), 0.0))

    def take(self, actions: list[Action]) -> None:
        for apply in only(Apply, actions):
            self.divisors.append(apply.divisor)
        told = {release.directive.seconds for release in only(Release, actions)}
        assert len(told) <= 1, "one deadline a round"
        for self.deadline in told:
            self.deadlines.append(self.deadline)
            self.round = only(Release, actions)[0].step

    def step(self, seconds: dict[int, float], tell_abandoned: bool = False) -> dict[int, int]:
        """One round; `seconds` of each worker's micro-batch. The number that each has finished."""
        counts: dict[int, int] = {}
        for worker in self.members:
            each = seconds[worker]
            end = self.deadline * (1 + MARGIN)
            counts[worker] = count = (int(end / each) if each < math.inf else 0) if self.deadline else self.micro
            push = Pushed(worker, self.round, count * self.size, count=count)
            push.measured = Measured(work=count * self.size, computed=count * each if count else 0.0)
            if tell_abandoned and not count:
                push.measured = Measured(work=self.size, computed=each)
            actions = self.policy.handle(push, self.now + self.deadline)
        self.now += self.deadline
        self.take(actions)
        return counts


def test_with_equal_speeds_it_is_bsp_with_the_joint_batch() -> None:
    job = Timed(4, "anytime:auto,micro=6")
    for number in range(8):
        assert job.step(dict.fromkeys(range(4), 0.25)) == dict.fromkeys(range(4), 6)
        assert job.deadlines[-1] == pytest.approx(1.5)
        assert job.divisors[-1] == (4 * 6 * 8 if number else 0), "the joint batch; by what came in the first round"


@often
@given(seconds=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6), micro=st.integers(4, 12))
def test_the_expected_joint_batch_is_what_was_asked_for(seconds: list[float], micro: int) -> None:
    job = Timed(len(seconds), f"anytime:auto,micro={micro}")
    for _ in range(5):
        counts = job.step(dict(enumerate(seconds)))
    wanted = micro * len(seconds)
    ideal = wanted / sum(1 / each for each in seconds)
    assert 0.9 * ideal <= job.deadline <= 1.1 * ideal
    assert 0.85 * wanted - len(seconds) <= sum(counts.values()) <= 1.15 * wanted
    assert job.divisors[-1] == pytest.approx(sum(counts.values()) * 8.0, rel=0.06), "what comes is what was expected"


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_the_deadline_follows_a_worker_that_changes_speed_within_ten_rounds(factor: float) -> None:
    seconds = dict.fromkeys(range(4), 0.1)
    job = Timed(4)
    for _ in range(8):
        job.step(seconds)
    before = job.deadline
    seconds[3] *= factor
    for _ in range(10):
        counts = job.step(seconds)
    ideal = 32 / sum(1 / each for each in seconds.values())
    assert job.deadline == pytest.approx(ideal, rel=0.1)
    assert (job.deadline > before) == (factor > 1)
    assert job.divisors[-1] == 8 * sum(counts.values())


@pytest.mark.parametrize(("micro", "slow"), [(8, 0.1), (2, 0.17)], ids=["nothing is lost", "a quarter is, at any deadline"])
def test_the_deadline_settles_although_speeds_are_noisy(micro: int, slow: float) -> None:
    job = Timed(2, f"anytime:auto,micro={micro}")
    dice = random.Random(3)
    for _ in range(60):
        job.step({0: 0.1 * dice.uniform(0.985, 1.015), 1: slow * dice.uniform(0.985, 1.015)})
    assert len(set(job.deadlines[20:])) <= 2


def test_a_stuck_worker_is_made_up_for_after_five_rounds_and_counts_again_when_it_is_back() -> None:
    seconds = dict.fromkeys(range(4), 0.1)
    job = Timed(4)
    for _ in range(3):
        job.step(seconds)
    seconds[3] = math.inf
    for number in range(8):
        counts = job.step(seconds)
        assert job.divisors[-1] == 32 * 8, "a round to which few contributed moves less"
        assert (job.deadline > 0.81) == (number >= 4)
    assert sum(counts.values()) == pytest.approx(32, abs=2)
    seconds[3] = 0.1
    job.step(seconds)
    assert job.deadline == pytest.approx(0.8), "at once"


def test_the_others_are_given_twice_the_time_at_most() -> None:
    seconds = dict.fromkeys(range(8), 0.1)
    job = Timed(8)
    for _ in range(3):
        job.step(seconds)
    for _ in range(12):
        job.step({worker: 0.1 if worker == 0 else math.inf for worker in range(8)})
    assert job.deadline == pytest.approx(1.6, rel=0.1)


def test_where_all_are_stuck_nothing_changes() -> None:
    job = Timed(3)
    for _ in range(4):
        job.step(dict.fromkeys(range(3), 0.1))
    deadline = job.deadline
    for _ in range(20):
        assert sum(job.step(dict.fromkeys(range(3), math.inf)).values()) == 0
    assert set(job.deadlines[-20:]) == {deadline}
    assert job.round == 24, "and rounds go on"
    assert job.step(dict.fromkeys(range(3), 0.1)) == dict.fromkeys(range(3), 8)


def test_workers_that_all_become_slower_than_the_deadline_are_followed_by_their_abandoned_micro_batches() -> None:
    job = Timed(3)
    for _ in range(4):
        job.step(dict.fromkeys(range(3), 0.1))
    for _ in range(10):
        counts = job.step(dict.fromkeys(range(3), 2.0), tell_abandoned=True)
    assert counts == dict.fromkeys(range(3), 8)
    assert job.deadline == pytest.approx(16.0, rel=0.1)


def test_a_worker_slower_than_the_deadline_does_not_make_it_longer() -> None:
    seconds = {0: 0.1, 1: 0.1, 2: 0.1, 3: 5.0}
    job = Timed(4)
    for _ in range(12):
        counts = job.step(seconds, tell_abandoned=True)
    assert counts[3] == 0
    assert job.deadline == pytest.approx(32 / 30, rel=0.1)
    assert job.divisors[-1] == 8 * sum(counts.values())


def test_a_fixed_deadline_stays_and_its_expected_number_is_measured() -> None:
    job = Timed(2, "anytime:1.0")
    assert job.deadline == 1.0
    for _ in range(4):
        assert job.step({0: 0.2, 1: 0.3}) == {0: 5, 1: 3}
    assert job.divisors == [0.0, 64.0, 64.0, 64.0]
    assert set(job.deadlines) == {1.0}
    actual = Timed(2, "anytime:1.0,divide=actual")
    for _ in range(4):
        actual.step({0: 0.2, 1: 0.3})
    assert actual.divisors == [0.0] * 4


def test_micro_batches_of_different_sizes_are_expected_at_theirs() -> None:
    policy = parse_spec("anytime:1").policy(2)
    policy.handle(Joined(0), 0.0)
    policy.handle(Joined(1), 0.0)
    for number in range(3):
        policy.handle(Pushed(0, number, 4 * 16.0, count=4, measured=Measured(work=64.0, computed=1.0)), number + 1.0)
        actions = policy.handle(
            Pushed(1, number, 2 * 64.0, count=2, measured=Measured(work=128.0, computed=1.0)), number + 1.0
        )
    (apply,) = only(Apply, actions)
    assert apply.divisor == 4 * 16 + 2 * 64


@often
@given(speeds=st.lists(st.floats(0.5, 20), min_size=1, max_size=6), deadline=st.floats(0.5, 5))
def test_an_aligned_deadline_is_near_and_loses_least(speeds: list[float], deadline: float) -> None:
    chosen = aligned(deadline, speeds)
    assert 0.9 * deadline - 1e-9 <= chosen <= 1.1 * deadline + 1e-9
    candidates = [deadline]
    for speed in speeds:
        candidates += [count / speed for count in range(1, 200) if 0.9 * deadline <= count / speed <= 1.1 * deadline]
    assert lost(chosen, speeds) <= min(lost(each, speeds) for each in candidates) + 0.001


# Rounds with deadlines: overdue workers.


def started(workers: int, sync: str = "anytime:2"):
    policy = parse_spec(sync).policy(workers)
    for worker in range(workers):
        policy.handle(Joined(worker), 0.0)
    return policy


def push(policy, worker: int, step: int, now: float) -> list[Action]:
    return policy.handle(Pushed(worker, step, 8.0, count=1, measured=Measured(work=8.0, computed=1.0)), now)


def test_a_round_closes_without_the_overdue_and_their_push_is_discarded() -> None:
    policy = started(4)
    assert only(Wake, push(policy, 0, 0, 2.0)) == [Wake(7.0)], "few have pushed: two and a half deadlines more"
    assert only(Wake, push(policy, 1, 0, 2.1)) == [Wake(2.1 + 1.25 * 2.1)], "half have"
    push(policy, 2, 0, 2.2)
    assert policy.handle(Ticked(), 4.7) == []
    actions = policy.handle(Ticked(), 4.7251)
    assert [[each.worker for each in apply.pushes] for apply in only(Apply, actions)] == [[0, 1, 2]]
    assert [(r.worker, r.step, r.directive.behind) for r in only(Release, actions)] == [(0, 1, 0), (1, 1, 0), (2, 1, 0)]
    for worker in (0, 1, 2):
        actions = push(policy, worker, 1, 5.0)
    assert [release.step for release in only(Release, actions)] == [2, 2, 2], "it is not waited for again"
    actions = push(policy, 3, 0, 6.0)
    assert [type(action) for action in actions] == [Discard, Hold, Wake]
    for worker in (0, 1, 2):
        actions = push(policy, worker, 2, 7.0)
    releases = {release.worker: release for release in only(Release, actions)}
    assert [each.worker for each in only(Apply, actions)[0].pushes] == [0, 1, 2]
    assert {worker: release.directive.behind for worker, release in releases.items()} == {0: 0, 1: 0, 2: 0, 3: 3}
    assert {release.directive.catching_up for release in releases.values()} == {(3,)}
    for worker in range(4):
        actions = push(policy, worker, 3, 9.0)
    assert [each.worker for each in only(Apply, actions)[0].pushes] == [0, 1, 2, 3]


def test_a_round_waits_for_slow_messages_but_not_for_a_stopped_job() -> None:
    """What the first half took is what the others are given, in proportion; up to a hundred deadlines. Pushes that pass one
    link after another arrive in time: the second half takes as long as the first."""
    policy = started(2)
    assert only(Wake, push(policy, 0, 0, 6.0)) == [Wake(6.0 + 1.25 * 6.0)]
    policy = started(2)
    assert only(Wake, push(policy, 0, 0, 3600.0)) == [Wake(3600.0 + 1.25 * 200.0)]


def test_a_worker_that_is_back_does_not_wait_for_one_that_is_stuck() -> None:
    policy = started(2)
    push(policy, 0, 0, 2.0)
    policy.handle(Ticked(), 4.5)  # 1 is overdue
    (wake,) = only(Wake, push(policy, 1, 0, 5.0))  # it is back, and 0 is stuck now
    actions = policy.handle(Ticked(), wake.at)
    assert [apply.pushes for apply in only(Apply, actions)] == [()], "a round without a push is a version like any other"
    assert [(r.worker, r.step, r.directive.behind) for r in only(Release, actions)] == [(1, 2, 2)]
    actions = push(policy, 0, 1, wake.at + 1.0)
    assert [type(action) for action in actions][:2] == [Discard, Hold]
    assert [r.directive.behind for r in only(Release, push(policy, 1, 2, wake.at + 2.0))] == [2, 0]


def test_the_last_worker_in_a_round_leaves_and_those_that_wait_go_on() -> None:
    policy = started(2)
    push(policy, 0, 0, 2.0)
    policy.handle(Ticked(), 4.5)
    push(policy, 1, 0, 5.0)
    actions = policy.handle(Left(0, "lost"), 5.5)
    assert [(r.worker, r.step) for r in only(Release, actions)] == [(1, 2)]


def test_all_overdue_workers_come_back_to_a_round_that_is_empty() -> None:
    policy = started(2)
    push(policy, 0, 0, 2.0)
    policy.handle(Ticked(), 4.5)
    assert policy.handle(Left(0, "lost"), 4.6) == []
    actions = push(policy, 1, 0, 100.0)
    assert [type(action) for action in actions] == [Discard, Apply, Release]
    assert (actions[-1].step, actions[-1].directive.behind, actions[-1].directive.catching_up) == (2, 2, (1,))


def test_a_joiner_starts_with_the_next_round_and_delays_none() -> None:
    policy = started(2)
    actions = policy.handle(Joined(5), 1.9)
    assert [type(action) for action in actions][1:] == [Hold, Wake]
    push(policy, 0, 0, 2.0)
    releases = only(Release, push(policy, 1, 0, 2.1))
    assert [(r.worker, r.step, r.directive.seconds, r.directive.behind) for r in releases] == [
        (5, 1, 2.0, 0),
        (0, 1, 2.0, 0),
        (1, 1, 2.0, 0),
    ]


def test_a_job_that_goes_on_from_a_checkpoint_begins_with_that_round() -> None:
    policy = parse_spec("anytime:2").policy(1)
    policy.begin_at(40)
    (release,) = only(Release, policy.handle(Joined(0), 0.0))
    assert (release.step, release.directive.seconds) == (40, 2.0)
    assert [r.step for r in only(Release, push(policy, 0, 40, 2.0))] == [41], "a single worker waits for none"


# The machine of a live worker, whose script may look at the job's values.


class TimedWorker:
    """A machine with a deadline of ten seconds in each round."""

    def __init__(self, late: str = "drop") -> None:
        self.machine: Any = parse_spec(f"anytime:10,late={late}").machine(0)
        assert self.release(0, 0.0) == (Compute(),)

    def release(self, step: int, now: float) -> Orders:
        return self.machine.handle(Release(0, step, step, NextDeadline(10.0)), now)

    def is_late(self) -> Orders:
        """A micro-batch is computed when the round after the one that it was ordered in is open."""
        assert self.machine.handle(Computed(2.0), 2.0) == (Compute(),)
        assert self.machine.handle(TimeUp(0), 10.2) == (SendPush(0, 1, beside=True),)
        assert self.release(1, 10.3) == ()
        assert self.machine.late
        return self.machine.handle(Computed(9.0), 11.0)


def test_a_worker_that_sees_the_values_ends_its_part_of_the_round() -> None:
    worker = TimedWorker()
    worker.machine.handle(Computed(2.0), 2.0)
    assert worker.machine.handle(EndBlock(), 3.0) == (SendPush(0, 1),)
    assert worker.machine.handle(EndBlock(), 3.0) == (), "the round wants no more of it"
    assert not worker.machine.computes
    assert worker.release(1, 4.0) == (Compute(),)
    assert worker.machine.handle(EndBlock(), 5.0) == (SendPush(1, 0),), "others end the round, and it has nothing for it"
    assert worker.release(2, 6.0) == (Compute(),)


@pytest.mark.parametrize("late", ["drop", "keep"])
def test_a_micro_batch_on_newer_values_is_not_late(late: str) -> None:
    worker = TimedWorker(late)
    worker.machine.handle(TimeUp(0), 10.2)
    worker.release(1, 10.3)
    worker.machine.handle(Fetched(), 10.4)
    assert worker.machine.handle(Computed(2.0), 12.0) == (Compute(),)
    assert worker.machine.finished == 1


def test_what_is_late_is_kept_unless_the_budget_is_used_up() -> None:
    kept, dropped, last = TimedWorker("keep"), TimedWorker(), TimedWorker("keep")
    assert (kept.is_late(), kept.machine.finished) == ((Compute(),), 1)
    assert (dropped.is_late(), dropped.machine.finished) == ((Abandon(), Compute()), 0)
    last.machine.handle(BudgetUsed(), 1.0)
    assert (last.is_late(), last.machine.finished) == ((Abandon(), Compute()), 0)
    assert last.machine.handle(Computed(2.0), 13.0) == (Compute(),)
    assert last.machine.finished == 1, "a script that goes on trains on"

"""Rounds: `bsp` and `bsp+backup:b`, one thing at a time."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from driving import Job

from polytempo.sync.actions import Action, Apply, Discard, Hold, Refuse, Release


def the(kind, actions: list[Action]):
    """The one action of a kind."""
    (action,) = [action for action in actions if isinstance(action, kind)]
    return action


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def ranks(actions: list[Action]) -> list[int]:
    """Whose pushes the update is made of, in its order."""
    return [push.worker for push in the(Apply, actions).pushes]


def released(actions: list[Action]) -> dict[int, int]:
    return {action.worker: action.step for action in actions if isinstance(action, Release)}


# bsp.


def test_a_round_is_one_update_of_all_and_then_all_go_on() -> None:
    job = Job("bsp", 3).start()
    assert job.push(2) == [Hold(2, 1, (0, 1), 2, "1 ahead of worker 0, bound 0")]
    assert job.push(0) == [Hold(0, 1, (1,), 1, "1 ahead of worker 1, bound 0")]
    actions = job.push(1)
    assert kinds(actions) == ["Apply", "Release", "Release", "Release"]
    assert the(Apply, actions).rate == 1
    assert released(actions) == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_an_update_does_not_depend_on_who_came_first(order: tuple[int, ...]) -> None:
    job = Job("bsp", 4).start()
    for worker in order:
        actions = job.push(worker)
    assert ranks(actions) == [0, 1, 2, 3]


def test_the_pushes_of_an_update_are_those_that_were_made() -> None:
    job = Job("bsp", 2).start()
    job.push(1)
    pushes = the(Apply, job.push(0)).pushes
    assert [(push.worker, push.step, push.samples) for push in pushes] == [(0, 0, 2), (1, 0, 1)]


@pytest.mark.parametrize("reason", ["finished", "failed", "lost"])
def test_the_push_of_one_that_left_still_counts(reason: str) -> None:
    job = Job("bsp", 3).start()
    job.push(2)
    assert job.leave(2, reason) == []
    job.push(1)
    actions = job.push(0)
    assert ranks(actions) == [0, 1, 2]
    assert released(actions) == {0: 1, 1: 1}


def test_the_last_one_missing_closes_the_round_by_leaving() -> None:
    job = Job("bsp", 3).start()
    job.push(2)
    job.push(0)
    actions = job.leave(1, "lost")
    assert ranks(actions) == [0, 2]
    assert released(actions) == {0: 1, 2: 1}


def test_a_leave_that_nobody_waited_for_closes_nothing() -> None:
    job = Job("bsp", 3).start()
    assert job.leave(1, "lost") == []
    job.push(0)
    assert ranks(job.push(2)) == [0, 2]


def test_when_all_have_left_what_was_pushed_is_applied() -> None:
    job = Job("bsp", 2).start()
    job.push(0)
    job.leave(0, "lost")
    assert job.leave(1, "lost") == [the(Apply, job.history[-1][2])]
    assert not job.pending


def test_a_joiner_takes_part_in_the_open_round() -> None:
    job = Job("bsp", 2).start()
    job.push(0)
    job.push(1)
    job.push(0)
    assert released(job.join(2)) == {2: 1}
    assert kinds(job.push(1)) == ["Hold"]
    assert ranks(job.push(2)) == [0, 1, 2]


def test_one_that_comes_back_into_the_round_it_had_pushed_for() -> None:
    job = Job("bsp", 2).start()
    job.push(0)
    job.leave(0, "lost")
    job.join(0)
    assert kinds(job.push(1)) == ["Hold"]  # worker 0 is there again and computes
    actions = job.push(0)
    assert ranks(actions) == [0, 0, 1]  # both its lives' pushes were accepted
    assert released(actions) == {0: 1, 1: 1}


def test_one_that_comes_back_and_leaves_again_leaves_its_first_push() -> None:
    job = Job("bsp", 2).start()
    job.push(0)
    job.leave(0, "lost")
    job.join(0)
    assert job.leave(0, "lost") == []
    actions = job.push(1)
    assert ranks(actions) == [0, 1]
    assert released(actions) == {1: 1}


def test_one_that_comes_when_all_have_left_starts_at_the_open_round() -> None:
    job = Job("bsp", 2).start()
    job.push(0)
    job.leave(0, "lost")
    job.leave(1, "lost")
    assert the(Release, job.join(2)) == Release(2, 1, slowest=1)


# Hyper-parameters.

ADAM = (("lr", 0.1), ("betas", (0.9, 0.999)))


def test_pushes_made_alike_are_applied_together() -> None:
    job = Job("bsp", 2).start()
    job.push(0, hyper=ADAM)
    assert ranks(job.push(1, hyper=ADAM)) == [0, 1]


@pytest.mark.parametrize(
    ("hyper", "name", "theirs", "ours"),
    [
        ((("lr", 0.2), ("betas", (0.9, 0.999))), "lr", "0.1", "0.2"),
        ((("lr", 0.1), ("betas", (0.8, 0.999))), "betas", "(0.9, 0.999)", "(0.8, 0.999)"),
        ((("lr", 0.1),), "betas", "(0.9, 0.999)", "not given"),
        ((*ADAM, ("eps", 1e-8)), "eps", "not given", "1e-08"),
    ],
)
def test_a_push_made_otherwise_is_refused_by_name(hyper: tuple, name: str, theirs: str, ours: str) -> None:
    job = Job("bsp", 2).start()
    job.push(0, hyper=ADAM)
    refusal = the(Refuse, job.push(1, hyper=hyper))
    assert (refusal.worker, refusal.step) == (1, 0)
    assert f"{name} is {ours} at worker 1 and {theirs} at worker 0" in refusal.reason
    assert "\n" not in refusal.reason


@pytest.mark.parametrize("sync", ["bsp", "bsp+backup:1"])
def test_a_refused_worker_can_push_again(sync: str) -> None:
    job = Job(sync, 3).start()
    job.push(0, hyper=ADAM)
    assert kinds(job.push(1, hyper=())) == ["Refuse"]
    assert 1 in job.computing()
    assert set(job.held) == {0}
    actions = job.push(1, hyper=ADAM)
    if sync == "bsp":
        actions = job.push(2, hyper=ADAM)
        assert ranks(actions) == [0, 1, 2]
    else:
        assert ranks(actions) == [0, 1]


def test_a_refused_worker_that_leaves_does_not_count() -> None:
    job = Job("bsp", 2).start()
    job.push(0, hyper=ADAM)
    job.push(1, hyper=())
    assert ranks(job.leave(1, "failed")) == [0]


def test_each_round_has_hyper_parameters_of_its_own() -> None:
    """A scheduler moves them; all that matters is that a round agrees."""
    job = Job("bsp", 2).start()
    for rate in (0.1, 0.05):
        job.push(0, hyper=(("lr", rate),))
        assert ranks(job.push(1, hyper=(("lr", rate),))) == [0, 1]


def test_the_order_in_which_they_are_named_does_not_matter() -> None:
    job = Job("bsp", 2).start()
    job.push(0, hyper=ADAM)
    assert ranks(job.push(1, hyper=ADAM[::-1])) == [0, 1]


def test_none_is_a_value_and_not_the_same_as_nothing() -> None:
    job = Job("bsp", 2).start()
    job.push(0, hyper=ADAM)
    assert "maximize" in the(Refuse, job.push(1, hyper=(*ADAM, ("maximize", None)))).reason


def test_eager_modes_take_whatever_hyper_parameters_come() -> None:
    job = Job("ssp:3", 2).start()
    job.push(0, hyper=ADAM)
    assert ranks(job.push(1, hyper=())) == [1]


# bsp+backup.


def test_a_round_closes_with_the_first_ones() -> None:
    job = Job("bsp+backup:1", 4).start()
    assert job.push(3) == [Hold(3, 1, (0, 1, 2), 3, "round 0 has 1 of 3 pushes")]
    assert kinds(job.push(1)) == ["Hold"]
    actions = job.push(2)
    assert ranks(actions) == [1, 2, 3]
    assert released(actions) == {1: 1, 2: 1, 3: 1}


def test_a_late_push_is_discarded_with_a_reason_and_its_worker_jumps() -> None:
    job = Job("bsp+backup:1", 3).start()
    for _ in range(4):
        job.push(0)
        job.push(1)
    actions = job.push(2)
    assert actions == [
        Discard(2, 0, "late: round 0 closed without it, the job is at round 4"),
        Release(2, 4, slowest=4),
    ]
    assert not job.pending
    assert job.steps == {0: 4, 1: 4, 2: 4}


def test_after_its_jump_it_is_in_time_again() -> None:
    job = Job("bsp+backup:1", 3).start()
    job.push(0)
    job.push(1)
    job.push(2)  # late, jumps to round 1
    job.push(2)
    assert ranks(job.push(0)) == [0, 2]
    assert kinds(job.push(1)) == ["Discard", "Release"]


def test_slowest_is_the_late_one_until_it_jumps() -> None:
    job = Job("bsp+backup:1", 3).start()
    for _ in range(3):
        job.push(0)
        actions = job.push(1)
    assert the_slowest(actions) == {0}
    assert the_slowest(job.push(2)) == {3}


def the_slowest(actions: list[Action]) -> set[int]:
    return {action.slowest for action in actions if isinstance(action, Release)}


def test_as_many_deaths_as_backups_cost_nothing() -> None:
    job = Job("bsp+backup:2", 5).start()
    job.push(0)
    job.push(1)
    assert job.leave(4, "lost") == []
    assert job.leave(3, "lost") == []
    assert ranks(job.push(2)) == [0, 1, 2]


def test_more_deaths_make_the_round_smaller() -> None:
    job = Job("bsp+backup:1", 4).start()
    job.push(0)
    job.leave(3, "lost")
    assert job.leave(2, "lost") == []
    assert kinds(job.leave(1, "lost")) == ["Apply", "Release"]  # 1 of 1


def test_a_death_closes_the_round_of_those_who_are_left() -> None:
    job = Job("bsp+backup:1", 4).start()
    job.leave(3, "lost")
    job.push(0)
    job.push(1)  # 2 of 3
    actions = job.leave(2, "lost")
    assert ranks(actions) == [0, 1]
    assert released(actions) == {0: 1, 1: 1}


def test_the_push_of_one_that_left_counts_towards_the_quorum() -> None:
    job = Job("bsp+backup:1", 4).start()
    job.push(3)
    job.leave(3, "lost")
    job.push(2)
    assert ranks(job.push(0)) == [0, 2, 3]


def test_a_joiner_raises_the_quorum_of_the_open_round() -> None:
    job = Job("bsp+backup:1", 3).start()
    job.push(0)
    job.join(3)
    assert kinds(job.push(1)) == ["Hold"]  # 2 of 3, where without the joiner it would have been 2 of 2
    assert ranks(job.push(3)) == [0, 1, 3]


def test_a_joiner_that_makes_up_for_a_death_does_not() -> None:
    job = Job("bsp+backup:1", 3).start()
    job.leave(2, "lost")
    job.push(0)
    job.join(3)
    assert ranks(job.push(3)) == [0, 3]


def test_a_joiner_starts_at_the_open_round_and_not_at_the_late_ones() -> None:
    job = Job("bsp+backup:1", 3).start()
    for _ in range(3):
        job.push(0)
        job.push(1)
    assert the(Release, job.join(3)) == Release(3, 3, slowest=0)


def test_late_ones_hyper_parameters_do_not_matter() -> None:
    job = Job("bsp+backup:1", 3).start()
    job.push(0, hyper=ADAM)
    job.push(1, hyper=ADAM)
    assert kinds(job.push(2, hyper=())) == ["Discard", "Release"]


def test_equally_fast_workers_are_late_equally_often() -> None:
    """Whoever was late has the next round's start to itself, so nobody starves where chance decides who is last."""
    dice = random.Random(1)
    job = Job("bsp+backup:1", 4).start()
    for _ in range(4000):
        job.push(dice.choice(job.computing()))
    applied = Counter(rank for line in job.lines if line["kind"] == "apply" for rank in line["workers"])
    assert min(applied.values()) > 0.9 * max(applied.values())
    assert sum(line["kind"] == "discard" for line in job.lines) > 500

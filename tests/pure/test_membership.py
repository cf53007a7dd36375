"""Who is in: the start line, joiners, leavers and those who come back; and whether a hold says whom it waits for."""

from __future__ import annotations

import random

import pytest
from driving import Job
from test_properties import Game, play, under_each

from polytempo.errors import OrderError, UsageError
from polytempo.sync.actions import Action, Admit, Discard, Hold, Release
from polytempo.sync.events import Left, Pushed
from polytempo.sync.spec import MODES, parse_spec

ALL = (*(mode.example for mode in MODES.values()), "every:8,wait=2", "delay:0")
every_mode = pytest.mark.parametrize("sync", ALL)


def only(kind, actions: list[Action]) -> list:
    return [action for action in actions if isinstance(action, kind)]


# The start line.


@every_mode
def test_nobody_starts_before_all_are_there(sync: str) -> None:
    job = Job(sync, 3)
    for count, worker in enumerate((2, 0), 1):
        missing = tuple(rank for rank in (0, 1, 2) if rank not in (2, 0)[:count])
        assert job.join(worker) == [
            Admit(worker, 0),
            Hold(worker, 0, missing, len(missing), f"{len(missing)} of 3 workers have not joined yet"),
        ]
    actions = job.join(1)
    assert actions[0] == Admit(1, 0)
    firsts = [action.worker for action in only(Release, actions) if action.step == 0]
    assert firsts == [0, 1, 2]
    assert job.computing() == [0, 1, 2]


@every_mode
def test_one_that_dies_before_it_joins_frees_the_rest(sync: str) -> None:
    job = Job(sync, 3)
    job.join(0)
    job.join(2)
    assert {release.worker for release in only(Release, job.leave(1, "lost"))} == {0, 2}
    assert job.computing() == [0, 2]


@every_mode
def test_one_that_joins_and_leaves_again_was_there(sync: str) -> None:
    job = Job(sync, 2)
    job.join(0)
    assert job.leave(0, "lost") == []
    assert {release.worker for release in only(Release, job.join(1))} == {1}


@every_mode
def test_a_job_whose_workers_all_die_before_the_start_takes_those_who_come_later(sync: str) -> None:
    job = Job(sync, 2)
    assert job.leave(0, "lost") == []
    assert job.leave(1, "failed") == []
    admitted, released = job.join(1)[:2]
    assert admitted == Admit(1, 0)
    assert isinstance(released, Release)
    assert (released.worker, released.step, released.slowest) == (1, 0, 0)


@every_mode
def test_extra_workers_wait_for_the_initial_ones(sync: str) -> None:
    job = Job(sync, 2)
    job.join(5)
    assert job.held == {5: 0}
    job.join(0)
    assert job.held == {5: 0, 0: 0}
    job.join(1)
    assert job.computing() == [0, 1, 5]


def test_whoever_waits_for_the_start_is_told_for_whom() -> None:
    job = Job("asp", 20)
    hold = job.join(3)[-1]
    assert isinstance(hold, Hold)
    assert hold.waiting_for == (0, 1, 2, 4, 5, 6, 7, 8)
    assert hold.waiting_count == 19
    assert job.policy.holds() == [hold]


def test_a_job_has_at_least_one_worker() -> None:
    for sync in ALL:
        with pytest.raises(UsageError):
            parse_spec(sync).policy(0)


# Joining, leaving, coming back.


def ahead(sync: str) -> Job:
    """Worker 0 has done 3 steps, or as many as it may, and worker 1 has done 2 of them."""
    job = Job(sync, 2).start()
    for worker in (0, 1, 0, 1, 0):
        if worker in job.computing():
            job.push(worker)
    return job


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:0", "ssp:3", "dssp:3..15", "dssp-paper:3..15", "every:8", "delay:8"])
def test_a_joiner_starts_at_the_slowest_ones_step(sync: str) -> None:
    job = ahead(sync)
    assert job.steps == {0: 3, 1: 2}
    actions = job.join(7)
    assert actions[:2] == [Admit(7, 2), Release(7, 2, 2)]
    assert not only(Hold, actions)


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:0", "ssp:3", "dssp:3..15", "dssp-paper:3..15", "every:8", "delay:8"])
def test_one_that_comes_back_starts_at_the_slowest_ones_step_too(sync: str) -> None:
    job = ahead(sync)
    job.leave(0, "lost")
    actions = job.join(0)
    assert actions[:2] == [Admit(0, 2), Release(0, 2, 2)]
    job.push(0)
    assert job.steps == {0: 3, 1: 2}


def test_a_joiner_is_waited_for() -> None:
    job = Job("ssp:1", 1).start()
    job.push(0)
    job.join(1)
    job.push(0)
    assert job.push(0) == [job.history[-1][2][0], Hold(0, 3, (1,), 1, "2 ahead of worker 1, bound 1")]


@every_mode
def test_nobody_joins_twice(sync: str) -> None:
    job = Job(sync, 2).start()
    with pytest.raises(OrderError, match="worker 1 joined twice"):
        job.join(1)


@every_mode
def test_nobody_joins_twice_before_the_start_either(sync: str) -> None:
    job = Job(sync, 2)
    job.join(1)
    with pytest.raises(OrderError, match="worker 1 joined twice"):
        job.join(1)


@every_mode
def test_the_push_of_a_stranger_is_discarded(sync: str) -> None:
    policy = Job(sync, 2).start().policy
    assert policy.handle(Pushed(9, 0), 0.0) == [Discard(9, 0, "worker 9 is not a member; it must join first")]


@every_mode
def test_the_push_of_one_that_left_is_discarded(sync: str) -> None:
    """It was declared dead and does not know: it must join again, never just go on."""
    job = Job(sync, 2).start()
    job.leave(1, "lost")
    assert [type(action) for action in job.policy.handle(Pushed(1, 0), 0.0)] == [Discard]
    assert job.computing() == [0]


@every_mode
@pytest.mark.parametrize("step", [-1, 1, 5])
def test_a_push_out_of_turn_is_the_drivers_mistake(sync: str, step: int) -> None:
    policy = Job(sync, 2).start().policy
    with pytest.raises(OrderError, match=f"worker 0 pushed step {step}; its next step is 0"):
        policy.handle(Pushed(0, step), 0.0)


@pytest.mark.parametrize("sync", ["bsp", "ssp:0", "dssp:0..0", "every:1"])
def test_a_push_of_one_that_is_held_is_the_drivers_mistake(sync: str) -> None:
    job = Job(sync, 2).start()
    job.push(0)
    with pytest.raises(OrderError, match="its next step is 1, which it may not start yet"):
        job.policy.handle(Pushed(0, 1), 0.0)


@every_mode
def test_a_push_before_the_start_is_the_drivers_mistake(sync: str) -> None:
    job = Job(sync, 2)
    job.join(0)
    with pytest.raises(OrderError, match="its next step is 0, which it may not start yet"):
        job.policy.handle(Pushed(0, 0), 0.0)


@every_mode
def test_the_leave_of_a_stranger_is_ignored(sync: str) -> None:
    job = Job(sync, 2).start()
    before = job.policy.holds()
    assert job.leave(9, "lost") == []
    job.leave(1, "lost")
    assert job.leave(1, "lost") == []  # said twice
    assert job.policy.holds() == before
    assert job.computing() == [0]


def test_members_are_those_who_joined_and_did_not_leave() -> None:
    job = Job("asp", 3).start()
    job.leave(1)
    job.join(8)
    assert set(job.policy.members) == {0, 2, 8}


# A hold says whom it waits for.


class Waited:
    """Who waits for whom, the slow way: every member is looked at each time."""

    def __init__(self, sync: str) -> None:
        self.name, _, argument = sync.split(",")[0].partition(":")
        self.bound = int(argument.split("..")[0] or 0)
        self._steps: dict[int, int] = {}
        self._came: dict[int, int] = {}  # when each member came to its step
        self._events = 0

    def note(self, job: Job) -> None:
        """Call after each event."""
        self._events += 1
        left = isinstance(job.history[-1][0], Left)
        self._came.update({w: self._events for w, step in job.steps.items() if not left and self._steps.get(w) != step})
        self._steps = dict(job.steps)

    def behind(self, step: int) -> list[int]:
        """Whoever must push before this step may start: the slowest first, then whoever has been there for longest."""
        needed = step // self.bound * self.bound if self.name == "every" else step - self.bound
        late = [worker for worker, own in self._steps.items() if own < needed]
        return sorted(late, key=lambda worker: (self._steps[worker], self._came[worker]))

    def look_at(self, hold: Hold) -> None:
        late = self.behind(hold.step)
        assert hold.waiting_for == tuple(late[:8])
        assert hold.waiting_count == len(late)
        assert f"worker {late[0]}" in hold.reason
        assert "\n" not in hold.reason


BOUNDED = ("bsp", "ssp:0", "ssp:2", "dssp:0..2", "dssp:1..3", "dssp-paper:1..3", "every:1", "every:3", "every:3,wait=1")


@under_each(BOUNDED)
def test_holds_name_exactly_those_who_are_waited_for(sync: str, game: Game) -> None:
    waited = Waited(sync)
    for job in play(sync, game):
        waited.note(job)
        said = job.policy.holds()
        assert {hold.worker: hold.step for hold in said} == job.held
        assert len(said) == len(job.held)
        if not job.awaited:
            for hold in (*said, *only(Hold, job.history[-1][2])):
                waited.look_at(hold)


@pytest.mark.parametrize("sync", ["ssp:1", "ssp:12", "every:4", "bsp"])
def test_also_among_many_and_after_many_moves(sync: str) -> None:
    """Speeds differ widely, ranks come and go, and all that time every hold is right."""
    dice = random.Random(7)
    job, waited = Job(sync, 40), Waited(sync)
    for worker in range(40):
        job.join(worker)
        waited.note(job)
    looked = 0
    for _ in range(4000):
        if dice.random() < 0.01 and len(job.steps) > 20:
            actions = job.leave(dice.choice(sorted(job.steps)), "lost")
        elif dice.random() < 0.01:
            actions = job.join(dice.choice([rank for rank in range(45) if rank not in job.steps]))
        else:
            able = job.computing()
            actions = job.push(able[int(len(able) * dice.random() ** 3)])
        waited.note(job)
        for hold in only(Hold, actions):
            waited.look_at(hold)
            looked += 1
    assert looked > 300
    for hold in job.policy.holds():
        waited.look_at(hold)


def test_a_hung_worker_far_behind_is_named_and_counted_with_the_others() -> None:
    job = Job("dssp-paper:1..3", 3).start()
    job.leave(2)
    job.push(1, now=1000.0)
    job.push(1, now=2000.0)
    for _ in range(50):
        if 0 in job.computing():
            job.push(0, job.now + 1)
    assert job.steps[0] > 40
    job.join(4)
    while 0 in job.computing():  # a newcomer: no forecast any more
        job.push(0, job.now + 10000)
    (hold,) = job.policy.holds()
    assert set(hold.waiting_for) == {1, 4}
    assert hold.waiting_count == 2


def test_a_hold_names_whoever_is_slowest_by_now() -> None:
    """What `holds` says moves with the job; what was said when the worker was held does not."""
    job = Job("ssp:0", 3).start()
    job.push(0)
    assert job.policy.holds() == [Hold(0, 1, (1, 2), 2, "1 ahead of worker 1, bound 0")]
    job.push(1)
    assert job.policy.holds()[0] == Hold(0, 1, (2,), 1, "1 ahead of worker 2, bound 0")
    job.feed(Left(2, "lost"))
    assert job.policy.holds() == []

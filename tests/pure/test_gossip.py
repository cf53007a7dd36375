"""Gossip by the orders of its policy: mass is kept, matrices stay stochastic, and without gradients all models meet.

`Models` does with exact fractions what workers do with tensors, and knows nothing but the orders. Each worker has (x, w). A
push sends a share of it to each out-neighbour that the release named; the next release says whose shares to take, and which
of its own come back because their receiver is lost.
"""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from driving import Job
from test_properties import Game, only, play, under_each
from test_topology import matrix

from polytempo.sync.actions import Admit, Hold, Release
from polytempo.sync.directives import Mixing, NextMixing
from polytempo.sync.events import Left, Pushed
from polytempo.sync.gossip import GossipSpec
from polytempo.sync.spec import parse_spec
from polytempo.sync.topology import mixing_rows

SYNCS = ("gossip:ring", "gossip:torus", "gossip:exp", "gossip:exp,static=1", "gossip:full")
UNDIRECTED = ("gossip:ring", "gossip:torus", "gossip:full")

Value = tuple[Fraction, Fraction]
NOTHING: Value = (Fraction(0), Fraction(0))
ALONE = Mixing(1.0, (), ())


def ratio_of(share: float) -> Fraction:
    """Shares are ratios of small numbers, up to rounding."""
    ratio = Fraction(share).limit_denominator(1000)
    assert abs(ratio - Fraction(share)) < 1e-15
    return ratio


def plus(one: Value, other: Value, share: Fraction = Fraction(1)) -> Value:
    return one[0] + share * other[0], one[1] + share * other[1]


class Models:
    """The values of all members, as the orders make them, and what is under way between them."""

    def __init__(self, sync: str, exact: bool = True) -> None:
        self.number = ratio_of if exact else float
        self.close = partial(pytest.approx, abs=0 if exact else 1e-12)
        self.undirected = sync in UNDIRECTED
        self.values: dict[int, Value] = {}
        self.begun = self.gone = NOTHING  # what members have started with, and what they have taken along
        self.shares: dict[tuple[int, int, int], Value] = {}  # (sender, receiver, step): sent and not taken yet
        self.rows: dict[int, tuple[int, Mixing]] = {}  # of each member: its step, and its part of that step's matrix
        self.pushed: set[tuple[int, int]] = set()  # (worker, step)
        self.past: set[tuple[int, int]] = set()  # (worker, step): it has mixed that step

    @classmethod
    def of(cls, job: Job, sync: str) -> Models:
        """Carry out all that was ordered from the beginning of the job."""
        models = cls(sync)
        for place in range(len(job.history)):
            models.follow(job, place)
        return models

    def makes(self, worker: int, step: int) -> bool:
        """Is this worker a member, and has yet to go on from this step?"""
        return worker in self.rows and self.rows[worker][0] <= step

    def follow(self, job: Job, place: int = -1) -> None:
        """Carry out what was ordered on an event, the latest by default."""
        event, _, actions = job.history[place]
        if isinstance(event, Pushed) and event.worker in self.rows:
            self.push(event.worker, event.step)
        if isinstance(event, Left) and event.worker in self.rows:
            self.leave(event.worker)
        starting = not self.rows
        for release in only(Release, actions):
            self.release(release, starting)

    def push(self, worker: int, step: int) -> None:
        at, row = self.rows[worker]
        assert at == step
        self.pushed.add((worker, step))
        value = self.values[worker]
        assert self.number(row.keep) + sum(self.number(share) for _, share in row.send) == self.close(1)
        self.values[worker] = plus(NOTHING, value, self.number(row.keep))
        for other, share in row.send:
            part = plus(NOTHING, value, self.number(share))
            if (other, step) in self.pushed and not self.makes(other, step):
                assert (other, step) not in self.past, "it went on without this share"
                self.gone = plus(self.gone, part)  # it pushed and left: this is a part of what its row gives it
            else:
                self.shares[worker, other, step] = part

    def release(self, release: Release, starting: bool) -> None:
        worker = release.worker
        if worker in self.rows:
            self.mix(worker, release.directive.lost)
        else:
            self.values[worker] = NOTHING
            assert not release.directive.lost
        if not release.directive.enters and self.values[worker] == NOTHING:  # it starts from values of its own
            assert starting or not any(weight for _, weight in self.values.values()), "another has a model"
            self.values[worker] = self.number(3**worker), self.number(1)
            self.begun = plus(self.begun, self.values[worker])
        assert release.directive.enters == (self.values[worker][1] == 0), "it enters until it has received something"
        self.rows[worker] = release.step, release.directive.mixing or ALONE

    def mix(self, worker: int, lost: tuple[int, ...]) -> None:
        step, row = self.rows[worker]
        total = self.number(row.keep)
        for other, share in row.send:
            if other in lost:
                assert (other, step) not in self.pushed
                assert not self.makes(other, step), "it is not lost"
                self.values[worker] = plus(self.values[worker], self.shares.pop((worker, other, step)))
                total += self.number(share)
        for other, share in row.receive:
            if other not in lost:
                self.values[worker] = plus(self.values[worker], self.shares.pop((other, worker, step)))
                total += self.number(share)
        assert total == self.close(1) or not self.undirected, (
            "rows of undirected graphs sum to 1, whichever members are lost"
        )
        self.past.add((worker, step))

    def leave(self, worker: int) -> None:
        """It takes along what it has, what its row of a step it has pushed gives it, and what neither side can take back."""
        del self.rows[worker]
        self.gone = plus(self.gone, self.values.pop(worker))
        for sender, receiver, at in list(self.shares):
            given = receiver == worker and (worker, at) in self.pushed
            assert given or receiver != worker or (sender, at) not in self.past, "its sender cannot take it back any more"
            orphaned = worker in (sender, receiver) and not self.makes(sender, at) and not self.makes(receiver, at)
            if given or orphaned:
                self.gone = plus(self.gone, self.shares.pop((sender, receiver, at)))


def sum_of(values: list[Value]) -> Value:
    total = NOTHING
    for value in values:
        total = plus(total, value)
    return total


def together(job: Job, models: Models, steps: int = 0) -> None:
    """All members come to the same step, with nothing under way, and go on from there together."""
    goal = max([0, *(step + 1 for _, step in models.pushed), *job.steps.values()]) + steps
    last = goal + 2 * len(job.steps)
    while any(step < goal for step in job.steps.values()) or job.held:
        able = [worker for worker in job.computing() if job.steps[worker] < goal]
        if not able:
            goal += 1
            assert goal <= last, f"held for ever: {job.policy.holds()}"
            continue
        job.push(min(able, key=lambda worker: job.steps[worker]))
        models.follow(job)


@under_each(SYNCS)
def test_mass_is_kept_whichever_members_leave_and_join(sync: str, game: Game) -> None:
    """What members have, and what those that left took along by the words of `sync/gossip.py`, is what they began with."""
    models = Models(sync)
    for job in play(sync, game):
        models.follow(job)
    together(job, models)
    assert not models.shares, "a share was neither taken nor taken back"
    assert sum_of([*models.values.values(), models.gone]) == models.begun
    together(job, models, steps=len(job.steps))  # whichever entered has a model by then
    assert all(weight > 0 for _, weight in models.values.values())


@under_each(SYNCS)
def test_without_gradients_all_models_meet_at_the_mean(sync: str, game: Game) -> None:
    """Whatever happened before: the mean is that of x over w, and it is approached as fast as the second eigenvalue says."""
    models = Models(sync, exact=False)
    for job in play(sync, replace(game, moves=game.moves[:30])):
        models.follow(job)
    together(job, models)
    assert job.steps or not models.values
    if len(job.steps) < 2:
        return
    mean, rounds = [np.mean([value[part] for value in models.values.values()]) for part in (0, 1)], 8
    factor = second_eigenvalue(parse_spec(sync).gossip, tuple(sorted(job.steps)), next(iter(job.steps.values())), rounds)
    before = distance(models, mean)
    together(job, models, steps=rounds)
    assert distance(models, mean) <= factor * before + 1e-9 * abs(mean[0])


def distance(models: Models, mean: list[float]) -> float:
    """Of x from its mean; w goes the same way."""
    return float(np.linalg.norm([value[0] - mean[0] for value in models.values.values()]))


def second_eigenvalue(gossip: GossipSpec, members: tuple[int, ...], first: int, rounds: int) -> float:
    """By how much at most these steps bring models closer to their mean."""
    product = np.eye(len(members))
    for step in range(first, first + rounds):
        product = matrix(mixing_rows(gossip.topology, members, step, gossip.static)) @ product
    return float(np.linalg.norm(product - 1 / len(members), 2))


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("workers", [8, 16])
def test_mass_is_kept_and_matrices_are_stochastic_among_many(sync: str, workers: int) -> None:
    """Up to 17 members, of which one in thirty events takes one away or brings one."""
    dice, job, models = random.Random(workers), Job(sync, workers).start(), Models(sync, exact=False)
    models.follow(job)
    for _ in range(600):
        chance = dice.random()
        if chance < 0.015 and len(job.steps) > 4:
            job.leave(dice.choice(sorted(job.steps)), "lost")
        elif chance < 0.03 and len(job.steps) < 17:
            job.join(dice.choice([rank for rank in range(17) if rank not in job.steps]))
        else:
            job.push(dice.choice(job.computing()))
        models.follow(job)
    together(job, models)
    assert not models.shares
    kept = sum_of([*models.values.values(), models.gone])
    assert kept == (pytest.approx(models.begun[0], rel=1e-12), pytest.approx(models.begun[1], rel=1e-12))


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_exp_is_exact_after_log2_n_steps_of_a_job(workers: int) -> None:
    job = Job("gossip:exp", workers).start()
    models = Models.of(job, "gossip:exp")
    mean = sum_of([*models.values.values()])[0] / workers
    together(job, models, steps=workers.bit_length() - 1)
    assert set(models.values.values()) == {(mean, Fraction(1))}


# What a leave and a join do, exactly.


def test_one_that_leaves_before_its_push_takes_along_its_own() -> None:
    job = Job("gossip:ring", 4).start()
    for worker in (0, 2):
        job.push(worker)
    assert job.leave(1, "lost") == [], "both wait for worker 3 as well"
    released = only(Release, job.push(3))
    assert [(release.worker, release.directive.lost) for release in released] == [(0, (1,)), (2, (1,)), (3, ())]
    assert released[0].directive.mixing is not None
    assert [other for other, _ in released[0].directive.mixing.send] == [2, 3], "the next graph is that of the survivors"
    models = Models.of(job, "gossip:ring")
    assert models.gone == (3, 1)
    assert models.values[0][0] == Fraction(2 * 1 + 27, 3)
    assert [weight for _, weight in models.values.values()] == [1, 1, 1]


def test_one_that_leaves_after_its_push_takes_along_what_its_row_gives_it() -> None:
    job = Job("gossip:ring", 4).start()
    for worker in (1, 0, 2):
        job.push(worker)
    job.leave(1, "lost")
    job.push(3)
    models = Models.of(job, "gossip:ring")
    assert models.gone == (Fraction(1 + 3 + 9, 3), 1)
    assert sum_of([*models.values.values()]) == (1 + 3 + 9 + 27 - models.gone[0], 3)


def test_a_joiner_has_half_of_a_neighbours_after_one_step() -> None:
    job = Job("gossip:exp", 2).start()
    for worker in (0, 1, 0, 1, 0, 1, 0):
        job.push(worker)
    actions = job.join(7)
    assert actions[0] == Admit(7, 4), "the first step that none has started"
    (release,) = only(Release, actions)
    assert release.directive.enters
    assert release.directive.mixing == Mixing(0.5, ((0, 0.5),), ((1, 0.5),))
    for worker in (1, 7, 0, 1):
        job.push(worker)
    models = Models.of(job, "gossip:exp")
    assert [release.directive.enters for release in only(Release, job.history[-1][2]) if release.worker == 7] == [False]
    assert models.values[7] == (1, Fraction(1, 2)), "both began with 1 and 3, whose mean is 2: half of (2, 1)"
    assert sum_of([*models.values.values()]) == (4, 2)


def test_a_joiner_whose_neighbours_are_lost_goes_on_entering() -> None:
    job = Job("gossip:ring", 4).start()
    assert only(Release, job.join(9))[0].directive.enters
    job.push(9)
    job.leave(3, "lost")
    (again,) = only(Release, job.leave(0, "lost"))
    assert (again.worker, again.step, again.directive.lost, again.directive.enters) == (9, 2, (0, 3), True)
    models = Models.of(job, "gossip:ring")
    together(job, models)
    together(job, models, steps=1)
    assert models.values[9][1] > 0
    assert sum_of([*models.values.values(), models.gone]) == models.begun == (1 + 3 + 9 + 27, 4)


def test_models_that_are_all_gone_begin_anew() -> None:
    """A joiner whose only neighbour dies before it could give anything starts from the values it has."""
    job = Job("gossip:ring", 1).start()
    job.join(1)
    job.join(2)
    job.push(1)
    job.push(2)
    job.leave(0, "lost")
    models = Models.of(job, "gossip:ring")
    releases = [release for _, _, actions in job.history for release in only(Release, actions)]
    enters = {release.worker: release.directive.enters for release in releases}
    assert enters[1] != enters[2], "one of the two begins, the other receives from it"
    together(job, models, steps=2)
    assert all(weight > 0 for _, weight in models.values.values())
    assert models.begun == plus(models.gone, sum_of([*models.values.values()]))


# The barrier is local.


def test_a_worker_waits_for_its_neighbours_alone_and_says_for_which() -> None:
    job = Job("gossip:ring", 6).start()
    assert job.push(0)[-1] == Hold(0, 1, (1, 5), 2, "worker 1, a neighbour, has not pushed step 0")
    job.push(1)
    assert job.policy.holds()[0] == Hold(0, 1, (5,), 1, "worker 5, a neighbour, has not pushed step 0")
    assert [release.worker for release in only(Release, job.push(5))] == [0]
    job.push(0)
    assert job.steps == {0: 2, 1: 1, 2: 0, 3: 0, 4: 0, 5: 1}


@pytest.mark.parametrize(("sync", "lead"), [("gossip:ring", 4), ("gossip:full", 1), ("gossip:exp", 3), ("gossip:torus", 3)])
def test_how_far_a_worker_may_be_ahead_of_one_that_hangs(sync: str, lead: int) -> None:
    """By the longest way through the graph: of 8 workers one makes no step."""
    job = Job(sync, 8).start()
    while able := [worker for worker in job.computing() if worker != 3]:
        job.push(able[0])
    assert max(job.steps.values()) == lead


def test_a_job_of_one_is_never_held_and_mixes_nothing() -> None:
    for sync in (*SYNCS, "gossip:ring,overlap=1"):
        job = Job(sync, 1).start()
        for step in range(4):
            assert only(Release, job.push(0)) == [Release(0, step + 1, step + 1, NextMixing())]


def test_specs() -> None:
    assert parse_spec("gossip:ring").gossip == GossipSpec("ring")
    assert parse_spec("gossip:exp,static=1,overlap=1").gossip == GossipSpec("exp", static=True, overlap=True)
    assert parse_spec("adpsgd:exp").gossip == GossipSpec("exp", asynchronous=True)
    assert parse_spec("bsp").gossip is None

"""Decoupled DiLoCo, the policy: merges by quorum and grace, one thing at a time, in random games and in every order."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from driving import Job
from test_properties import Game, answers, bare, drain, only, play, played, under_each

from polytempo.errors import BrokenInvariant, OrderError, SpecError
from polytempo.records.check import check_lines
from polytempo.records.files import to_text
from polytempo.records.lines import RecordLine
from polytempo.records.replay import replay
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Release, Wake
from polytempo.sync.decoupled_diloco import SLACK, merge_weights
from polytempo.sync.directives import NextBlock
from polytempo.sync.events import Joined, Left, Pushed, Ticked
from polytempo.sync.spec import parse_spec

MODES = (
    "diloco:4,quorum=2,grace=0",
    "diloco:4,quorum=2,grace=1.5",
    "diloco:4,quorum=3",
    "diloco:4,quorum=2,grace=auto,drop=1",
    "diloco:4,quorum=1,grace=0,drop=0",
    "diloco:4,quorum=2,grace=inf",
)

every_mode = under_each(MODES)


def merged(actions: list[Action]) -> list[list[int]]:
    return [[push.worker for push in apply.pushes] for apply in only(Apply, actions)]


def released(actions: list[Action]) -> dict[int, int]:
    return {release.worker: release.step for release in only(Release, actions)}


# One thing at a time.


def test_a_push_below_the_quorum_is_kept_and_its_worker_is_not_held() -> None:
    job = Job("diloco:4,quorum=2,grace=1", 3).start()
    assert job.push(0, now=1.0) == []
    assert not job.held


def test_a_quorum_is_merged_when_its_grace_is_over_and_not_before() -> None:
    job = Job("diloco:4,quorum=2,grace=1.5", 3).start()
    job.push(0, now=1.0)
    assert job.push(2, now=4.0) == [Wake(5.5)]
    assert job.tick(now=5.4) == []
    actions = job.tick(now=5.5)
    assert merged(actions) == [[0, 2]]
    assert released(actions) == {0: 1, 2: 1}
    assert [release.directive.period for release in only(Release, actions)] == [4, 4]


def test_no_grace_is_needed_when_all_active_workers_are_in() -> None:
    job = Job("diloco:4,quorum=2,grace=1.5", 3).start()
    for worker in (2, 0):
        job.push(worker, now=1.0)
    assert merged(job.push(1, now=1.2)) == [[0, 1, 2]]
    assert job.tick(now=2.5) == []  # the wake of a merge that was made


def test_without_grace_the_quorum_is_merged_at_once() -> None:
    job = Job("diloco:4,quorum=2,grace=0", 4).start()
    job.push(3, now=1.0)
    assert merged(job.push(1, now=2.0)) == [[1, 3]]


def test_who_comes_within_the_grace_is_in_the_merge() -> None:
    job = Job("diloco:4,quorum=2,grace=2", 4).start()
    for worker, now in ((0, 1.0), (1, 2.0), (2, 3.9)):
        job.push(worker, now=now)
    assert merged(job.tick(now=4.0)) == [[0, 1, 2]]


def test_what_comes_after_the_grace_is_in_the_next_merge_though_no_tick_came() -> None:
    job = Job("diloco:4,quorum=2,grace=2", 4).start()
    for worker, now in ((0, 1.0), (1, 2.0)):
        job.push(worker, now=now)
    actions = job.push(2, now=4.5)
    assert merged(actions) == [[0, 1]]
    assert released(actions) == {0: 1, 1: 1}
    assert merged(job.push(0, now=5.0)) == []
    assert merged(job.tick(now=7.0)) == [[0, 2]]


def test_a_leave_and_a_join_after_the_grace_merge_too() -> None:
    for happens in (lambda job: job.leave(3, "lost", now=9.0), lambda job: job.join(4, now=9.0)):
        job = Job("diloco:4,quorum=2,grace=2", 4).start()
        job.push(0, now=1.0)
        job.push(1, now=2.0)
        assert merged(happens(job)) == [[0, 1]]


def test_a_joiner_takes_the_values_after_a_merge_that_was_due() -> None:
    job = Job("diloco:4,quorum=2,grace=2", 4).start()
    job.push(0, now=1.0)
    job.push(1, now=2.0)
    actions = job.join(4, now=9.0)
    assert [type(action) for action in actions] == [Admit, Apply, Release, Release, Release]
    assert released(actions)[4] == 0  # the slowest one's step


def test_a_stopped_worker_delays_no_merge_and_comes_back_with_its_change() -> None:
    """Worker 3 stands still for a long time and is not known to be gone."""
    job = Job("diloco:4,quorum=2,grace=0.5", 4).start()
    for step in range(5):
        start = float(step)
        for worker in (0, 1, 2):
            job.push(worker, now=start + 0.1)
        assert merged(job.tick(now=start + 0.6)) == [[0, 1, 2]]
    job.push(3, now=5.5)
    assert job.steps[3] == 1
    for worker in (0, 1):
        job.push(worker, now=5.7)
    assert merged(job.tick()) == [[0, 1, 3]]
    assert job.lines[-4]["staleness"] == [0, 0, 5]


def test_a_dead_worker_is_not_waited_for() -> None:
    job = Job("diloco:4,quorum=3,grace=100", 3).start()
    job.push(0, now=1.0)
    job.push(1, now=2.0)
    assert merged(job.leave(2, "lost", now=3.0)) == [[0, 1]]


@pytest.mark.parametrize("reason", ["finished", "failed", "lost"])
def test_a_push_of_a_worker_that_has_left_since_counts(reason: str) -> None:
    job = Job("diloco:4,quorum=2,grace=1", 3).start()
    job.push(2, now=1.0)
    assert job.leave(2, reason, now=1.5) == []
    assert job.push(0, now=2.0) == [Wake(3.0)]  # two workers' pushes: a quorum; worker 1 may still come
    actions = job.tick(now=3.0)
    assert merged(actions) == [[0, 2]]
    assert released(actions) == {0: 1}


def test_the_dead_do_not_lower_the_quorum_below_the_active_workers() -> None:
    job = Job("diloco:4,quorum=3,grace=0", 3).start()
    job.push(0, now=1.0)
    job.leave(0, "lost", now=1.0)
    assert merged(job.push(1, now=2.0)) == []  # two of three: worker 2 is active, and not in
    assert merged(job.push(2, now=9.0)) == [[0, 1, 2]]


def test_when_all_have_left_what_was_pushed_is_merged() -> None:
    job = Job("diloco:4,quorum=2,grace=1", 2).start()
    job.push(0)
    job.leave(0, "lost")
    assert merged(job.leave(1, "lost")) == [[0]]
    assert released(job.join(1)) == {1: 1}


def test_both_lives_of_a_worker_are_merged_and_are_one_of_the_quorum() -> None:
    job = Job("diloco:4,quorum=2,grace=0", 3).start()
    job.push(0)
    job.leave(0, "lost")
    job.join(0)
    assert merged(job.push(0)) == []
    assert merged(job.push(1)) == [[0, 0, 1]]


def test_a_second_push_before_the_answer_is_the_drivers_mistake() -> None:
    job = Job("diloco:4,quorum=2,grace=0", 3).start()
    job.push(0)
    with pytest.raises(OrderError, match="worker 0 pushed step 1; its push of step 0 is not merged yet"):
        job.push(0)
    assert merged(job.push(1)) == [[0, 1]]


def test_a_push_on_too_old_an_anchor_is_dropped_and_its_worker_goes_on_at_once() -> None:
    job = Job("diloco:4,quorum=1,grace=0,drop=2", 2).start()
    for _ in range(2):
        job.push(0)
    fork = job.fork()
    assert merged(fork.push(1)) == [[1]]  # 2 merges old
    job.push(0)
    assert job.push(1) == [Discard(1, 0, "staleness 3 is above 2"), Release(1, 1, 1, NextBlock(4))]
    assert merged(job.push(1)) == [[1]]  # on the newest values


def test_the_grace_by_slack_ends_half_a_block_after_the_first_push() -> None:
    job = Job("diloco:4,quorum=2", 4).start()
    job.push(0, now=10.0)  # a block of 10 s
    assert job.push(1, now=12.0) == [Wake(10 + SLACK * 10)]
    assert job.push(2, now=14.0) == [Wake(15.0)]
    assert merged(job.tick(now=15.0)) == [[0, 1, 2]]


def test_the_grace_by_slack_is_none_where_no_slack_is_left() -> None:
    job = Job("diloco:4,quorum=2", 3).start()
    job.push(0, now=10.0)
    assert merged(job.push(1, now=15.1)) == [[0, 1]]


def test_a_turn_that_was_left_out_is_no_slack() -> None:
    job = Job("diloco:4,quorum=1", 2).start()
    actions = job.feed(Pushed(0, 0, 64, count=8), 16.0)  # 8 steps in 16 s: a block is 8 s
    assert actions == [Wake(16 + SLACK * 8)]


def test_holds_name_the_workers_that_are_not_in() -> None:
    job = Job("diloco:4,quorum=3,grace=1", 4).start()
    job.push(2)
    assert job.policy.holds() == [Hold(2, 1, (0, 1, 3), 3, "the merge has pushes of 1 worker, its quorum is 3")]


def test_a_job_that_goes_on_begins_at_its_step() -> None:
    policy = parse_spec("diloco:4,quorum=1,grace=0").policy(1)
    policy.begin_at(7)
    assert released(Job(policy, 1).join(0)) == {0: 7}


def test_a_quorum_above_the_workers_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^quorum=5 needs at least 5 workers, got 4; use at most quorum=4$"):
        parse_spec("diloco:4,quorum=5").policy(4)


# Weights.


@pytest.mark.parametrize(
    ("blocks", "weights"),
    [
        ([(64, 8), (64, 8)], ()),  # equal: as in rounds
        ([(64, 8), (32, 4)], ()),  # half a block of the same batches: its samples say so
        ([(64, 8), (64, 4)], (32.0, 64.0)),  # the same samples in half the steps: 64 * 8 and 64 * 16
        ([(0, 8), (0, 4)], ()),
        ([(10, 5), (0, 5)], (10.0, 0.0)),
    ],
)
def test_weights_of_a_merge(blocks: list[tuple[float, int]], weights: tuple[float, ...]) -> None:
    pushes = tuple(Pushed(rank, 0, samples, count=count) for rank, (samples, count) in enumerate(blocks))
    assert merge_weights(pushes) == weights


def test_weights_are_tokens_times_tokens_by_steps() -> None:
    pushes = tuple(Pushed(rank, 0, 7.0 + 3 * rank, count=2 + rank) for rank in range(5))
    weights = merge_weights(pushes)
    wanted = [push.samples**2 / push.count for push in pushes]
    assert [w / sum(weights) for w in weights] == pytest.approx([w / sum(wanted) for w in wanted], rel=1e-12)


def test_a_merge_says_its_weights() -> None:
    job = Job("diloco:4,quorum=2,grace=0", 2).start()
    job.feed(Pushed(0, 0, 64, count=4))
    (apply,) = only(Apply, job.feed(Pushed(1, 0, 32, count=4)))
    assert (apply.rate, apply.weights) == (1.0, (64.0, 16.0))


# Every order.


@every_mode
def test_the_record_passes_the_checker_and_replays_from_its_text(sync: str, game: Game) -> None:
    job = played(sync, game)
    assert check_lines(job.lines, parse_spec(sync), job.workers) == len(job.lines)
    lines = [json.loads(to_text(line)) for line in job.lines]
    decided = [line for line in lines if line["kind"] not in ("push", "leave", "tick")]
    assert replay(lines, parse_spec(sync).policy(job.workers)) == len(decided)


class Expected:
    """What the rules say of merges, in their plainest form: it knows only what happened."""

    def __init__(self, sync: str) -> None:
        spec = parse_spec(sync)
        self.quorum, self.grace = spec.options["quorum"], spec.options.get("grace", "auto")
        self.drop, self.merges = spec.options.get("drop", math.inf), 0
        self.pending: list[Pushed] = []
        self.inside: set[int] = set()
        self.reached = math.inf
        self.base: dict[int, int] = {}

    def look(self, job: Job) -> None:
        event, now, actions = job.history[-1]
        if isinstance(event, Left):
            self.inside.discard(event.worker)
        dropped = {action.worker for action in only(Discard, actions)}
        new = event if isinstance(event, Pushed) else None
        for action in actions:
            if isinstance(action, Apply):
                if new is not None and new in action.pushes:
                    self.add(new, now)
                    new = None
                self.merge(job, action, now)
            elif isinstance(action, Release):
                assert action.worker not in self.inside, "released, and its push is not merged"
                self.base[action.worker] = self.merges
            elif isinstance(action, Discard):
                assert self.merges - self.base[action.worker] > self.drop
        if new is not None and new.worker not in dropped:
            self.add(new, now)
        self.look_at_rest(job, now)

    def add(self, push: Pushed, now: float) -> None:
        assert self.merges - self.base[push.worker] <= self.drop
        self.pending.append(push)
        self.inside.add(push.worker)
        if len({pending.worker for pending in self.pending}) >= self.quorum:
            self.reached = min(self.reached, now)

    def merge(self, job: Job, apply: Apply, now: float) -> None:
        assert Counter(push.samples for push in apply.pushes) == Counter(push.samples for push in self.pending)
        every = self.inside >= set(job.steps)
        assert every or self.reached <= now, "below the quorum, and more are active"
        if not every and isinstance(self.grace, float):
            assert now >= self.reached + self.grace, "before the grace was over"
        self.pending, self.inside, self.reached = [], set(), math.inf
        self.merges += 1

    def look_at_rest(self, job: Job, now: float) -> None:
        assert not self.pending or not self.inside >= set(job.steps), "all are in, and there is no merge"
        if isinstance(self.grace, float):
            assert now < self.reached + self.grace, "the grace is over, and there is no merge"
        elif job.steps:
            assert self.reached == math.inf or any(at >= now for at in job.wakes), "no wake for the end of the grace"
        assert {worker for worker in job.steps if worker not in job.computing() and not job.awaited} == self.inside
        assert not job.held or job.awaited or self.grace == math.inf


@every_mode
def test_merges_are_made_by_quorum_and_grace_and_each_push_is_merged_once(sync: str, game: Game) -> None:
    expected = Expected(sync)
    for job in play(sync, game):
        expected.look(job)
    drain(job, fastest_first=True)
    assert not job.pending


@every_mode
def test_all_that_is_pending_is_merged_as_workers_die(sync: str, game: Game) -> None:
    job = played(sync, game).start()
    while job.steps:
        able = job.computing()
        assert able, f"no worker can push: {job.policy.holds()}"
        job.leave(able[0], "lost")
    assert not job.pending


@every_mode
def test_the_same_events_give_the_same_actions_with_reasons_or_without(sync: str, game: Game) -> None:
    job = played(sync, game)
    decided = [actions for _, _, actions in job.history]
    assert answers(sync, job) == decided
    assert [bare(actions) for actions in answers(sync, job, explains=False)] == [bare(actions) for actions in decided]


@under_each([("diloco:4,quorum=2,grace=inf", "diloco:4"), ("diloco:4,quorum=1,grace=inf,outer_lr=1", "diloco:4")])
def test_an_unbounded_grace_decides_as_rounds_do(pair: tuple[str, str], game: Game) -> None:
    """Action for action, reasons included; with a quorum of all as with one of less. (The samples of a game all differ, and
    so do the weights of its merges.)"""
    sync, rounds = pair
    job = played(sync, game)
    assert answers(rounds, job) == [unweighted(actions) for _, _, actions in job.history]


@under_each([1, 3])
def test_a_quorum_of_all_and_an_unbounded_grace_are_diloco(workers: int, game: Game) -> None:
    job = played(f"diloco:4,quorum={workers},grace=inf", replace(game, workers=workers))
    assert answers("diloco:4", job) == [unweighted(actions) for _, _, actions in job.history]


def unweighted(actions: list[Action]) -> list[Action]:
    return [replace(action, weights=()) if isinstance(action, Apply) else action for action in actions]


@pytest.mark.long
def test_the_games_reach_what_they_are_meant_to_reach() -> None:
    seen: dict[str, set[str]] = {sync: set() for sync in MODES}

    @every_mode
    def look(sync: str, game: Game) -> None:
        for job in play(sync, game):
            event, _, actions = job.history[-1]
            for ranks in merged(actions):
                seen[sync] |= {"some"} if len(ranks) < len(job.steps) else {"all"}
                seen[sync] |= {"tick merge"} if isinstance(event, Ticked) else set()
        seen[sync] |= {line["kind"] for line in job.lines}

    look()
    for sync, kinds in seen.items():
        assert {"join", "push", "release", "apply", "leave", "all"} <= kinds, sync
        timed = "grace=0" not in sync and "inf" not in sync
        assert ("some" in kinds) == ("inf" not in sync), sync
        assert ("tick merge" in kinds) == timed, sync
        assert ("discard" in kinds) <= ("drop" in sync), sync
    assert "discard" in seen["diloco:4,quorum=1,grace=0,drop=0"]


# Every order there is, of small jobs: the grace may be over at any moment, or never.


def walk(sync: str, workers: int, steps: int) -> int:
    """Go through all states of a job in which one worker may die and one may join or come back; the number of them."""
    first = Job(sync, workers, recording=False)
    seen: set[tuple[object, ...]] = set()
    unseen: list[tuple[Job, bool, bool]] = [(first, True, True)]
    while unseen:
        job, may_die, may_join = unseen.pop()
        key = (state_of(job), may_die, may_join)
        if key in seen:
            continue
        seen.add(key)
        look_at_state(job)
        for kind, worker in moves(job, steps, may_die, may_join):
            twin = job.fork()
            now = job.now + 0.001
            if kind == "push":
                actions = twin.push(worker, now)
            elif kind == "join":
                actions = twin.join(worker, now)
            elif kind == "tick":
                actions = twin.tick(max(now, min(twin.wakes)))
            else:
                actions = twin.leave(worker, "lost" if kind == "die" else "finished", now)
            look_at_merges(job, twin, kind, worker, actions)
            unseen.append((twin, may_die and kind != "die", may_join and (kind != "join" or worker in job.awaited)))
    return len(seen)


def state_of(job: Job) -> tuple[object, ...]:
    """All that can influence what comes next; of anchors their age, and of moments whether the grace runs."""
    policy = job.policy
    ages = (
        {worker: policy._merges - anchor for worker, anchor in policy._anchor.items()}
        if policy._too_old.most is not None
        else {}
    )
    tables = (job.steps, job.released, ages)
    pending = sorted((push.worker, push.step) for push in policy._pending)
    timed = policy._reached is not None, any(at > job.now for at in job.wakes), policy._next if not job.steps else 0
    return (
        *(tuple(sorted(table.items())) for table in tables),
        tuple(sorted(job.awaited)),
        tuple(pending),
        tuple(sorted(policy._waiting)),
        timed,
    )


def moves(job: Job, steps: int, may_die: bool, may_join: bool) -> Iterator[tuple[str, int]]:
    for worker in job.computing():
        yield ("push" if job.steps[worker] < steps else "finish"), worker
    yield from (("join", worker) for worker in job.awaited)
    if may_die:
        yield from (("die", worker) for worker in (*job.steps, *job.awaited))
    if may_join:
        yield from (("join", worker) for worker in range(job.workers + 1) if worker not in {*job.steps, *job.awaited})
    if any(at > job.now for at in job.wakes):
        yield "tick", -1


def look_at_state(job: Job) -> None:
    if job.awaited:
        assert not job.computing()
    elif job.steps:
        assert job.computing(), "a dead end"
    else:
        assert not job.pending


def look_at_merges(before: Job, after: Job, kind: str, worker: int, actions: list[Action]) -> None:
    inside = ({*before.policy._waiting} | ({worker} if kind == "push" else set())) & after.steps.keys()
    for apply in only(Apply, actions):
        distinct = {push.worker for push in apply.pushes}
        assert len(distinct) >= before.policy.quorum or inside == after.steps.keys()
        assert len(apply.pushes) == len(before.pending) + (kind == "push")
        assert released(actions).keys() - {worker} == inside - {worker}
    if kind == "tick" and before.policy._reached is not None:
        assert after.now < before.policy._reached + before.policy.grace or only(Apply, actions)


#: Jobs, and the least number of states that their walk comes to.
WALKS = [
    ("diloco:4,quorum=1,grace=0", 2, 3, 230),
    ("diloco:4,quorum=2,grace=10,drop=1", 2, 3, 300),
    ("diloco:4,quorum=2,grace=0", 3, 2, 1000),
    ("diloco:4,quorum=2,grace=10", 3, 2, 1000),
    ("diloco:4,quorum=3,grace=10", 3, 2, 1000),
]
#: Ten seconds and more each: `make proof` walks them.
LONGER_WALKS = [("diloco:4,quorum=2,grace=10", 3, 3, 4000), ("diloco:4,quorum=2,grace=10,drop=1", 3, 3, 4000)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "states" in metafunc.fixturenames:
        walks = WALKS + LONGER_WALKS if metafunc.config.getoption("--proof") else WALKS
        metafunc.parametrize(("sync", "workers", "steps", "states"), walks)


@pytest.mark.long
def test_all_orders_of_a_small_job(sync: str, workers: int, steps: int, states: int) -> None:
    assert walk(sync, workers, steps) >= states


# The checker must be able to say no.

GRACE = "diloco:4,quorum=2,grace=1"


def record() -> list[RecordLine]:
    job = Job(GRACE, 3).start()
    for step in range(3):
        job.push(0, now=10.0 * step + 4)
        job.push(1, now=10.0 * step + 5)
        job.tick(now=10.0 * step + 6)
        job.push(2, now=10.0 * step + 7)
    return job.lines


def nth(lines: list[RecordLine], kind: str, number: int) -> int:
    return [index for index, line in enumerate(lines) if line["kind"] == kind][number]


def _below(lines: list[RecordLine]) -> None:
    at = nth(lines, "push", 1)
    apply = {**lines[nth(lines, "apply", 0)], "t": lines[at]["t"], "workers": [0], "staleness": [0]}
    lines.insert(at, apply)


def _early(lines: list[RecordLine]) -> None:
    at = nth(lines, "tick", 0)
    lines[at]["t"] = 5.5
    for line in lines[at + 1 : at + 4]:
        line["t"] = 5.5


def _late(lines: list[RecordLine]) -> None:
    at = nth(lines, "tick", 0)
    lines.insert(at, {"t": 6.0, "kind": "tick"})


def _without_one(lines: list[RecordLine]) -> None:
    lines[nth(lines, "apply", 0)].update(workers=[0], staleness=[0])


def _released_unmerged(lines: list[RecordLine]) -> None:
    at = nth(lines, "push", 0)
    lines.insert(at + 1, {"t": lines[at]["t"], "kind": "release", "worker": 0, "step": 1, "slowest": 0, "period": 4})


def _all_in(lines: list[RecordLine]) -> None:
    at = nth(lines, "push", 2)
    tick = nth(lines, "tick", 0)
    lines.insert(tick, {**lines.pop(at), "t": 5.0})


def _dropped(lines: list[RecordLine]) -> None:
    at = nth(lines, "push", 0)
    reason = {"worker": 0, "step": 0, "reason": "staleness 3 is above 2"}
    lines.insert(at + 1, {"t": lines[at]["t"], "kind": "discard", **reason})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_below, "merged with 1 workers, the quorum is 2"),
        (_early, "merged before 6 s without all workers"),
        (_late, "no merge, although the grace was over at 6 s"),
        (_without_one, "pending are the pushes of [0, 1]"),
        (_released_unmerged, "released although its push is not merged"),
        (_all_in, "all active workers have pushed, and there is no merge"),
        (_dropped, "discarded, although the mode applies every push"),
    ],
    ids=lambda case: case.__name__ if callable(case) else "",
)
def test_the_checker_sees_a_wrong_merge(damage: Callable[[list[RecordLine]], None], says: str) -> None:
    lines = copy.deepcopy(record())
    check_lines(lines, parse_spec(GRACE), 3)
    damage(lines)
    with pytest.raises(BrokenInvariant) as caught:
        check_lines(lines, parse_spec(GRACE), 3)
    assert says in str(caught.value)


def test_the_checker_knows_drops_apart() -> None:
    job = Job("diloco:4,quorum=1,grace=0,drop=1", 2).start()
    for _ in range(3):
        job.push(0)
    job.push(1)
    check_lines(job.lines, parse_spec("diloco:4,quorum=1,grace=0,drop=1"), 2)
    replay(job.lines, parse_spec("diloco:4,quorum=1,grace=0,drop=1").policy(2))
    with pytest.raises(BrokenInvariant, match="discarded, although the mode applies every push"):
        check_lines(job.lines, parse_spec("diloco:4,quorum=1,grace=0,drop=2"), 2)
    with pytest.raises(BrokenInvariant, match="discarded, although"):
        check_lines(job.lines, parse_spec("diloco:4,quorum=1,grace=0"), 2)


def test_replay_sees_another_quorum_and_another_grace() -> None:
    for other in ("diloco:4,quorum=1,grace=1", "diloco:4,quorum=3,grace=1", "diloco:4,quorum=2,grace=2"):
        with pytest.raises(BrokenInvariant, match="replay"):
            replay(record(), parse_spec(other).policy(3))


def test_a_drop_after_a_merge_of_the_same_worker_alone_replays() -> None:
    """A discard that the policy itself decides is not taken for one that stands in the place of an update."""
    sync = "diloco:4,quorum=1,grace=1,drop=0"
    job = Job(sync, 2).start()
    job.push(0, now=1.0)
    job.leave(0, "lost", now=1.1)
    job.join(0, now=1.2)
    assert merged(job.tick(now=2.0)) == [[0]]  # of its first life
    assert only(Discard, job.push(0, now=3.0)) == [Discard(0, 0, "staleness 1 is above 0")]
    assert merged(job.push(1, now=4.0)) == []
    check_lines(job.lines, parse_spec(sync), 2)
    replay(job.lines, parse_spec(sync).policy(2))


def test_joined_and_left_before_the_start_merge_nothing() -> None:
    job = Job("diloco:4,quorum=2,grace=0", 3)
    job.feed(Joined(0))
    job.feed(Left(1, "lost"))
    assert merged(job.feed(Joined(2))) == []
    assert job.computing() == [0, 2]

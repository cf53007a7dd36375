"""What must hold for every mode in every order of events: random jobs, with a second opinion written from the contract.

A game is a list of numbers; each number is a move (push, join, leave, tick), made by whoever can make it. So every game can
be played under every mode, and a failing one shrinks to a few moves.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from driving import Job
from hypothesis import given, note, settings
from hypothesis import strategies as st

from polytempo.records.check import check_lines
from polytempo.records.files import to_text
from polytempo.records.replay import replay
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Release, Wake
from polytempo.sync.directives import NextDeadline
from polytempo.sync.events import Event, Joined, Left, Pushed, Ticked
from polytempo.sync.spec import parse_spec

BARRIERS = ("bsp", "bsp+backup:1", "bsp+backup:2")
EAGER = ("asp", "asp,scale=1", "ssp:0", "ssp:1", "ssp:3,scale=0.5", "every:1", "every:3", "delay:0", "delay:2", "asup")
WARM = ("downpour", "downpour:push=2,warm=5", "downpour:warm=3,scale=2")
TIMED = ("dssp:0..2", "dssp:1..4", "dssp-paper:1..4", "every:3,wait=0.5", "every:2,wait=2,scale=3")
NEIGHBOURS = ("gossip:ring", "gossip:exp", "adpsgd:ring")
DEADLINES = ("anytime:2", "anytime:auto", "anytime:0.3,divide=actual")
PLANNED = ("bsp+balance", "bsp+balance,micro=2,most=4", *DEADLINES)
MODES = (*BARRIERS, *PLANNED, *EAGER, "asup,bound=1", *WARM, *TIMED, *NEIGHBOURS)

moderately = settings(max_examples=60, deadline=None, derandomize=True, database=None)

KINDS = (*["push"] * 8, "join", "leave", "tick")
REASONS = ("finished", "failed", "lost")
PAUSES = (0.0, 1.0, 0.25, 3.5)
NEWCOMERS = 2


@dataclass(frozen=True)
class Game:
    """So many initial workers, what happens before they are all there, and what happens then."""

    workers: int
    opening: list[int]
    moves: list[int]


MOVE = st.integers(0, len(KINDS) * 16 * len(PAUSES) - 1)
MOVES = st.lists(MOVE, max_size=12) | st.lists(MOVE, min_size=30, max_size=90)
GAMES = st.builds(Game, st.integers(1, 5), st.lists(MOVE, max_size=6), MOVES)


def under_each(cases: Sequence[Any]) -> Callable[[Callable[[Any, Game], None]], Callable[[], None]]:
    """A test with one case after the other on each game: to make up a game takes longer than to play it."""

    def decorate(look: Callable[[Any, Game], None]) -> Callable[[], None]:
        def test(game: Game) -> None:
            for case in cases:
                note(f"under {case}")  # the last one is the one that failed
                look(case, game)

        test.__name__, test.__doc__ = look.__name__, look.__doc__  # games depend on the name: each test has its own
        return given(game=GAMES)(moderately(test))

    return decorate


every_mode = under_each(MODES)


def workers_for(sync: str, game: Game) -> int:
    """The game's workers; `bsp+backup:b` needs more than b, a quorum as many as it is, a torus rows and columns."""
    if "torus" in sync:
        return {1: 1, 5: 6, 7: 8}.get(game.workers, max(game.workers, 4))
    backups = int(sync.removeprefix("bsp+backup:")) if "backup" in sync else 0
    quorum = int(sync.partition("quorum=")[2].partition(",")[0] or 1)
    return max(game.workers, backups + 1, quorum)


def play(sync: str, game: Game) -> Iterator[Job]:
    """Play a game under a mode; the job is given out after each event."""
    job = Job(sync, workers_for(sync, game))
    for number in game.opening:
        if make_move(job, number):
            yield job
    for worker in sorted(job.awaited):
        job.join(worker)
        yield job
    for number in game.moves:
        if make_move(job, number):
            yield job


def make_move(job: Job, number: int) -> bool:
    """Make the move that a number stands for, if anybody can."""
    kind, pick, pause = number % len(KINDS), number // len(KINDS) % 16, number // len(KINDS) // 16
    now = job.now + PAUSES[pause]
    if KINDS[kind] == "push":
        return chosen(job.computing(), pick, lambda worker: job.push(worker, now))
    if KINDS[kind] == "join":
        absent = [rank for rank in range(job.workers + NEWCOMERS) if rank not in job.steps]
        return chosen(absent, pick, lambda worker: job.join(worker, now))
    if KINDS[kind] == "leave":
        anybody = sorted(job.steps.keys() | job.awaited)
        return chosen(anybody, pick, lambda worker: job.leave(worker, REASONS[pick % 3], now))
    return chosen(job.wakes, pick, lambda at: job.tick(max(at, now)))


def chosen(candidates, pick: int, act) -> bool:
    """Let the picked one act; false when there is none."""
    if not candidates:
        return False
    act(candidates[pick % len(candidates)])
    return True


def played(sync: str, game: Game) -> Job:
    """A job in which a whole game was played."""
    job = Job(sync, workers_for(sync, game))
    for job in play(sync, game):  # noqa: B007
        pass
    return job


def drain(job: Job, fastest_first: bool) -> None:
    """Everybody does a few more steps and finishes; only those who compute can do anything, and only due wakes tick."""
    goal = max(job.steps.values(), default=0) + 3
    for worker in sorted(job.awaited):
        job.join(worker)
    while job.steps:
        able = sorted(job.computing(), key=lambda worker: job.steps[worker], reverse=fastest_first)
        if not able:
            assert job.wakes, f"nobody can do anything: {job.policy.holds()}"
            job.tick()
        elif job.steps[able[0]] < goal:
            job.push(able[0], job.now + 1)
        else:
            job.leave(able[0], now=job.now + 1)


# The second opinion: the contract's words, in their plainest form.


class Opinion:
    """What the contract says of one mode. `look` is called after each event and knows no more than the orders."""

    def __init__(self, sync: str, workers: int) -> None:
        head, *options = sync.split(",")
        self.name, _, self.argument = head.partition(":")
        self.options = dict(option.split("=") for option in options)
        self.workers = workers
        self._started: set[tuple[int, int]] = set()

    def free(self, step: int, slowest: int) -> bool:
        """A worker may not be kept from this step."""
        raise NotImplementedError

    def allowed(self, step: int, slowest: int) -> bool:
        """A worker may be released for this step."""
        return self.free(step, slowest)

    def look(self, job: Job) -> None:
        event, now, actions = job.history[-1]
        self.happened(job, event, now, actions)
        for release in only(Release, actions):
            self.look_at_release(job, release)
        if isinstance(event, Left):
            self._started = {(worker, step) for worker, step in self._started if worker != event.worker}
        if job.awaited:
            assert job.held == job.steps, "somebody does not wait for the start"
        elif job.steps:
            self.look_at_members(job)

    def happened(self, job: Job, event: Event, now: float, actions: list[Action]) -> None:
        """For those who must remember."""

    def look_at_release(self, job: Job, release: Release) -> None:
        worker, step = release.worker, release.step
        assert not job.awaited, "released before all initial workers joined"
        assert release.slowest == job.slowest()
        assert self.allowed(step, job.slowest()), f"{release} breaks {self.name}:{self.argument}"
        assert (worker, step) not in self._started, "released twice"
        self._started.add((worker, step))
        ahead = {"delay": self.argument, "downpour": 1}.get(self.name, 0)
        assert job.steps[worker] <= step <= job.steps[worker] + int(ahead)

    def look_at_members(self, job: Job) -> None:
        computing = job.computing()
        assert computing, "nobody can push"
        for worker, step in job.steps.items():
            assert (worker in job.held) != (worker in computing)
            if worker in job.held:
                assert job.held[worker] == step
                assert not self.free(step, job.slowest()), f"worker {worker} is held for step {step} without need"


class Open(Opinion):
    """asp, delay: nobody is ever kept from anything."""

    def free(self, step: int, slowest: int) -> bool:
        return True


class Bounded(Opinion):
    """ssp, and asup with a bound: c - min <= s."""

    def free(self, step: int, slowest: int) -> bool:
        return step - slowest <= int(self.options.get("bound", self.argument or 1000))


class Warmed(Opinion):
    """downpour: nobody is kept, but during the warm start all except one, the lowest of those who could have been it."""

    def __init__(self, sync: str, workers: int) -> None:
        super().__init__(sync.replace(":", ","), workers)
        self.needed = -(-int(self.options.get("warm", 0)) // int(self.options.get("push", 1)))
        self.alone: int | None = None
        self.pushes = 0

    def free(self, step: int, slowest: int) -> bool:
        return self.pushes >= self.needed

    def allowed(self, step: int, slowest: int) -> bool:
        return True

    def happened(self, job: Job, event: Event, now: float, actions: list[Action]) -> None:
        self.pushes += isinstance(event, Pushed)
        waited = set(job.steps) if self.alone not in job.steps else set()
        self.alone = self.alone if self.alone in job.steps else None
        if not self.free(0, 0) and not job.awaited and waited:
            self.alone = min(waited)
            assert only(Release, actions) == [
                Release(self.alone, job.steps[self.alone] + more, job.slowest()) for more in (0, 1)
            ]

    def look_at_members(self, job: Job) -> None:
        super().look_at_members(job)
        assert self.free(0, 0) or job.computing() == [self.alone]
        assert all(hold.waiting_for == (self.alone,) for hold in job.policy.holds())


class Dynamic(Opinion):
    """dssp: held only beyond l, and always beyond u; as printed there is no u."""

    def free(self, step: int, slowest: int) -> bool:
        return step - slowest <= int(self.argument.split("..")[0])

    def allowed(self, step: int, slowest: int) -> bool:
        return self.name == "dssp-paper" or step - slowest <= int(self.argument.split("..")[1])


class Blocks(Opinion):
    """every: floor(c/k) <= floor(min/k); with `wait`, or x steps' time after the first one came to the barrier."""

    def __init__(self, sync: str, workers: int) -> None:
        super().__init__(sync, workers)
        self.period = int(self.argument)
        self.opened = 0
        self.deadlines: dict[int, float] = {}
        self.since: dict[int, float] = {}
        self.took: dict[int, list[float]] = defaultdict(list)  # by each worker, in its present block

    def free(self, step: int, slowest: int) -> bool:
        block = step // self.period
        return block <= slowest // self.period or block <= self.opened

    def happened(self, job: Job, event: Event, now: float, actions: list[Action]) -> None:
        if isinstance(event, Pushed):
            if event.step % self.period == 0:
                self.took[event.worker].clear()
            self.took[event.worker].append(now - self.since[event.worker])
        if isinstance(event, Left):
            self.took.pop(event.worker, None)
        if isinstance(event, Ticked):
            self.opened = max([self.opened, *(block for block, at in self.deadlines.items() if at <= now)])
        self.since.update((release.worker, now) for release in only(Release, actions))
        if not job.awaited and "wait" in self.options:
            self.look_at_holds(actions, now)
        else:
            assert not only(Wake, actions)

    def look_at_holds(self, actions: list[Action], now: float) -> None:
        """The first one at a barrier sets its deadline, and nobody else."""
        expected = []
        for hold in only(Hold, actions):
            block, took = hold.step // self.period, self.took[hold.worker]
            if block not in self.deadlines:
                self.deadlines[block] = now + float(self.options["wait"]) * sum(took) / len(took)
                expected.append(pytest.approx(self.deadlines[block]))
        assert [wake.at for wake in only(Wake, actions)] == expected


class Rounds(Opinion):
    """bsp: a round closes when all have pushed; with b backups, when n - b have, or all who still can."""

    def __init__(self, sync: str, workers: int) -> None:
        super().__init__(sync, workers)
        self.backups = int(self.argument or 0)
        self.round = 0
        self.arrived: set[int] = set()  # members whose push is in the open round
        self.left_theirs = 0  # pushes in the open round whose workers have left since

    def needed(self, job: Job) -> int:
        present = len(job.steps) + self.left_theirs
        return min(max(self.workers, present) - self.backups, present)

    def happened(self, job: Job, event: Event, now: float, actions: list[Action]) -> None:
        dropped = only(Discard, actions)
        if isinstance(event, Pushed) and not dropped:
            self.arrived.add(event.worker)
        if isinstance(event, Pushed) and dropped:
            assert self.backups, "only backup workers are late"
            assert event.step < self.round
        if isinstance(event, Left) and event.worker in self.arrived:
            self.arrived.discard(event.worker)
            self.left_theirs += 1
        for apply in only(Apply, actions):
            self.close(job, apply)
        count = len(self.arrived) + self.left_theirs
        assert count == 0 or count < self.needed(job), "a round that could close is open"

    def close(self, job: Job, apply: Apply) -> None:
        assert len(apply.pushes) == len(self.arrived) + self.left_theirs >= self.needed(job)
        assert {push.step for push in apply.pushes} == {self.round}
        self.round += 1
        self.arrived.clear()
        self.left_theirs = 0

    def free(self, step: int, slowest: int) -> bool:
        return step <= self.round  # bsp: the round is the slowest one's step

    def look_at_members(self, job: Job) -> None:
        super().look_at_members(job)
        assert set(job.held) == self.arrived
        assert self.backups or job.slowest() == self.round


class PlannedRounds(Opinion):
    """bsp+balance, anytime: a round closes when all who are in it have pushed; at a deadline's wake without the others. Who
    joins or is late waits for the next."""

    def __init__(self, sync: str, workers: int) -> None:
        super().__init__(sync, workers)
        self.round = 0
        self.inside: set[int] = set()  # they compute for the open round
        self.arrived: list[int] = []  # ranks of pushes in it
        self.later: set[int] = set()  # they wait for the next
        self.wakes: list[float] = []

    def happened(self, job: Job, event: Event, now: float, actions: list[Action]) -> None:
        worker, dropped = getattr(event, "worker", -1), only(Discard, actions)
        if isinstance(event, Pushed):
            assert (worker in self.inside) == (not dropped), "an overdue worker's push is discarded, and no other"
            self.inside.discard(worker)
            self.arrived += [worker] if not dropped else []
            self.later |= {worker} if dropped else set()
        elif isinstance(event, Left):
            self.inside.discard(worker)
            self.later.discard(worker)
        elif isinstance(event, Joined) and not job.awaited and (self.inside or self.arrived):
            self.later.add(worker)
        for apply in only(Apply, actions):
            self.close(job, event, now, apply, actions)
        if not only(Apply, actions):
            assert self.inside or not (self.arrived or self.later), "a round that could close is open"
            self.inside |= {release.worker for release in only(Release, actions)}
        self.wakes += [wake.at for wake in only(Wake, actions)]

    def close(self, job: Job, event: Event, now: float, apply: Apply, actions: list[Action]) -> None:
        assert [push.worker for push in apply.pushes] == sorted(self.arrived)
        if self.inside:
            assert isinstance(event, Ticked), "closed without workers that are not overdue"
            assert any(at <= now for at in self.wakes)
        released = only(Release, actions)
        assert {release.worker for release in released} == (set(self.arrived) | self.later) & job.steps.keys()
        assert {release.step for release in released} <= {self.round + 1}
        assert len({deadline_of(release) for release in released}) <= 1
        self.round += 1
        self.inside, self.arrived, self.later, self.wakes = {release.worker for release in released}, [], set(), []

    def free(self, step: int, slowest: int) -> bool:
        return step <= self.round

    def look_at_members(self, job: Job) -> None:
        super().look_at_members(job)
        assert set(job.held) == (set(self.arrived) | self.later) & job.steps.keys()


def deadline_of(release: Release) -> object:
    told = release.directive
    return (told.seconds, told.catching_up) if isinstance(told, NextDeadline) else None


class Neighbours(Opinion):
    """gossip: held exactly while a neighbour, in or out, of the step it pushed has neither pushed it nor left."""

    def __init__(self, sync: str, workers: int) -> None:
        super().__init__(sync, workers)
        self.neighbours: dict[tuple[int, int], list[int]] = {}  # (worker, step): its neighbours, in and out

    def happened(self, job: Job, event: Event, now: float, actions: list[Action]) -> None:
        if isinstance(event, Left):
            self.neighbours = {key: others for key, others in self.neighbours.items() if key[0] != event.worker}
        for release in only(Release, actions):
            assert not self.missing(job, release.worker), "released although a neighbour has not pushed"
            row = release.directive.mixing
            pairs = (*row.send, *row.receive) if row else ()
            self.neighbours[release.worker, release.step] = sorted({other for other, _ in pairs})

    def missing(self, job: Job, worker: int) -> list[int]:
        step = job.steps[worker]
        return [other for other in self.neighbours.get((worker, step - 1), []) if job.steps.get(other, step) < step]

    def allowed(self, step: int, slowest: int) -> bool:
        return True

    def look_at_members(self, job: Job) -> None:
        assert job.computing(), "nobody can push"
        for worker in job.steps:
            assert (worker in job.held) != (worker in job.computing())
            if worker in job.held:
                assert self.missing(job, worker), f"worker {worker} is held without need"
        for hold in job.policy.holds():
            assert sorted(hold.waiting_for) == sorted(self.missing(job, hold.worker))


OPINIONS = {
    "gossip": Neighbours,
    "adpsgd": Open,
    "asp": Open,
    "delay": Open,
    "asup": Bounded,
    "downpour": Warmed,
    "ssp": Bounded,
    "dssp": Dynamic,
    "dssp-paper": Dynamic,
    "every": Blocks,
    "bsp": Rounds,
    "bsp+backup": Rounds,
    "bsp+balance": PlannedRounds,
    "anytime": PlannedRounds,
}


def opinion_on(sync: str, workers: int) -> Opinion:
    name = sync.split(",")[0].split(":")[0]
    return OPINIONS[name](sync, workers)


def only(kind, actions: list[Action]) -> list:
    return [action for action in actions if isinstance(action, kind)]


# Every mode, every order.


@every_mode
def test_the_record_passes_the_checker_and_replays_from_its_text(sync: str, game: Game) -> None:
    job = played(sync, game)
    assert check_lines(job.lines, parse_spec(sync), job.workers) == len(job.lines)
    lines = [json.loads(to_text(line)) for line in job.lines]
    decided = [line for line in lines if line["kind"] not in ("push", "leave", "tick")]
    assert replay(lines, parse_spec(sync).policy(job.workers)) == len(decided)


@every_mode
def test_the_bound_holds_and_nobody_waits_without_need(sync: str, game: Game) -> None:
    opinion = opinion_on(sync, workers_for(sync, game))
    for job in play(sync, game):
        opinion.look(job)


@every_mode
def test_every_accepted_push_is_applied_once_at_the_right_rate(sync: str, game: Game) -> None:
    for job in play(sync, game):
        event, _, actions = job.history[-1]
        updates = only(Apply, actions)
        if sync in BARRIERS:
            look_at_round(updates)
            assert all(update.pushes for update in updates)
        elif sync in PLANNED:
            look_at_round(updates)
        else:
            look_at_single_updates(event, updates, rate_of(sync, job))
            assert not job.pending
    drain(job, fastest_first=False)
    assert not job.pending  # the driver has already made sure that none was applied twice


def look_at_round(updates: list[Apply]) -> None:
    for update in updates:
        ranks = [push.worker for push in update.pushes]
        assert ranks == sorted(ranks)
        assert update.rate == 1


def look_at_single_updates(event: Event, updates: list[Apply], rate: float) -> None:
    expected = [(event,)] if isinstance(event, Pushed) else []
    assert [update.pushes for update in updates] == expected
    assert all(update.rate == rate for update in updates)


def rate_of(sync: str, job: Job) -> float:
    _, _, scale = sync.partition("scale=")
    if sync in NEIGHBOURS:  # each step is whole, on the worker's own model
        return 1.0
    return float(scale) if scale else 1 / max(len(job.steps), 1)


@every_mode
def test_nobody_is_held_for_ever(sync: str, game: Game) -> None:
    job = played(sync, game)
    for twin, fastest_first in ((job.fork(), True), (job, False)):
        drain(twin, fastest_first)
        assert not twin.held
        assert not twin.pending
        assert twin.policy.holds() == []


@every_mode
def test_each_death_frees_the_rest_in_the_same_call(sync: str, game: Game) -> None:
    job = played(sync, game).start()
    while job.steps:
        able = job.computing()
        assert able, f"all who could push are dead, and still held: {job.held}"
        job.leave(able[0], "lost")
    assert not job.pending


@pytest.mark.long
@every_mode
def test_a_leave_holds_nobody_back(sync: str, game: Game) -> None:
    job = played(sync, game)
    able = set(job.computing())
    going_on = goes_on_at_once(job, able)
    for leaver in sorted(job.steps):
        twin = job.fork()
        assert not only(Hold, twin.leave(leaver, "lost"))
        assert able - {leaver} <= set(twin.computing())
        if sync not in TIMED + DEADLINES:  # a forecast, or a deadline, may come out otherwise with another slowest worker
            assert going_on - {leaver} <= goes_on_at_once(twin, able - {leaver})


def goes_on_at_once(job: Job, workers: set[int]) -> set[int]:
    """Of these workers those who, pushing now, would not be held."""
    after = {worker: job.fork() for worker in workers}
    for worker, twin in after.items():
        twin.push(worker)
    return {worker for worker, twin in after.items() if worker in twin.computing()}


@every_mode
def test_the_same_events_give_the_same_actions(sync: str, game: Game) -> None:
    job = played(sync, game)
    assert answers(sync, job) == [actions for _, _, actions in job.history]


@every_mode
def test_without_explanations_the_decisions_are_the_same(sync: str, game: Game) -> None:
    job = played(sync, game)
    quiet = answers(sync, job, explains=False)
    assert [bare(actions) for actions in quiet] == [bare(actions) for _, _, actions in job.history]


@under_each(
    [
        ("dssp:0..0", "ssp:0"),
        ("dssp:2..2", "ssp:2"),
        ("delay:0", "asp"),
        ("ssp:1000", "asp"),
        ("every:1000", "asp"),
        ("asup", "asp"),
        ("asup,bound=2,momentum=0.5", "ssp:2"),
        ("downpour:push=3,fetch=2", "delay:1"),
        ("asp,drop=1,lr=staleness", "asp"),
        ("ssp:1,dc=1,momentum=async", "ssp:1"),
    ]
)
def test_modes_that_are_one_and_the_same(pair: tuple[str, str], game: Game) -> None:
    sync, same_as = pair
    job = played(sync, game)
    assert answers(same_as, job) == [actions for _, _, actions in job.history]


@under_each([("every:1", "ssp:0"), ("dssp-paper:2..2", "ssp:2"), ("bsp", "ssp:0")])
def test_modes_that_decide_alike_with_other_words(pair: tuple[str, str], game: Game) -> None:
    sync, same_as = pair
    job = played(sync, without_leaves(game) if sync == "bsp" else game)
    decided = [without_updates(actions) for _, _, actions in job.history]
    assert [without_updates(actions) for actions in answers(same_as, job)] == decided


def answers(sync: str, job: Job, explains: bool = True) -> list[list[Action]]:
    """What a fresh policy says to a job's events."""
    policy = parse_spec(sync).policy(job.workers)
    policy.explains = explains
    return [policy.handle(event, now) for event, now, _ in job.history]


def bare(actions: list[Action]) -> list[Action]:
    """Holds without names and reasons."""
    plain = {"waiting_for": (), "waiting_count": 0, "reason": ""}
    return [replace(action, **plain) if isinstance(action, Hold) else action for action in actions]


def without_updates(actions: list[Action]) -> list[Action]:
    """Who is admitted, held and released, without reasons."""
    decided = [action for action in actions if isinstance(action, Admit | Hold | Release)]
    return [replace(action, reason="") if isinstance(action, Hold) else action for action in decided]


def without_leaves(game: Game) -> Game:
    """The same game, but nobody leaves: a round closes on a death only if somebody has pushed, an open bound at once."""
    stays = [number for number in game.moves if KINDS[number % len(KINDS)] != "leave"]
    return replace(game, opening=[], moves=stays)


# Directed: what random jobs might not reach.


@pytest.mark.parametrize("bound", [0, 1, 3, 7])
def test_ssp_lets_a_worker_exactly_s_ahead_and_shows_a_gap_of_one_more(bound: int) -> None:
    job = Job(f"ssp:{bound}", 2).start()
    leads = []
    while 0 in job.computing():
        leads.append(job.steps[0] - job.slowest())
        job.push(0)
    assert max(leads) == bound
    assert job.steps[0] - job.steps[1] == bound + 1
    assert job.held == {0: bound + 1}
    assert Release(0, bound + 1, 1) in job.push(1)


@pytest.mark.parametrize(
    ("sync", "ahead"), [("bsp", 0), ("ssp:2", 2), ("dssp:2..2", 2), ("dssp-paper:2..2", 2), ("every:3", 2)]
)
def test_a_dead_slowest_worker_frees_everybody_in_the_same_call(sync: str, ahead: int) -> None:
    job = Job(sync, 4).start()
    for _ in range(ahead + 1):
        for worker in (1, 2, 3):
            job.push(worker)
    assert job.held == {1: ahead + 1, 2: ahead + 1, 3: ahead + 1}
    released = only(Release, job.leave(0, "lost"))
    assert [(release.worker, release.step, release.slowest) for release in released] == [
        (worker, ahead + 1, ahead + 1) for worker in (1, 2, 3)
    ]


def test_every_stops_at_the_multiple_and_not_k_ahead() -> None:
    job = Job("every:4", 2).start()
    for _ in range(3):
        job.push(1)
    for _ in range(4):
        job.push(0)
    assert job.held == {0: 4}  # 1 ahead, at the barrier
    actions = job.push(1)
    assert only(Release, actions) == [Release(0, 4, 4), Release(1, 4, 4)]
    for _ in range(3):
        job.push(0)
    assert job.computing() == [0, 1]  # 3 ahead, inside a block


def test_a_soft_barrier_opens_when_its_time_is_over_and_not_before() -> None:
    job = Job("every:2,wait=3", 2).start()
    job.push(0, now=1.0)
    actions = job.push(0, now=3.0)  # two steps in 3 s: a step's time is 1.5 s
    assert only(Wake, actions) == [Wake(3.0 + 3 * 1.5)]
    assert not only(Release, job.tick(now=7.4))
    assert only(Release, job.tick(now=7.5)) == [Release(0, 2, 0)]
    assert not only(Hold, job.push(1, now=8.0))  # the late one walks through
    assert not only(Hold, job.push(1, now=9.0))


def test_a_soft_barrier_that_opened_by_itself_needs_no_tick() -> None:
    job = Job("every:1,wait=1", 2).start()
    job.push(0, now=1.0)
    assert only(Release, job.push(1, now=1.5)) == [Release(0, 1, 1), Release(1, 1, 1)]
    job.push(0, now=2.0)
    assert only(Release, job.tick(now=2.0)) == []  # the wake of the first barrier frees nobody at the second
    assert job.held == {0: 2}


def test_delay_releases_so_many_steps_at_the_start_and_one_for_each_push() -> None:
    job = Job("delay:2", 1)
    assert only(Release, job.join(0)) == [Release(0, step, 0) for step in (0, 1, 2)]
    assert only(Release, job.push(0)) == [Release(0, 3, 1)]
    assert only(Release, job.push(0)) == [Release(0, 4, 2)]


def test_a_single_worker_is_never_held() -> None:
    for sync in ("bsp", "asp", "ssp:0", "dssp:0..0", "dssp-paper:0..0", "every:1", "every:1,wait=1", "delay:0"):
        job = Job(sync, 1).start()
        for step in range(5):
            actions = job.push(0, now=float(step))
            assert [type(action) for action in actions] == [Apply, Release], sync
            assert actions[0].rate == 1


def test_a_game_reaches_what_it_is_meant_to_reach() -> None:
    """The games are worth something only if they hold, discard, tick, leave and come back."""
    seen: dict[str, set[str]] = {sync: set() for sync in MODES}

    @settings(moderately, max_examples=40)
    @given(game=GAMES)
    def look(game: Game) -> None:
        for sync in MODES:
            job = played(sync, game)
            seen[sync] |= {line["kind"] for line in job.lines}
            joins = [event.worker for event, _, _ in job.history if isinstance(event, Joined)]
            seen[sync] |= {"return"} if len(set(joins)) < len(joins) else set()

    look()
    everywhere = {"join", "push", "release", "apply", "leave", "hold", "return"}
    for sync, kinds in seen.items():
        assert everywhere <= kinds, sync
    assert all("tick" in seen[sync] for sync in seen if "wait=" in sync or sync in DEADLINES)
    assert all("discard" in seen[sync] for sync in seen if "backup" in sync or sync in DEADLINES)

"""Every order in which a small job can happen: up to 3 workers and 4 steps each, one of whom may leave and one join at any moment.

The walk goes through all states that can be reached, each once. A state is everything that can influence what comes next:
the policy's whole memory (moments left out: here nothing depends on them) and what each worker is doing. Workers that have
done their steps finish at any later moment, if they compute; a held one cannot.

In every state: the bound holds, nobody is held without need, and whoever is not done can still get there, because somebody
can push. Every move brings the job nearer to its end, so a walk without a dead end proves that everything drains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from driving import Job

from polytempo.sync.actions import Action, Apply, Discard, Release
from polytempo.sync.dssp import DynamicBound
from polytempo.sync.eager import Eager
from polytempo.sync.events import Pushed
from polytempo.sync.policy import Policy
from polytempo.sync.spec import parse_spec

STEPS = 4
Move = tuple[str, int]
Rule = Callable[[int, int], bool]


@dataclass
class Oracle:
    """A forecast that says whatever it is told to say, and knows whether it was asked."""

    answer: int = 0
    asked: bool = False

    def __call__(self, last: float, interval: float, slow_last: float, slow_interval: float, most: int) -> int:
        self.asked = True
        return self.answer

    def __deepcopy__(self, memo: dict[int, Any]) -> Oracle:
        return self


@dataclass
class World:
    """A job, what may still befall it, and how many moves it took so far."""

    job: Job
    may_leave: bool = True
    may_join: bool = True
    left: frozenset[int] = frozenset()
    moves: int = 0

    def possible(self) -> Iterator[Move]:
        """All moves from here; the last two kinds need not happen."""
        job = self.job
        for worker in job.computing():
            yield ("push" if job.steps[worker] < STEPS else "finish"), worker
        for worker in job.awaited:
            yield "start", worker
        if self.may_leave:
            yield from (("die", worker) for worker in (*job.steps, *job.awaited))
        if self.may_join:
            known = {*job.steps, *job.awaited}
            yield from (("join", worker) for worker in range(job.workers + 1) if worker not in known)

    def after(self, move: Move) -> tuple[World, list[Action]]:
        """The world after a move, and what was ordered on it."""
        kind, worker = move
        left = self.left | {worker} if kind in ("die", "finish") else self.left
        twin = World(
            self.job.fork(), self.may_leave and kind != "die", self.may_join and kind != "join", left, self.moves + 1
        )
        now = 1 - 0.5**self.moves  # time passes, and so that nobody ever seems overdue
        if kind == "push":
            return twin, twin.job.push(worker, now)
        if kind in ("start", "join"):
            return twin, twin.job.join(worker, now)
        return twin, twin.job.leave(worker, "lost" if kind == "die" else "finished", now)

    def key(self) -> tuple[Any, ...]:
        """What tells this state from others."""
        job = self.job
        workers = [sorted(table.items()) for table in (job.steps, job.released, job.held)]
        at_slowest = {worker for worker, step in job.steps.items() if step == job.slowest()}
        comers = self.left if self.may_join else self.left & job.steps.keys()
        return snapshot([workers, sorted(job.awaited), self.may_leave, self.may_join, job.policy], at_slowest | comers)


def snapshot(value: Any, relevant: set[int]) -> Any:
    """A policy's memory as a value that can be compared, whatever it is made of; moments and functions are left out.

    Of the names in queues only some are `relevant`: of the slowest, and of those who left and may be back. A worker goes
    forward only, so where another has been cannot matter any more, and where it is now stands elsewhere.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) or callable(value):
        return None
    if isinstance(value, Pushed):
        return value.worker, value.step  # not its number
    if isinstance(value, dict):
        return tuple((key, snapshot(value[key], relevant)) for key in sorted(value))
    if isinstance(value, deque):
        return tuple(sorted(name for name in value if name in relevant))
    if is_heap(value):
        return tuple(name for _, name in sorted(value) if name in relevant)
    if isinstance(value, list | tuple | set):
        return tuple(snapshot(part, relevant) for part in (sorted(value) if isinstance(value, set) else value))
    names = getattr(value, "__slots__", None) or value.__dict__
    return tuple(snapshot(getattr(value, name), relevant) for name in names)


def is_heap(value: Any) -> bool:
    """Names in order of moments."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], tuple) and isinstance(value[0][0], float)


@dataclass
class Findings:
    """What a walk came across."""

    states: int = 0
    ends: int = 0
    largest_lead: int = 0
    kinds: set[str] = field(default_factory=set)


@dataclass
class Case:
    """A mode, what the contract says of it, and how many states its walk must at least have."""

    sync: str
    states: int
    free: Rule  # a worker may not be kept from this step while the slowest is there
    allowed: Rule | None = None  # it may be released, where that is not the same
    backups: int | None = None  # it has rounds
    answers: tuple[int, ...] = (0,)  # of the forecast
    lead: int = 0  # the largest that is reached


def walk(case: Case, workers: int) -> Findings:
    """Go through all states of a job, and look at each."""
    oracle = Oracle()
    first = World(Job(policy_of(case, workers, oracle), workers, recording=False))
    seen = {first.key()}
    unseen = [first]
    findings = Findings()
    while unseen:
        world = unseen.pop()
        look_at_state(world, findings)
        for move in world.possible():
            for twin, actions in outcomes(world, move, oracle, case.answers):
                look_at_move(case, world, move, twin, actions, findings)
                key = twin.key()
                if key not in seen:
                    seen.add(key)
                    unseen.append(twin)
    findings.states = len(seen)
    return findings


def policy_of(case: Case, workers: int, oracle: Oracle) -> Policy:
    spec = parse_spec(case.sync)
    if spec.mode.name == "dssp":
        return Eager(workers, DynamicBound(*spec.arguments[0], forecast=oracle))
    return spec.policy(workers)


def outcomes(world: World, move: Move, oracle: Oracle, answers: tuple[int, ...]) -> Iterator[tuple[World, list[Action]]]:
    """What can come of a move: one thing, or as many as the forecast can say."""
    for oracle.answer in answers:
        oracle.asked = False
        yield world.after(move)
        if not oracle.asked:
            return


def look_at_state(world: World, findings: Findings) -> None:
    job = world.job
    computing = set(job.computing())
    assert computing.isdisjoint(job.held)
    assert computing | job.held.keys() == job.steps.keys()
    if job.awaited:
        assert not computing, "somebody started before all were there"
    elif job.steps:
        assert computing, f"a dead end: {job.policy.holds()}"
    else:
        findings.ends += 1
        assert not job.pending, "everybody is gone and a push was never applied"
    assert {hold.worker: hold.step for hold in job.policy.holds()} == job.held


def look_at_move(case: Case, before: World, move: Move, after: World, actions: list[Action], findings: Findings) -> None:
    job = after.job
    findings.kinds |= {type(action).__name__ for action in actions}
    allowed = case.allowed or case.free
    for release in actions:
        if isinstance(release, Release):
            assert release.slowest == job.slowest()
            assert allowed(release.step, job.slowest()), f"{release} after {move}"
            findings.largest_lead = max(findings.largest_lead, release.step - release.slowest)
    if case.backups is not None:
        look_at_round(case.backups, before.job, move, job, actions)
    elif not job.awaited:
        assert not job.pending, "a push was not applied at once"
        for worker, step in job.held.items():
            assert not case.free(step, job.slowest()), f"worker {worker} is held without need after {move}"


def look_at_round(backups: int, before: Job, move: Move, job: Job, actions: list[Action]) -> None:
    """A round closes with all but `backups` of those who are there, at once and not earlier."""
    kind, worker = move
    updates = [action for action in actions if isinstance(action, Apply)]
    late = any(isinstance(action, Discard) for action in actions)
    pushes = len(before.pending) + (kind == "push" and not late)
    left_theirs = len(before.pending) - len(before.held) * (not before.awaited) + (kind == "die" and worker in before.held)
    present = len(job.steps) + left_theirs * (not before.awaited)
    needed = min(max(job.workers, present) - backups, present)
    assert len(updates) == (0 < needed <= pushes or (needed == 0 < pushes)), (
        f"{pushes} pushes, {needed} needed, after {move}"
    )
    assert all(len(update.pushes) == pushes for update in updates)
    assert late == (kind == "push" and before.steps[worker] < before.version)


def lead_of(case: Case) -> Rule:
    return case.allowed or case.free


CASES = [
    Case("bsp", 1000, free=lambda c, low: c <= low, backups=0),
    Case("bsp+backup:1", 1000, free=lambda c, low: True, backups=1),
    Case("asp", 1000, free=lambda c, low: True, lead=STEPS),
    Case("ssp:0", 1000, free=lambda c, low: c - low <= 0, lead=0),
    Case("ssp:1", 1000, free=lambda c, low: c - low <= 1, lead=1),
    Case("ssp:2", 1000, free=lambda c, low: c - low <= 2, lead=2),
    Case("every:2", 1000, free=lambda c, low: c // 2 <= low // 2, lead=1),
    Case("delay:1", 1000, free=lambda c, low: True, lead=STEPS + 1),
    Case("dssp:0..2", 1000, free=lambda c, low: c <= low, allowed=lambda c, low: c - low <= 2, answers=(0, 1, 2, 9), lead=2),
    Case(
        "dssp:1..2", 1000, free=lambda c, low: c - low <= 1, allowed=lambda c, low: c - low <= 2, answers=(0, 1, 5), lead=2
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.sync)
def test_all_orders_of_a_small_job(case: Case) -> None:
    findings = [walk(case, workers) for workers in (1, 2, 3) if workers > (case.backups or 0)]
    print(
        case.sync,
        [f.states for f in findings],
        [f.ends for f in findings],
        [f.largest_lead for f in findings],
        findings[-1].kinds,
    )

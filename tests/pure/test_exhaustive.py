"""Every order in which a small job can happen: up to 3 workers and 4 steps, where one may leave and one join at any moment.
(dssp, gossip, adpsgd, bsp+balance and anytime with 3 workers: fewer steps here, and 4 in `make proof`.)

The walk goes through all states that can be reached, each once. A state is everything that can influence what comes next:
the policy's whole memory (moments left out: here nothing depends on them) and what each worker is doing. A worker that has
done its steps finishes at any later moment, if it computes; a held one cannot.

In every state the bound holds, nobody is held without need, and somebody can push unless all are gone. Every move brings the
job nearer to its end, so a walk without a dead end shows that everything drains.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import NoneType
from typing import Any

import pytest
from driving import Job

from polytempo.sync.actions import Action, Apply, Discard, Release
from polytempo.sync.anytime import DeadlineBarrier, DeadlineRule
from polytempo.sync.asynchronous import AsynchronousPolicy
from polytempo.sync.barrier import Barrier, RoundRule
from polytempo.sync.dssp import DynamicBound
from polytempo.sync.events import Pushed
from polytempo.sync.gossip import GossipPolicy
from polytempo.sync.policy import Policy
from polytempo.sync.spec import parse_spec

Move = tuple[str, int]
Rule = Callable[[int, int], bool]


@dataclass(frozen=True)
class Size:
    """How large a job is, and what may befall it."""

    workers: int
    steps: int = 4
    leave: bool = True
    join: bool = True


SIZES = (Size(1), Size(2), Size(3))


@dataclass(frozen=True)
class Case:
    """A mode, what the contract says of it, and how much its walk must at least come across."""

    sync: str
    states: int
    lead: int | None  # the largest that a worker is released at; None: it depends on the size
    free: Rule  # a worker may not be kept from this step while the slowest is there
    allowed: Rule | None = None  # it may be released for it, where that is not the same
    backups: int | None = None  # of a mode with rounds
    answers: tuple[int, ...] = (0,)  # all that the forecast says
    planned: RoundRule | None = None  # of a mode whose rounds have shares or deadlines
    sizes: tuple[Size, ...] = SIZES


@dataclass
class Oracle:
    """A forecast that says whatever it is told to say, and knows whether it was asked."""

    answer: int = 0
    asked: bool = False

    def __call__(self, last: float, interval: float, slow_last: float, slow_interval: float, most: int) -> int:
        self.asked = True
        return self.answer

    def __reduce__(self) -> str:
        return "ORACLE"  # whoever copies a policy gets the same one


ORACLE = Oracle()


@dataclass(frozen=True)
class World:
    """A job, what may still befall it, and how it came here."""

    job: Job
    steps: int
    may_leave: bool
    may_join: bool
    left: frozenset[int] = frozenset()
    path: tuple[Move, ...] = ()

    def moves(self) -> Iterator[Move]:
        """All that can happen next; to die and to join is optional."""
        job = self.job
        for worker in job.computing():
            yield ("push" if job.steps[worker] < self.steps else "finish"), worker
        members = {*job.steps, *job.awaited}
        yield from (("start", worker) for worker in job.awaited)
        if job.wakes:
            yield "tick", -1
        if self.may_leave:
            yield from (("die", worker) for worker in members)
        if self.may_join:
            yield from (("join", worker) for worker in range(job.workers + 1) if worker not in members)

    @cached_property
    def thaw(self) -> Callable[[], Job]:
        """What makes another job like this one."""
        return self.job.frozen()

    def after(self, move: Move) -> tuple[World, list[Action]]:
        """The world after a move, and what was ordered on it."""
        kind, worker = move
        twin = World(
            self.thaw(),
            self.steps,
            self.may_leave and kind != "die",
            self.may_join and kind != "join",
            self.left | {worker} if kind in ("die", "finish") else self.left,
            (*self.path, move),
        )
        now = self.job.now + 0.5 ** (len(self.path) + 1)  # time passes, and so that nobody ever seems overdue
        if kind == "tick":
            return twin, twin.job.tick(max(self.job.wakes))
        if kind == "push":
            return twin, twin.job.push(worker, now)
        if kind in ("start", "join"):
            return twin, twin.job.join(worker, now)
        return twin, twin.job.leave(worker, "lost" if kind == "die" else "finished", now)

    def key(self) -> bytes:
        """What tells this state from others. As bytes: hundreds of thousands of nested tuples keep the collector busy."""
        job = self.job
        doing = [sorted(table.items()) for table in (job.steps, job.released, job.held)]
        at_slowest = {worker for worker, step in job.steps.items() if step == job.slowest()}
        comers = self.left if self.may_join else self.left & job.steps.keys()
        state = snapshot([doing, job.awaited, self.may_leave, self.may_join, job.policy], at_slowest | comers)
        return marshal.dumps(state, 2)  # later versions also tell which parts are the same object


ATOMS = frozenset((int, bool, str, NoneType))


def snapshot(value: Any, relevant: set[int]) -> Any:
    """A policy's memory as a value that can be compared, whatever it is made of; moments and functions are left out.

    Of the names in queues only some are `relevant`: of the slowest, and of those who left and may be back. A worker goes
    forward only, so where another has been cannot matter any more, and where it is now stands elsewhere.
    """
    kind = type(value)  # not isinstance: this is called tens of millions of times
    if kind in ATOMS:
        return value
    if kind is dict:
        names = sorted(value)
        return (*names, *parts_of([value[name] for name in names], relevant))
    if kind is list and is_heap(value):
        return tuple([name for _, name in sorted(value) if name in relevant])
    if kind is list or kind is tuple:
        return parts_of(value, relevant)
    if kind is set:
        return parts_of(sorted(value), relevant)
    if kind is deque:
        return tuple(sorted([name for name in value if name in relevant]))
    if kind is float or callable(value):
        return None
    if kind is Pushed:
        return value.worker, value.step  # not its number
    fields = getattr(value, "__slots__", None) or value.__dict__
    return parts_of([getattr(value, name) for name in fields], relevant)


def parts_of(values: Iterable[Any], relevant: set[int]) -> tuple[Any, ...]:
    return tuple([part if type(part) in ATOMS else snapshot(part, relevant) for part in values])  # a list: it is faster


def is_heap(value: list[Any]) -> bool:
    """Names in order of moments."""
    return bool(value) and type(value[0]) is tuple and type(value[0][0]) is float


# The walk.


@dataclass
class Findings:
    """What a walk came across."""

    states: int = 0
    ends: int = 0
    lead: int = 0
    orders: set[str] = field(default_factory=set)


def walk(case: Case, size: Size, findings: Findings) -> None:
    """Go through all states of a job, and look at each of them and at each move between them."""
    job = Job(policy_of(case, size.workers), size.workers, recording=False)
    first = World(job, size.steps, size.leave, size.join)
    seen, unseen = {first.key()}, [first]
    while unseen:
        world = unseen.pop()
        look_at_state(world, findings)
        for move in world.moves():
            for twin, actions in outcomes(world, move, case.answers):
                look_at_move(case, world, twin, actions, findings)
                key = twin.key()
                if key not in seen:
                    seen.add(key)
                    unseen.append(twin)
    findings.states += len(seen)


def policy_of(case: Case, workers: int) -> Policy:
    spec = parse_spec(case.sync)
    if case.planned is not None:
        rule = deepcopy(case.planned)
        return DeadlineBarrier(workers, rule) if isinstance(rule, DeadlineRule) else Barrier(workers, rule=rule)
    if spec.mode.name == "dssp":
        return AsynchronousPolicy(workers, DynamicBound(*spec.arguments[0], forecast=ORACLE))
    return spec.policy(workers)


def outcomes(world: World, move: Move, answers: tuple[int, ...]) -> Iterator[tuple[World, list[Action]]]:
    """What can come of a move: one thing, or as many as the forecast can say."""
    for ORACLE.answer in answers:
        ORACLE.asked = False
        yield world.after(move)
        if not ORACLE.asked:
            return


def look_at_state(world: World, findings: Findings) -> None:
    job, computing = world.job, set(world.job.computing())
    assert computing.isdisjoint(job.held), world.path
    assert computing | job.held.keys() == job.steps.keys(), world.path
    holds = job.policy.holds()
    assert {hold.worker: hold.step for hold in holds} == job.held, world.path
    for hold in holds if not job.awaited and isinstance(job.policy, GossipPolicy) else ():
        assert hold.waiting_for, f"held for nobody after {world.path}"
        assert all(job.steps[other] < hold.step for other in hold.waiting_for), f"{hold} after {world.path}"
    if job.awaited:
        assert not computing, f"somebody started before all were there: {world.path}"
    elif job.steps:
        assert computing, f"a dead end: {job.policy.holds()} after {world.path}"
    else:
        findings.ends += 1
        assert not job.pending, f"everybody is gone and a push was never applied: {world.path}"


def look_at_move(case: Case, before: World, after: World, actions: list[Action], findings: Findings) -> None:
    job, allowed = after.job, case.allowed or case.free
    for action in actions:
        findings.orders.add(type(action).__name__)
        if isinstance(action, Release):
            assert action.slowest == job.slowest(), f"{action} after {after.path}"
            assert allowed(action.step, job.slowest()), f"{action} after {after.path}"
            findings.lead = max(findings.lead, action.step - action.slowest)
    if before.job.awaited:
        return
    if case.planned is not None:
        look_at_planned(isinstance(case.planned, DeadlineRule), before.job, after, actions)
    elif case.backups is not None:
        look_at_round(case.backups, before.job, after, actions)
    else:
        assert not job.pending, f"a push was not applied at once: {after.path}"
        for worker, step in job.held.items():
            assert not case.free(step, job.slowest()), f"worker {worker} is held without need after {after.path}"


def look_at_round(backups: int, before: Job, after: World, actions: list[Action]) -> None:
    """A round closes with all but `backups` of those who are there, at once and not earlier; who is late is discarded."""
    job, (kind, worker) = after.job, after.path[-1]
    late = kind == "push" and before.steps[worker] < before.version
    assert late == any(isinstance(action, Discard) for action in actions), after.path
    pushes = len(before.pending) + (kind == "push" and not late)
    left_theirs = len(before.pending) - len(before.held) + (kind == "die" and worker in before.held)
    present = len(job.steps) + left_theirs
    needed = min(max(job.workers, present) - backups, present)
    closed = [len(action.pushes) for action in actions if isinstance(action, Apply)]
    assert closed == ([pushes] if 0 < needed <= pushes else []), f"{pushes} pushes, {needed} needed, after {after.path}"


def inside(job: Job) -> set[int]:
    """Those who compute for the open round; there has been one update for each round before it."""
    return {worker for worker in job.computing() if job.steps[worker] == job.version}


def look_at_planned(timed: bool, before: Job, after: World, actions: list[Action]) -> None:
    """A round closes when all who are in it have pushed or left; on a tick without the others, who are overdue from then on.
    Who waits is woken: by the last one who is inside, or by the clock."""
    job, (kind, worker) = after.job, after.path[-1]
    late = kind == "push" and before.steps[worker] < before.version
    assert late == any(isinstance(action, Discard) for action in actions), after.path
    if job.version > before.version:
        assert job.version == before.version + 1, f"two rounds closed at once: {after.path}"
        assert kind == "tick" or inside(before) <= {worker}, f"closed too early: {after.path}"
        assert not job.pending, after.path
        assert not job.held, f"somebody is held at the start of a round: {after.path}"
    if job.held:
        assert inside(job), f"held for nobody: {job.policy.holds()} after {after.path}"
        assert not timed or job.wakes, f"held, and no clock will ring: {after.path}"
        assert all(set(hold.waiting_for) <= inside(job) for hold in job.policy.holds()), after.path
    assert not job.pending or inside(job) or not job.steps, f"a push is left in a round of nobody: {after.path}"


class TimedRounds(DeadlineRule):
    """Deadlines that are never changed, as nothing is measured."""

    directive = RoundRule.directive  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(2.0)

    def _measure(self, push: Pushed) -> None:
        pass


class SharedRounds(RoundRule):
    """Shares that are never changed."""

    planned = True


CASES = [
    Case("bsp", 1300, 0, lambda c, low: c <= low, backups=0),
    Case("bsp+backup:1", 3200, 4, lambda c, low: True, backups=1, sizes=(Size(2), Size(3))),
    Case("asp", 6500, 4, lambda c, low: True),
    Case("ssp:0", 1000, 0, lambda c, low: c - low <= 0),
    Case("ssp:1", 2300, 1, lambda c, low: c - low <= 1),
    Case("ssp:2", 3800, 2, lambda c, low: c - low <= 2),
    Case("every:2", 1600, 1, lambda c, low: c // 2 <= low // 2),
    Case("delay:1", 6000, 5, lambda c, low: True),
    Case("downpour:push=2,warm=3", 1000, 5, lambda c, low: False, allowed=lambda c, low: True),
]


def dssp(lower: int, upper: int, states: int) -> Case:
    """Any forecast at any moment: none, one step, more than allowed."""
    return Case(
        f"dssp:{lower}..{upper}",
        states,
        upper,
        free=lambda c, low: c - low <= lower,
        allowed=lambda c, low: c - low <= upper,
        answers=(0, 1, 9),
    )


#: Three workers with a leave and a join in four steps are a minute of their own: `make proof` walks them.
SHORTER = (Size(1), Size(2), Size(3, join=False), Size(3, steps=3))
SHORTEST = (Size(1), Size(2), Size(3, steps=3, join=False), Size(3, steps=2))
SMALL = (Size(1), Size(2), Size(3, steps=2, join=False))
CASES += [replace(dssp(lower, 2, states), sizes=SHORTEST) for lower, states in ((0, 13_000), (1, 6_000))]
CASES += [
    Case("gossip:ring", 3500, 1, lambda c, low: False, allowed=lambda c, low: True, sizes=SHORTER),
    Case("gossip:exp", 3900, 2, lambda c, low: False, allowed=lambda c, low: True, sizes=SHORTER),
    Case("adpsgd:ring", 9000, 4, lambda c, low: True, sizes=SHORTER),
    Case("bsp+balance", 400, 0, lambda c, low: c <= low, planned=SharedRounds(), sizes=SMALL),
    Case("anytime:2", 3000, None, lambda c, low: True, planned=TimedRounds(), sizes=SMALL),
]


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    """`make check` walks some of the modes; the others take seconds each, the last two ten and more."""
    return [] if case.sync in ("bsp", "ssp:0", "bsp+balance") else [pytest.mark.long]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.sync, marks=marks_of(case)) for case in CASES])
def test_all_orders_of_a_small_job(
    case: Case, record_property: Callable[[str, object], None], pytestconfig: pytest.Config
) -> None:
    findings = Findings()
    for size in SIZES if case.sizes in (SHORTER, SHORTEST, SMALL) and pytestconfig.getoption("--proof") else case.sizes:
        walk(case, size, findings)
    record_property("states", findings.states)
    assert findings.states >= case.states, f"the walk came to {findings.states} states only"
    assert case.lead in (None, findings.lead)
    assert findings.ends > len(case.sizes)
    assert {"Admit", "Hold", "Release", "Apply"} <= findings.orders
    assert ("Discard" in findings.orders) == (bool(case.backups) or case.sync == "anytime:2")

"""Every order in which the machines and the policy of a mode can meet in a small job: both halves of each mode together.

The walk goes through all worlds that can be reached (`polytempo/proving`), each once. The driver looks at every order;
here it is looked at that every way ends, and how: all workers have gone home, and each of their pushes has been decided on.

Options are made so small that a few steps come across what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from clusters import MODES

from polytempo.proving.small_job import Job
from polytempo.proving.walk import BrokenOnTheWay, Walk
from polytempo.sync.actions import Release
from polytempo.sync.adpsgd import PairMachine
from polytempo.sync.anytime import DeadlineMachine
from polytempo.sync.balance import ShareMachine
from polytempo.sync.barrier import Barrier
from polytempo.sync.blocks import BlockMachine
from polytempo.sync.downpour import DownpourMachine
from polytempo.sync.gossip import GossipMachine
from polytempo.sync.machine import NO_ORDERS, Dropped, GoHome, Install, Mix, Parted, Replied, StepMachine
from polytempo.sync.spec import parse_spec

#: What is walked through in place of a mode with larger numbers.
SMALLER = {
    "bsp+balance,micro=4": "bsp+balance,micro=2",
    "anytime:auto": "anytime:auto,micro=2",
    "ssp:3": "ssp:1",
    "dssp:1..6": "dssp:0..2",
    "dssp-paper:1..6": "dssp-paper:0..2",
    "every:4": "every:2",
    "every:4,wait=1": "every:2,wait=1",
    "delay:3": "delay:1",
    "downpour:push=2,fetch=3,warm=7": "downpour:push=2,fetch=3,warm=3",
    "asp,drop=3,lr=staleness": "asp,drop=1,lr=staleness",
    "local:3": "local:2",
    "local:4,after=4": "local:2,after=1",
    "adacomm:2": "adacomm:2,every=2",
    "diloco:3": "diloco:2",
    "diloco:3,quorum=2": "diloco:2,quorum=2",
    "easgd:3": "easgd:2",
    "easgd:3,rho=0.5,overlap=1": "easgd:2,rho=0.5,overlap=1",
}
#: Beside them: options that machines of blocks know.
MORE = ("diloco:2,fragments=2", "diloco:2,overlap=1", "diloco:2,quorum=2,grace=inf")
WALKED = [*(SMALLER.get(mode, mode) for mode in MODES), *MORE]

#: A clock, or pushes and fetches beside the steps: with one who joins, three steps of these are seconds each.
MANY = [
    sync for sync in WALKED if sync.startswith(("anytime", "dssp", "adacomm", "downpour", "adpsgd", "easgd")) or "," in sync
]
#: In the mode in which neither a merge nor its worker waits, minutes.
TOO_MANY = [sync for sync in WALKED if sync.startswith("downpour") or sync == "diloco:2,quorum=2"]

#: With one who joins two steps of these are ten seconds.
TEN_SECONDS = ["easgd:2,rho=0.5,overlap=1"]

#: Where two steps of other times are ten seconds.
MANY_TIMES = [sync for sync in WALKED if sync.startswith("anytime") or sync == "diloco:2,quorum=2"]


def job_of(sync: str, workers: int = 2, steps: int = 3, losses: int = 0, joins: int = 0, odd: int = 1) -> Job:
    """A job of a few pushes for each worker; of pushes with several local steps the last is short."""
    spec = parse_spec(sync)
    last = steps * spec.period - (spec.period > 1)
    in_flight = 2 if spec.capabilities.fetches or sync == "delay:1" else 1
    timed = spec.capabilities.by_speed or spec.mode.name in ("dssp", "dssp-paper", "adacomm") or "wait=" in sync
    deadline = 2.0 if timed or sync == "diloco:2,quorum=2" else 0.0
    return Job(spec, workers, last, in_flight, deadline, odd, losses, joins, prompt=bool(joins) and sync in TOO_MANY)


def marks_of(sync: str) -> list[pytest.MarkDecorator]:
    """`make check` walks a few."""
    return [] if sync in ("bsp", "ssp:0", "local:2", "gossip:ring") else [pytest.mark.long]


def check(job: Job, record_property: Callable[[str, object], None]) -> None:
    walk = Walk(job)
    record_property("worlds", walk.worlds)
    assert walk.exhaustive
    assert {"Apply", "Release", "Compute", "Settle", "GoHome", "end"} <= walk.seen.keys()


EVERY = [pytest.param(sync, marks=marks_of(sync), id=sync) for sync in WALKED]


@pytest.mark.parametrize("sync", EVERY)
def test_one_dies_or_leaves_at_any_moment(sync: str, record_property: Callable[[str, object], None]) -> None:
    check(job_of(sync, losses=1, odd=1 if sync in MANY_TIMES else 2), record_property)


@pytest.mark.parametrize("sync", [case for case in EVERY if case.id not in TEN_SECONDS])
def test_one_joins_at_any_moment(sync: str, record_property: Callable[[str, object], None]) -> None:
    check(job_of(sync, steps=2 if sync in MANY else 3, joins=1), record_property)


@pytest.mark.proof
@pytest.mark.parametrize("sync", TEN_SECONDS)
def test_one_joins(sync: str, record_property: Callable[[str, object], None]) -> None:
    check(job_of(sync, steps=2, joins=1), record_property)


@pytest.mark.proof
@pytest.mark.parametrize("sync", MANY_TIMES)
def test_two_steps_take_other_times(sync: str, record_property: Callable[[str, object], None]) -> None:
    check(job_of(sync, losses=1, odd=2), record_property)


@pytest.mark.proof
@pytest.mark.parametrize("sync", [sync for sync in MANY if sync not in (*TOO_MANY, *TEN_SECONDS)])
def test_one_joins_in_three_steps(sync: str, record_property: Callable[[str, object], None]) -> None:
    check(job_of(sync, joins=1), record_property)


@pytest.mark.proof
@pytest.mark.parametrize("sync", [sync for sync in WALKED if sync not in TOO_MANY and not sync.startswith("anytime")])
def test_one_dies_and_one_joins(sync: str, record_property: Callable[[str, object], None]) -> None:
    check(job_of(sync, steps=2, losses=1, joins=1), record_property)


@pytest.mark.proof
@pytest.mark.parametrize("sync", [sync for sync in WALKED if sync not in TOO_MANY])
def test_three_workers(sync: str, record_property: Callable[[str, object], None]) -> None:
    check(job_of(sync, workers=3, steps=2, losses=1), record_property)


# The walk finds what is wrong with a machine, or a policy.


def forgets(machine: type, kind: type) -> Callable[..., Any]:
    """Events of this kind go unnoticed."""
    handle = machine.handle  # type: ignore[attr-defined]

    def without(self: Any, event: Any, now: float, part: int = 0) -> Any:
        return NO_ORDERS if isinstance(event, kind) else handle(self, event, now, part)

    return without


def swaps(machine: type, of: type, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Orders of this kind are other ones."""
    handle = machine.handle  # type: ignore[attr-defined]

    def otherwise(self: Any, event: Any, now: float, part: int = 0) -> Any:
        return [change(order) if isinstance(order, of) else order for order in handle(self, event, now, part)]

    return otherwise


def averages_always(self: PairMachine, event: Any, now: float, part: int = 0) -> Any:
    orders = PAIR_HANDLE(self, event, now, part)
    for order in orders:
        if hasattr(order, "averaged"):
            order.averaged = True
    return orders


def does_not_wait(self: StepMachine, event: Any, now: float, part: int = 0) -> Any:
    self.allowed += 1
    return STEP_HANDLE(self, event, now, part)


def waits_for_nothing(self: BlockMachine) -> bool:
    return False


def takes_all(self: BlockMachine) -> Any:
    return [Install(number) for number in range(self.parts)]


def goes_at_once(self: BlockMachine) -> Any:
    return [GoHome()]


def fetches_again(self: DownpourMachine) -> Any:
    self._fetching = False
    return DOWNPOUR_GO(self)


def keeps_old_shares(self: ShareMachine, event: Any, now: float, part: int = 0) -> Any:
    if isinstance(event, Release) and self._shares.weights:
        event = Release(event.worker, event.step, event.slowest)
    return SHARE_HANDLE(self, event, now, part)


def pushes_what_is_late(self: DeadlineMachine, seconds: float, now: float) -> Any:
    self.late, self._keeps = False, True
    self.finished += 1
    return DEADLINE_COMPUTED(self, seconds, now)


def look(sync: str) -> None:
    Walk(job_of(sync, losses=1))
    Walk(job_of(sync, joins=1))


STEP_HANDLE, PAIR_HANDLE, SHARE_HANDLE = StepMachine.handle, PairMachine.handle, ShareMachine.handle
DOWNPOUR_GO, DEADLINE_COMPUTED = DownpourMachine._go, DeadlineMachine._computed

MISTAKES = [
    ("bsp+backup:1", StepMachine, "handle", forgets(StepMachine, Dropped), "pushes step|without a release"),
    ("ssp:0", StepMachine, "handle", does_not_wait, "without a release"),
    ("delay:1", StepMachine, "handle", does_not_wait, "without a release"),
    ("local:2", BlockMachine, "_waits", waits_for_nothing, "without the values|does not wait"),
    ("diloco:2,overlap=1", BlockMachine, "_takes", takes_all, "that have not come"),
    ("diloco:2", BlockMachine, "_end", goes_at_once, "goes home"),
    ("diloco:2,overlap=1", BlockMachine, "_takes", lambda self: [], "has not taken"),
    ("downpour", DownpourMachine, "_go", fetches_again, "fetches twice"),
    (
        "gossip:ring",
        GossipMachine,
        "handle",
        swaps(GossipMachine, Mix, lambda mix: Mix(mix.row, mix.step)),
        "not sent",
    ),
    ("adpsgd:ring", PairMachine, "handle", forgets(PairMachine, Parted), "nothing can happen any more"),
    ("adpsgd:ring", PairMachine, "handle", forgets(PairMachine, Replied), "nothing can happen any more"),
    ("adpsgd:ring", PairMachine, "handle", averages_always, "averages"),
    ("anytime:auto,micro=2", DeadlineMachine, "_computed", pushes_what_is_late, "pushes 2 steps of 1"),
    ("bsp+balance", ShareMachine, "handle", keeps_old_shares, "cut in two ways"),
    ("bsp", Barrier, "on_leave", lambda self, worker, now: [], "nothing can happen any more"),
]


@pytest.mark.parametrize(("sync", "of", "name", "mistaken", "said"), MISTAKES)
def test_the_walk_finds_mistakes(
    sync: str, of: type, name: str, mistaken: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, name, mistaken)
    with pytest.raises(BrokenOnTheWay, match=said):
        look(sync)

"""Proves a schedule before it runs, and computes its needs; raises `BrokenInvariant` where it is wrong.

Actions wait for named actions only, and sends never block, so every order of execution gives the same result: one run on
symbols (`ScheduleRun`) stands for all of them, and finds an order or a deadlock. Versions need no run at all: the replicas
of a stage synchronise at every update, so the version at an action is the number of updates before it on its replica. A
backward always uses the version of its forward; the number of versions to keep is counted here: the newest, and every older
one that a microbatch in flight still reads.

The text of an error begins with its kind: `impossible`, `missing`, `twice`, `order`, `update`, `version` or `deadlock`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from polytempo.errors import BrokenInvariant
from polytempo.pipeline.actions import UPDATE, ReplicaActions, Schedule, ScheduleAction

#: Stage, replica, and the index of an action on that replica.
Spot = tuple[int, int, int]


class ScheduleRun:
    """A run of all replicas against each other; each is valid by itself."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.at = [[0] * count for count in schedule.replicas]
        self.done: set[tuple[int, ScheduleAction]] = set()

    def to_the_end(self) -> Iterator[Spot]:
        """Run each replica until it waits, and then the replicas that its actions unblock, until none can go on."""
        ready = [(stage, replica) for stage, replica, _ in self.schedule.each_replica()][::-1]
        while ready:
            stage, replica = ready.pop()
            while (action := self.next(stage, replica)) and not self.awaited(stage, replica, action):
                if action == UPDATE:
                    yield from self.update(stage)
                    ready += [(stage, other) for other in range(len(self.at[stage])) if other != replica]
                    continue
                yield stage, replica, self.at[stage][replica]
                self.at[stage][replica] += 1
                self.done.add((stage, action))
                ready += self.unblocked(stage, action)
        if waiting := [(stage, replica) for stage, replica, _ in self.schedule.each_replica() if self.next(stage, replica)]:
            raise BrokenInvariant(f"deadlock: {self.deadlock(waiting)}")

    def next(self, stage: int, replica: int) -> ScheduleAction | None:
        """The next action of this replica; None at its end."""
        actions, at = self.schedule.actions[stage][replica], self.at[stage][replica]
        return actions[at] if at < len(actions) else None

    def awaited(self, stage: int, replica: int, action: ScheduleAction) -> list[tuple[int, int, ScheduleAction]]:
        """The stages, replicas and actions that must come first, and have not."""
        if action == UPDATE:
            others = (other for other in range(len(self.at[stage])) if other != replica)
            return [(stage, other, UPDATE) for other in others if self.next(stage, other) != UPDATE]
        before = stage - 1 if action.kind == "F" else stage + 1
        if not 0 <= before < self.schedule.stages or (before, action) in self.done:
            return []
        return [(before, self.schedule.replica_of(before, action.microbatch), action)]

    def update(self, stage: int) -> Iterator[Spot]:
        """All replicas of the stage update."""
        for replica, at in enumerate(self.at[stage]):
            yield stage, replica, at
            self.at[stage][replica] += 1

    def unblocked(self, stage: int, action: ScheduleAction) -> list[tuple[int, int]]:
        """The replicas that may have waited for this action."""
        behind = stage + 1 if action.kind == "F" else stage - 1
        known = 0 <= behind < self.schedule.stages
        return [(behind, self.schedule.replica_of(behind, action.microbatch))] if known else []

    def deadlock(self, waiting: list[tuple[int, int]]) -> str:
        texts = [self.wait_of(stage, replica) for stage, replica in waiting[:4]]
        return "; ".join([*texts, *([f"and {len(waiting) - 4} more"] if len(waiting) > 4 else [])])

    def wait_of(self, stage: int, replica: int) -> str:
        action = self.next(stage, replica)
        assert action is not None
        names = [f"{wanted} of {self.schedule.place(*place)}" for *place, wanted in self.awaited(stage, replica, action)]
        where = f"{self.schedule.place(stage, replica)} at action {self.at[stage][replica]} ({action})"
        return f"{where} waits for {' and '.join(names)}"


@dataclass(frozen=True, slots=True)
class Facts:
    """The needs of a schedule; a tuple has one entry for each stage."""

    #: The most microbatches between their forward and their backward on one replica; with recompute: inputs kept.
    in_flight: tuple[int, ...]
    #: The most microbatches with activations at once: with recompute 1; and `spare` more.
    activations: tuple[int, ...]
    #: The most versions of the weights that one replica must hold at once, the newest among them.
    versions_kept: tuple[int, ...]
    #: used[stage][microbatch]: the version that its forward and its backward use.
    used: tuple[tuple[int, ...], ...]
    #: updates[stage][version]: the microbatches, all replicas together, whose gradients lead to the next version.
    updates: tuple[tuple[tuple[int, ...], ...], ...]
    #: An order in which one thread could run all actions; the updates of a stage's replicas stand together.
    order: tuple[Spot, ...]


def check(schedule: Schedule) -> Facts:
    """Prove that the schedule is right for any timing; its facts."""
    for stage, replica, actions in schedule.each_replica():
        _check_line(schedule, stage, replica, actions)
    updates = tuple(_updates(schedule, stage) for stage in range(schedule.stages))
    used = _used(schedule, updates)
    in_flight = tuple(max(map(_peak_in_flight, replicas)) for replicas in schedule.actions)
    kept = tuple(
        max(_peak_versions(actions, of_stage) for actions in replicas)
        for replicas, of_stage in zip(schedule.actions, used, strict=True)
    )
    least = (1,) * schedule.stages if schedule.recompute else in_flight
    shares = [-(-schedule.microbatches // count) for count in schedule.replicas]
    activations = tuple(min(share, most + schedule.spare) for share, most in zip(shares, least, strict=True))
    return Facts(in_flight, activations, kept, used, updates, tuple(ScheduleRun(schedule).to_the_end()))


def _check_line(schedule: Schedule, stage: int, replica: int, actions: ReplicaActions) -> None:
    """Every microbatch of this replica once each way, the forward first, and an update behind every backward."""
    where, done = schedule.place(stage, replica), set[ScheduleAction]()
    for index, action in enumerate(actions):
        number, at = action.microbatch, f"{where}, action {index} ({action})"
        if action.kind == "U":
            continue
        if action.kind == "W":
            raise BrokenInvariant(f"impossible: {at}: gradients of weights are part of B{number}; leave it out")
        if number >= schedule.microbatches:
            raise BrokenInvariant(f"impossible: {at}: there are microbatches 0 to {schedule.microbatches - 1}")
        if (owner := schedule.replica_of(stage, number)) != replica:
            raise BrokenInvariant(f"impossible: {at}: microbatch {number} belongs to replica {owner}")
        if action in done:
            raise BrokenInvariant(f"twice: {at} was done before")
        if action.kind == "B" and ScheduleAction("F", number) not in done:
            raise BrokenInvariant(f"order: {at} comes before its forward")
        done.add(action)
    for number in range(replica, schedule.microbatches, len(schedule.actions[stage])):
        for action in (ScheduleAction("F", number), ScheduleAction("B", number)):
            if action not in done:
                raise BrokenInvariant(f"missing: {where} never does {action}")
    last = actions[-1] if actions else None
    if last is not None and last.kind != "U":
        raise BrokenInvariant(f"update: {where} ends with {last}: no update uses its gradient; end with U")


def _updates(schedule: Schedule, stage: int) -> tuple[tuple[int, ...], ...]:
    """What goes into each update of the stage; its replicas make equally many, and none with nothing at all."""
    rounds = [list(_rounds(actions)) for actions in schedule.actions[stage]]
    for replica, mine in enumerate(rounds):
        if len(mine) != len(rounds[0]):
            raise BrokenInvariant(
                f"update: stage {stage}.0 makes {len(rounds[0])} updates and stage {stage}.{replica} makes {len(mine)}; "
                "replicas synchronise at every update"
            )
    together = tuple(tuple(sorted(chain(*parts))) for parts in zip(*rounds, strict=True))
    if () in together:
        raise BrokenInvariant(f"update: update {together.index(())} of stage {stage} has no gradient to use; leave it out")
    if schedule.flushes and len(together) != 1:
        raise BrokenInvariant(f"update: stage {stage} updates {len(together)} times in a step; expected one U, at the end")
    return together


def _rounds(actions: ReplicaActions) -> Iterator[list[int]]:
    """The microbatches of the backwards before each update."""
    pending: list[int] = []
    for action in actions:
        if action.kind == "B":
            pending.append(action.microbatch)
        elif action.kind == "U":
            yield pending
            pending = []


def _used(schedule: Schedule, updates: tuple[tuple[tuple[int, ...], ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The version that each stage uses for each microbatch."""
    newest = [[0] * schedule.microbatches for _ in range(schedule.stages)]
    for stage, _, actions in schedule.each_replica():
        version = 0
        for action in actions:
            version += action.kind == "U"
            if action.kind == "F":
                newest[stage][action.microbatch] = version
    if schedule.versions == "newest":
        return tuple(map(tuple, newest))
    for stage, made in enumerate(updates):
        if made != updates[0]:
            version, theirs, mine = next(
                (at, *parts) for at, parts in enumerate(zip(updates[0], made, strict=False)) if parts[0] != parts[1]
            )
            raise BrokenInvariant(
                f"version: update {version} uses microbatches {theirs} at stage 0 and {mine} at stage {stage}; "
                "with the versions of the first stage all must use the same"
            )
        for number, (here, first) in enumerate(zip(newest[stage], newest[0], strict=True)):
            if here < first:
                raise BrokenInvariant(
                    f"version: F{number} needs version {first} of stage {stage}, which is at version {here} by then"
                )
    return (tuple(newest[0]),) * schedule.stages


def _peak_in_flight(actions: ReplicaActions) -> int:
    now = most = 0
    for action in actions:
        now += {"F": 1, "B": -1}.get(action.kind, 0)
        most = max(most, now)
    return most


def _peak_versions(actions: ReplicaActions, used: tuple[int, ...]) -> int:
    readers = Counter(used[action.microbatch] for action in actions if action.kind == "B")
    newest, older, most = 0, set[int](), 1
    for action in actions:
        if action.kind == "B":
            version = used[action.microbatch]
            readers[version] -= 1
            older -= set() if readers[version] else {version}
        elif action.kind == "U":
            older |= {newest} if readers[newest] else set()
            newest += 1
            most = max(most, len(older) + 1)
    return most

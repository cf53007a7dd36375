"""Runs the lines of a schedule against each other on symbols: an order that respects who waits for whom, or a deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from polytempo.errors import BrokenInvariant
from polytempo.pipeline.actions import UPDATE, ReplicaActions, Schedule, ScheduleAction

#: Stage, replica, and the index of an action in their line.
Spot = tuple[int, int, int]


class ScheduleRun:
    """All lines, side by side; each of them is right by itself."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.at = [[0] * count for count in schedule.replicas]
        self.done: set[tuple[int, ScheduleAction]] = set()

    def to_the_end(self) -> Iterator[Spot]:
        """Everybody does what he can, and wakes whom this helps, until nobody can do anything."""
        ready = [(stage, replica) for stage, replica, _ in self.schedule.each_line()][::-1]
        while ready:
            stage, replica = ready.pop()
            while (action := self.next(stage, replica)) and not self.awaited(stage, replica, action):
                if action == UPDATE:
                    yield from self.meet(stage)
                    ready += [(stage, other) for other in range(len(self.at[stage])) if other != replica]
                    continue
                yield stage, replica, self.at[stage][replica]
                self.at[stage][replica] += 1
                self.done.add((stage, action))
                ready += self.helped(stage, action)
        if stuck := [(stage, replica) for stage, replica, _ in self.schedule.each_line() if self.next(stage, replica)]:
            raise BrokenInvariant(f"deadlock: {self.who_waits(stuck)}")

    def next(self, stage: int, replica: int) -> ScheduleAction | None:
        """What this replica does next, unless it has ended."""
        line, at = self.schedule.lines[stage][replica], self.at[stage][replica]
        return line[at] if at < len(line) else None

    def awaited(self, stage: int, replica: int, action: ScheduleAction) -> list[tuple[int, int, ScheduleAction]]:
        """The stages, replicas and actions that must come first, and have not."""
        if action == UPDATE:
            others = (other for other in range(len(self.at[stage])) if other != replica)
            return [(stage, other, UPDATE) for other in others if self.next(stage, other) != UPDATE]
        before = stage - 1 if action.kind == "F" else stage + 1
        if not 0 <= before < self.schedule.stages or (before, action) in self.done:
            return []
        return [(before, self.schedule.replica_of(before, action.microbatch), action)]

    def meet(self, stage: int) -> Iterator[Spot]:
        """All replicas of the stage update."""
        for replica, at in enumerate(self.at[stage]):
            yield stage, replica, at
            self.at[stage][replica] += 1

    def helped(self, stage: int, action: ScheduleAction) -> list[tuple[int, int]]:
        """Who may have waited for this."""
        behind = stage + 1 if action.kind == "F" else stage - 1
        known = 0 <= behind < self.schedule.stages
        return [(behind, self.schedule.replica_of(behind, action.microbatch))] if known else []

    def who_waits(self, stuck: list[tuple[int, int]]) -> str:
        texts = [self.wait_of(stage, replica) for stage, replica in stuck[:4]]
        return "; ".join([*texts, *([f"and {len(stuck) - 4} more"] if len(stuck) > 4 else [])])

    def wait_of(self, stage: int, replica: int) -> str:
        action = self.next(stage, replica)
        assert action is not None
        names = [f"{wanted} of {self.schedule.place(*place)}" for *place, wanted in self.awaited(stage, replica, action)]
        where = f"{self.schedule.place(stage, replica)} at action {self.at[stage][replica]} ({action})"
        return f"{where} waits for {' and '.join(names)}"


# Proves a schedule before it runs, and says what it needs; raises `BrokenInvariant` where it is wrong.
#
# Actions wait for named others only, and sends never wait, so any order of running gives the same result: one run on
# symbols stands for all of them. Versions need no run at all: the replicas of a stage meet at every update, so the version
# at a place is the number of updates before it in its line. A backward always uses the version of its forward; how many
# versions must be kept for this is counted here: the newest, and every older one that somebody on this replica still reads.
#
# The text of an error begins with its kind: `impossible`, `missing`, `twice`, `order`, `update`, `version` or `deadlock`.


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true of a schedule; a tuple has one entry for each stage."""

    #: The most microbatches between their forward and their backward on one replica; with recompute: inputs kept.
    in_flight: tuple[int, ...]
    #: The most microbatches of which activations are there at once: with recompute 1; and what is spare.
    activations: tuple[int, ...]
    #: The most versions of the weights that one replica must hold at once, the newest among them.
    versions_kept: tuple[int, ...]
    #: used[stage][microbatch]: the version that its forward and its backward use.
    used: tuple[tuple[int, ...], ...]
    #: updates[stage][version]: the microbatches, all replicas together, whose gradients lead to the next version.
    updates: tuple[tuple[tuple[int, ...], ...], ...]
    #: An order in which one after the other could do everything; the replicas of a stage update next to each other.
    order: tuple[Spot, ...]


def check(schedule: Schedule) -> Facts:
    """The schedule is right, whatever the timing; what it needs."""
    for stage, replica, line in schedule.each_line():
        _check_line(schedule, stage, replica, line)
    updates = tuple(_updates(schedule, stage) for stage in range(schedule.stages))
    used = _used(schedule, updates)
    in_flight = _most(schedule, [_peak_in_flight(line) for _, _, line in schedule.each_line()])
    kept = _most(schedule, [_peak_versions(line, used[stage]) for stage, _, line in schedule.each_line()])
    least = (1,) * schedule.stages if schedule.recompute else in_flight
    shares = [-(-schedule.microbatches // count) for count in schedule.replicas]
    activations = tuple(min(share, most + schedule.spare) for share, most in zip(shares, least, strict=True))
    return Facts(in_flight, activations, kept, used, updates, tuple(ScheduleRun(schedule).to_the_end()))


def _check_line(schedule: Schedule, stage: int, replica: int, line: ReplicaActions) -> None:
    """Every microbatch of this replica once each way, the forward first, and an update behind every backward."""
    where, done = schedule.place(stage, replica), set[ScheduleAction]()
    for index, action in enumerate(line):
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
    for number in range(replica, schedule.microbatches, len(schedule.lines[stage])):
        for action in (ScheduleAction("F", number), ScheduleAction("B", number)):
            if action not in done:
                raise BrokenInvariant(f"missing: {where} never does {action}")
    last = line[-1] if line else None
    if last is not None and last.kind != "U":
        raise BrokenInvariant(f"update: {where} ends with {last}: no update uses its gradient; end with U")


def _updates(schedule: Schedule, stage: int) -> tuple[tuple[int, ...], ...]:
    """What goes into each update of the stage; its replicas make equally many, and none with nothing at all."""
    rounds = [list(_rounds(line)) for line in schedule.lines[stage]]
    for replica, mine in enumerate(rounds):
        if len(mine) != len(rounds[0]):
            raise BrokenInvariant(
                f"update: stage {stage}.0 makes {len(rounds[0])} updates and stage {stage}.{replica} makes {len(mine)}; "
                "replicas meet at every update"
            )
    together = tuple(tuple(sorted(chain(*parts))) for parts in zip(*rounds, strict=True))
    if () in together:
        raise BrokenInvariant(f"update: update {together.index(())} of stage {stage} has no gradient to use; leave it out")
    if schedule.flushes and len(together) != 1:
        raise BrokenInvariant(f"update: stage {stage} updates {len(together)} times in a step; expected one U, at the end")
    return together


def _rounds(line: ReplicaActions) -> Iterator[list[int]]:
    """The microbatches of the backwards before each update of a line."""
    pending: list[int] = []
    for action in line:
        if action.kind == "B":
            pending.append(action.microbatch)
        elif action.kind == "U":
            yield pending
            pending = []


def _used(schedule: Schedule, updates: tuple[tuple[tuple[int, ...], ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The version that each stage uses for each microbatch."""
    newest = [[0] * schedule.microbatches for _ in range(schedule.stages)]
    for stage, _, line in schedule.each_line():
        version = 0
        for action in line:
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


def _most(schedule: Schedule, numbers: list[int]) -> tuple[int, ...]:
    """The largest number of each stage, from one for each line."""
    rest = iter(numbers)
    return tuple(max(next(rest) for _ in range(count)) for count in schedule.replicas)


def _peak_in_flight(line: ReplicaActions) -> int:
    now = most = 0
    for action in line:
        now += {"F": 1, "B": -1}.get(action.kind, 0)
        most = max(most, now)
    return most


def _peak_versions(line: ReplicaActions, used: tuple[int, ...]) -> int:
    readers = Counter(used[action.microbatch] for action in line if action.kind == "B")
    newest, older, most = 0, set[int](), 1
    for action in line:
        if action.kind == "B":
            version = used[action.microbatch]
            readers[version] -= 1
            older -= set() if readers[version] else {version}
        elif action.kind == "U":
            older |= {newest} if readers[newest] else set()
            newest += 1
            most = max(most, len(older) + 1)
    return most

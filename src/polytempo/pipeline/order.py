"""Runs the lines of a schedule against each other on symbols: an order that respects who waits for whom, or a deadlock."""

from __future__ import annotations

from collections.abc import Iterator

from polytempo.errors import BrokenInvariant
from polytempo.pipeline.actions import UPDATE, Action, Schedule

#: Stage, replica, and the index of an action in their line.
Spot = tuple[int, int, int]


class Run:
    """All lines, side by side; each of them is right by itself."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.at = [[0] * count for count in schedule.replicas]
        self.done: set[tuple[int, Action]] = set()

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

    def next(self, stage: int, replica: int) -> Action | None:
        """What this replica does next, unless it has ended."""
        line, at = self.schedule.lines[stage][replica], self.at[stage][replica]
        return line[at] if at < len(line) else None

    def awaited(self, stage: int, replica: int, action: Action) -> list[tuple[int, int, Action]]:
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

    def helped(self, stage: int, action: Action) -> list[tuple[int, int]]:
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

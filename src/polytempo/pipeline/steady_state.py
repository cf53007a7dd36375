"""A schedule without a flush, minibatch by minibatch, for as many as will come.

What was written down of it is for some number of minibatches. Behind its beginning such a line repeats itself: what a
replica does from one of its forwards up to the next is what it did a turn before, with higher numbers. So a *call* with
minibatch k is that stretch; and when no more come, what is left is the line without those that never came.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import lcm

from polytempo.errors import BrokenInvariant
from polytempo.pipeline.actions import UPDATE, Schedule, ScheduleAction


class SteadyState:
    """One replica's line. `make` writes the schedule down for some number of minibatches."""

    def __init__(self, make: Callable[[int], Schedule], stage: int, replica: int, replicas: tuple[int, ...]) -> None:
        self._turn = lcm(*replicas)
        self._begin = self._turn * (2 + sum(replicas))
        self._shares = replicas[stage]
        schedule = make(self._begin + 4 * self._turn)
        self._stretches = [_cut(line) for line in schedule.lines[stage]]
        self._replica = replica
        for other in range(self._shares):
            self._check(other)

    def _check(self, replica: int) -> None:
        """It does repeat itself."""
        turn = self._turn
        for number in range(self._begin - turn, self._begin):
            here, later = self._stretches[replica].get(number), self._stretches[replica].get(number + turn)
            if here is not None and later != [_shifted(action, turn) for action in here]:
                raise BrokenInvariant(
                    f"a schedule without flushes must repeat itself; F{number} and F{number + turn} go on differently"
                )

    def call(self, number: int, replica: int | None = None) -> list[ScheduleAction]:
        """From the forward of this minibatch up to the next forward: nothing, where it is another replica's."""
        replica = self._replica if replica is None else replica
        if number % self._shares != replica:
            return []
        known = number if number < self._begin else self._begin + (number - self._begin) % self._turn
        return [_shifted(action, number - known) for action in self._stretches[replica][known]]

    def rest(self, fed: int) -> list[ScheduleAction]:
        """When so many minibatches came, and no more: backwards and updates that are left for this replica."""
        rests = [self._rest(fed, replica) for replica in range(self._shares)]
        missing = max(updates for updates, _ in rests) - rests[self._replica][0]
        return [*rests[self._replica][1], *[UPDATE] * missing]  # replicas meet at every update

    def _rest(self, fed: int, replica: int) -> tuple[int, list[ScheduleAction]]:
        """How many updates a replica makes in all, and what of its line is left."""
        mine = len(range(replica, fed, self._shares))
        calls = (replica + index * self._shares for index in count())
        backwards = updates = 0
        rest: list[ScheduleAction] = []
        fresh = False  # a backward since the last update
        for index, number in enumerate(calls):
            if backwards == mine and not fresh:
                return updates, rest
            for action in self.call(number, replica):
                if action.kind == "F" or action.microbatch >= fed or (action == UPDATE and not fresh):
                    continue
                backwards, updates = backwards + (action.kind == "B"), updates + (action == UPDATE)
                fresh = action.kind == "B"
                rest += [action] if index >= mine else []
        raise AssertionError

    def lag(self) -> int:
        """By how many calls the first backward is behind its forward."""
        return next(number for number in count() if ScheduleAction("B", self._replica) in self.call(number)) - self._replica


def _cut(line: tuple[ScheduleAction, ...]) -> dict[int, list[ScheduleAction]]:
    """By forward: it, and what follows up to the next."""
    stretches: dict[int, list[ScheduleAction]] = {}
    for action in line:
        if action.kind == "F":
            current = stretches[action.microbatch] = []
        current.append(action)
    return stretches


def _shifted(action: ScheduleAction, by: int) -> ScheduleAction:
    return action if action == UPDATE else ScheduleAction(action.kind, action.microbatch + by)

"""The timeline of a schedule: from the durations of its stages, the start and end of every action.

Every action starts as soon as its replica is free and its message has arrived. A message between stages s and s + 1 takes
`transfer[s]` both ways and delays no other: a link carries any number at once, and sending costs a stage nothing. The
replicas of a stage take equally long, and start an update together. Weight gradients with a duration of their own are
deferred by the rule of the runtime (`deferred_gradients.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polytempo.errors import UsageError
from polytempo.pipeline.actions import Schedule, ScheduleAction
from polytempo.pipeline.check import check
from polytempo.pipeline.deferred_gradients import DeferredGradients


@dataclass(frozen=True, slots=True)
class Span:
    """An action, from when to when."""

    action: ScheduleAction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of each replica with their times: `spans[stage][replica]`; the first action starts at 0."""

    schedule: Schedule
    spans: tuple[tuple[tuple[Span, ...], ...], ...]

    @property
    def total(self) -> float:
        """When the last action ends."""
        return max(span.end for stage in self.spans for line in stage for span in line)

    def bubble(self, stage: int | None = None) -> float:
        """The share of the whole time in which the stage, or all stages on average, are idle."""
        return self._idle(0.0, self.total, self.spans if stage is None else self.spans[stage : stage + 1])

    def steady_bubble(self, skip: int = 0) -> float:
        """The same for the steady state of a schedule without a flush: from the first backward of the first stage, after
        `skip` backwards on each of its replicas, to its last forward."""
        if skip < 0:
            raise UsageError(f"skip must be 0 or more, not {skip}")
        first = self.spans[0]
        backwards = ([span.start for span in line if span.action.kind == "B"] for line in first)
        begin = max([*starts[skip:], math.inf][0] for starts in backwards)
        end = min(max((span.end for span in line if span.action.kind == "F"), default=0.0) for line in first)
        if end <= begin:
            raise UsageError(
                f"there is no steady state: not every replica of the first stage makes a forward after backward {skip + 1}; "
                "give more minibatches or skip fewer"
            )
        return self._idle(begin, end, self.spans)

    def as_lines(self) -> list[dict[str, str | int | float]]:
        """For a record: one dictionary an action, in order of time."""
        lines: list[dict[str, str | int | float]] = [
            {"stage": stage, "replica": replica, "action": str(span.action), "start": span.start, "end": span.end}
            for stage, replicas in enumerate(self.spans)
            for replica, line in enumerate(replicas)
            for span in line
        ]
        return sorted(lines, key=lambda line: line["start"])

    def _idle(self, begin: float, end: float, stages: Sequence[Sequence[Sequence[Span]]]) -> float:
        lines = [line for stage in stages for line in stage]
        busy = math.fsum(max(0.0, min(span.end, end) - max(span.start, begin)) for line in lines for span in line)
        whole = (end - begin) * len(lines)
        return max(0.0, 1.0 - busy / whole) if whole else 0.0


def run(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float] = (),
    recompute: Sequence[float] = (),
    update: Sequence[float] = (),
    weights: Sequence[float] = (),
    pieces: int = 1,
) -> Timeline:
    """The timeline, from the durations of an action at each stage; a backward that recomputes its forward takes `recompute`
    more. `weights`: the duration of the weight gradients, in `pieces` pieces; it is then no part of `backward`. Durations
    that are left out are 0. The schedule is checked first."""
    stages = schedule.stages
    durations = {
        "F": _times("forward", forward, stages),
        "B": _times("backward", backward, stages),
        "U": _times("update", update or [0.0] * stages, stages),
    }
    travel = _times("transfer", transfer or [0.0] * (stages - 1), stages - 1)
    extra = _times("recompute", recompute or [0.0] * stages, stages)
    later = [time / pieces for time in _times("weights", weights or [0.0] * stages, stages)]
    again = {(stage, replica): schedule.recomputed(stage, replica) for stage, replica, _ in schedule.each_replica()}
    facts = check(schedule)
    clock = _Clock(schedule, travel, later, facts.activations)
    for stage, replica, index in facts.order:
        action = schedule.actions[stage][replica][index]
        repeated = action.microbatch in again[stage, replica]
        more = extra[stage] if action.kind == "B" and repeated else 0.0
        clock.run_deferred(stage, replica, action, repeated)
        clock.do(stage, replica, action, durations[action.kind][stage] + more)
        clock.deferred[stage][replica].completed(action, repeated, pieces if later[stage] else 0)
    return Timeline(schedule, tuple(tuple(map(tuple, replicas)) for replicas in clock.spans))


@dataclass(frozen=True, slots=True)
class Computation:
    """A forward or backward in an order that one thread could run, and what it waits for."""

    stage: int
    microbatch: int
    backward: bool
    source: int  #: where in that order the computation stands whose message it needs; -1: none
    link: int  #: between stage `link` and the next


def computations(schedule: Schedule) -> tuple[Computation, ...]:
    """The forwards and backwards of one step of a pipeline whose stages have one replica each. The schedule is checked."""
    made: list[Computation] = []
    places: dict[tuple[int, ScheduleAction], int] = {}
    for stage, replica, index in check(schedule).order:
        action = schedule.actions[stage][replica][index]
        if action.kind == "U":
            continue
        backward = action.kind == "B"
        source, link = (stage + 1, stage) if backward else (stage - 1, stage - 1)
        places[stage, action] = len(made)
        made.append(Computation(stage, action.microbatch, backward, places.get((source, action), -1), link))
    return tuple(made)


def stage_ends(
    order: Sequence[Computation],
    seconds: Sequence[Sequence[tuple[float, float]]],
    transfer: Sequence[float],
) -> list[float]:
    """When each stage is done, where every computation has a duration of its own: `seconds[microbatch][stage]` is (forward,
    backward). The same as `run`, for many steps of a schedule whose `computations` are made once."""
    free = [0.0] * len(seconds[0])
    ends: list[float] = []
    for one in order:
        stage, start = one.stage, free[one.stage]
        if one.source >= 0 and (arrives := ends[one.source] + transfer[one.link]) > start:
            start = arrives
        free[stage] = end = start + seconds[one.microbatch][stage][one.backward]
        ends.append(end)
    return free


def _times(name: str, times: Sequence[float], count: int) -> Sequence[float]:
    if len(times) != count:
        raise UsageError(f"expected {count} times for {name}, got {len(times)}")
    if wrong := [time for time in times if not 0 <= time < math.inf]:
        raise UsageError(f"times for {name} must be finite and not negative, got {wrong[0]}")
    return times


class _Clock:
    """When each replica is free, and when each message arrives."""

    def __init__(
        self, schedule: Schedule, travel: Sequence[float], later: Sequence[float], capacities: Sequence[int]
    ) -> None:
        self.travel, self.later = travel, later
        self.deferred = [
            [DeferredGradients(capacity) for _ in replicas]
            for capacity, replicas in zip(capacities, schedule.actions, strict=True)
        ]
        self.free = [[0.0] * count for count in schedule.replicas]
        self.spans: list[list[list[Span]]] = [[[] for _ in replicas] for replicas in self.free]
        self.ends: dict[tuple[int, ScheduleAction], float] = {}
        self.synchronised = [0.0] * schedule.stages

    def do(self, stage: int, replica: int, action: ScheduleAction, duration: float) -> None:
        """Run an action as early as possible; the actions it waits for have run."""
        start = max(self.free[stage][replica], self.arrival(stage, replica, action))
        self.spans[stage][replica].append(Span(action, start, start + duration))
        self.free[stage][replica] = self.ends[stage, action] = start + duration

    def run_deferred(self, stage: int, replica: int, action: ScheduleAction, again: bool) -> None:
        """Deferred pieces that are due before this action, or fit in before it can start."""
        if action.kind == "U":
            for other, deferred in enumerate(self.deferred[stage]):  # replicas synchronise: none may be left
                while deferred:
                    self.piece(stage, other)
            return
        deferred = self.deferred[stage][replica]
        while deferred.due(action, again) or (deferred and self.free[stage][replica] < self.arrival(stage, replica, action)):
            self.piece(stage, replica)

    def piece(self, stage: int, replica: int) -> None:
        """Run a deferred piece; adjacent pieces of a microbatch are one span."""
        spans, start = self.spans[stage][replica], self.free[stage][replica]
        action = ScheduleAction("W", self.deferred[stage][replica].pop())
        end = self.free[stage][replica] = start + self.later[stage]
        if spans[-1].action == action and spans[-1].end == start:
            start = spans.pop().start
        spans.append(Span(action, start, end))

    def arrival(self, stage: int, replica: int, action: ScheduleAction) -> float:
        if action.kind == "U":
            if replica == 0:  # the replicas come here one after the other, and start together
                self.synchronised[stage] = max(self.free[stage])
            return self.synchronised[stage]
        before, link = (stage - 1, stage - 1) if action.kind == "F" else (stage + 1, stage)
        return self.ends[before, action] + self.travel[link] if 0 <= link < len(self.travel) else 0.0

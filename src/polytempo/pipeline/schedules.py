"""The schedules that have a name, each made by a pure function; a spec such as `gpipe,recompute=0` names one.

    sequential   one microbatch at a time: forward through all stages, and back (plain model parallelism)
    gpipe        all forwards, then all backwards, the last first (GPipe, 2019)
    1f1b         as few forwards ahead as keep all stages busy, then one backward for one forward; a flush at the end
                 (PipeDream-Flush, 2021)
    pipedream    the same without a flush: an update after every backward, with weight stashing for microbatches in flight
                 (PipeDream, 2019)

With replicas, a stage has ceil(replicas from it to the last stage / its own) microbatches in flight on each of them; at the
first stage this is PipeDream's NOAM. Its replicas synchronise at every update, as in data parallelism. When the microbatches
do not divide evenly, a replica without one takes part in the last update with no gradient of its own. The published number
in flight leaves stages idle where replicas differ between stages and synchronise after every backward: `timeline` computes
how much.

A schedule without a flush is written down for some number of minibatches. After its beginning it is periodic: the actions of
a replica from one of its forwards to the next are those of a period before, with higher numbers. `SteadyState` gives that
stretch for any minibatch, and the actions that are left when no more minibatches come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from math import lcm

from polytempo.errors import BrokenInvariant, UsageError
from polytempo.options import ArgumentReader, Syntax, parse, switch, whole_number
from polytempo.pipeline.actions import UPDATE, ReplicaActions, Schedule, ScheduleAction

Replicas = Sequence[int] | None


def sequential(stages: int, microbatches: int, replicas: Replicas = None) -> Schedule:
    """One microbatch at a time on every replica: all stages but one wait."""
    counts = _counts(stages, microbatches, replicas)
    actions = [[_one_f_one_b(mine, 1) for mine in _shares(microbatches, count)] for count in counts]
    return _schedule("sequential", microbatches, actions)


def gpipe(stages: int, microbatches: int, recompute: bool = True, replicas: Replicas = None) -> Schedule:
    """All forwards, then all backwards in reverse order."""
    counts = _counts(stages, microbatches, replicas)
    actions = [[_all_then_back(mine) for mine in _shares(microbatches, count)] for count in counts]
    return _schedule("gpipe", microbatches, actions, recompute)


def one_f_one_b(stages: int, microbatches: int, recompute: bool = False, replicas: Replicas = None) -> Schedule:
    """One forward, one backward, with a flush at the end of the step."""
    counts = _counts(stages, microbatches, replicas)
    ahead = [in_flight(counts, stage) for stage in range(stages)]
    actions = [
        [_one_f_one_b(mine, most) for mine in _shares(microbatches, count)]
        for most, count in zip(ahead, counts, strict=True)
    ]
    return _schedule("1f1b", microbatches, actions, recompute)


def pipedream(
    stages: int, minibatches: int, replicas: Replicas = None, vertical_sync: bool = False, recompute: bool = False
) -> Schedule:
    """One forward, one backward and update, for `minibatches` minibatches."""
    counts = _counts(stages, minibatches, replicas, "minibatches")
    if vertical_sync and len(set(counts)) > 1:
        raise UsageError(
            f"vertical sync needs equally many replicas at every stage, so that a version is made of the same minibatches "
            f"everywhere; got {counts}; nearest: {(counts[0],) * stages}, or leave vertical sync out"
        )
    actions = [
        [_one_f_one_b(mine, in_flight(counts, stage), -(-minibatches // count)) for mine in _shares(minibatches, count)]
        for stage, count in enumerate(counts)
    ]
    made = tuple(map(tuple, actions))
    return Schedule("pipedream", minibatches, made, recompute, "first" if vertical_sync else "newest", flushes=False)


def in_flight(replicas: Sequence[int], stage: int) -> int:
    """The most microbatches in flight on each replica of the stage, so that no stage behind it waits."""
    return -(-sum(replicas[stage:]) // replicas[stage])


def _schedule(name: str, microbatches: int, actions: list[list[ReplicaActions]], recompute: bool = False) -> Schedule:
    return Schedule(name, microbatches, tuple(map(tuple, actions)), recompute)


def _shares(microbatches: int, replicas: int) -> Iterator[Sequence[int]]:
    return (range(replica, microbatches, replicas) for replica in range(replicas))


def _all_then_back(mine: Sequence[int]) -> ReplicaActions:
    return (
        *(ScheduleAction("F", number) for number in mine),
        *(ScheduleAction("B", number) for number in reversed(mine)),
        UPDATE,
    )


def _one_f_one_b(mine: Sequence[int], ahead: int, updates: int = 0) -> ReplicaActions:
    """`ahead` forwards, then a backward for a forward. `updates`: an update after each backward; 0: one, at the end."""
    actions = [ScheduleAction("F", number) for number in mine[: ahead - 1]]
    for index, number in enumerate(mine):
        actions += [ScheduleAction("F", mine[at]) for at in (index + ahead - 1,) if at < len(mine)]
        actions += [ScheduleAction("B", number), *([UPDATE] if updates else [])]
    return (*actions, *[UPDATE] * (updates - len(mine) if updates else 1))


def _counts(stages: int, microbatches: int, replicas: Replicas, things: str = "microbatches") -> tuple[int, ...]:
    """The replicas of each stage, one by default; refuses impossible numbers."""
    if stages < 1:
        raise UsageError(f"expected 1 stage or more, got {stages}; nearest: 1")
    if microbatches < 1:
        raise UsageError(f"expected 1 of the {things} or more, got {microbatches}; nearest: 1")
    counts = (1,) * stages if replicas is None else tuple(replicas)
    if len(counts) != stages:
        near = (*counts, *[1] * stages)[:stages]
        raise UsageError(f"expected a number of replicas for each of {stages} stages, got {counts}; nearest: {near}")
    if not all(1 <= count <= microbatches for count in counts):
        near = tuple(min(max(count, 1), microbatches) for count in counts)
        raise UsageError(
            f"with {microbatches} {things} every stage has 1 to {microbatches} replicas, or some have nothing to do; "
            f"got {counts}; nearest: {near}"
        )
    return counts


@dataclass(frozen=True)
class NamedSchedule:
    """How a schedule is made, and the options of its spec. `spare` is a fact of the schedule, not an argument of `make`."""

    make: Callable[..., Schedule]
    options: Mapping[str, ArgumentReader] = field(default_factory=dict)


_RECOMPUTE = {"recompute": switch("0")}
#: Room for activations of more microbatches: schedules whose weight gradients may be deferred can use it.
_SPARE = {"spare": whole_number("of microbatches", at_least=0, example="1")}

SCHEDULES: dict[str, NamedSchedule] = {
    "sequential": NamedSchedule(sequential),
    "gpipe": NamedSchedule(gpipe, _RECOMPUTE | _SPARE),
    "1f1b": NamedSchedule(one_f_one_b, _RECOMPUTE | _SPARE),
    "pipedream": NamedSchedule(pipedream, {"vertical_sync": switch()} | _RECOMPUTE),
}
_SYNTAX = {name: Syntax(name, options=schedule.options) for name, schedule in SCHEDULES.items()}


def make(spec: str, stages: int, microbatches: int, replicas: Replicas = None) -> Schedule:
    """The schedule of a spec `name[,recompute=0|1][,vertical_sync=0|1][,spare=N]`."""
    choice = parse(spec, "pipeline schedule", _SYNTAX)
    spare = choice.options.pop("spare", 0)
    made = SCHEDULES[choice.name].make(stages, microbatches, replicas=replicas, **choice.options)
    return replace(made, spare=spare)


class SteadyState:
    """One replica's actions without end. `make` gives the schedule for some number of minibatches."""

    def __init__(self, make: Callable[[int], Schedule], stage: int, replica: int, replicas: tuple[int, ...]) -> None:
        self._period = lcm(*replicas)
        self._begin = self._period * (2 + sum(replicas))
        self._replicas = replicas[stage]
        schedule = make(self._begin + 4 * self._period)
        self._stretches = [_stretches(actions) for actions in schedule.actions[stage]]
        self._replica, period = replica, self._period
        for stretches, number in product(self._stretches, range(self._begin - period, self._begin)):
            here, later = stretches.get(number), stretches.get(number + period)
            if here is not None and later != [_shifted(action, period) for action in here]:
                raise BrokenInvariant(
                    f"a schedule without flushes must be periodic; F{number} and F{number + period} go on differently"
                )

    def call(self, number: int, replica: int | None = None) -> list[ScheduleAction]:
        """The actions from the forward of this minibatch up to the next forward; none where it is another replica's."""
        replica = self._replica if replica is None else replica
        if number % self._replicas != replica:
            return []
        known = number if number < self._begin else self._begin + (number - self._begin) % self._period
        return [_shifted(action, number - known) for action in self._stretches[replica][known]]

    def rest(self, fed: int) -> list[ScheduleAction]:
        """The backwards and updates that are left for this replica when no more than `fed` minibatches come."""
        rests = [self._rest(fed, replica) for replica in range(self._replicas)]
        missing = max(updates for updates, _ in rests) - rests[self._replica][0]
        return [*rests[self._replica][1], *[UPDATE] * missing]  # replicas synchronise at every update

    def _rest(self, fed: int, replica: int) -> tuple[int, list[ScheduleAction]]:
        """The number of updates of a replica in all, and its actions that are left."""
        mine = len(range(replica, fed, self._replicas))
        calls = (replica + index * self._replicas for index in count())
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
        """How many calls after its forward the first backward comes."""
        return next(number for number in count() if ScheduleAction("B", self._replica) in self.call(number)) - self._replica


def _stretches(actions: ReplicaActions) -> dict[int, list[ScheduleAction]]:
    """For each forward: it, and the actions up to the next."""
    stretches: dict[int, list[ScheduleAction]] = {}
    for action in actions:
        if action.kind == "F":
            current = stretches[action.microbatch] = []
        current.append(action)
    return stretches


def _shifted(action: ScheduleAction, by: int) -> ScheduleAction:
    return action if action == UPDATE else ScheduleAction(action.kind, action.microbatch + by)

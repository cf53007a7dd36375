"""The schedules that have a name, each made by a pure function; a spec such as `gpipe,recompute=0` names one.

    sequential   one microbatch at a time: forward through all stages, and back (plain model parallelism)
    gpipe        all forwards, then all backwards, the last first (GPipe, 2019)
    1f1b         as few forwards ahead as keep all stages at work, then one backward for one forward; a flush at the end
                 (PipeDream-Flush, 2021)
    pipedream    the same without a flush: an update after every backward, old weights kept for those under way
                 (PipeDream, 2019)

With replicas, a stage has ceil(replicas from it to the last stage / its own) microbatches under way on each of them; at the
first stage this is PipeDream's NOAM. Its replicas meet at every update, as in data parallelism. When the microbatches do
not come out even, a replica without one takes part in the last update with nothing of its own. The published number under
way leaves stages idle where replicas differ between stages and meet after every backward: `clock` says how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from polytempo.errors import UsageError
from polytempo.options import ArgumentReader, Syntax, parse, switch, whole_number
from polytempo.pipeline.actions import UPDATE, ReplicaActions, Schedule, ScheduleAction

Replicas = Sequence[int] | None


def sequential(stages: int, microbatches: int, replicas: Replicas = None) -> Schedule:
    """One microbatch at a time on every replica: all stages but one wait."""
    counts = _counts(stages, microbatches, replicas)
    lines = [[_line(mine, 1) for mine in _shares(microbatches, count)] for count in counts]
    return _schedule("sequential", microbatches, lines)


def gpipe(stages: int, microbatches: int, recompute: bool = True, replicas: Replicas = None) -> Schedule:
    """All forwards, then all backwards in reverse order."""
    counts = _counts(stages, microbatches, replicas)
    lines = [[_all_then_back(mine) for mine in _shares(microbatches, count)] for count in counts]
    return _schedule("gpipe", microbatches, lines, recompute)


def one_f_one_b(stages: int, microbatches: int, recompute: bool = False, replicas: Replicas = None) -> Schedule:
    """One forward, one backward, with a flush at the end of the step."""
    counts = _counts(stages, microbatches, replicas)
    ahead = [in_flight(counts, stage) for stage in range(stages)]
    lines = [[_line(mine, most) for mine in _shares(microbatches, count)] for most, count in zip(ahead, counts, strict=True)]
    return _schedule("1f1b", microbatches, lines, recompute)


def pipedream(
    stages: int, minibatches: int, replicas: Replicas = None, vertical_sync: bool = False, recompute: bool = False
) -> Schedule:
    """One forward, one backward and update, until so many minibatches have gone through."""
    counts = _counts(stages, minibatches, replicas, "minibatches")
    if vertical_sync and len(set(counts)) > 1:
        raise UsageError(
            f"vertical sync needs equally many replicas at every stage, so that a version is made of the same minibatches "
            f"everywhere; got {counts}; nearest: {(counts[0],) * stages}, or leave vertical sync out"
        )
    lines = [
        [_line(mine, in_flight(counts, stage), -(-minibatches // count)) for mine in _shares(minibatches, count)]
        for stage, count in enumerate(counts)
    ]
    made = tuple(map(tuple, lines))
    return Schedule("pipedream", minibatches, made, recompute, "first" if vertical_sync else "newest", flushes=False)


def in_flight(replicas: Sequence[int], stage: int) -> int:
    """How many microbatches each replica of the stage has under way at most, so that no stage behind it waits."""
    return -(-sum(replicas[stage:]) // replicas[stage])


def _schedule(name: str, microbatches: int, lines: list[list[ReplicaActions]], recompute: bool = False) -> Schedule:
    return Schedule(name, microbatches, tuple(map(tuple, lines)), recompute)


def _shares(microbatches: int, replicas: int) -> Iterator[Sequence[int]]:
    """The microbatches of each replica."""
    return (range(replica, microbatches, replicas) for replica in range(replicas))


def _all_then_back(mine: Sequence[int]) -> ReplicaActions:
    return (
        *(ScheduleAction("F", number) for number in mine),
        *(ScheduleAction("B", number) for number in reversed(mine)),
        UPDATE,
    )


def _line(mine: Sequence[int], ahead: int, updates: int = 0) -> ReplicaActions:
    """So many forwards ahead, then a backward for a forward; an update after each backward, or, with 0, one at the end."""
    line = [ScheduleAction("F", number) for number in mine[: ahead - 1]]
    for index, number in enumerate(mine):
        line += [ScheduleAction("F", mine[at]) for at in (index + ahead - 1,) if at < len(mine)]
        line += [ScheduleAction("B", number), *([UPDATE] if updates else [])]
    return (*line, *[UPDATE] * (updates - len(mine) if updates else 1))


def _counts(stages: int, microbatches: int, replicas: Replicas, things: str = "microbatches") -> tuple[int, ...]:
    """The replicas of each stage, one unless told; refuses what cannot be."""
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

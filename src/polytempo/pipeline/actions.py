"""The words of which schedules are made: what one replica of a stage does with the microbatches, one after the other.

`F3` is the forward of microbatch 3, `B3` its backward, `U` the update of the stage's weights with the gradients of all
backwards since the last one. What travels follows: F3 waits for F3 of the stage before, B3 for B3 of the stage behind.
Microbatch m is on replica m mod r of a stage with r replicas, both ways. All replicas of a stage meet at U, the first with
the first, and so on: they take the mean of their gradients, so that they always hold the same weights. The version of
the weights is the number of updates so far.

`W3`, the gradients of weights for microbatch 3, is part of B3 and stands in no schedule. A run may do it later, before the
next U, and then says when.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast, get_args

from polytempo.errors import UsageError, nearest

ActionKind = Literal["F", "B", "U", "W"]
WeightVersions = Literal["newest", "first"]


@dataclass(frozen=True, slots=True)
class ScheduleAction:
    """One thing to do; an update has no microbatch."""

    kind: ActionKind
    microbatch: int = -1

    def __post_init__(self) -> None:
        if self.kind not in get_args(ActionKind) or (self.microbatch != -1 if self.kind == "U" else self.microbatch < 0):
            raise UsageError(f"expected F or B with a microbatch from 0 on, or U without one; got {self}")

    def __str__(self) -> str:
        return self.kind if self.microbatch == -1 else f"{self.kind}{self.microbatch}"


ReplicaActions = tuple[ScheduleAction, ...]

UPDATE = ScheduleAction("U")


@dataclass(frozen=True)
class Schedule:
    """What all replicas of all stages do: `lines[stage][replica]`. Nothing here is proven yet: see `check`."""

    name: str
    #: Of one step; of one that goes on without a flush: how many were written down.
    microbatches: int
    lines: tuple[tuple[ReplicaActions, ...], ...]
    #: Only the inputs of a stage are kept for the backward, which makes the forward again.
    recompute: bool = False
    #: Which weights a forward uses: the newest of its stage, or the version that the first stage used.
    versions: WeightVersions = "newest"
    #: The list is one step: one update, at the end, with nothing under way.
    flushes: bool = True
    #: Room for the activations of so many microbatches more, kept for gradients of weights that wait (see `debts`).
    spare: int = 0

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip() or not self.name.isprintable():
            raise UsageError(f"expected a name of one line, without blanks around it; got {self.name!r}")
        if self.versions not in get_args(WeightVersions):
            raise UsageError(f"versions must be newest or first, not {self.versions!r}")
        if self.microbatches < 1:
            raise UsageError(f"microbatches must be 1 or more, not {self.microbatches}")
        if self.spare < 0:
            raise UsageError(f"spare must be 0 or more, not {self.spare}")
        if not self.lines or not all(self.lines):
            raise UsageError(f"expected a stage or more, each with a replica or more; got replicas {self.replicas}")

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.lines)

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many replicas each stage has."""
        return tuple(map(len, self.lines))

    def replica_of(self, stage: int, microbatch: int) -> int:
        """The replica of the stage that this microbatch visits, both ways."""
        return microbatch % len(self.lines[stage])

    def each_line(self) -> Iterator[tuple[int, int, ReplicaActions]]:
        """Stage, replica, actions."""
        for stage, replicas in enumerate(self.lines):
            for replica, line in enumerate(replicas):
                yield stage, replica, line

    def place(self, stage: int, replica: int) -> str:
        """How texts name it: stage 2, or stage 2.1 when it has replicas."""
        return f"stage {stage}" if len(self.lines[stage]) == 1 else f"stage {stage}.{replica}"

    def made_again(self, stage: int, replica: int) -> frozenset[int]:
        """The microbatches whose forward the backward makes again: not those whose forward has only just been made."""
        line = self.lines[stage][replica]
        pairs = zip((UPDATE, *line), line, strict=False)
        again = (
            now.microbatch for before, now in pairs if now.kind == "B" and before != ScheduleAction("F", now.microbatch)
        )
        return frozenset(again if self.recompute else ())


def to_text(schedule: Schedule) -> str:
    """A head with the facts, and a line for each replica of a stage."""
    facts = {
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "recompute": "yes" if schedule.recompute else "no",
        "versions": schedule.versions,
        "flushes": "yes" if schedule.flushes else "no",
    }
    if schedule.spare:
        facts["spare"] = schedule.spare
    head = [f"{name}: {value}" for name, value in facts.items()]
    body = [f"{schedule.place(stage, replica)}: {' '.join(map(str, line))}" for stage, replica, line in schedule.each_line()]
    return "\n".join([*head, *body, ""])


#: What the head may say, how a value looks, and how that is said.
_HEAD = {
    "schedule": (r".+", "a name"),
    "microbatches": (r"[0-9]+", "a number"),
    "recompute": (r"yes|no", "yes or no"),
    "versions": (r"newest|first", "newest or first"),
    "flushes": (r"yes|no", "yes or no"),
    "spare": (r"[0-9]+", "a number"),
}


def from_text(text: str) -> Schedule:
    """What `to_text` wrote, or somebody by hand: the head may be left out; empty lines and those that begin with # are."""
    head: dict[str, str] = {}
    lines: dict[tuple[int, int], ReplicaActions] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            _read_line(f"line {number}", line, head, lines)
    if not lines:
        raise UsageError("expected a line for each stage, such as 'stage 0: F0 B0 U'; there is none")
    counted = max((action.microbatch for line in lines.values() for action in line), default=-1) + 1
    return Schedule(
        head.get("schedule", "by hand"),
        int(head.get("microbatches", max(counted, 1))),
        _folded(lines),
        head.get("recompute") == "yes",
        cast(WeightVersions, head.get("versions", "newest")),
        head["flushes"] == "yes" if "flushes" in head else all(line.count(UPDATE) == 1 for line in lines.values()),
        int(head.get("spare", 0)),
    )


def _read_line(where: str, line: str, head: dict[str, str], lines: dict[tuple[int, int], ReplicaActions]) -> None:
    name, colon, rest = (part.strip() for part in line.partition(":"))
    stage = re.fullmatch(r"stage\s+([0-9]+)(?:\.([0-9]+))?", name)
    if not colon or not (stage or name in _HEAD):
        raise UsageError(
            f"{where}: expected 'stage NUMBER: ACTIONS' or one of {', '.join(_HEAD)} with a colon, got {line.strip()!r}"
            f"{nearest(name.split()[0] if name else '', ('stage', *_HEAD))}"
        )
    key = (int(stage[1]), int(stage[2] or 0)) if stage else None
    if key in lines or name in head:
        raise UsageError(f"{where}: {name} is there twice; leave one of them out")
    if key:
        lines[key] = tuple(_action(f"{where}, word {count}", word) for count, word in enumerate(rest.split(), 1))
        return
    pattern, expected = _HEAD[name]
    if not re.fullmatch(pattern, rest):
        raise UsageError(f"{where}: {name} must be {expected}, not {rest!r}")
    head[name] = rest


def _action(where: str, word: str) -> ScheduleAction:
    match = re.fullmatch(r"([FB])([0-9]+)|U", word)
    if not match:
        raise UsageError(f"{where}: {word!r} is no action; write F or B with a number (F0, B12), or U")
    return ScheduleAction(cast(ActionKind, match[1]), int(match[2])) if match[1] else UPDATE


def _folded(lines: dict[tuple[int, int], ReplicaActions]) -> tuple[tuple[ReplicaActions, ...], ...]:
    """By stage and replica, of which none may be missing."""
    stages = 1 + max(stage for stage, _ in lines)
    replicas = [1 + max((replica for at, replica in lines if at == stage), default=0) for stage in range(stages)]
    wanted = [(stage, replica) for stage in range(stages) for replica in range(replicas[stage])]
    if missing := next((key for key in wanted if key not in lines), None):
        there, absent = (f"stage {stage}.{replica}" for stage, replica in (max(lines), missing))
        raise UsageError(f"there is a line for {there}, but none for {absent}; add it")
    return tuple(tuple(lines[stage, replica] for replica in range(replicas[stage])) for stage in range(stages))

"""The actions of which schedules are made: what one replica of a stage does with the microbatches, in order.

`F3` is the forward of microbatch 3, `B3` its backward, `U` the update of the stage's weights with the gradients of all
backwards since the last one. Messages follow from that: F3 waits for F3 of the stage before, B3 for B3 of the stage behind.
Microbatch m is on replica m mod r of a stage with r replicas, both ways. All replicas of a stage synchronise at U, the first
U of each with the first U of the others, and so on: they take the mean of their gradients, so that they always hold the same
weights. The version of the weights is the number of updates so far.

`W3`, the weight gradients of microbatch 3, is part of B3 and stands in no schedule. A run may defer it to any time before
the next U, and its log then has W3 as an action.
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
    """One action; an update has no microbatch."""

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
    """A pipeline schedule as data: the actions of every replica of every stage, in order.

    It has a text form (`to_text`, `from_text`), and a checker that proves it before it runs (`pipeline/check.py`).

    Args:
        name: A name of one line.
        microbatches: The microbatches of one step; of a schedule without flushes, of the part that is written down.
        actions: `actions[stage][replica]` is a tuple of actions: forward F, backward B, update U.
        recompute: Keep only the inputs of a stage; backward makes the forward again.
        versions: Which weights a forward uses: the `"newest"` of its stage, or the version that the `"first"` stage used.
        flushes: The list is one step: one update, at the end, with nothing under way.
        spare: Activations of this number of further microbatches may be kept for deferred weight gradients.

    Raises:
        UsageError: A value is out of range.
    """

    name: str
    #: Of one step; of a schedule without a flush, of the part that was written down.
    microbatches: int
    actions: tuple[tuple[ReplicaActions, ...], ...]
    #: Only the inputs of a stage are kept for the backward, which recomputes the forward.
    recompute: bool = False
    #: Which weights a forward uses: the newest of its stage, or the version that the first stage used.
    versions: WeightVersions = "newest"
    #: The actions are one step: one update, at the end, with no microbatch in flight.
    flushes: bool = True
    #: Memory for the activations of this many more microbatches, for deferred weight gradients (`deferred_gradients.py`).
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
        if not self.actions or not all(self.actions):
            raise UsageError(f"expected a stage or more, each with a replica or more; got replicas {self.replicas}")

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.actions)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of replicas of each stage."""
        return tuple(map(len, self.actions))

    def replica_of(self, stage: int, microbatch: int) -> int:
        """The replica of a stage that computes a microbatch, forward and backward.

        Args:
            stage: The stage.
            microbatch: The microbatch.

        Returns:
            The index of the replica.
        """
        return microbatch % len(self.actions[stage])

    def each_replica(self) -> Iterator[tuple[int, int, ReplicaActions]]:
        """Stage, replica, actions."""
        for stage, replicas in enumerate(self.actions):
            for replica, actions in enumerate(replicas):
                yield stage, replica, actions

    def place(self, stage: int, replica: int) -> str:
        """The name of a stage or replica in texts: "stage 2", or "stage 2.1" where the stage has replicas.

        Args:
            stage: The stage.
            replica: The replica.

        Returns:
            The name.
        """
        return f"stage {stage}" if len(self.actions[stage]) == 1 else f"stage {stage}.{replica}"

    def recomputed(self, stage: int, replica: int) -> frozenset[int]:
        """The microbatches whose forward is recomputed in backward: not those whose forward has just been made.

        Args:
            stage: The stage.
            replica: The replica.

        Returns:
            Their numbers; none without `recompute`.
        """
        actions = self.actions[stage][replica]
        pairs = zip((UPDATE, *actions), actions, strict=False)
        again = (
            now.microbatch for before, now in pairs if now.kind == "B" and before != ScheduleAction("F", now.microbatch)
        )
        return frozenset(again if self.recompute else ())


def last_backwards(actions: ReplicaActions) -> frozenset[int]:
    """The microbatches whose backwards are the last before an update."""
    found, last = set(), None
    for action in actions:
        if action.kind == "B":
            last = action.microbatch
        elif action.kind == "U" and last is not None:
            found.add(last)
    return frozenset(found)


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
    body = [
        f"{schedule.place(stage, replica)}: {' '.join(map(str, actions))}"
        for stage, replica, actions in schedule.each_replica()
    ]
    return "\n".join([*head, *body, ""])


#: Fields of the head: a pattern for the value, and how errors describe it.
_HEAD = {
    "schedule": (r".+", "a name"),
    "microbatches": (r"[0-9]+", "a number"),
    "recompute": (r"yes|no", "yes or no"),
    "versions": (r"newest|first", "newest or first"),
    "flushes": (r"yes|no", "yes or no"),
    "spare": (r"[0-9]+", "a number"),
}


def from_text(text: str) -> Schedule:
    """A schedule from text: as `to_text` writes it, or by hand without the head; empty lines and # comments are ignored."""
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

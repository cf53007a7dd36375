"""A job of machines and policies as a value: what a walk goes through and a game is played with.

A `JobWorld` is a job at one moment, and a `Draft` the next one while a move makes it. `JobWorld`s are equal where everything
that comes can only be equal, so a walk goes through each once. Policies and machines stand in it as numbers (`states.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polytempo.proving.states import Broken
from polytempo.sync.fields import Fields
from polytempo.sync.spec import Spec

#: What a worker is: not here (yet, or any more), of the initial ones and awaited, here, or dead without others knowing it.
AWAY, AWAITED, ALIVE, DEAD = range(4)

#: In `mail`, in place of a receiver: the sender has no model, so that no worker is sent anything.
NO_MODEL = -1

#: "push", fragment, step, count, seconds, version that it was computed on, what its mode measures
SentPush = tuple[str, int, int, int, float, int, Fields | None]
Told = tuple[Any, ...]
PairCall = tuple[int, int, str, int, bool]  # sender, receiver, "request" or "reply", the asker's step, averaged
Move = tuple[Any, ...]


class Doing(NamedTuple):
    """A worker, as its driver knows it."""

    status: int
    machine: int = -1
    up: tuple[SentPush, ...] = ()
    down: tuple[Told, ...] = ()
    ends: float = math.inf  # when what it computes is done; inf: it computes nothing
    took: float = 0.0  # seconds of what it computes
    spent: float = 0.0  # seconds of what is not pushed yet
    number: int = -1  # of the last step that its own optimizer made
    leaving: bool = False  # it was told to leave
    home: bool = False  # it has ordered to go home
    settles: bool = False  # it wants to know when nothing is under way
    again: bool = False  # it wants to know when it is done with its orders
    fetching: bool = False
    snapshot: bool = False
    model: bool = False  # has it values to compute on?
    asks: tuple[int, int] | None = None  # the partner whose reply it waits for, and the step
    dropped: bool = False  # a push was; its next release says where it goes on
    released: tuple[int, ...] = ()  # of each fragment the last step that it may push
    pushes: tuple[int, ...] = ()  # the step of its next push
    unsent: tuple[int, ...] = ()  # (local) steps since its last push
    come: tuple[bool, ...] = ()  # values that are there and not taken
    version: int = 0  # of the values that it holds


class JobWorld(NamedTuple):
    """A job at one moment."""

    policies: tuple[int, ...]
    workers: tuple[Doing, ...]
    pending: tuple[tuple[int, int, int], ...] = ()  # pushes that no policy has decided on: fragment, worker, step
    calls: tuple[PairCall, ...] = ()
    mail: frozenset[tuple[int, int, int]] = frozenset()  # sender, step, receiver
    cuts: tuple[tuple[int, Any], ...] = ()  # by which shares the joint batch of a step is cut
    wakes: tuple[float, ...] = ()
    now: float = 0.0
    version: int = 0
    losses: int = 0  # workers that may still die, or be told to leave
    joins: int = 0
    odd: int = 0  # steps, or messages on which the clock goes on, that may still take other than 1, or than no time

    @property
    def in_flight(self) -> bool:
        """Is a message under way?"""
        return bool(self.calls) or any(doing.up or doing.down for doing in self.workers)


class Draft:
    """The world that a move makes of the one before it."""

    def begin(self, world: JobWorld, seconds: float) -> None:
        """A move begins in this world; a step that begins with it takes this long."""
        self.workers = list(world.workers)
        self.policies = list(world.policies)
        self.pending = list(world.pending)
        self.calls = list(world.calls)
        self.mail = set(world.mail)
        self.cuts, self.wakes = world.cuts, world.wakes
        self.now, self.version = world.now, world.version
        self.losses, self.joins = world.losses, world.joins
        self.seconds = seconds
        self.chose = False  # did a step begin, so that the world depends on its seconds?

    def change(self, rank: int, **changes: Any) -> None:
        """A worker does something else."""
        self.workers[rank] = self.workers[rank]._replace(**changes)

    def tell(self, rank: int, *told: Any) -> None:
        """A worker will hear of this: at any later moment, or never if it is dead."""
        doing = self.workers[rank]
        if doing.status not in (ALIVE, DEAD):
            raise Broken(f"worker {rank} is gone, and is told {told}")
        if doing.status == ALIVE:
            self.change(rank, down=(*doing.down, told))

    def decide_on(self, part: int, worker: int, step: int) -> None:
        """A push is applied or discarded, once. One of an earlier life may be of the same step."""
        push = next((push for push in ((part, worker, step), (part, -1 - worker, step)) if push in self.pending), None)
        if push is None:
            raise Broken(f"step {step} of worker {worker} is applied or discarded, and has not been pushed")
        self.pending.remove(push)

    def world(self, odd: int) -> JobWorld:
        """The world after the move."""
        return JobWorld(
            tuple(self.policies),
            tuple(self.workers),
            tuple(sorted(self.pending)),
            tuple(self.calls),
            frozenset(self.mail),
            self.cuts,
            self.wakes,
            self.now,
            self.version,
            self.losses,
            self.joins,
            odd,
        )


@dataclass(frozen=True)
class Job:
    """A mode, how large the job is, and what may befall it."""

    spec: Spec
    workers: int
    last: float  # steps of each worker
    in_flight: int = 1  # pushes of a worker
    deadline: float = 0.0  # 0: time does not matter
    odd: int = 0  # steps that take 0 or as long as the deadline, not 1; or messages that take time
    losses: int = 0
    joins: int = 0
    comers: int = 1  # workers that may join and were not awaited
    prompt: bool = False  # a worker hears at once when its orders are done; one that is gone does not come back


def stuck(ranks: Sequence[int]) -> Broken:
    """The finding that these workers wait for ever."""
    workers, waits = " and ".join(f"worker {rank}" for rank in ranks), "wait" if len(ranks) > 1 else "waits"
    return Broken(f"nothing can happen any more, and {workers} {waits}", promise="liveness")


def replaced(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    """These values with another one in one place."""
    return (*values[:place], value, *values[place + 1 :])

"""A small job of machines and policies as a value: what `performing.py` changes, and `test_machines.py` walks through.

Policies and machines are interned: a number stands for a state of either, and what it does on an event is worked out once,
however many worlds it happens in.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import msgspec

from polytempo.sync.events import Pushed
from polytempo.sync.progress import Progress
from polytempo.sync.spec import Spec

#: What a worker is: not here (yet, or any more), of the initial ones and awaited, here, or dead without others knowing it.
AWAY, AWAITED, ALIVE, DEAD = range(4)

#: In `mail`, in place of a receiver: the sender has no model, so that nobody is sent anything.
NO_MODEL = -1

Push = tuple[str, int, int, int, float, int]  # "push", fragment, step, count, seconds, version that it was computed on
Told = tuple[Any, ...]
Call = tuple[int, int, str, int, bool]  # sender, receiver, "request" or "reply", the asker's step, averaged
Move = tuple[Any, ...]


class Doing(NamedTuple):
    """A worker, as its driver knows it."""

    status: int
    machine: int = -1
    up: tuple[Push, ...] = ()
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


class World(NamedTuple):
    """A job at one moment."""

    policies: tuple[int, ...]
    workers: tuple[Doing, ...]
    pending: tuple[tuple[int, int, int], ...] = ()  # pushes that no policy has decided on: fragment, worker, step
    calls: tuple[Call, ...] = ()
    mail: frozenset[tuple[int, int, int]] = frozenset()  # sender, step, receiver
    cuts: tuple[tuple[int, Any], ...] = ()  # by which shares the joint batch of a step is cut
    wakes: tuple[float, ...] = ()
    now: float = 0.0
    version: int = 0
    losses: int = 0  # workers that may still die, or be told to leave
    joins: int = 0
    odd: int = 0  # steps, or messages on which the clock goes on, that may still take other than 1, or than no time


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
    prompt: bool = False  # a worker hears at once when its orders are done; one that is gone does not come back


# What makes states equal.


ATOMS = frozenset((int, float, bool, str, NoneType))


def canonical(thing: Any) -> Any:
    """The memory of a policy or machine as a value: without what decides only in which order workers are told of things,
    which go to different workers, or who is named in a message."""
    kind = type(thing)
    if kind in ATOMS:
        return thing
    if isinstance(thing, dict | set | frozenset):
        items = thing.items() if isinstance(thing, dict) else thing
        return tuple(sorted((canonical(item) for item in items), key=repr))
    if isinstance(thing, tuple | list | deque):
        parts = [canonical(part) for part in thing]
        return tuple(sorted(parts) if thing and isinstance(thing[0], Pushed) else parts)
    if kind is Progress:
        return thing.slowest, thing.fastest, tuple(sorted(thing.pushed.items()))
    if isinstance(thing, msgspec.Struct):
        return thing
    if callable(thing):
        return None
    names = [name for base in reversed(kind.__mro__) for name in getattr(base, "__slots__", ())]
    return tuple([canonical(getattr(thing, name)) for name in [*names, *sorted(getattr(thing, "__dict__", ()))]])


class Interned:
    """States of policies, or of machines, each with a number; and what they do."""

    def __init__(self) -> None:
        self.things: list[Any] = []  # never changed
        self._pickled: list[bytes] = []
        self._numbers: dict[Any, int] = {}
        self._after: dict[Any, tuple[Any, int]] = {}

    def number(self, thing: Any) -> int:
        key = canonical(thing)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.things)
            self.things.append(thing)
            self._pickled.append(pickle.dumps(thing, pickle.HIGHEST_PROTOCOL))
        return number

    def handle(self, number: int, event: type, args: tuple[Any, ...], *about: Any) -> tuple[Any, int]:
        """What this state does on an event, and the state after it."""
        key = (number, event, args, about)
        known = self._after.get(key)
        if known is None:
            thing = pickle.loads(self._pickled[number])
            answer = thing.handle(event(*args), *about)
            known = self._after[key] = (answer, self.number(thing))
        return known


def in_flight(world: World) -> bool:
    """Is a message under way?"""
    return bool(world.calls) or any(doing.up or doing.down for doing in world.workers)


def replaced(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])

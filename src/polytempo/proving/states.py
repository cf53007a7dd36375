"""States of policies and of machines, and what they do: each state has a number.

Interned    for walks: what a state does on an event is worked out once, in however many worlds it happens; two states
            that differ in nothing which matters have one number
Played      for games: each policy and each machine goes through its states itself, and nothing is copied
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any, Protocol

import msgspec

from polytempo.sync.capabilities import Capabilities
from polytempo.sync.events import Joined, Left, Measured, Pushed, Ticked
from polytempo.sync.gossip import GossipSpec
from polytempo.sync.mode import Mode, Origin
from polytempo.sync.progress import Progress
from polytempo.sync.watch import WatchedMachine, WatchedPolicy


class Broken(Exception):  # no PolytempoError: it is a finding, and what finds it makes a line of it
    """A mode does what it may not do.

    Args:
        text: What.
        about: The action or order that is wrong, where it is one.
        promise: What is broken by it, by its name in a report.
    """

    def __init__(self, text: str, about: object = None, promise: str = "orders") -> None:
        super().__init__(text)
        self.about, self.promise = about, promise


class States(Protocol):
    """Policies, or machines, by numbers."""

    things: list[Any]

    def number(self, thing: Any) -> int:
        """The number of this state."""

    def handle(self, number: int, event: type, args: tuple[Any, ...], *about: Any) -> tuple[Any, int]:
        """What this state does on an event, and the number of the state after it."""


class Interned:
    """States that are never changed."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._after: dict[Any, tuple[Any, int]] = {}

    def number(self, thing: Any) -> int:
        key = canonical(thing)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.things)
            self.things.append(thing)
        return number

    def handle(self, number: int, event: type, args: tuple[Any, ...], *about: Any) -> tuple[Any, int]:
        key = (number, event, args, about)
        known = self._after.get(key)
        if known is None:
            thing = twin(self.things[number], {})
            answer = thing.handle(event(*args), *about)
            known = self._after[key] = (answer, self.number(thing))
        return known


class Played:
    """States of one course of events."""

    def __init__(self) -> None:
        self.things: list[Any] = []

    def number(self, thing: Any) -> int:
        self.things.append(thing)
        return len(self.things) - 1

    def handle(self, number: int, event: type, args: tuple[Any, ...], *about: Any) -> tuple[Any, int]:
        return self.things[number].handle(event(*args), *about), number


# What makes states equal.

ATOMS = frozenset((int, float, bool, str, NoneType))

#: What a watch knows beside what it watches.
_OF_WATCH = ("_next", "_released", "_dropped", "_undecided", "_former")


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
        return tuple(sorted(parts, key=repr) if thing and isinstance(thing[0], Pushed) else parts)
    if kind is Progress:
        return thing.slowest, thing.fastest, tuple(sorted(thing.pushed.items()))
    if isinstance(thing, msgspec.Struct):
        return thing
    if kind is WatchedPolicy:
        return canonical(thing.watched), *[canonical(getattr(thing, name)) for name in _OF_WATCH]
    if kind is WatchedMachine:
        return canonical(thing.watched)
    if isinstance(thing, type) or callable(thing):
        return None
    if not _is_plain(kind):  # a generator of random numbers, say
        return repr(thing.__reduce_ex__(2)[1:])
    names = [name for base in reversed(kind.__mro__) for name in _slots(base)]
    values = vars(thing) if hasattr(thing, "__dict__") else {}
    return tuple([canonical(getattr(thing, name, None)) for name in [*names, *sorted(values)]])


# Copies. `copy.deepcopy` would do, and takes several times as long as all else that a walk does.

#: Kinds of values that are never changed.
_SHARED = (
    *(Pushed, Joined, Left, Ticked, Measured, msgspec.Struct, Mode, Origin, Capabilities, GossipSpec),
    *(type, FunctionType, BuiltinFunctionType, frozenset, bytes, complex, range),
)


def twin(thing: Any, memo: dict[int, Any]) -> Any:
    """A copy that shares nothing which can be changed. `memo`: what was copied already, by identity: what is one thing in
    two places is one thing in the copy."""
    kind = type(thing)
    if kind in ATOMS:
        return thing
    known = memo.get(id(thing))
    if known is not None:
        return known
    made: Any
    if kind is dict or kind is OrderedDict:
        made = memo[id(thing)] = kind()
        for name, value in thing.items():
            made[name if type(name) in ATOMS else twin(name, memo)] = value if type(value) in ATOMS else twin(value, memo)
        return made
    if kind is list or kind is deque:
        made = memo[id(thing)] = kind()
        made.extend([part if type(part) in ATOMS else twin(part, memo) for part in thing])
        return made
    if kind is tuple:
        return tuple([part if type(part) in ATOMS else twin(part, memo) for part in thing])
    if kind is set:
        made = memo[id(thing)] = {part if type(part) in ATOMS else twin(part, memo) for part in thing}
        return made
    if isinstance(thing, _SHARED):
        return thing
    if kind is MethodType:
        return MethodType(thing.__func__, twin(thing.__self__, memo))
    if not _is_plain(kind):
        return copy.deepcopy(thing, memo)
    made = memo[id(thing)] = object.__new__(kind)
    for base in kind.__mro__:
        for name in _slots(base):
            if hasattr(thing, name):
                object.__setattr__(made, name, twin(getattr(thing, name), memo))
    if hasattr(thing, "__dict__"):
        made.__dict__.update({name: twin(value, memo) for name, value in vars(thing).items()})
    return made


_PLAIN: dict[type, bool] = {}


def _is_plain(kind: type) -> bool:
    """Is an object of this kind what its slots and its dictionary hold, and nothing more?"""
    known = _PLAIN.get(kind)
    if known is None:
        made_in_python = all(base.__flags__ & 1 << 9 for base in kind.__mro__[:-1])
        copies = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__")
        own = any(name in base.__dict__ for base in kind.__mro__[:-1] for name in copies)
        known = _PLAIN[kind] = made_in_python and not own
    return known


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)

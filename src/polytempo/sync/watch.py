"""A watch around each half of a mode that was brought in: what no policy and no machine may do is a `ModeError`.

    policy     actions of known kinds; a release to a member, of a step that is its turn, once, and not before its push is
               decided on (unless the mode says `early`); an update of pushes that were given, each once; numbers that are
               numbers; fields as they are declared
    machine    orders of known kinds, that go with what it brings; fields as they are declared

An error of the mode's own code is one, too. Each is one line that begins with file and line: that of the code that failed,
or of the method that answered. Modes of ours are not watched.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping
from typing import Any, get_args

import msgspec

from polytempo.errors import ModeError, PolytempoError
from polytempo.options import ArgumentReader
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.blocks import Averaging
from polytempo.sync.capabilities import Capabilities, PushedWork, Pushes
from polytempo.sync.directives import Directive, NextBlock
from polytempo.sync.events import Event, Joined, Left, Pushed, Ticked
from polytempo.sync.fields import TYPES, Fields, trouble
from polytempo.sync.machine import (
    AskAgain,
    Compute,
    GoHome,
    Install,
    Orders,
    PushStep,
    SendPush,
    Settle,
    WorkerEvent,
    WorkerMachine,
    WorkerOrder,
    orders_for,
)
from polytempo.sync.mode import Mode, Origin
from polytempo.sync.policy import Policy

#: Orders that go with whatever a machine brings.
COMMON = (Compute, AskAgain, Settle, GoHome)

#: Of a machine that says nothing of averages.
ELSEWHERE = Averaging(1)

#: What a push of a machine brings, by what its mode declares.
_BRINGS = {
    Pushes.GRADIENTS: ("gradient", "share", "batches", "sum"),
    Pushes.VALUES: ("values",),
    Pushes.NOTHING: ("nothing",),
}

#: What a release tells goes through a message.
_ENCODER, _DIRECTIVES = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Directive)

#: The methods of a policy that answer an event, the most particular first.
ANSWERS: dict[type, tuple[str, ...]] = {
    Pushed: ("on_push", "handle"),
    Joined: ("on_start", "_joined", "_start", "handle"),
    Left: ("on_leave", "_left", "handle"),
    Ticked: ("on_tick", "handle"),
}


def place_of(origin: Origin, thing: object, methods: Iterable[str]) -> str:
    """File and line of the first of these methods that stands in the mode's file; else of the mode."""
    for name in methods:
        for kind in type(thing).__mro__:
            code = getattr(kind.__dict__.get(name), "__code__", None)
            if code is not None and code.co_filename == origin.code:
                return f"{origin.file}:{code.co_firstlineno}"
    return f"{origin.file}:{origin.line}" if origin.line else origin.file


def place_of_error(origin: Origin, error: BaseException) -> str:
    """File and line of the last line of the mode's file that an error has passed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == origin.code]
    last = lines[-1] if lines else origin.line
    return f"{origin.file}:{last}" if last else origin.file


def called(origin: Origin, call: Callable[[], Any]) -> Any:
    """What code of a mode returns.

    Raises:
        ModeError: It has failed.
    """
    try:
        return call()
    except PolytempoError:  # said in a line already
        raise
    except Exception as error:  # whatever it is, it is the mode's
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModeError(f"{place_of_error(origin, error)}: {said}") from error


def check_declaration(mode: Mode) -> None:
    """Refuse a declaration that cannot be used, whatever its argument and options are.

    Raises:
        ModeError: With file and line of the declaration.
    """
    assert mode.origin is not None
    wrong = ""
    for name, reader in {"argument": mode.argument, **mode.options}.items():
        if not isinstance(reader, ArgumentReader | None) or (reader is None and name != "argument"):
            wrong = f"{name}={reader!r}; expected what reads it, such as whole_number({name!r}, at_least=1)"
    for name, kind in {**mode.tells, **mode.measures}.items():
        if kind not in TYPES:
            wrong = f"the field {name} as {kind!r}; expected {', '.join(known.__name__ for known in TYPES)}"
    if not isinstance(mode.capabilities, Capabilities) and not callable(mode.capabilities):
        wrong = f"capabilities={mode.capabilities!r}; expected Capabilities(...)"
    if wrong:
        raise ModeError(f"{place_of(mode.origin, mode, ())}: {mode.name} declares {wrong}")


class _Watched:
    """The mode's own half, what was said about it, and where. What is not asked here is the mode's own.

    Args:
        mode: The mode.
        maker: Which function of it makes the half.
        kind: Of what the half must be.
        make: Makes it.
    """

    def __init__(self, mode: Mode, maker: str, kind: type, make: Callable[[], Any]) -> None:
        assert mode.origin is not None
        self._mode, self._origin = mode, mode.origin
        self._inner: Any = called(self._origin, make)
        if not isinstance(self._inner, kind):
            made = type(self._inner).__name__
            raise ModeError(f"{self._place()}: {maker} of {mode.name} makes {made}, expected a {kind.__name__}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":  # a copy asks before there is anything
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def watched(self) -> Any:
        """The mode's own."""
        return self._inner

    def _place(self, *methods: str) -> str:
        """File and line of the first of these methods that is the mode's own."""
        return place_of(self._origin, self._inner, methods)


class WatchedPolicy(_Watched, Policy):
    """A policy of a mode that was brought in."""

    def __init__(
        self,
        mode: Mode,
        capabilities: Capabilities,
        members: Collection[int],
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(mode, "build", Policy, lambda: mode.build(len(members), *arguments, **options))
        self._can = capabilities
        if list(members) != list(range(len(members))):
            self._inner.expect(members)
        self._next: dict[int, int] = {}  # step of each member
        self._released: dict[int, int] = {}
        self._dropped: set[int] = set()  # members whose last push was discarded: their next release may be of any step
        self._undecided: list[Pushed] = []
        self._former: list[Pushed] = []  # likewise, of workers that have left since: one that is back does not wait for it

    @property
    def explains(self) -> bool:
        """Are names and reasons in holds?"""
        return bool(self._inner.explains)

    @explains.setter
    def explains(self, wanted: bool) -> None:
        self._inner.explains = wanted

    def begin_at(self, step: int) -> None:
        called(self._origin, lambda: self._inner.begin_at(step))

    def saved(self) -> dict[str, float]:
        found: dict[str, float] = called(self._origin, self._inner.saved)
        return found

    def restore(self, saved: Mapping[str, float]) -> None:
        called(self._origin, lambda: self._inner.restore(saved))

    def expect(self, members: Iterable[int]) -> None:
        self._inner.expect(members)

    @property
    def members(self) -> KeysView[int]:
        members: KeysView[int] = self._inner.members
        return members

    @property
    def reached(self) -> int:
        return int(called(self._origin, lambda: self._inner.reached))

    def holds(self) -> list[Hold]:
        found: list[Hold] = called(self._origin, self._inner.holds)
        return found

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = called(self._origin, lambda: self._inner.handle(event, now))
        if not isinstance(actions, list):
            wrong = f"answered {type(event).__name__} with {type(actions).__name__}, expected a list"
            raise ModeError(f"{self._place(*ANSWERS[type(event)])}: {wrong}")
        if isinstance(event, Pushed) and event.worker in self._next:
            self._undecided.append(event)
            self._next[event.worker] = max(self._next[event.worker], event.step + 1)
        elif isinstance(event, Left):
            for state in (self._next, self._released):
                state.pop(event.worker, None)
            self._dropped.discard(event.worker)
            self._former += [push for push in self._undecided if push.worker == event.worker]
            self._undecided = [push for push in self._undecided if push.worker != event.worker]
        for action in actions:
            wrong = self._look(event, action)
            if wrong:
                error = ModeError(f"{self._place(*ANSWERS[type(event)])}: {wrong}")
                error.about = action
                raise error
        return actions

    def _look(self, event: Event, action: Action) -> str:
        """What is wrong with an action; empty where nothing is."""
        match action:
            case Admit(worker, step):
                self._next[worker] = step
                self._released.pop(worker, None)
            case Release():
                return self._look_at_release(action)
            case Apply():
                return self._look_at_update(action)
            case Discard(worker, step) | Refuse(worker, step):
                return self._look_at_drop(event, worker, step)
            case Hold(worker) if worker not in self._next:
                return f"holds worker {worker}, which is no member"
            case Wake(at) if not math.isfinite(at):
                return f"asks to be woken at {at}"
            case Hold() | Wake():
                pass
            case _:
                return f"answered with {action!r}, expected actions: {', '.join(kind.__name__ for kind in get_args(Action))}"
        return ""

    def _look_at_release(self, release: Release) -> str:
        worker, step = release.worker, release.step
        due, before = self._next.get(worker), self._released.get(worker, -1)
        if due is None:
            return f"releases worker {worker}, which is no member"
        if step <= before:
            return f"releases worker {worker} for step {step}, after step {before}"
        if worker in self._dropped:
            self._dropped.discard(worker)
            due = self._next[worker] = max(due, step)
        if not due <= step <= due + self._can.ahead:
            upto = f" to {due + self._can.ahead}" if self._can.ahead else ""
            return f"releases worker {worker} for step {step}; its next is {due}{upto}"
        if not (self._can.early or self._can.ahead) and any(push.worker == worker for push in self._undecided):
            return (
                f"releases worker {worker} for step {step} before its last push is applied or discarded; put that first, or "
                "declare Capabilities(early=True)"
            )
        if wrong := _wrong_directive(release.directive, self._mode.tells):
            return f"tells worker {worker} {wrong}"
        self._released[worker] = step
        return ""

    def _look_at_update(self, update: Apply) -> str:
        for push in update.pushes:
            if not (_taken(self._undecided, push) or _taken(self._former, push)):
                step = f"step {push.step} of worker {push.worker}"
                return f"applies a push of {step} that it was not given, or has decided on already"
        numbers = [update.rate, update.divisor, *update.weights]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            with_ = f"rate {update.rate}, weights {update.weights} and divisor {update.divisor}"
            return f"makes an update with {with_}; expected numbers from 0 on"
        if update.weights and len(update.weights) != len(update.pushes):
            return f"applies {len(update.pushes)} pushes with {len(update.weights)} weights"
        return ""

    def _look_at_drop(self, event: Event, worker: int, step: int) -> str:
        known, former = (
            next((push for push in reversed(pushes) if (push.worker, push.step) == (worker, step)), None)
            for pushes in (self._undecided, self._former)
        )
        if known is not None:
            _taken(self._undecided, known)
            self._dropped.add(worker)
        elif former is not None:
            _taken(self._former, former)
        elif not (isinstance(event, Pushed) and (event.worker, event.step) == (worker, step)):  # of one that is no member
            return f"discards step {step} of worker {worker}, which was not pushed, or is decided on already"
        return ""

    def on_push(self, push: Pushed, now: float) -> list[Action]:
        raise AssertionError("`handle` passes events on")


def _taken(pushes: list[Pushed], push: Pushed) -> bool:
    """Take this very push out of a list; false where it is not in it."""
    place = next((index for index, known in enumerate(pushes) if known is push), None)
    if place is None:
        return False
    del pushes[place]
    return True


def _wrong_directive(directive: object, declared: Mapping[str, type]) -> str:
    """Why no worker could read what a release tells; empty where it can."""
    if directive is None:
        return ""
    kinds = get_args(Directive)
    if not isinstance(directive, kinds):
        known = ", ".join(kind.__name__ for kind in kinds)
        return f"{directive!r}, of type {type(directive).__name__}; expected nothing, or one of {known}"
    try:
        _DIRECTIVES.decode(_ENCODER.encode(directive))
    except (msgspec.MsgspecError, TypeError) as error:
        return f"{directive!r}, which does not pass a message: {error}"
    if isinstance(directive, NextBlock) and directive.period < 1:
        return f"{directive!r}; a block has at least 1 step"
    return trouble(directive, declared) if isinstance(directive, Fields) else ""


class WatchedMachine(_Watched):
    """A machine of a mode that was brought in."""

    def __init__(
        self,
        mode: Mode,
        capabilities: Capabilities,
        worker: int,
        last: float,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(mode, "machine", WorkerMachine, lambda: mode.machine(worker, last, *arguments, **options))
        brings = self._inner.brings
        self._known = (*COMMON, *orders_for(brings))
        if len(self._known) == len(COMMON):
            raise ModeError(f"{self._place()}: a machine cannot bring {brings!r}")
        if wrong := self._differs(capabilities):
            raise ModeError(f"{self._place()}: {mode.name} {wrong}")

    def _differs(self, can: Capabilities) -> str:
        """How what the mode declares differs from what its machine does; empty where it does not."""
        brings = self._inner.brings
        if brings not in _BRINGS[can.pushes]:
            fits = next(pushes.name for pushes, known in _BRINGS.items() if brings in known)
            return (
                f"declares pushes=Pushes.{can.pushes.name}, and its machine brings {brings!r}; declare "
                f"Capabilities(pushes=Pushes.{fits}), or another machine"
            )
        if brings == "values" and self._mode.averaging is None:
            return "has a machine of blocks, and no averaging=; give the function that makes the machine's Averaging"
        if brings == "values" and can.work is not PushedWork.LOCAL:
            return f"declares work=PushedWork.{can.work.name}, and its machine makes local steps; declare PushedWork.LOCAL"
        return ""

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        """As the machine does."""
        if isinstance(event, Release) and event.directive is not None:
            self._look_at_directive(event)
        orders: Orders = called(self._origin, lambda: self._inner.handle(event, now, part))
        for order in orders if isinstance(orders, tuple | list) else (orders,):
            wrong = self._look(order)
            if wrong:
                error = ModeError(f"{self._place('handle')}: on {type(event).__name__} the machine {wrong}")
                error.about = order
                raise error
        return orders

    def _look_at_directive(self, release: Release) -> None:
        wrong = _wrong_directive(release.directive, self._mode.tells)
        if not wrong and isinstance(release.directive, NextBlock) and self._inner.brings != "values":
            wrong = f"{release.directive!r}, which is for blocks of local steps; this machine brings {self._inner.brings!r}"
        if wrong:
            raise ModeError(f"{self._place()}: a release tells worker {release.worker} {wrong}")

    def _look(self, order: WorkerOrder) -> str:
        if type(order) not in self._known:
            known = ", ".join(kind.__name__ for kind in self._known)
            return f"orders {order!r}; one that brings {self._inner.brings!r} may order {known}"
        if isinstance(order, Install) and order.pull != 1.0 and not getattr(self._inner, "averaging", ELSEWHERE).own:
            return f"orders {order!r}, a part of the way, and what was sent is not kept; declare Averaging(own=True)"
        if isinstance(order, PushStep | SendPush) and (wrong := trouble(order.measured, self._mode.measures)):
            return f"measures {wrong}"
        return ""

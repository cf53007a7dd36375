"""What was found broken, for a reader: one line with file and line, and the sequence of events that leads to it.

The same events give the same answers, so the sequence that breaks a promise is gone through once more, and the last call of
the mode's code is looked at while it runs: at which line of its file is each action and order made? One that stands in a
constant is made nowhere there; then it is the line of the method that answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, get_args

from polytempo.errors import ModeError
from polytempo.proving.driver import Driver, Witness
from polytempo.proving.games import Game, Play
from polytempo.proving.small_job import Job
from polytempo.proving.states import Broken, Played
from polytempo.proving.telling import answered, happened, numbered, told
from polytempo.proving.walk import MovesMade
from polytempo.sync.actions import Action
from polytempo.sync.events import Event
from polytempo.sync.machine import WorkerEvent, WorkerOrder
from polytempo.sync.policy import Policy
from polytempo.sync.spec import Spec
from polytempo.sync.watch import ANSWERS, place_of

#: The constructors of actions and orders.
_MADE = {
    kind.__init__.__code__ for kind in (*get_args(Action), *get_args(WorkerOrder)) if hasattr(kind.__init__, "__code__")
}


@dataclass(frozen=True)
class Finding:
    """A broken promise."""

    promise: str  #: its name, as in `judge.PROMISES`
    text: str  #: what is broken
    place: str = ""  #: file and line in it; empty for a mode of ours
    story: tuple[str, ...] = ()  #: what happened until then

    @property
    def line(self) -> str:
        """In one line."""
        return f"{self.place}: {self.text}" if self.place else self.text


class Tracer:
    """Runs a call, and notes at which line of a file, as Python names it, things are made."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._made: list[tuple[object, int]] = []

    def __call__(self, call: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code not in _MADE:
            return
        thing, caller = frame.f_locals.get("self"), frame.f_back
        while caller is not None:
            if caller.f_code.co_filename == self._code:
                self._made.append((thing, caller.f_lineno))
                return
            caller = caller.f_back

    def line_of(self, thing: object) -> int:
        """Where this very thing was made; 0: not in the file."""
        return next((line for made, line in self._made if made is thing), 0)


class _Story(Witness):
    """What is told of a course of events.

    Args:
        tracer: What looks at a call.
        traced: The number of that call, from 1 on.
        with_machines: Are orders told, too?
    """

    def __init__(self, tracer: Tracer | None = None, traced: int = 0, with_machines: bool = False) -> None:
        self._tracer, self._traced, self._with_machines = tracer, traced, with_machines
        self.several = False  #: are there several fragments?
        self.lines: list[str] = []
        self.calls = 0  #: of policies and machines
        self.last: tuple[object, type, tuple[Any, ...]] = (None, type(None), ())  #: the last: of which, on what event

    def asked(self, thing: object, event: type, args: tuple[Any, ...], answer: Callable[[], Any]) -> Any:
        self.calls, self.last = self.calls + 1, (thing, event, args)
        return self._tracer(answer) if self._tracer is not None and self.calls == self._traced else answer()

    def hears_policy(self, part: int, event: Event, now: float, actions: list[Action]) -> None:
        of = f"fragment {part}: " if self.several else ""
        self.lines.append(f"{of}{happened(event, now)} -> {answered(event, actions)}")

    def hears_machine(self, rank: int, event: WorkerEvent, orders: Sequence[WorkerOrder]) -> None:
        if orders and self._with_machines:
            self.lines.append(told(rank, event, orders))


#: A course of events that can be gone through: the driver and what runs it, with this witness.
_Course = Callable[[_Story], tuple[Driver, Callable[[], object]]]


def of_game(spec: Spec, game: Game, again: bool = False) -> Finding | None:
    """What is wrong in a game; `again`: when it is played a second time. None: nothing is."""

    def course(story: _Story) -> tuple[Driver, Callable[[], object]]:
        play = Play(spec, game, witness=story)
        return play.driver, partial(play.run, again)

    return _told(spec, course, with_machines=False)


def of_way(job: Job, way: MovesMade) -> Finding | None:
    """What is wrong on the way that a walk has found; None: nothing is, for another representative of its states."""

    def course(story: _Story) -> tuple[Driver, Callable[[], object]]:
        driver = Driver(job, Played, explains=True, witness=story)

        def run() -> None:
            world = driver.first()
            for move, which in way:
                (world,) = driver.after(world, move, which)

        return driver, run

    return _told(job.spec, course, with_machines=True)


def _told(spec: Spec, course: _Course, with_machines: bool) -> Finding | None:
    """Go through a course, once to see how it ends, and once more to see where what is wrong is made."""
    first, origin = _Story(), spec.mode.origin
    driver, run = course(first)
    error = _end_of(run)
    if error is None:
        return None
    answering, event, args = first.last
    of_policy, tracer = isinstance(answering, Policy), Tracer(origin.code if origin is not None else "")
    second = _Story(tracer, first.calls, with_machines or not of_policy)
    driver, run = course(second)
    second.several = driver.parts > 1
    twin = _end_of(run) or error
    finding = of_error(twin)
    if not isinstance(twin, Broken) and of_policy:  # it failed before it could be told
        second.lines.append(f"{happened(event(*args), driver.draft.now)} -> {finding.text}")
    if origin is not None:
        about = getattr(twin, "about", None) or driver.current
        line = tracer.line_of(about) if about is not None else 0
        if line:
            finding = replace(finding, place=f"{origin.file}:{line}")
        elif not finding.place:
            thing = getattr(answering, "watched", answering)
            finding = replace(finding, place=place_of(origin, thing, ANSWERS.get(event, ("handle",))))
    return replace(finding, story=numbered(second.lines))


def _end_of(run: Callable[[], object]) -> Exception | None:
    try:
        run()
    except Exception as error:  # noqa: BLE001  whatever it is, it is what was found
        return error
    return None


def of_error(error: Exception, place: str = "") -> Finding:
    """A finding without a story; `place`: where, unless the error says so."""
    if isinstance(error, Broken):
        return Finding(error.promise, str(error), place)
    said = " ".join(str(error).split())
    if not isinstance(error, ModeError):
        return Finding("orders", f"{type(error).__name__}: {said}", place)
    place, _, text = str(error).partition(": ")  # it begins with file and line
    return Finding("orders", text, place)

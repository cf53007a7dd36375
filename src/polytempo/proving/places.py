"""Where in a mode's file an action or an order is made that may not be.

The same events give the same answers, so the sequence that breaks a promise is gone through once more, and the last call of
the mode's code is looked at while it runs: at which line of its file is each action and order made? One that stands in a
constant is made nowhere there; then it is the line of the method that answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, get_args

from polytempo.errors import ModeError
from polytempo.sync.actions import Action
from polytempo.sync.machine import WorkerOrder
from polytempo.sync.mode import Origin
from polytempo.sync.watch import ANSWERS, place_of

_MADE = {
    kind.__init__.__code__ for kind in (*get_args(Action), *get_args(WorkerOrder)) if hasattr(kind.__init__, "__code__")
}


class Tracer:
    """Runs a call, and notes at which line of a file things are made.

    Args:
        code: The file, as Python names it.
    """

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


def place_of_answer(origin: Origin, answering: object, event: type) -> str:
    """File and line of the method that answers an event."""
    thing = getattr(answering, "watched", answering)
    return place_of(origin, thing, ANSWERS.get(event, ("handle",)))


def placed(error: ModeError) -> tuple[str, str]:
    """File and line of such an error, and what it says."""
    place, _, text = str(error).partition(": ")
    return place, text

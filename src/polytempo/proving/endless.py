"""Code of a mode that does not return: a mistake, too, and one that would be waited for without end.

At the edge, where a command or a launcher plays a mode: in the main thread a timer interrupts it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from polytempo.errors import ModeError
from polytempo.sync.spec import Spec


class _Endless(BaseException):
    """No handler of errors is to take it for one of the mode's own."""


@contextmanager
def returning_within(spec: Spec, seconds: float) -> Iterator[None]:
    """Inside, code of a mode that was brought in may take this long, all in all.

    Raises:
        ModeError: It takes longer; with the line at which it was then.
    """
    origin = spec.mode.origin
    if origin is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    place = f"{origin.file}:{origin.line}"

    def late(number: int, frame: FrameType | None) -> None:
        nonlocal place
        while frame is not None and frame.f_code.co_filename != origin.code:
            frame = frame.f_back
        if frame is None:  # it is not in the mode's code now, and may be slow in all
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return
        place = f"{origin.file}:{frame.f_lineno}"
        raise _Endless

    before = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Endless:
        raise ModeError(f"{place}: does not return within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)

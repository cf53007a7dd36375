"""CPU affinity of threads of two processes that wait for each other.

Two threads that take turns do so on one core (`Companion`). A worker that waits for its server leaves its core idle, and
waking a thread on another core costs more than everything else in a small exchange (on virtual machines a hundred
microseconds, twice); and what the server has just computed is then in another core's cache. So a worker that has its server
to itself calls it over to the core it is on, and stays there until it is answered; and longer only while exchanges follow
each other within milliseconds. Only where both compute with one thread: others would inherit the narrow mask.

Two threads that both compute do so on two (`CoreSlot`). The system takes a message through a socket for the last thing its
sender does for now, and wakes the receiver on the sender's core; where that goes on computing, both then share a core for as
long as the system does not notice: tens of milliseconds. So a receiver wakes up where it fell asleep.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

#: Seconds of computing between two exchanges below which a worker stays on its core: asking twice costs more.
BRIEF = 2e-3


def _find_which_core() -> Callable[[], int] | None:
    """The system's function that says which core a thread is on."""
    return getattr(ctypes.CDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None


class CoreSlot:
    """`with slot:` around a wait: this thread wakes up on the core on which it fell asleep. `threads`: how many compute on
    this host; where there are more of them than cores, any core that is free will do."""

    def __init__(self, threads: int) -> None:
        self._own: set[int] = set()
        self._which_core = _find_which_core()
        if self._which_core is not None and threads > len(os.sched_getaffinity(0)):
            self._which_core = None

    def __enter__(self) -> None:
        if self._which_core is None:
            return
        try:
            own = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {self._which_core()})
            self._own = own
        except OSError:  # not allowed here: then it is merely slower
            self._which_core = None

    def __exit__(self, *error: object) -> None:
        if self._own:
            os.sched_setaffinity(0, self._own)
            self._own = set()


class Companion:
    """A thread of another process that works only while this one waits: `with companion:` around the wait."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._core = -1
        self._own: set[int] | None = None  # the cores this thread may use, while it keeps to one
        self._left = 0.0  # when the last exchange was over
        self._brief = False  # was it not long before this one began?
        self._which_core = _find_which_core()
        self._possible = self._which_core is not None

    def __enter__(self) -> None:
        """From now on both are on this core."""
        self._brief = time.monotonic() - self._left < BRIEF
        if not self._possible or self._own is not None:
            return
        core = self._which_core() if self._which_core is not None else -1
        try:
            if core != self._core:
                os.sched_setaffinity(self._thread, {core})
                self._core = core
            own = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {core})
            self._own = own
        except (OSError, ValueError):  # not allowed here, or the thread is gone: then it is merely slower
            self._possible = False

    def __exit__(self, *error: object) -> None:
        self._left = time.monotonic()
        if self._own is not None and not (self._brief and error[0] is None):
            self.release()

    def release(self) -> None:
        if self._own is not None:
            os.sched_setaffinity(0, self._own)
            self._own = None

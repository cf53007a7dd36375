"""Two threads that take turns do so on one core.

A worker that waits for its server leaves its core idle, and waking a thread on another core costs more than everything else
in a small exchange (on virtual machines a hundred microseconds, twice); and what the server has just computed is then in
another core's cache. So a worker that has its server to itself calls it over to the core it is on, and stays there until it
is answered; and longer only while exchanges follow each other within milliseconds. Only where both compute with one thread:
others would inherit the narrow mask.
"""

from __future__ import annotations

import ctypes
import os
import time

#: Seconds of computing between two exchanges below which a worker stays on its core: asking twice costs more.
BRIEF = 2e-3


class Companion:
    """A thread of another process that works only while this one waits: `with companion:` around the wait."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._core = -1
        self._own: set[int] | None = None  # the cores this thread may use, while it keeps to one
        self._left = 0.0  # when the last exchange was over
        self._brief = False  # was it not long before this one began?
        self._which_core = getattr(ctypes.CDLL(None), "sched_getcpu", None)
        self._possible = self._which_core is not None and hasattr(os, "sched_setaffinity")

    def __enter__(self) -> None:
        """From now on both are on this core."""
        self._brief = time.monotonic() - self._left < BRIEF
        if self._possible and self._own is None:
            self._call_over()

    def __exit__(self, *error: object) -> None:
        self._left = time.monotonic()
        if self._own is not None and not (self._brief and error[0] is None):
            self.release()

    def release(self) -> None:
        """This thread may use all its cores again."""
        if self._own is not None:
            os.sched_setaffinity(0, self._own)
            self._own = None

    def _call_over(self) -> None:
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

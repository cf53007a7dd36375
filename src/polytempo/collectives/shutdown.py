"""How a process ends: whether its script failed, what closes links at its exit, and threads for that."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn


def at_exit(close: Callable[[bool], None]) -> Callable[[], None]:
    """When the process ends, close: politely, unless it has failed. Returns what takes this back."""
    process = os.getpid()
    watch_exit()

    def leave() -> None:
        if os.getpid() == process:  # a forked child's end is not its parent's
            close(not ended_badly())

    atexit.register(leave)
    return lambda: atexit.unregister(leave)


_said: list[object] = []  # the status that sys.exit was last called with


def watch_exit() -> None:
    """Note what `sys.exit` is called with: what runs at the end of a process is not told its exit status."""
    plain = sys.exit

    def noting(status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends a thread, not the process
            _said[:] = [status]
        plain(status)

    if not hasattr(plain, "plain"):
        noting.plain = plain  # type: ignore[attr-defined]
        sys.exit = noting


def ended_badly() -> bool:
    """At the end of the process: has an error ended it, or `sys.exit` with a status that is none of success?

    torch, pytest and others replace `sys.excepthook`; the interpreter stores an uncaught error before it calls it.
    `raise SystemExit(3)` cannot be seen from here, but by the parent process.
    """
    return hasattr(sys, "last_value") or any(status not in (None, 0) for status in _said)


class ExitThread:
    """A thread that waits to make one call: when a process ends, Python from 3.12 on starts no thread any more.

    It is made in time; then `begin`, and `end` in any case.
    """

    def __init__(self) -> None:
        self._call: Callable[[], None] = lambda: None
        self._error: Exception | None = None
        self._begin = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="polytempo-standby", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self._begin.wait()
        try:
            self._call()
        except Exception as error:  # noqa: BLE001  `end` raises it
            self._error = error

    def begin(self, call: Callable[[], None]) -> None:
        """Make this call."""
        self._call = call
        self._begin.set()

    def end(self) -> None:
        """Wait until the call, if there was one, has returned; what it raised is raised here."""
        self._begin.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

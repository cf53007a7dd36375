"""A thread that waits to make one call: when a process ends, Python from 3.12 on starts no thread any more."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ExitThread:
    """Made in time; then `begin`, and `end` in any case."""

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

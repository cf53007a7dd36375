"""The clock by which a worker's rounds with deadlines are timed; tests have one of their own."""

from __future__ import annotations

import math
import threading
import time


class RoundClock:
    """Seconds that go on, and the wait for one of them."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, until: float) -> None:
        """Wait until the condition is notified or the moment has come; it may return early. The condition's lock is held."""
        condition.wait(None if until == math.inf else max(until - self.now(), 0.0))

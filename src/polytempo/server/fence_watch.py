"""Watches the fences of pushes that are still being written: a thread that reads their words in host memory.

A GPU tells no host of another process that it has reached a point of its stream; it writes a word. While pushes are pending
the thread looks at their words again and again: every `QUICK` seconds at first, then less often, at most `LATE` of the time
that the oldest has been pending later than it could have. Without a pending push it sleeps, and costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

#: Seconds between looks, at least and at most; and the share of the time that has passed by which a look may be late.
QUICK, SLOW, LATE = 30e-6, 80e-6, 0.005

K = TypeVar("K", bound=Hashable)


def pause(pending_for: float) -> float:
    """Seconds until the next look, after the newest push has been pending for `pending_for` seconds."""
    return min(max(QUICK, LATE * pending_for), SLOW)


class FenceWatch(Generic[K]):
    """Says which pushes are complete. `add`, `discard` and `take` are the I/O loop's.

    Args:
        ring: Called in the watching thread when `take` has something.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._pending: dict[K, Callable[[], bool]] = {}
        self._reached: deque[K] = deque()
        self._wanted = threading.Condition()
        self._since = 0.0  # the last push came then
        self._thread: threading.Thread | None = None
        self._over = False

    def add(self, key: K, is_reached: Callable[[], bool]) -> None:
        """Watch for this push; the function says whether it is complete."""
        with self._wanted:
            self._pending[key] = is_reached
            self._since = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fence watch", daemon=True)
                self._thread.start()
            self._wanted.notify()

    def discard(self, key: K) -> None:
        """Its worker is gone: `take` will not give it any more."""
        with self._wanted:
            self._pending.pop(key, None)
            if key in self._reached:
                self._reached.remove(key)

    def take(self) -> list[K]:
        """Pushes that have become complete, in the order in which that was seen."""
        return [self._reached.popleft() for _ in range(len(self._reached))]

    def close(self) -> None:
        """End the thread."""
        with self._wanted:
            self._over = True
            self._wanted.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over:
            with self._wanted:
                while not self._pending and not self._over:
                    self._wanted.wait()
                found = self._look()
                wait = pause(time.monotonic() - self._since)
            if found:
                self._ring()
            time.sleep(wait)

    def _look(self) -> bool:
        """Move what is complete. Words are looked at under the lock: what is discarded is not looked at any more."""
        found = [key for key, is_reached in self._pending.items() if is_reached()]
        for key in found:
            del self._pending[key]
            self._reached.append(key)
        return bool(found)

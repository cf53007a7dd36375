"""Waits of this process's streams for servers, and their end when a server is gone.

A stream that waits for a fence holds up a host that waits for the stream (`.item()`, `torch.cuda.synchronize()`), and such a
host reads no message. So a thread watches the connections to the servers: when one ends, all waits are released, the host
returns, and its next call of this library raises what the connection has to say. The thread reads nothing.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable


class StreamWaits:
    """Of one worker."""

    def __init__(self) -> None:
        self._releases: list[Callable[[], None]] = []
        self._stop: int | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, release: Callable[[], None], connections: Iterable[int]) -> None:
        """Call `release` when the servers will not end the waits of a stream themselves.

        Args:
            release: Ends the waits; it may be called more than once, by any thread.
            connections: The descriptors of the connections to all servers.
        """
        self._releases.append(release)
        if self._thread is None:
            self._stop = os.eventfd(0)
            self._thread = threading.Thread(
                target=self._watch, args=(list(connections), self._stop), name="polytempo-hang-up", daemon=True
            )
            self._thread.start()

    def _watch(self, connections: list[int], stop: int) -> None:
        poller = select.poll()
        poller.register(stop, select.POLLIN)
        for descriptor in connections:
            poller.register(descriptor, select.POLLRDHUP)  # and POLLHUP and POLLERR, which need not be named
        if all(descriptor != stop for descriptor, _ in poller.poll()):
            self.release()

    def release(self) -> None:
        """End all waits: what is behind them must not be used."""
        with self._lock:
            for release in self._releases:
                release()

    def close(self) -> None:
        """End all waits, and the thread; before the connections are closed, whose descriptors it watches."""
        self.release()
        thread, self._thread = self._thread, None
        if thread is not None and self._stop is not None:
            os.eventfd_write(self._stop, 1)
            thread.join()
            os.close(self._stop)

    def let_go(self) -> None:
        """In a forked child: the thread is its parent's, and so are the streams."""
        self._thread, self._releases = None, []

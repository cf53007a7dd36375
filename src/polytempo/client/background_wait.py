"""Waits for an answer in a thread beside the script's: the client is locked only while messages are taken in.

`Client` has no thread of its own: the caller that waits receives, and holds the lock while it waits. A communication thread
waits for whole rounds, during which the script's thread may read values, lease samples or log figures. So this wait blocks
on the connections without the lock, and takes it for each look at what has come. Whichever of the two threads looks first
hands a message to its owner.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable

from polytempo.client.client import Client
from polytempo.client.client_state import ClientState
from polytempo.transport.deadline import Deadline

#: Seconds between two looks, at most: a message may have been taken in by the other thread.
LOOK = 0.02
#: The same where connections are sockets that two threads must not touch at once.
NAP = 0.001


class BackgroundWait:
    """The waits of one thread.

    Args:
        client: The worker's connections to the servers.
        lock: Held whenever the client is used.
    """

    def __init__(self, client: Client, lock: threading.RLock) -> None:
        self._client, self._lock = client, lock

    def for_release(self, state: ClientState, step: int, given_up: Callable[[], bool]) -> bool:
        """Wait until a step may be started; the ranks that it waits for are named after a while.

        Args:
            state: Of the optimizer.
            step: The step.
            given_up: Is the answer no longer wanted?

        Returns:
            Whether it may be started; False where the wait was given up.
        """
        client = self._client
        deadline, heard, moved = Deadline(client.rank, client.timeout), time.monotonic(), client.connections.moved()
        while True:
            with self._lock:
                if given_up():
                    return False
                client.check_group(state)
                client.poll()
                if state.released >= step:
                    return True
                now, before, moved = time.monotonic(), moved, client.connections.moved()
                if moved != before:
                    heard = now
                client.check_wait(deadline, "an answer", [state])
                if now - heard >= client.retry:
                    heard = now
                    client.exchanges.ask_status(state)
            self._pause()

    def for_key(self, key: str, seconds: float) -> str | None:
        """The value of a key, once a worker has set it; None if that takes longer."""
        client, over = self._client, time.monotonic() + seconds
        ask_at = 0.0
        while True:
            with self._lock:
                if time.monotonic() >= ask_at:  # again: the question or the answer may have been lost
                    ask_at = time.monotonic() + client.retry
                    client.ask_key(key)
                client.poll()
                found = client.value_of(key)
            if found is not None or time.monotonic() >= over:
                return found
            self._pause()

    def _pause(self) -> None:
        """Until something has come, or for a while."""
        watched = [channel.pollable() for channel in self._client.connections.channels]
        if not all(isinstance(descriptor, int) for descriptor in watched):
            time.sleep(NAP)
            return
        poller = select.poll()
        for descriptor in watched:
            poller.register(descriptor, select.POLLIN)
        poller.poll(LOOK * 1000)

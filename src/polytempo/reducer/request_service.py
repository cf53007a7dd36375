"""Answers other workers at any time, while the worker itself computes: one thread for all kinds of requests of an optimizer.

A kind of request has a tag and memory for one message. Its handler is called with the rank that sent it; the next message of
the kind is received after that. The thread ends with `stop`, or when the links are closed or all other workers are gone. It
must have ended before the process does: the interpreter's end would abort it inside of torch.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch

from polytempo.collectives.tasks import Task
from polytempo.reducer.neighbour_links import NeighbourLinks

#: Seconds between two calls of `tick`, while it asks for them.
TICK = 0.2

#: Called with the rank that a message came from.
Handler = Callable[[int], None]


class RequestService:
    """The requests of one optimizer."""

    def __init__(self, links: NeighbourLinks) -> None:
        self._links = links
        self._kinds: dict[int, tuple[torch.Tensor, Handler]] = {}
        self._came: SimpleQueue[tuple[int, Task] | None] = SimpleQueue()
        self.tick: Callable[[], bool] = lambda: False  #: called after each request; and soon again, if it says so
        self._thread = threading.Thread(target=self._serve, name="polytempo-requests", daemon=True)

    def on(self, tag: int, data: torch.Tensor, handle: Handler) -> None:
        """Receive requests of a kind into `data`; before `start`."""
        self._kinds[tag] = data, handle

    def start(self) -> None:
        """Answer from now on."""
        for tag in self._kinds:
            self._listen(tag)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more; returns when the thread has ended."""
        self._came.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _listen(self, tag: int) -> None:
        self._links.listen(self._kinds[tag][0], tag).when_done(lambda task: self._came.put((tag, task)))

    def _serve(self) -> None:
        left, again = set(self._kinds), False
        with torch.no_grad():
            while left:
                try:
                    came = self._came.get(timeout=TICK if again else None)
                    if came is None:
                        return
                    if came[1].error is None:
                        self._handle(came[0], int(came[1].result))
                    else:
                        left.discard(came[0])
                except Empty:
                    pass
                again = self.tick()

    def _handle(self, tag: int, source: int) -> None:
        try:
            self._kinds[tag][1](source)
        except Exception:  # noqa: BLE001  the workers that ask must be answered, and this one must hear of it
            sys.stderr.write(f"polytempo: rank {self._links.rank} failed to answer:\n{traceback.format_exc()}")
        self._listen(tag)

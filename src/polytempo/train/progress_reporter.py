"""How something that trains without pushes gets on, for the display, the record and the last line of `polytempo run`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from polytempo.errors import PeerError
from polytempo.protocol.values import TrainingProgress
from polytempo.session.session import Session

#: The first server is told at most so often, in seconds.
EVERY = 1.0


class ProgressReporter:
    """The first worker tells the first server, where there is one: at once, now and then, and at the end."""

    def __init__(self, session: Session, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._session, self._what, self._clock = session, what, clock
        self._steps = 0
        self._loss: float | None = None
        self._begun: float | None = None
        self._ended = self._told = clock()
        if session.rank == 0 and session.client is not None:
            session.flushing.append(self.tell)
        self.tell()

    def begins(self) -> None:
        """A step begins."""
        if self._begun is None:
            self._begun = self._clock()

    def made(self, steps: int, loss: float | None) -> None:
        """So many steps were made; `loss` is the last that is known."""
        self._steps += steps
        self._loss = self._loss if loss is None else loss
        self._ended = self._clock()
        if self._ended - self._told >= EVERY:
            self.tell()

    def tell(self) -> None:
        """Say how far it is."""
        self._told = self._clock()
        client = self._session.client
        if client is None or self._session.rank != 0:
            return
        seconds = self._ended - self._begun if self._begun is not None else 0.0
        figures: dict[str, float | int | str] = {"steps": self._steps}
        if self._loss is not None:
            figures["loss"] = self._loss
        with suppress(PeerError), self._session.lock:  # nobody here needs the server; the launcher sees that it is gone
            client.metric(figures, TrainingProgress(self._what, self._steps, seconds, self._loss))

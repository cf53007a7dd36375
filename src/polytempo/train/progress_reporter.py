"""Progress of training without pushes (a pipeline), for the display, the record and the summary of `polytempo run`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from polytempo.errors import PeerError
from polytempo.protocol.messages import MetricReport
from polytempo.protocol.values import TrainingProgress
from polytempo.session.session import Session

#: Seconds between two reports.
EVERY = 1.0


class ProgressReporter:
    """The first worker reports to the first server, if there is one: at the start, once a second, and at the end."""

    def __init__(
        self,
        session: Session,
        what: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        distributed: bool = False,
    ) -> None:
        self._session, self._what, self._clock = session, what, clock
        self._flags = session.job.budgeted and not distributed, distributed
        self._steps = 0
        self._loss: float | None = None
        self._begun: float | None = None
        self._ended = self._reported = clock()
        if session.rank == 0 and session.client is not None:
            session.flushing.append(self.report)
        self.report()

    def begins(self) -> None:
        """A step begins."""
        if self._begun is None:
            self._begun = self._clock()

    def made(self, steps: int, loss: float | None) -> None:
        """Steps were made; `loss` is the last that is known."""
        self._steps += steps
        self._loss = self._loss if loss is None else loss
        self._ended = self._clock()
        if self._ended - self._reported >= EVERY:
            self.report()

    def report(self) -> None:
        """Send a report."""
        self._reported = self._clock()
        client = self._session.client
        if client is None or self._session.rank != 0:
            return
        seconds = self._ended - self._begun if self._begun is not None else 0.0
        figures: dict[str, float | int | str] = {"steps": self._steps}
        if self._loss is not None:
            figures["loss"] = self._loss
        with suppress(PeerError), self._session.lock:  # training does not need the server; the launcher sees that it is gone
            progress = TrainingProgress(self._what, self._steps, seconds, self._loss, *self._flags)
            client.send(0, MetricReport(worker=self._session.rank, values=figures, progress=progress))

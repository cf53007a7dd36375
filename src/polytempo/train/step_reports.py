"""What servers hear of steps that no other worker needs: of a pipeline, or of a group of one.

StepClock         a clock of the sequencer counts them for the budget of the job. They are reported as pushes without
                  data, by one worker or a few; each answer says whether the budget is used up. Of several pipelines side
                  by side that of rank 0 is counted; the others are told the same
ProgressReporter  how far training without pushes is, for the display, the record and the summary of `polytempo run`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from polytempo.client.client_state import ClientState
from polytempo.errors import PeerError
from polytempo.protocol.messages import MetricReport
from polytempo.protocol.push import Measures, StepReport
from polytempo.protocol.values import OptimizerSpec, TrainingProgress, name_in_group
from polytempo.reducer.coordination import SequencerClient
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session
from polytempo.train.driver import StepRequest, StepUpdate

#: Seconds between two reports of progress.
EVERY = 1.0


class StepClock:
    """One worker's part in counting.

    Args:
        session: The job.
        name: Of the optimizer: the budget counts the first.
        members: The workers that report steps, ascending; each step is reported by one of them.
    """

    def __init__(self, session: Session, name: str, members: Sequence[int]) -> None:
        spec = OptimizerSpec(
            sync="bsp" if len(members) == 1 else "asp",
            apply="peers",
            optimizer="",
            tensors=(),
            groups=({},),
            members=tuple(members),
        )
        self._clock = SequencerClient(session, spec, ClientState(name))
        self._returned = time.perf_counter()

    @property
    def steps(self) -> int:
        return self._clock.step

    @property
    def waited(self) -> float:
        """Seconds for which the mode has made this worker wait."""
        return self._clock.state.waited

    def count(self, samples: float) -> bool:
        """Report a step of this worker with this number of examples; whether the budget of the job is used up."""
        return self.report(Measures(samples=samples, size=samples, computed=time.perf_counter() - self._returned))

    def report(self, measures: Measures, skip: bool = False) -> bool:
        """Report a step of this worker.

        Args:
            measures: What is said of it.
            skip: It has changed nothing.

        Returns:
            Whether the budget of the job is used up.
        """
        clock, began = self._clock, time.perf_counter()
        traffic = clock.client.bytes_sent, clock.client.bytes_received
        clock.push(StepReport(hyper=({},), skip=skip), measures, traffic)
        clock.wait_for(clock.step + 1)
        clock.step = clock.state.released
        self._returned = time.perf_counter()
        clock.waited = self._returned - began
        return clock.client.stop


def clock_in_group(session: Session, number: str, members: Sequence[int], main: bool) -> StepClock:
    """The clock of these workers under this number of an optimizer; `main`: of several side by side the one that counts."""
    return StepClock(session, name_in_group(number, members, main), members)


class CountedSteps(StepUpdate):
    """Steps of a group of one, made by another update and reported to the sequencer."""

    def __init__(self, update: StepUpdate, session: Session, clock: StepClock) -> None:
        self._update, self._session, self._clock = update, session, clock

    @property
    def steps(self) -> int:
        return self._clock.steps

    def step(self, request: StepRequest) -> Any:
        computed = self._session.computed(time.perf_counter())
        result = self._update.step(request)
        request.measures.computed = computed
        self._clock.report(request.measures, request.skip)
        return result

    def stats(self) -> dict[str, Any]:
        return {"waited_s": self._clock.waited}


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
            session.on_leave(LeavingStep.FLUSH, self.report)
        self.report()

    def begins(self) -> None:
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

"""A clock of the sequencer for steps that no other worker needs (of a pipeline, of a group of one): it counts them, for the
budget of the job.

Steps are reported as pushes without data, by one worker or a few; each answer says whether the budget is used up. Of
several pipelines side by side that of rank 0 is counted; the others are told the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from polytempo.client.client_state import ClientState
from polytempo.protocol.push import Measures, StepReport
from polytempo.protocol.values import OptimizerSpec, name_in_group
from polytempo.reducer.coordination import SequencerClient
from polytempo.session.session import Session
from polytempo.train.driver import StepRequest, StepUpdate


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
        """This worker's steps so far."""
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

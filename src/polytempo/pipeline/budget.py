"""The budget of the job (`--steps`, `--samples`, `--seconds`) in a pipeline.

The last stage learns whether it is used up: with the answer of its `DistributedOptimizer`, where the pipeline has replicas
on the data axis, else from a clock of its own (`train/step_clock.py`), to which it reports each step. What it was told
travels to the other ranks with the loss, so `should_stop()` turns true on all ranks with the same step. Without a budget
nothing is reported.
"""

from __future__ import annotations

from collections.abc import Callable

from polytempo.pipeline.builder import StageBuild
from polytempo.session.session import Session
from polytempo.train.step_clock import StepClock, clock_in_group


class PipelineBudget:
    """One rank's part: it decides on the last stage only."""

    def __init__(self, session: Session, built: StageBuild, agree: Callable[[bool], bool] | None) -> None:
        self._session, self._agree = session, agree
        self._exists = session.job.budgeted and session.client is not None
        self._distributed = built.stage.data_axis is not None
        self._clock: StepClock | None = None
        if session.client is not None:
            session.stops = bool(session.stops)  # from now on, what the last stage says
        if not self._exists or self._distributed:
            return
        number, layout = session.next_optimizer_id(), built.layout
        last = layout.ranks(layout.last_stage)
        members = last[:1] if built.steady_state is None else last  # without flushes, each replica has steps of its own
        if session.rank in members:
            self._clock = clock_in_group(session, number, members, 0 in layout.members)

    def used_up(self, samples: float) -> bool:
        """On the last stage, after a step with this number of examples."""
        if not self._exists:
            return False
        stop = False
        if self._clock is not None:
            stop = self._clock.count(samples)
        elif self._distributed and self._session.client is not None:
            stop = self._session.client.stop
        return self._agree(stop) if self._agree is not None else stop

    def told(self, stop: bool) -> None:
        """The last stage has said with a loss whether the budget is used up."""
        if stop and self._exists:
            self._session.stops = True

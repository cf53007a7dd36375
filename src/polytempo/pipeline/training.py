"""The training loop of one rank: a batch is split into microbatches, the schedule's actions run, every rank gets the loss.

With a schedule that flushes, a step is one whole pass of the schedule. Without (PipeDream), each call feeds one minibatch
and runs the stretch of the steady state that belongs to it; its loss is returned `lag` calls later. Microbatches are
numbered through the whole run (`base` + number in the step), so that messages of different steps cannot be mistaken for each
other.

The last stage learns whether the budget of the job (`--steps`, `--samples`, `--seconds`) is used up: with the answer of its
`DistributedOptimizer`, where the pipeline has replicas on the data axis, else from a clock of its own
(`train/step_reports.py`), to which it reports each step. What it was told travels to the other ranks with the loss, so
`should_stop()` turns true on all ranks with the same step. Without a budget nothing is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polytempo.pipeline.builder import StageBuild
from polytempo.pipeline.point_to_point import LOSS
from polytempo.pipeline.schedules import SteadyState
from polytempo.pipeline.stage_message import StageMessage, split, stage_inputs
from polytempo.session.session import Session
from polytempo.summation import in_order
from polytempo.train.step_reports import StepClock, clock_in_group


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


class TrainingLoop:
    """Steps and flushes of one rank."""

    def __init__(self, built: StageBuild, budget: PipelineBudget) -> None:
        self._built, self._runtime, self._layout, self._budget = built, built.runtime, built.layout, budget
        self.steps = 0  #: completed; without flushes, started
        self.base = 0  #: microbatches before this step; without flushes, before the last flush
        self.in_flight = 0  #: minibatches since the last flush; 0 with a schedule that flushes
        self._losses: dict[int, StageMessage] = {}  # of this rank, by number

    def step(self, x: Any, y: Any) -> float | None:
        """Train on a batch; its loss, or, without flushes, that of the batch `lag` calls before."""
        if self._built.steady_state is not None:
            return self._feed(self._built.steady_state, x, y)
        self._hand_in(range(self._built.microbatches), x, y)
        self._runtime.run(self._built.actions, self.base)
        loss = self._mean_loss()
        self._settle()
        self.steps += 1
        self.base += self._built.microbatches
        return loss

    def _feed(self, steady_state: SteadyState, x: Any, y: Any) -> float | None:
        number, lag = self.in_flight, self._built.lag
        self.in_flight += 1
        self.steps += 1
        self._hand_in([number], x, y)
        self._runtime.run(steady_state.call(number), self.base)
        losses, examples = self._take_losses()
        for found, loss in losses.items():
            self._send_loss(self.base + found, loss, self._budget.used_up(examples[found]))
        return self._loss_of(number - lag) if number >= lag else None

    def flush(self) -> float | None:
        """Run the actions that are left for the minibatches in flight; the loss of the last."""
        assert self._built.steady_state is not None
        fed = self.in_flight
        self._runtime.run(self._built.steady_state.rest(fed), self.base)
        losses = [self._loss_of(number) for number in range(max(0, fed - self._built.lag), fed)]
        self._settle()
        self.base += fed
        self.in_flight = 0
        return losses[-1] if losses else None

    def _settle(self) -> None:
        self._built.p2p.settle()
        self._built.stage.settle()

    def _hand_in(self, numbers: Sequence[int], x: Any, y: Any) -> None:
        """Give inputs to the first stage and targets to the last, each replica its own microbatches."""
        stage, replicas = self._built.stage, self._layout.replicas
        mine = [number % replicas[stage.number] == self._built.replica for number in numbers]
        if stage.number == 0 and any(mine):
            inputs = stage_inputs(x, len(numbers), stage.device)
            self._runtime.inputs |= {n: piece for n, piece, own in zip(numbers, inputs, mine, strict=True) if own}
        if stage.number == self._layout.last_stage and any(mine):
            targets = split(y, len(numbers), stage.device)
            self._runtime.targets |= {n: piece for n, piece, own in zip(numbers, targets, mine, strict=True) if own}

    # Losses: the last stage computes them and sends them to all ranks, and with them whether the budget is used up.

    def _take_losses(self) -> tuple[dict[int, float], dict[int, float]]:
        """Of this rank since the last call: the loss of each microbatch, and how many examples it has."""
        found, self._runtime.losses = self._runtime.losses, {}
        examples, self._runtime.examples = self._runtime.examples, {}
        return {number: float(loss) for number, loss in found.items()}, examples

    def _mean_loss(self) -> float:
        losses, examples = self._take_losses()
        last = self._layout.ranks(self._layout.last_stage)
        if self._built.rank in last:
            total = in_order(losses[number] for number in sorted(losses))
            stop = False
            if self._built.replica == 0:  # it has a share of the examples
                stop = self._budget.used_up(in_order(examples.values()) * self._built.microbatches / max(1, len(examples)))
            self._send_loss(self.steps, total, stop)
        return in_order(self._receive_loss(rank, self.steps) for rank in last) / self._built.microbatches

    def _loss_of(self, number: int) -> float:
        """The loss of a minibatch, counted from the last flush."""
        last = self._layout.last_stage
        return self._receive_loss(self._layout.rank(last, number % self._layout.replicas[last]), self.base + number)

    def _send_loss(self, number: int, loss: float, stop: bool) -> None:
        self._losses[number] = message = StageMessage([], number=number, version=int(stop), figure=loss)
        for rank in self._layout.members:
            if rank != self._built.rank:
                self._built.p2p.send(rank, LOSS, message)

    def _receive_loss(self, rank: int, number: int) -> float:
        own = rank == self._built.rank
        message = self._losses.pop(number) if own else self._built.p2p.take(rank, LOSS, number)
        self._budget.told(bool(message.version))
        return message.figure

"""The training loop of one rank: a batch is split into microbatches, the schedule's actions run, every rank gets the loss.

With a schedule that flushes, a step is one whole pass of the schedule. Without (PipeDream), each call feeds one minibatch
and runs the stretch of the steady state that belongs to it; its loss is returned `lag` calls later. Microbatches are
numbered through the whole run (`base` + number in the step), so that messages of different steps cannot be mistaken for each
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polytempo.pipeline.budget import PipelineBudget
from polytempo.pipeline.builder import StageBuild
from polytempo.pipeline.point_to_point import LOSS
from polytempo.pipeline.stage_message import StageMessage, split, stage_inputs
from polytempo.summation import in_order


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
        return self._whole_step(x, y) if self._built.steady_state is None else self._feed(x, y)

    def _whole_step(self, x: Any, y: Any) -> float:
        self._hand_in(range(self._built.microbatches), x, y)
        self._runtime.run(self._built.actions, self.base)
        loss = self._mean_loss()
        self._settle()
        self.steps += 1
        self.base += self._built.microbatches
        return loss

    def _feed(self, x: Any, y: Any) -> float | None:
        assert self._built.steady_state is not None
        number, lag = self.in_flight, self._built.lag
        self.in_flight += 1
        self.steps += 1
        self._hand_in([number], x, y)
        self._runtime.run(self._built.steady_state.call(number), self.base)
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

"""Workers of `anytime` whose time is the test's: a clock that the script advances, micro-batches as long as it says."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers import Batch, MakeOptimizer, loss_of, until, weights
from torch import nn

from polytempo.session.session import RoundClock, Session
from polytempo.train.optimizer import DistributedOptimizer

#: Seconds of a round: so long that the sequencer, whose clock is real, never loses patience.
LONG = 10_000.0


class ManualClock(RoundClock):
    """Time stands still until a test advances it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._conditions: set[threading.Condition] = set()

    def now(self) -> float:
        return self._now

    def wait(self, condition: threading.Condition, until: float) -> None:
        self._conditions.add(condition)
        if self._now < until:
            condition.wait(0.5)

    def advance(self, seconds: float) -> None:
        self._now += seconds
        for condition in list(self._conditions):
            with condition:
                condition.notify_all()


@dataclass
class Made:
    """A micro-batch: in which round it was computed, in which it counted, on which weights, of what."""

    computed: int
    counted: int | None
    batch: Batch


@dataclass
class PacedWorker:
    """One worker with a clock of its own."""

    session: Session
    model: nn.Module
    make: MakeOptimizer
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = self.session.round_clock = ManualClock()
        self._took = self._due = 0.0
        self.session.computed = self._computed  # type: ignore[method-assign]
        self.model = copy.deepcopy(self.model)
        self.optimizer = DistributedOptimizer(self.make(list(self.model.parameters())), self.model, **self.options)
        self.made: list[Made] = []
        self.values: dict[int, list[torch.Tensor]] = {0: weights(self.model)}  # by round, as the script saw them

    @property
    def round(self) -> int:
        """Rounds that have ended for this worker."""
        return int(self.optimizer.stats["rounds"])

    def compute(self, batch: Batch, seconds: float) -> None:
        """Forward and backward, which take this long."""
        self._took = seconds
        self.optimizer.zero_grad()
        loss_of(self.model, batch).backward()
        self.clock.advance(seconds)

    def _computed(self, now: float) -> float:
        """What the session is asked in a step. A micro-batch takes its time here, not before: else the communication thread
        might end the round while the step, which is in time, is on its way to it."""
        due, self._due = self._due, 0.0
        if due:
            self.clock.advance(due)
        return self._took

    def micro_batch(self, batch: Batch, seconds: float) -> None:
        """One in time."""
        began = self.round
        self.compute(batch, 0.0)
        self._took = self._due = seconds
        self.optimizer.step(samples=len(batch[0]))
        self.made.append(Made(began, began, batch))
        self.values.setdefault(self.round, weights(self.model))

    def stall(self, batch: Batch, rounds: int, late: str, deadline: float = LONG) -> None:
        """One that takes so long that this number of rounds end meanwhile."""
        began = self.round
        self.optimizer.zero_grad()
        loss_of(self.model, batch).backward()
        self._took = 1.0
        for number in range(rounds):
            self.clock.advance(1.1 * deadline)
            until(lambda: self.round > began + number, "the communication thread to end a round")  # noqa: B023
        self.optimizer.step(samples=len(batch[0]))
        self.made.append(Made(began, began + rounds if late == "keep" else None, batch))
        self.values.setdefault(self.round, weights(self.model))


def alone(
    model: nn.Module, make: MakeOptimizer, made: list[Made], divisors: list[float]
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """One process that takes exactly the same samples, with the same divisor for each round; its weights at the end, and at
    the start of each round."""
    model = copy.deepcopy(model)
    optimizer, seen = make(list(model.parameters())), []
    for number, divisor in enumerate(divisors):
        seen.append(weights(model))
        chosen = [one for one in made if one.counted == number]
        if not chosen:
            continue
        total = sum(len(one.batch[0]) for one in chosen)
        sums = [torch.zeros_like(param) for param in model.parameters()]
        for one in chosen:
            twin = copy.deepcopy(model)
            with torch.no_grad():
                for param, value in zip(twin.parameters(), seen[one.computed], strict=True):
                    param.copy_(value)
            twin.zero_grad()
            loss_of(twin, one.batch).backward()
            for whole, param in zip(sums, twin.parameters(), strict=True):
                whole += len(one.batch[0]) * param.grad
        for param, whole in zip(model.parameters(), sums, strict=True):
            param.grad = whole / (divisor or total)
        optimizer.step()
    return weights(model), seen

"""What is fixed about a job before it starts, and how much of its budget is used up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from polytempo.errors import UsageError
from polytempo.protocol.messages import Push


@dataclass(frozen=True)
class Limits:
    """The job's budget, summed over all workers. The first to be used up ends the job; none at all is allowed."""

    steps: float = math.inf
    samples: float = math.inf
    seconds: float = math.inf

    def __post_init__(self) -> None:
        for limit in (self.steps, self.samples, self.seconds):
            if not limit > 0:
                raise UsageError(f"expected a budget above 0, got {limit:g}")

    @property
    def any(self) -> bool:
        """Is there one?"""
        return min(self.steps, self.samples, self.seconds) < math.inf

    def used(self, steps: int, samples: float, seconds: float) -> float:
        """The share that is used up."""
        return max(steps / self.steps, samples / self.samples, seconds / self.seconds)


@dataclass(frozen=True)
class JobPlan:
    """The facts every part of a job agrees on."""

    size: int
    shards: int
    sync: str
    limits: Limits = field(default_factory=Limits)
    checkpoint_every: int = 0
    resumed: dict[str, Any] = field(default_factory=dict)  #: the manifest of the checkpoint to go on from
    recorded: bool = True  #: is a record written?

    @property
    def first_step(self) -> int:
        """The number of all workers' first step."""
        return int(self.resumed.get("step", 0))


class JobBudget:
    """What of the budget is used up, and whether workers are to stop. It counts the main optimizer's pushes."""

    def __init__(self, plan: JobPlan) -> None:
        self.steps = int(plan.resumed.get("steps", 0))
        self.samples = float(plan.resumed.get("samples", 0))
        self.started: float | None = None  #: when the first step was released
        self.stopping = False  #: the budget is used up; it stays so
        self._limits = plan.limits
        self._beyond = 0  # steps that came after the budget was used up
        self._asked = False  # has any worker asked whether to stop?

    def begin(self, now: float) -> None:
        """A step is released; the first starts the job's seconds."""
        if self.started is None:
            self.started = now

    def count(self, push: Push, sign: int = 1) -> None:
        """A push was counted (or, with sign -1, refused after all)."""
        self._beyond += sign * push.count * self.stopping
        self._asked |= push.asked
        self.steps += sign * push.count
        self.samples += sign * push.samples

    def discard(self, push: Push) -> None:
        """A counted push was not applied."""
        self.steps -= push.count
        self.samples -= push.samples

    def check(self, now: float) -> None:
        """Decide whether to stop."""
        if not self.stopping and self.used(now) >= 1:
            self.stopping = True

    def seconds(self, now: float) -> float:
        """Since the first step was released."""
        return now - self.started if self.started is not None else 0.0

    def used(self, now: float) -> float:
        """The share of the budget that is used up."""
        return self._limits.used(self.steps, self.samples, self.seconds(now))

    def unheeded(self) -> int:
        """Steps beyond the budget, where no worker ever asks whether to stop."""
        return 0 if self._asked else self._beyond

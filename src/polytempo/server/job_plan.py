"""What is fixed about a job before it starts, and when its budget is used up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from polytempo.errors import UsageError


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

"""What is fixed about a job before it starts."""

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

    @property
    def any(self) -> bool:
        return min(self.steps, self.samples, self.seconds) < math.inf

    def used(self, steps: int, samples: float, seconds: float) -> float:
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

    @property
    def saved_push(self) -> int:
        """The number of pushes that each worker of the earlier job had come to."""
        return int(self.resumed.get("exchange", self.first_step))

    @property
    def first_push(self) -> int:
        """The number of all workers' first push. It goes on from the earlier job's, where that was in the same mode; in
        another mode a push may hold another number of steps, so that steps are what goes on."""
        return self.saved_push if self.resumed.get("sync") == self.sync else self.first_step

    def saved_policy(self, optimizer_id: str, sync: str) -> dict[str, float]:
        """What the policy of an optimizer had learned in the job that this one goes on from, in the same mode."""
        policy = self.resumed.get("tracks", {}).get(optimizer_id, {}).get("policy", {})
        saved: dict[str, float] = policy.get("saved", {}) if policy.get("sync") == sync else {}
        return saved

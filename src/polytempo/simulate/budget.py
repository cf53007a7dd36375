"""When a run ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polytempo.errors import UsageError


@dataclass(frozen=True)
class Budget:
    """A run ends with the first of these to be used up. `steps` and `samples` are summed over all workers."""

    seconds: float = math.inf
    steps: float = math.inf
    samples: float = math.inf
    steps_each: float = math.inf

    def __post_init__(self) -> None:
        limits = (self.seconds, self.steps, self.samples, self.steps_each)
        if not min(limits) > 0:
            raise UsageError(f"expected a budget above 0, got {min(limits)}")
        if min(limits) == math.inf:
            raise UsageError("a run needs an end: give seconds, steps, samples or steps_each")

    def used(self, now: float, steps: int, samples: float, workers: int) -> float:
        """The share of the budget that is used up."""
        return max(now / self.seconds, steps / self.steps, samples / self.samples, steps / (self.steps_each * workers))

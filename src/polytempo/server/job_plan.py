"""What is fixed about a job before it starts, and how much of its budget is used up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from polytempo.errors import UsageError
from polytempo.protocol.messages import Push
from polytempo.protocol.push import Measures


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


#: Further answers that are certain not to say `stop`, at most: without a budget, and with one.
ALWAYS, KNOWN = 1 << 20, 64


def certain_answers(left: Limits, members: int, rounds: bool, largest: tuple[int, float]) -> int:
    """For how many further answers of a worker, beyond the one that is given, the budget lasts.

    In rounds of single steps, under a budget of steps, the members make one step each between two answers, so the number is
    known. Otherwise other workers may use up the budget meanwhile: then it is one answer, while there is enough left for
    all members to push twice more; seconds are never known, so it is one as well. What was promised is kept
    (`OptimizerClock.reply`): if the budget is used up all the same, the worker stops one answer later.

    Args:
        left: Of the budget.
        members: Workers whose pushes are counted, at most.
        rounds: Does every member push once before each answer?
        largest: The most steps and samples that a push has had.
    """
    if not left.any:
        return ALWAYS
    count, samples = largest
    if rounds and count == 1 and min(left.samples, left.seconds) == math.inf:
        return min(KNOWN, math.ceil(left.steps / members) - 1)
    return 1 if left.steps > 2 * members * count and left.samples > 2 * members * samples else 0


class JobBudget:
    """What of the budget is used up, and whether workers are to stop. It counts the main optimizer's pushes."""

    def __init__(self, plan: JobPlan) -> None:
        self.steps = int(plan.resumed.get("steps", 0))
        self.samples = float(plan.resumed.get("samples", 0))
        self.started: float | None = None  #: when the first step was released
        self.stopping = False  #: the budget is used up; it stays so
        self._limits, self._size = plan.limits, plan.size
        self._largest = 1, 0.0  # steps and samples of a push
        self.unknown = False  #: are samples limited, and has neither script nor sampler said how many a step had?
        self._beyond = 0  # steps that came after the budget was used up
        self._asked = False  # has any worker asked whether to stop?

    def begin(self, now: float) -> None:
        """A step is released; the first starts the job's seconds."""
        if self.started is None:
            self.started = now

    def count(self, push: Push, sign: int = 1, dealt: bool = False) -> None:
        """A push was counted (or, with sign -1, refused after all). `dealt`: the mode deals out batches, and weighs a push
        by its samples."""
        measures = push.measures
        self._beyond += sign * measures.count * self.stopping
        self._asked |= push.asked
        self.unknown |= measures.size is None and not dealt and measures.samples > 0 and self._limits.samples < math.inf
        self._largest = max(self._largest[0], measures.count), max(self._largest[1], measures.taken)
        self.steps += sign * measures.count
        self.samples += sign * measures.taken

    def discard(self, measures: Measures) -> None:
        self.steps -= measures.count
        self.samples -= measures.taken

    def check(self, now: float) -> None:
        """Decide whether to stop."""
        if not self.stopping and self.used(now) >= 1:
            self.stopping = True

    def certain(self, rounds: bool) -> int:
        """For how many further answers of a worker it is certain to last."""
        if self.stopping or self.steps >= self._limits.steps or self.samples >= self._limits.samples:
            return 0
        left = Limits(self._limits.steps - self.steps, self._limits.samples - self.samples, self._limits.seconds)
        return certain_answers(left, self._size, rounds, self._largest)

    def seconds(self, now: float) -> float:
        """Since the first step was released."""
        return now - self.started if self.started is not None else 0.0

    def used(self, now: float) -> float:
        return self._limits.used(self.steps, self.samples, self.seconds(now))

    def unheeded(self) -> int:
        """Steps beyond the budget, where no worker ever asks whether to stop."""
        return 0 if self._asked else self._beyond

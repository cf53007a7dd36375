"""Everything that is predicted of one way to spread a model."""

from __future__ import annotations

from dataclasses import dataclass

from polytempo.strategy.bytes_moved import RankBytes, bytes_moved
from polytempo.strategy.costs import Machine, ModelProfile
from polytempo.strategy.memory import RankMemory, memory_needed
from polytempo.strategy.parallel_plan import ParallelPlan
from polytempo.strategy.step_time import StepTime, step_time


@dataclass(frozen=True)
class Prediction:
    """The figures of a plan; tuples are by rank."""

    plan: ParallelPlan
    time: StepTime
    moved: tuple[RankBytes, ...]
    memory: tuple[RankMemory, ...]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.time.seconds

    @property
    def samples_per_second(self) -> float:
        """Of all replicas together."""
        return self.plan.batch / self.seconds if self.seconds else 0.0

    @property
    def largest_memory(self) -> float:
        """Bytes of the rank that needs the most."""
        return max(one.total for one in self.memory)

    @property
    def most_moved(self) -> float:
        """Bytes of the rank that hands over the most."""
        return max(one.total for one in self.moved)

    @property
    def all_moved(self) -> float:
        """Bytes of all ranks."""
        return sum(one.total for one in self.moved)

    @property
    def waiting(self) -> float:
        """The share of the step in which the busiest rank waits for others."""
        return max(0.0, 1 - max(self.time.occupied) / self.seconds) if self.seconds else 0.0


def predict(plan: ParallelPlan, profile: ModelProfile, machine: Machine) -> Prediction:
    """All figures of a plan, from a profile at its number of shards and its microbatch size."""
    return Prediction(
        plan, step_time(plan, profile, machine), bytes_moved(plan, profile, machine), memory_needed(plan, profile)
    )

"""Everything that is predicted of one way to spread a model; of it the memory of each rank is computed here.

Memory is that at the moment of a step at which it is largest. Activations are those of the microbatches between their
forward and their backward, of which the schedule says the number (`pipeline/check.py`): for each, what autograd keeps, the
stage's input, and its output. A schedule that recomputes keeps inputs only, and the rest for one microbatch.

Gradients lie in the flat buffer of the data axis where there is one, and count once. Beside them that axis has a buffer for
the mean (shared by the ranks of a host, which is not taken into account), modes that average values one for the values too.
Where servers apply the optimizer, they hold its state.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from polytempo.strategy.bytes_moved import RankBytes, bytes_moved
from polytempo.strategy.costs import Machine, ModelProfile
from polytempo.strategy.parallel_plan import ParallelPlan, stage_sum
from polytempo.strategy.step_time import StepTime, step_time
from polytempo.summation import in_order


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    parameters: float = 0.0
    gradients: float = 0.0
    state: float = 0.0  #: of the optimizer
    activations: float = 0.0
    buffers: float = 0.0  #: flat ones of the data axis, beside the gradients
    stashed: float = 0.0  #: older versions of the parameters

    @property
    def total(self) -> float:
        """All of them."""
        return in_order(getattr(self, field.name) for field in fields(self))


def memory_needed(plan: ParallelPlan, profile: ModelProfile) -> tuple[RankMemory, ...]:
    """By rank."""
    stages = [stage_memory(plan, profile, stage) for stage in range(plan.mesh.pipe)]
    return tuple(stages[plan.mesh.point(rank).pipe] for rank in range(plan.mesh.size))


def stage_memory(plan: ParallelPlan, profile: ModelProfile, stage: int) -> RankMemory:
    """Of each rank of a stage."""
    first = plan.stage_layers(stage)[0]
    kept = in_order(one.layer.kept_bytes for one in plan.held_layers(profile, stage))
    if stage < plan.mesh.pipe - 1:  # a stage keeps what it has sent
        kept += profile.layers[plan.stage_layers(stage)[-1]].passing_bytes
    held = HeldBytes(
        stage_sum(plan, profile, stage, "weight_bytes"),
        stage_sum(plan, profile, stage, "gradient_bytes"),
        stage_sum(plan, profile, stage, "state_bytes"),
        kept,
        profile.layers[first - 1].layer.activation_bytes if first else profile.input_bytes,
    )
    return held_memory(held, plan, stage)


@dataclass(frozen=True)
class HeldBytes:
    """What a rank has, whatever the schedule."""

    weights: float
    gradients: float
    state: float
    kept: float  #: of a microbatch, for its backward
    given: float  #: the input of a microbatch


def held_memory(held: HeldBytes, plan: ParallelPlan, stage: int) -> RankMemory:
    """Of a rank of this stage that has these bytes."""
    exchange, replicated, facts = plan.exchange, plan.mesh.data > 1, plan.facts
    on_servers = replicated and exchange.servers and not exchange.values
    return RankMemory(
        parameters=held.weights,
        gradients=held.gradients,
        state=0.0 if on_servers else held.state,
        activations=facts.activations[stage] * held.kept + facts.in_flight[stage] * held.given,
        buffers=held.gradients * (0 if not replicated else 2 if exchange.values else 0 if exchange.servers else 1),
        stashed=held.weights * (facts.versions_kept[stage] - 1),
    )


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

"""The memory of each rank, at the moment of a step at which it is largest.

Activations are those of the microbatches between their forward and their backward, of which the schedule says the number
(`pipeline/check.py`): for each, what autograd keeps, and the stage's input. A schedule that recomputes keeps inputs only, and
what autograd keeps for one microbatch.

Gradients lie in the flat buffer of the data axis where there is one, and count once. Beside them that axis has a buffer for
the mean (shared by the ranks of a host, which is not taken into account), modes that average values one for the values too.
Where servers apply the optimizer, they hold its state.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from polytempo.strategy.costs import ModelProfile
from polytempo.strategy.parallel_plan import ParallelPlan, weight_bytes


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
        return sum(getattr(self, field.name) for field in fields(self))


def memory_needed(plan: ParallelPlan, profile: ModelProfile) -> tuple[RankMemory, ...]:
    """By rank."""
    stages = [stage_memory(plan, profile, stage) for stage in range(plan.mesh.pipe)]
    return tuple(stages[plan.mesh.point(rank).pipe] for rank in range(plan.mesh.size))


def stage_memory(plan: ParallelPlan, profile: ModelProfile, stage: int) -> RankMemory:
    """Of each rank of a stage."""
    held = plan.held_layers(profile, stage)
    kept, given = sum(one.layer.kept_bytes for one in held), input_bytes(plan, profile, stage)
    state = sum(one.state_bytes for one in held)
    return held_memory(weight_bytes(plan, profile, stage), kept, given, state, plan, stage)


def held_memory(weights: float, kept: float, given: float, state: float, plan: ParallelPlan, stage: int) -> RankMemory:
    """Of a rank with these bytes of weights and of optimizer state; `kept` and `given`: what a microbatch keeps, its input."""
    exchange, replicated, facts = plan.exchange, plan.mesh.data > 1, plan.facts
    on_servers = replicated and exchange.servers and not exchange.values
    return RankMemory(
        parameters=weights,
        gradients=weights,
        state=0.0 if on_servers else state,
        activations=facts.activations[stage] * kept + facts.in_flight[stage] * given,
        buffers=weights * (0 if not replicated else 2 if exchange.values else 0 if exchange.servers else 1),
        stashed=weights * (facts.versions_kept[stage] - 1),
    )


def input_bytes(plan: ParallelPlan, profile: ModelProfile, stage: int) -> float:
    """A microbatch's input of a stage."""
    first = plan.stage_layers(stage)[0]
    return profile.layers[first - 1].layer.activation_bytes if first else profile.input_bytes

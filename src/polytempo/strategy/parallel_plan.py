"""One way to spread a model: everything that the predictions need to know of it, and which ways are possible at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from polytempo.errors import UsageError
from polytempo.mesh import Mesh
from polytempo.pipeline.actions import Schedule
from polytempo.pipeline.check import Facts, check
from polytempo.pipeline.schedules import make
from polytempo.strategy.costs import ModelProfile, ShardedLayer
from polytempo.summation import in_order
from polytempo.sync.spec import parse_spec


@dataclass(frozen=True)
class DataExchange:
    """What the mode of the data axis means for the cost of a step."""

    servers: bool  #: pushed to servers and pulled; else reduced among the ranks
    barrier: bool  #: all replicas wait for each other
    period: int = 1  #: steps between two exchanges
    values: bool = False  #: values are averaged, not gradients


def data_exchange(sync: str, via: str | None = None) -> DataExchange:
    """The exchange of a synchronisation mode; `via="ps"`: over servers also where the mode needs none."""
    spec = parse_spec(sync)
    can = spec.capabilities
    barrier = can.waits if can.averages else can.rounds
    return DataExchange(via == "ps" or not can.common, barrier, spec.period, values=can.averages)


@dataclass(frozen=True)
class ParallelPlan:
    """Mesh, stages, schedule and mode. `layers` is the number of layers of each stage."""

    mesh: Mesh
    layers: tuple[int, ...]
    batch: int  #: samples of a step, of all replicas together
    microbatches: int = 1  #: of each replica's part of the batch
    schedule: str = "1f1b"
    sync: str = "bsp"
    via: str | None = None  #: how gradients travel, where that was set: "ps" or "allreduce"

    def __post_init__(self) -> None:
        if len(self.layers) != self.mesh.pipe or min(self.layers) < 1:
            raise UsageError(f"expected a number of layers for each of {self.mesh.pipe} stages, got {self.layers}")
        if problem := batch_problem(self.batch, self.mesh.data, self.microbatches):
            raise UsageError(problem)

    def __str__(self) -> str:
        parts = [axes_text(self.mesh)]
        if self.mesh.pipe > 1:
            parts.append(f"schedule={self.schedule}")
        if self.mesh.pipe > 1 or self.microbatches > 1:
            parts.append(f"microbatches={self.microbatches}")
        return ",".join(parts)

    @property
    def samples(self) -> int:
        """The samples of each replica in a step."""
        return self.batch // self.mesh.data

    @property
    def microbatch(self) -> int:
        """The samples of a microbatch."""
        return self.samples // self.microbatches

    @cached_property
    def exchange(self) -> DataExchange:
        """The exchange on the data axis."""
        return data_exchange(self.sync, self.via)

    @cached_property
    def actions(self) -> Schedule:
        """The schedule of a replica's stages."""
        return make(self.schedule, self.mesh.pipe, self.microbatches)

    @cached_property
    def facts(self) -> Facts:
        """What the schedule needs."""
        return check(self.actions)

    def stage_layers(self, stage: int) -> range:
        """The numbers of the layers of a stage."""
        first = sum(self.layers[:stage])
        return range(first, first + self.layers[stage])

    def held_layers(self, profile: ModelProfile, stage: int) -> list[ShardedLayer]:
        """What a stage computes: its layers, and on the last stage the loss."""
        held = [profile.layers[number] for number in self.stage_layers(stage)]
        return [*held, profile.loss] if stage == self.mesh.pipe - 1 and profile.loss is not None else held


def axes_text(mesh: Mesh) -> str:
    """The axes that have several ranks: `data=2,pipe=2`."""
    counts = {"data": mesh.data, "pipe": mesh.pipe, "tensor": mesh.tensor}
    return ",".join(f"{name}={count}" for name, count in counts.items() if count > 1) or "data=1"


def batch_problem(batch: int, data: int, microbatches: int, world: int | None = None) -> str | None:
    """Why a batch cannot be cut so; None where it can. `world`: replicas are to share this number of ranks."""
    if batch % data:
        possible = divisors(batch if world is None else math.gcd(batch, world))
        near = min(possible, key=lambda number: (abs(number - data), number))
        return f"a batch of {batch} cannot be cut by data={data}; nearest: data={near}"
    if (batch // data) % microbatches:
        near = min(divisors(batch // data), key=lambda number: (abs(number - microbatches), number))
        return f"{batch // data} samples cannot be cut into {microbatches} equal microbatches; nearest: microbatches={near}"
    return None


def divisors(number: int) -> list[int]:
    """All divisors, the least first."""
    return [part for part in range(1, number + 1) if number % part == 0]


def stage_sum(plan: ParallelPlan, profile: ModelProfile, stage: int, what: str) -> float:
    """The `weight_bytes`, `gradient_bytes` or `state_bytes` of a rank of a stage; what several layers hold counts once."""
    mine = plan.stage_layers(stage)
    held = (profile.layers[number] for number in mine)
    whole = in_order(one.layer.weight_bytes if what == "weight_bytes" else getattr(one, what) for one in held)
    for tied in profile.tied:
        whole -= getattr(tied, what) * max(0, sum(number in mine for number in tied.layers) - 1)
    return whole


def tied_groups(plan: ParallelPlan, profile: ModelProfile) -> list[tuple[tuple[int, ...], float]]:
    """The stages that hold the same parameters, where these are in several of them, and the bytes of their gradients."""
    found = []
    for tied in profile.tied:
        stages = {stage for stage in range(plan.mesh.pipe) for number in tied.layers if number in plan.stage_layers(stage)}
        if len(stages) > 1:
            found.append((tuple(sorted(stages)), tied.gradient_bytes))
    return found

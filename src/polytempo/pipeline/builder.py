"""From a model and a schedule to this rank's stage: cut, checked, placed, and connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polytempo.collectives.group import RankGroup
from polytempo.collectives.world import World
from polytempo.errors import BrokenInvariant, UsageError
from polytempo.pipeline.actions import ReplicaActions, Schedule, from_text
from polytempo.pipeline.auto_stages import planned
from polytempo.pipeline.check import Facts, check
from polytempo.pipeline.deferred_gradients import DeferredGradients
from polytempo.pipeline.evaluation import fixed_in_training
from polytempo.pipeline.gradient_sync import Clipping, GradientSync
from polytempo.pipeline.model_part import ModelPart, tied
from polytempo.pipeline.partition import PartitionPlan, cut
from polytempo.pipeline.point_to_point import PointToPoint
from polytempo.pipeline.runtime import Places, Runtime
from polytempo.pipeline.schedules import make
from polytempo.pipeline.stage import Loss, MakeOptimizer, Stage
from polytempo.pipeline.steady_state import SteadyState

Cuts = int | Sequence[int] | PartitionPlan
Catalogue = dict[str, tuple[torch.Size, torch.dtype]]


@dataclass
class StageBuild:
    """All that a pipeline needs."""

    schedule: Schedule
    facts: Facts
    places: Places
    stage: Stage
    runtime: Runtime
    carrier: PointToPoint
    group: RankGroup
    line: ReplicaActions
    microbatches: int
    endless: SteadyState | None
    lag: int
    #: Of the whole model: all names; what each stage holds; what no stage holds.
    names: list[str]
    catalogue: list[Catalogue]
    aside: dict[str, torch.Tensor]
    #: An operation that cannot be told to evaluate.
    fixed: str


class StageBuilder:
    """What the caller wants."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        stages: Cuts | str | None,
        schedule: str | Schedule,
        microbatches: int | None,
        replicas: Sequence[int] | None,
        example: tuple[Any, ...] | None,
        clip_norm: float | None = None,
    ) -> None:
        self.model, self.spec, self.example, self.clip_norm = model, schedule, example, clip_norm
        self.auto = stages if isinstance(stages, str) else None
        self.stages: Cuts | None = stages if not isinstance(stages, str) else None
        self.microbatches, self.replicas = microbatches, replicas

    def build(
        self, world: World, loss: Loss, optimizer: MakeOptimizer, seed: int, device: torch.device | str | None
    ) -> StageBuild:
        """This rank's share."""
        if self.auto is not None:
            self.stages = self._planned(self.auto, world, device)
        schedule = self._schedule(world.size)
        facts = _checked(schedule)
        self._check_clipping(schedule)
        places = Places(schedule.replicas)
        if places.size != world.size:
            raise UsageError(
                f"the schedule needs {places.size} ranks, one for each replica of a stage {schedule.replicas}; the job has "
                f"{world.size}; start {places.size}, or use other stages or replicas"
            )
        parts = cut(self.model, self._cuts(schedule), self.example)
        number, replica = places.of(world.rank)
        group = world.new_group(range(world.size))
        assert group is not None
        exchange = self._exchange(world, places, parts, schedule)
        told = schedule.versions == "first"
        stage = Stage(
            parts[number],
            number,
            optimizer,
            loss if number == len(parts) - 1 else None,
            versioned=facts.versions_kept[number] > 1 or told,
            told=told,
            share=schedule.microbatches if schedule.flushes else 1,
            seed=seed,
            device=torch.device(device) if device is not None else None,
        )
        carrier = PointToPoint(group, stage.device)
        exchange.start_equal([*stage.params, *stage.part.module.buffers()])
        debts = DeferredGradients(facts.activations[number])
        runtime = Runtime(stage, places, carrier, exchange, debts, schedule.recompute)
        endless = self._endless(schedule, number, replica)
        first = self._endless(schedule, 0, 0)
        names, catalogue, aside = self._described(parts)
        group.barrier().wait()  # nobody computes while others still trace: they might be threads
        return StageBuild(
            schedule,
            facts,
            places,
            stage,
            runtime,
            carrier,
            group,
            schedule.lines[number][replica],
            1 if endless else schedule.microbatches,
            endless,
            max(first.lag(), max(places.replicas) - 1) if first is not None else 0,  # who meets must be let through
            names,
            catalogue,
            aside,
            fixed_in_training(part.module for part in parts),
        )

    # The schedule.

    def _check_clipping(self, schedule: Schedule) -> None:
        if self.clip_norm is None:
            return
        if not self.clip_norm > 0:
            raise UsageError(f"expected clip_norm above 0, got {self.clip_norm}")
        if not schedule.flushes:
            raise UsageError(
                f"clip_norm needs a moment at which all stages have their gradients, and {schedule.name} has none; "
                "use a schedule that flushes (1f1b), or clip in the optimizer that you hand in"
            )

    def _planned(self, spec: str, world: World, device: torch.device | str | None) -> Cuts:
        """Stages by measurement; replicas of one each ask for a straight pipeline."""
        if not isinstance(self.spec, str) or ":" in self.spec:
            raise UsageError(f"stages={spec!r} needs a schedule by its name, such as 1f1b, not one that is written down")
        if self.replicas is not None and tuple(self.replicas) != (1,) * world.size:
            raise UsageError(
                f"stages={spec!r} chooses replicas itself, got replicas={self.replicas}; leave them out, or give "
                f"replicas={[1] * world.size} for a straight pipeline"
            )
        straight, group = self.replicas is not None, world.all_ranks
        found = planned(
            spec, self.model, self.example, group, straight=straight, microbatches=self.microbatches, device=device
        )
        if len(found.stages) == 1 < world.size and not make(self.spec, 1, world.size, (world.size,)).flushes:
            raise UsageError(
                f"the best plan is one stage on all ranks, which needs a schedule that flushes, got {self.spec}; "
                f"use 1f1b, or replicas={[1] * world.size} for a straight pipeline"
            )
        return found

    def _schedule(self, ranks: int) -> Schedule:
        if isinstance(self.spec, str) and ":" not in self.spec:
            return self._by_spec(self.spec, ranks)
        schedule = self.spec if isinstance(self.spec, Schedule) else from_text(self.spec)
        for name, asked, has in (
            ("stages", self._count(schedule.stages), schedule.stages),
            ("microbatches", self.microbatches, schedule.microbatches),
            ("replicas", self._replicas(), schedule.replicas),
        ):
            if asked is not None and asked != has:
                raise UsageError(f"the schedule {schedule.name!r} has {name} {has}, not {asked}; leave {name} out")
        return schedule

    def _by_spec(self, spec: str, ranks: int) -> Schedule:
        replicas = self._replicas()
        stages = self._count(len(replicas) if replicas is not None else ranks)
        least = sum(replicas) if replicas is not None else stages
        schedule = make(spec, stages, least if self.microbatches is None else self.microbatches, replicas)
        if not schedule.flushes and self.microbatches not in (None, 1):
            raise UsageError(
                f"{schedule.name} moves whole minibatches, one for each step(); "
                f"got microbatches={self.microbatches}; leave it out"
            )
        return schedule if schedule.flushes else make(spec, stages, 8 * least, replicas)

    def _replicas(self) -> tuple[int, ...] | None:
        if self.replicas is None and self.stages is not None and not isinstance(self.stages, int | Sequence):
            return tuple(stage.replicas for stage in self.stages.stages)
        return tuple(self.replicas) if self.replicas is not None else None

    def _count(self, otherwise: int) -> int:
        """How many stages."""
        if self.stages is None:
            return otherwise
        if isinstance(self.stages, int):
            return self.stages
        return len(self.stages if isinstance(self.stages, Sequence) else self.stages.stages)

    def _cuts(self, schedule: Schedule) -> Cuts:
        return self.stages if self.stages is not None else schedule.stages

    def _endless(self, schedule: Schedule, stage: int, replica: int) -> SteadyState | None:
        spec = self.spec
        if schedule.flushes or not isinstance(spec, str) or ":" in spec:
            return None
        return SteadyState(
            lambda count: make(spec, schedule.stages, count, schedule.replicas), stage, replica, schedule.replicas
        )

    # The model.

    def _exchange(self, world: World, places: Places, parts: list[ModelPart], schedule: Schedule) -> GradientSync:
        """All ranks make all groups, in the same order."""
        own = places.of(world.rank)[0]
        ours = [world.new_group(places.ranks(stage)) if count > 1 else None for stage, count in enumerate(places.replicas)]
        shared = tied(parts)
        if shared and not schedule.flushes:
            stages = ", ".join(map(str, next(iter(shared))))
            raise UsageError(
                f"stages {stages} hold the same parameter, and {schedule.name} updates them at different times; "
                "use a schedule that flushes (1f1b), or other stages"
            )
        groups = [
            (world.new_group([rank for stage in stages for rank in places.ranks(stage)]), params)
            for stages, params in sorted(shared.items())
        ]
        clipping = None
        if self.clip_norm is not None and (everybody := world.new_group(range(world.size))) is not None:
            elsewhere = {param for stages, params in shared.items() if stages[0] != own for param in params}
            mine = dict.fromkeys(param for _, param in parts[own].parameters() if param not in elsewhere)
            first = world.rank == places.rank(own, 0)
            clipping = Clipping(everybody, self.clip_norm, list(mine) if first else [])
        return GradientSync(ours[own], [(group, params) for group, params in groups if group is not None], clipping)

    def _described(self, parts: list[ModelPart]) -> tuple[list[str], list[Catalogue], dict[str, torch.Tensor]]:
        catalogue = [{name: (value.shape, value.dtype) for name, value in part.state().items()} for part in parts]
        held = [name for stage in catalogue for name in stage]
        if not isinstance(self.model, nn.Module):
            return held, catalogue, {}
        whole = {name: value for name, value in self.model.state_dict().items() if isinstance(value, torch.Tensor)}
        return list(whole), catalogue, {name: value for name, value in whole.items() if name not in held}


def _checked(schedule: Schedule) -> Facts:
    try:
        return check(schedule)
    except BrokenInvariant as problem:
        raise UsageError(f"the schedule {schedule.name!r} cannot be run: {problem}") from problem

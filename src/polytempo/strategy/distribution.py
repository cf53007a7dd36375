"""From a model and a strategy to this rank's part of it: the groups of each axis, the shards, the stage, its optimizer.

Three mechanisms are put together here, and none knows of the others:

    pipe     `Pipeline` on this rank's lane: the stages of its replica at its shard
    tensor   `parallelize` replaces the layers of the stage by their shards, once it is cut out
    data     the optimizer of the stage is a `DistributedOptimizer` among the ranks with the same part of the model

All ranks make all groups, in the same order, from the mesh alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polytempo.collectives.group import RankGroup
from polytempo.collectives.world import World
from polytempo.errors import UsageError
from polytempo.mesh import Mesh, MeshPoint, ReplicaRanks
from polytempo.pipeline.builder import StageHooks, planned_stages
from polytempo.pipeline.partition import ModelPart, PartitionPlan, cut, tied
from polytempo.pipeline.pipeline import Pipeline
from polytempo.pipeline.stage import Loss, MakeOptimizer
from polytempo.session.session import Session
from polytempo.strategy.parallel_plan import axes_text
from polytempo.strategy.soundness import check_pair, check_tied
from polytempo.strategy.state import SpreadState, UnsplitModel, exchanged
from polytempo.strategy.strategy import Strategy
from polytempo.sync.spec import refused_of
from polytempo.tensor_parallel.cross_entropy import parallel_loss
from polytempo.tensor_parallel.group import RankTensorGroup
from polytempo.tensor_parallel.plan import TensorPlan, find_plan, parallelize
from polytempo.train.communication import Group
from polytempo.train.optimizer import DistributedOptimizer

Stages = Sequence[int] | PartitionPlan | str | None


@dataclass(frozen=True)
class AxisGroups:
    """The groups of one rank. A group of one is left out."""

    job: RankGroup  #: all ranks
    lane: RankGroup  #: the stages of this replica at this shard
    shards: RankGroup | None  #: the ranks of this stage in this replica
    replica: RankGroup | None  #: all ranks of this replica

    @classmethod
    def of(cls, world: World, mesh: Mesh) -> AxisGroups:
        """Made by all ranks together."""

        def own(group_of: Callable[[int], tuple[int, ...]]) -> RankGroup:
            made = [world.new_group(ranks) for ranks in sorted({group_of(rank) for rank in range(world.size)})]
            return next(group for group in made if group is not None)

        job = world.new_group(range(world.size))
        assert job is not None
        lane = own(mesh.pipe_group)
        shards = own(mesh.tensor_group) if mesh.tensor > 1 else None
        replica = own(mesh.replica_group) if mesh.pipe * mesh.tensor > 1 else None
        return cls(job, lane, shards, replica)


@dataclass(frozen=True)
class Distribution:
    """What `distribute` makes on one rank."""

    session: Session
    strategy: Strategy
    mesh: Mesh
    point: MeshPoint
    groups: AxisGroups
    plan: TensorPlan
    pipeline: Pipeline
    optimizer: DistributedOptimizer
    names: list[str]  #: of the optimizer's parameters, in its order, in the unsplit model
    state: SpreadState


@dataclass
class Distributor:
    """The arguments of `distribute`, and from them this rank's part. All ranks build together."""

    strategy: Strategy
    model: nn.Module
    loss: Loss
    optimizer: MakeOptimizer
    example: tuple[Any, ...] | None = None
    seed: int = 0
    device: torch.device | str | None = None
    clip_norm: float | None = None
    tensor_plan: Mapping[str, Any] | None = None
    stages: Stages = None

    def build(self, session: Session) -> Distribution:
        """This rank's part."""
        job, world = session.job, session.world()
        strategy = self.strategy.resolved(session.size, job.sync)
        mesh = strategy.mesh(session.size)
        point = mesh.point(session.rank)
        plan = find_plan(self.model, mesh.tensor, self.tensor_plan, self.loss)
        groups = AxisGroups.of(world, mesh)
        stages = self._stages(strategy, groups)
        self._check_stages(strategy, stages)
        _start_alike(groups.job, self.model, strategy)
        unsplit = UnsplitModel.of(self.model)
        whole = dict(self.model.state_dict(keep_vars=True))
        if session.scope is None:  # samplers that are made from now on
            session.data_axis = (point.data, mesh.data) if strategy.is_split else None
        made = _StageMaker(session, strategy, mesh, point, plan, groups, self.optimizer, self.clip_norm is not None)
        pipeline = Pipeline(
            self.model,
            loss=made.loss(self.loss),
            optimizer=made.make_optimizer,
            stages=stages,
            schedule=strategy.schedule,
            microbatches=strategy.microbatches,
            seed=self.seed + 1_000_003 * point.data,  # replicas draw different masks
            device=self.device,
            example=self.example,
            clip_norm=self.clip_norm,
            group=Group(groups.lane.ranks, groups.lane),
            _hooks=made.hooks(),
        )
        held = {name for stage in pipeline._built.tensors for name in stage}
        unused = {name: value for name, value in whole.items() if isinstance(value, torch.Tensor) and name not in held}
        lane = groups.lane if mesh.pipe > 1 else None
        state = SpreadState(unsplit, pipeline.stage.state, lane, groups.shards, plan.sharding, unused)
        optimizer = pipeline.stage.distributed
        assert optimizer is not None
        names = made.names(pipeline.stage.part, optimizer)
        return Distribution(session, strategy, mesh, point, groups, plan, pipeline, optimizer, names, state)

    def _stages(self, strategy: Strategy, groups: AxisGroups) -> int | Sequence[int] | PartitionPlan:
        """How the model is cut, alike in all lanes: where it is measured, by the lane of rank 0."""
        if not isinstance(self.stages, str):
            return self.stages if self.stages is not None else strategy.pipe
        counts: list[int] = []
        if 0 in groups.lane.ranks and strategy.pipe > 1:
            found = planned_stages(
                self.stages, self.model, self.example, groups.lane, straight=True, microbatches=strategy.microbatches
            )
            counts = [stage.last - stage.first + 1 for stage in found.stages]
        return exchanged(groups.job, counts)[0] or strategy.pipe

    def _check_stages(self, strategy: Strategy, stages: int | Sequence[int] | PartitionPlan) -> None:
        """Refuse stages without parameters, and tied ones where copies would drift apart: on all ranks alike."""
        if strategy.pipe == 1:
            return
        parts = cut(self.model, stages, self.example)
        if len(parts) != strategy.pipe:
            raise UsageError(f"stages= cuts the model into {len(parts)} stages, and the strategy has pipe={strategy.pipe}")
        for number, part in enumerate(parts):
            if not any(param.requires_grad for _, param in part.parameters()):
                raise UsageError(
                    f"stage {number} of {strategy.pipe} has no parameters to train, and the data axis has nothing to keep "
                    f"in step there; give stages= with parameters in each, or pipe={strategy.pipe - 1}"
                )
        for holders, params in tied(parts).items():
            held = dict(parts[holders[0]].parameters())
            check_tied(strategy.spec, holders, next(name for name, param in held.items() if param is params[0]))


@dataclass
class _StageMaker:
    """The hooks of this rank's pipeline: the shards of its part, and its optimizer."""

    session: Session
    strategy: Strategy
    mesh: Mesh
    point: MeshPoint
    plan: TensorPlan
    groups: AxisGroups
    inner: MakeOptimizer
    clips: bool
    part: nn.Module | None = None  #: the module of this rank's stage

    def hooks(self) -> StageHooks:
        """What the other axes add to the pipeline; where there is one stage, they are all there is."""
        shards = self.groups.shards
        return StageHooks(
            prepare_part=self.prepare,
            norm_group=self.groups.replica if self.clips else None,
            counts=lambda name: self.point.tensor == 0 or name in self.plan.sharding,
            groups=(shards,) if shards is not None else (),
            agree_to_stop=functools.partial(_agreed, shards) if shards is not None else None,
            title=axes_text(self.mesh) if self.mesh.pipe == 1 else "",
        )

    def prepare(self, part: ModelPart) -> None:
        """Make the layers of this rank's part their shards."""
        self.part = part.module
        if self.groups.shards is not None:
            for name, member in part.members:
                parallelize(member, self.plan, RankTensorGroup(self.groups.shards), name)

    def loss(self, loss: Loss) -> Loss:
        """The loss: of this rank's logits, where the output layer stays split."""
        if self.groups.shards is None or self.plan.logits is None:
            return loss
        return parallel_loss(loss, RankTensorGroup(self.groups.shards), self.plan.logits[1])

    def make_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of this rank's part, whose steps are taken together with those of the other replicas."""
        main = self.point.pipe == self.mesh.pipe - 1 and self.point.tensor == 0
        split = self.mesh.pipe, self.mesh.tensor
        refused = refused_of(lambda spec: check_pair(spec, *split, self.strategy.schedule))
        ranks = ReplicaRanks(self.mesh.data_group(self.session.rank), main, refused)
        way: dict[str, Any] = {"sync": self.strategy.sync, "via": self.strategy.via}
        if self.part is not None and any(buffer.is_floating_point() for buffer in self.part.buffers()):
            return DistributedOptimizer(self.inner(params), self.part, buffers="mean", group=ranks, **way)
        return DistributedOptimizer(self.inner(params), group=ranks, **way)

    def names(self, part: ModelPart, optimizer: DistributedOptimizer) -> list[str]:
        """The names of the optimizer's parameters, in its order."""
        known: dict[nn.Parameter, str] = {}
        for name, param in part.parameters():
            known.setdefault(param, name)
        return [known[param] for group in optimizer.param_groups for param in group["params"]]


def _agreed(shards: RankGroup, told: bool) -> bool:
    """What the first shard was told about the budget: its clock is the one that counts."""
    flag = torch.tensor([int(told)])
    shards.broadcast([flag], 0).wait()
    return bool(flag)


def _start_alike(job: RankGroup, model: nn.Module, strategy: Strategy) -> None:
    """Refuse ranks with another model or another strategy; then all take the weights of rank 0."""
    state = [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
    forms = [(name, tuple(value.shape), str(value.dtype)) for name, value in model.state_dict().items()]
    mine = [str(strategy), hashlib.sha256(repr(forms).encode()).hexdigest()]
    found = exchanged(job, mine)
    for rank, theirs in enumerate(found):
        if theirs[0] != found[0][0]:
            raise UsageError(f"rank {rank} has strategy {theirs[0]} and rank 0 {found[0][0]}; give all ranks the same")
        if theirs[1] != found[0][1]:
            raise UsageError(f"rank {rank} has another model than rank 0: names, shapes or dtypes differ; build the same")
    if job.size == 1 or not state:
        return
    with torch.no_grad():
        on_cpu = [value.detach().cpu() for value in state]  # the same memory where it is there already
        job.broadcast(on_cpu, 0).wait()
        for value, sent in zip(state, on_cpu, strict=True):
            if value.device.type != "cpu":
                value.copy_(sent)

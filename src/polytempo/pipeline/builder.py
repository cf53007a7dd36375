"""From a model and a schedule to this rank's stage: partitioned, checked, placed, and connected.

A pipeline runs on a group of ranks, all or some: their order is that of the stages. What it needs of groups besides are
subgroups of that one, so ranks outside need not know of it, and pipelines on disjoint groups run side by side.

`stages="auto"`: the first rank measures the model and plans stages for all; all ranks build the same plan.

    auto                          every rank behind a link of 5 GB/s, about the bandwidth of shared memory between processes
    auto:10Gb/s                   the same with another bandwidth
    auto:4x4:12GB/s,10Gb/s        a topology (see planner.py), the ranks of a host adjacent

The plan uses every rank. Its unit of work is the example, so it should have as many samples as a step.

A pipeline is one axis of a mesh, and knows nothing of the others; they add hooks (`StageHooks`):

    tensor   `prepare_part` replaces layers of this rank's part by their shards; the norm for clipping is over the ranks of
             the whole replica, where a replicated parameter is counted once; all shards stop at the same step
    data     the optimizer of a stage is a `DistributedOptimizer` (`stage.py`): nothing of it is in here

Where a stage computes:

    device="cuda:1", torch.device(...), "cpu"      this rank's stage is there
    device="cuda"                                  GPU `local_rank` of this host, modulo those that this process sees
    device=["cuda:0", "cuda:0", "cpu"]             one for each stage, the same on every rank
    device=None                                    where the model is; as "cuda" if the example is on a GPU and it is not
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from polytempo.collectives.group import RankGroup
from polytempo.collectives.world import World
from polytempo.device.device import Device
from polytempo.errors import BrokenInvariant, PeerError, PolytempoError, UsageError, nearest
from polytempo.pipeline.actions import ReplicaActions, Schedule, from_text, last_backwards
from polytempo.pipeline.check import Facts, check
from polytempo.pipeline.deferred_gradients import DeferredGradients
from polytempo.pipeline.device_messages import exchange_devices
from polytempo.pipeline.gradient_sync import Clipping, GradientSync
from polytempo.pipeline.partition import ModelPart, PartitionPlan, cut, tied, training_only
from polytempo.pipeline.plan_report import explain
from polytempo.pipeline.planner import PlannedStage, StagePlan, Topology, parse_topology, plan
from polytempo.pipeline.point_to_point import PointToPoint
from polytempo.pipeline.profiler import profile
from polytempo.pipeline.runtime import RankLayout, Runtime
from polytempo.pipeline.schedules import SteadyState, make
from polytempo.pipeline.stage import Loss, MakeOptimizer, Stage
from polytempo.sync.compatibility import Feature, check_features

StageDevice: TypeAlias = torch.device | str | None
StageDevices: TypeAlias = StageDevice | Sequence[torch.device | str]


def chosen(
    device: StageDevices, stage: int, stages: int, local_rank: int, gpus: int, asks: bool = False
) -> torch.device | None:
    """Where a stage computes; None: where its parameters are.

    Args:
        device: As the user gave it.
        stage: The number of the stage.
        stages: How many there are.
        local_rank: Of this process among those of its host.
        gpus: How many this process sees.
        asks: The example is on a GPU and the model is not.

    Raises:
        UsageError: There is no such device, or a list is not of one device for each stage.
    """
    if isinstance(device, Sequence) and not isinstance(device, str):
        if len(device) != stages:
            raise UsageError(
                f"expected a device for each of {stages} stages, got {len(device)}; give {stages}, or one for all"
            )
        device = device[stage]
    if device is None and not asks:
        return None
    place = torch.device("cuda" if device is None else device)
    if place.type != "cuda":
        return place
    if not gpus:
        raise UsageError(f"expected a GPU for device={str(place)!r}, and this process sees none; use device='cpu'")
    index = local_rank % gpus if place.index is None else place.index
    if index >= gpus:
        raise UsageError(f"expected a GPU from cuda:0 to cuda:{gpus - 1}, got {str(place)!r}; see CUDA_VISIBLE_DEVICES")
    return torch.device("cuda", index)


def asks_for_gpu(example: Any, parameters: Sequence[torch.Tensor]) -> bool:
    """Is the example on a GPU, and the model not?"""
    given = example if isinstance(example, tuple | list) else (example,)
    there = any(isinstance(value, torch.Tensor) and value.is_cuda for value in given)
    return there and not any(tensor.is_cuda for tensor in parameters)


def shared_device(place: torch.device) -> Device | None:
    """The device whose memory a stage shares with others: its GPU; None on the CPU, or where the driver refuses."""
    if place.type != "cuda":
        return None
    from polytempo.device.cuda_device import CudaDevice

    try:
        return CudaDevice(place.index if place.index is not None else torch.cuda.current_device())
    except PeerError:
        return None


@dataclass(frozen=True)
class StageHooks:
    """Hooks of one rank; all ranks of a pipeline have the same kinds of them.

    Attributes:
        prepare_part: Called with this rank's part after the cut, before its optimizer is made.
        norm_group: The ranks over which the norm of the gradients is taken; None: those of the pipeline.
        counts: Does this rank add the gradient of a parameter, by its name in the whole model, to that norm?
        groups: Groups beside those of the pipeline whose ranks are told when this rank fails.
        agree_to_stop: Called on the last stage at each step of a job with a budget, with what this rank was told; returns
            what all lanes of the replica were.
        device: Whose memory this rank shares with other stages; None: that of its GPU, if it has one.
        title: What lines about the progress call the training; empty: the pipeline.
    """

    prepare_part: Callable[[ModelPart], None] | None = None
    norm_group: RankGroup | None = None
    counts: Callable[[str], bool] = lambda name: True
    groups: tuple[RankGroup, ...] = ()
    agree_to_stop: Callable[[bool], bool] | None = None
    device: Device | None = None
    title: str = ""


Cuts = int | Sequence[int] | PartitionPlan
#: For each set of stages that hold the same parameters, the names of these in this rank's part.
TiedNames = dict[tuple[int, ...], list[str]]
TensorShapes = dict[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class StageBuild:
    """What a pipeline consists of on one rank; its training loop, state and evaluation take this one object."""

    schedule: Schedule
    facts: Facts
    layout: RankLayout
    group: RankGroup  #: all ranks of the pipeline
    stage: Stage
    p2p: PointToPoint
    runtime: Runtime
    actions: ReplicaActions  #: of this rank, in one step
    microbatches: int  #: of a batch
    steady_state: SteadyState | None  #: of a schedule that does not flush
    lag: int  #: calls between a minibatch and its loss, in the steady state
    names: list[str]  #: of the whole model's state
    tensors: list[TensorShapes]  #: the part of it that each stage holds
    unused: dict[str, torch.Tensor]  #: the part of it that no stage holds
    training_only: str  #: an operation that cannot be switched to evaluation mode

    @property
    def rank(self) -> int:
        """This rank, of the job."""
        return self.group.engine.rank

    @property
    def is_first(self) -> bool:
        """Is this the first rank of the pipeline?"""
        return self.rank == self.layout.members[0]

    @property
    def replica(self) -> int:
        """Which replica of its stage this rank is."""
        return self.layout.of(self.rank)[1]

    def position(self, stage: int) -> int:
        """The index within the group of the first replica of a stage."""
        return self.group.ranks.index(self.layout.rank(stage, 0))


class StageBuilder:
    """The arguments of a pipeline, and from them this rank's stage."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        stages: Cuts | str | None,
        schedule: str | Schedule,
        microbatches: int | None,
        replicas: Sequence[int] | None,
        example: tuple[Any, ...] | None,
        clip_norm: float | None = None,
        hooks: StageHooks | None = None,
    ) -> None:
        self.hooks = hooks or StageHooks()
        self.model, self.spec, self.example, self.clip_norm = model, schedule, example, clip_norm
        self.auto = stages if isinstance(stages, str) else None
        self.stages: Cuts | None = stages if not isinstance(stages, str) else None
        self.microbatches, self.replicas = microbatches, replicas

    def build(
        self,
        world: World,
        group: RankGroup | None,
        loss: Loss,
        optimizer: MakeOptimizer,
        seed: int,
        device: StageDevices,
    ) -> StageBuild:
        """This rank's stage, connected to the others; all ranks of the group (None: all of the job) call this together."""
        planning = world.all_ranks if group is None else group
        if self.auto is not None:
            self.stages = self._planned(self.auto, planning, self._place(device, 0, 0, world))
        schedule = self._schedule(planning.size)
        try:
            facts = check(schedule)
        except BrokenInvariant as problem:
            raise UsageError(f"the schedule {schedule.name!r} cannot be run: {problem}") from problem
        self._check_clipping(schedule)
        layout = RankLayout(schedule.replicas, planning.ranks)
        if layout.size != planning.size:
            raise UsageError(
                f"the schedule needs {layout.size} ranks, one for each replica of a stage {schedule.replicas}; the "
                f"{'job' if group is None else 'group'} has {planning.size}; "
                f"{'start' if group is None else 'give a group of'} {layout.size}, or use other stages or replicas"
            )
        parts = cut(self.model, self.stages if self.stages is not None else schedule.stages, self.example)
        number, replica = layout.of(world.rank)
        parent = world.new_group(planning.ranks) if group is None else group
        assert parent is not None
        group = world.subgroup(parent, parent.ranks)
        assert group is not None
        tensors = [{name: (value.shape, value.dtype) for name, value in part.state().items()} for part in parts]
        held = [name for stage in tensors for name in stage]
        state = self.model.state_dict() if isinstance(self.model, nn.Module) else {}
        whole = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        shared, part = _tied_names(parts, number, schedule), parts[number]
        if self.hooks.prepare_part is not None:
            self.hooks.prepare_part(part)
        place = self._place(device, number, schedule.stages, world)
        if place is not None:
            part.module.to(place)
        gradient_sync = self._gradient_sync(world, parent, layout, part, shared)
        gradient_sync.broadcast_initial([*(param for _, param in part.parameters()), *part.module.buffers()])
        stage = _stage(part, number, schedule, facts, loss, optimizer, seed, place)
        _check_data_axis(stage, schedule, shared)
        if stage.data_axis is not None:
            stage.data_axis.sends_early = not gradient_sync.changes_gradients()
        shared_memory = self.hooks.device or shared_device(stage.device)
        peers = exchange_devices(group, shared_memory)  # the ranks with which this stage shares its memory
        p2p = PointToPoint(group, stage.device, (shared_memory, peers) if shared_memory is not None else None)
        deferred, actions = DeferredGradients(facts.activations[number]), schedule.actions[number][replica]
        steady_state, first = self._steady_state(schedule, number, replica), self._steady_state(schedule, 0, 0)
        lasts = frozenset[int]() if steady_state else last_backwards(actions)
        group.barrier().wait()  # no rank computes while another still traces: ranks may be threads
        return StageBuild(
            schedule=schedule,
            facts=facts,
            layout=layout,
            group=group,
            stage=stage,
            p2p=p2p,
            runtime=Runtime(stage, layout, p2p, gradient_sync, deferred, schedule.recompute, lasts),
            actions=actions,
            microbatches=1 if steady_state else schedule.microbatches,
            steady_state=steady_state,
            # Replicas synchronise at updates: a loss is there only after the minibatches of the other replicas.
            lag=max(first.lag(), max(layout.replicas) - 1) if first is not None else 0,
            names=list(whole) if isinstance(self.model, nn.Module) else held,
            tensors=tensors,
            unused={name: value for name, value in whole.items() if name not in held},
            training_only=training_only(part.module for part in parts),
        )

    # The device.

    def _place(self, device: StageDevices, stage: int, stages: int, world: World) -> torch.device | None:
        """Where a stage computes. `stages` 0: where layers are measured, which is where the first stage is."""
        ranks = next(host for host in world.all_ranks.place.hosts if world.rank in host)
        given: StageDevices = device if isinstance(device, str) or not isinstance(device, Sequence) or stages else device[0]
        modules = [self.model] if isinstance(self.model, nn.Module) else self.model
        params = [param for module in modules for param in module.parameters()]
        asks = given is None and self.example is not None and asks_for_gpu(self.example, params)
        seen = torch.cuda.device_count() if asks or given is not None else 0
        return chosen(given, stage, stages, ranks.index(world.rank), seen, asks)

    # The schedule.

    def _check_clipping(self, schedule: Schedule) -> None:
        if self.clip_norm is None:
            return
        if not self.clip_norm > 0:
            raise UsageError(f"expected clip_norm above 0, got {self.clip_norm}")
        if not schedule.flushes:
            raise UsageError(
                f"clip_norm needs a point at which all stages have their gradients, and {schedule.name} has none; "
                "use a schedule that flushes (1f1b), or clip in the optimizer that you pass"
            )

    def _planned(self, spec: str, group: RankGroup, device: torch.device | str | None) -> Cuts:
        """Stages by measurement; replicas of one each ask for a straight pipeline."""
        if not isinstance(self.spec, str) or ":" in self.spec:
            raise UsageError(f"stages={spec!r} needs the name of a schedule, such as 1f1b, not a schedule as text")
        if self.replicas is not None and tuple(self.replicas) != (1,) * group.size:
            raise UsageError(
                f"stages={spec!r} chooses replicas itself, got replicas={self.replicas}; leave them out, or give "
                f"replicas={[1] * group.size} for a straight pipeline"
            )
        straight = self.replicas is not None
        found = planned_stages(
            spec, self.model, self.example, group, straight=straight, microbatches=self.microbatches, device=device
        )
        if len(found.stages) == 1 < group.size and not make(self.spec, 1, group.size, (group.size,)).flushes:
            raise UsageError(
                f"the best plan is one stage on all ranks, which needs a schedule that flushes, got {self.spec}; "
                f"use 1f1b, or replicas={[1] * group.size} for a straight pipeline"
            )
        return found

    def _schedule(self, ranks: int) -> Schedule:
        spec, replicas = self.spec, self._replicas()
        if not isinstance(spec, str) or ":" in spec:
            schedule = spec if isinstance(spec, Schedule) else from_text(spec)
            for name, asked, has in (
                ("stages", self._count(schedule.stages), schedule.stages),
                ("microbatches", self.microbatches, schedule.microbatches),
                ("replicas", replicas, schedule.replicas),
            ):
                if asked is not None and asked != has:
                    raise UsageError(f"the schedule {schedule.name!r} has {name} {has}, not {asked}; leave {name} out")
            return schedule
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
        if self.stages is None:
            return otherwise
        if isinstance(self.stages, int):
            return self.stages
        return len(self.stages if isinstance(self.stages, Sequence) else self.stages.stages)

    def _steady_state(self, schedule: Schedule, stage: int, replica: int) -> SteadyState | None:
        spec = self.spec
        if schedule.flushes or not isinstance(spec, str) or ":" in spec:
            return None
        return SteadyState(
            lambda count: make(spec, schedule.stages, count, schedule.replicas), stage, replica, schedule.replicas
        )

    # The model.

    def _gradient_sync(
        self, world: World, group: RankGroup, layout: RankLayout, part: ModelPart, shared: TiedNames
    ) -> GradientSync:
        """The groups of this rank; all ranks of the pipeline make all groups, in the same order."""
        own, params = layout.of(world.rank)[0], dict(part.parameters())
        replicas = [
            world.subgroup(group, layout.ranks(stage)) if count > 1 else None for stage, count in enumerate(layout.replicas)
        ]
        groups = [
            (world.subgroup(group, [rank for stage in stages for rank in layout.ranks(stage)]), [params[n] for n in names])
            for stages, names in shared.items()
        ]
        clipping = None
        if self.clip_norm is not None:
            whole = self.hooks.norm_group or world.subgroup(group, group.ranks)
            assert whole is not None
            elsewhere = {params[name] for stages, names in shared.items() if stages[0] != own for name in names}
            mine = dict.fromkeys(
                param for name, param in params.items() if param not in elsewhere and self.hooks.counts(name)
            )
            first = world.rank == layout.rank(own, 0)
            clipping = Clipping(whole, self.clip_norm, list(mine) if first else [])
        return GradientSync(replicas[own], [(group, own) for group, own in groups if group is not None], clipping)


def _tied_names(parts: list[ModelPart], own: int, schedule: Schedule) -> TiedNames:
    """The parameters that several parts hold: which parts, and their names in this rank's part, if it holds them."""
    shared = tied(parts)
    if shared and not schedule.flushes:
        stages = ", ".join(map(str, next(iter(shared))))
        raise UsageError(
            f"stages {stages} hold the same parameter, and {schedule.name} updates them at different times; "
            "use a schedule that flushes (1f1b), or other stages"
        )
    names: dict[nn.Parameter, str] = {}
    for name, param in parts[own].parameters():
        names.setdefault(param, name)
    return {stages: [names[param] for param in params] if own in stages else [] for stages, params in sorted(shared.items())}


def _check_data_axis(stage: Stage, schedule: Schedule, shared: TiedNames) -> None:
    """Refuse what is not sound where other replicas of the model take their steps together with this one."""
    if stage.data_axis is None:
        return
    optimizer = stage.data_axis.optimizer
    if not schedule.flushes:
        raise UsageError(
            f"{schedule.name} has microbatches in flight at every update, and a DistributedOptimizer takes new weights from "
            "other replicas, which would change under them; use a schedule that flushes (1f1b)"
        )
    if max(schedule.replicas) > 1:
        raise UsageError(
            f"a DistributedOptimizer makes replicas of the whole pipeline, got replicas={schedule.replicas} of single "
            "stages too; leave replicas out"
        )
    tied_here = next((stages for stages, names in shared.items() if names), None)
    if tied_here:
        stages = ", ".join(map(str, tied_here))
        check_features(optimizer.spec, Feature.TIED, parameter="the same parameter", stages=stages)


def _stage(
    part: ModelPart,
    number: int,
    schedule: Schedule,
    facts: Facts,
    loss: Loss,
    optimizer: MakeOptimizer,
    seed: int,
    place: torch.device | None,
) -> Stage:
    vertical_sync = schedule.versions == "first"
    return Stage(
        part,
        number,
        optimizer,
        loss if number == schedule.stages - 1 else None,
        stashing=facts.versions_kept[number] > 1 or vertical_sync,
        vertical_sync=vertical_sync,
        divisor=schedule.microbatches if schedule.flushes else 1,
        seed=seed,
        device=place,
        alone=schedule.stages == 1,
    )


DEFAULT_RATE = "5GB/s"
_EXAMPLES = "auto, auto:10Gb/s or auto:4x4:12GB/s,10Gb/s"


def planned_stages(
    spec: str,
    model: nn.Module | Sequence[nn.Module],
    example: tuple[Any, ...] | None,
    group: RankGroup,
    *,
    straight: bool = False,
    microbatches: int | None = None,
    device: torch.device | str | None = None,
) -> StagePlan:
    """The plan that the first rank makes and prints, on every rank. `straight`: without replicas."""
    topology = topology_of(spec, group.size)
    if example is None:
        raise UsageError(f"stages={spec!r} measures the model on an example of its inputs, got none; give example=(x,)")
    facts: dict[str, Any] = {}
    if group.rank == 0:
        try:
            measured = profile(model, example, device=device)
            found = plan(measured, topology, straight=straight)
            sys.stdout.write("\n".join([*explain(measured, found, microbatches=microbatches or group.size), ""]))
            sys.stdout.flush()
            facts = asdict(found)
        except PolytempoError as error:
            facts = {"error": str(error)}
    facts = broadcast_facts(group, facts)
    if "error" in facts:
        raise UsageError(facts["error"])
    return StagePlan(**facts | {"stages": tuple(PlannedStage(**stage) for stage in facts["stages"])})


def topology_of(spec: str, ranks: int) -> Topology:
    """The links between `ranks` ranks, from "auto", "auto:RATE" or "auto:TOPOLOGY"."""
    word, _, rest = spec.partition(":")
    if word != "auto":
        hint = nearest(word, ["auto"])
        raise UsageError(f"expected stages as a number, layers for each, a plan, or {_EXAMPLES}; got {spec!r}{hint}")
    topology = parse_topology(rest if ":" in rest else f"{ranks}:{rest or DEFAULT_RATE}")
    if topology.devices != ranks:
        raise UsageError(
            f"stages={spec!r} has {topology.devices} devices and the job {ranks} ranks; start {topology.devices}, "
            "or give a topology with one device for each rank"
        )
    return topology


def broadcast_facts(group: RankGroup, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of the first rank, on every rank."""
    text = json.dumps(facts).encode()
    size = torch.tensor([len(text)])
    group.broadcast([size], 0).wait()
    letters = torch.zeros(int(size), dtype=torch.uint8)
    if group.rank == 0:
        letters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    group.broadcast([letters], 0).wait()
    found: dict[str, Any] = json.loads(letters.numpy().tobytes())
    return found

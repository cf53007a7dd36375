"""Choosing and explaining a strategy for a model: measures, and hands the figures to what decides (`search.py`, pure).

In a job all ranks call these together. The ranks measure what lies between them; then rank 0 measures the model, by itself,
and sends all figures to the others. Each rank decides from the same figures, and so decides the same. An error of rank 0 is
raised on all ranks. Outside of a job, a short one measures the links (`links.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from polytempo.errors import UsageError
from polytempo.mesh import Mesh
from polytempo.pipeline.builder import broadcast_facts
from polytempo.pipeline.partition import balanced, layers_of
from polytempo.pipeline.profiler import Device
from polytempo.pipeline.stage import Loss, MakeOptimizer
from polytempo.pipeline.stage_message import rows
from polytempo.session.session import Session
from polytempo.strategy.costs import Machine, ModelProfile, as_data, from_data
from polytempo.strategy.explanation import Explanation, explain_impossible, explain_plan
from polytempo.strategy.links import measure_machine, measured_machine
from polytempo.strategy.measure import measure_model
from polytempo.strategy.parallel_plan import ParallelPlan, batch_problem
from polytempo.strategy.search import Profiles, SearchResult, SearchSpace, mesh_problem, needed_profiles, search
from polytempo.strategy.soundness import check_pair
from polytempo.strategy.strategy import Strategy
from polytempo.sync.spec import Spec
from polytempo.tensor_parallel.plan import find_plan

#: Seconds that all measurements of a model may take, beyond one run of each layer in each of them; and each at least.
BUDGET, LEAST = 8.0, 0.4


@dataclass(frozen=True)
class PlannedModel:
    """A model that is to be spread, with examples of its inputs and targets."""

    model: nn.Module
    example: Any
    loss: Loss | None = None
    optimizer: MakeOptimizer | None = None
    target: Any = None
    tensor_plan: Mapping[str, Any] | None = None
    device: Device = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The example as arguments of the model."""
        return tuple(self.example) if isinstance(self.example, tuple | list) else (self.example,)

    def costs(self) -> list[int]:
        """The parameters of each layer between which the model can be cut, by which stages are balanced by default."""
        return list(layers_of(self.model, self.inputs).costs)

    def trained(self) -> list[bool]:
        """Which layers have parameters to train."""
        chain = layers_of(self.model, self.inputs)
        parts = [chain.part(number, number + 1) for number in range(len(chain.costs))]
        return [any(param.requires_grad for _, param in part.parameters()) for part in parts]

    def trained_layers(self) -> int:
        """The number of layers that have parameters to train."""
        return max(1, sum(self.trained()))

    def split_problem(self, shards: int) -> str | None:
        """Why its layers cannot be split over this number of ranks."""
        try:
            find_plan(self.model, shards, self.tensor_plan, self.loss)
        except UsageError as error:
            return str(error)
        return None

    def measured(self, pairs: Iterable[tuple[int, int]]) -> list[ModelProfile]:
        """Profiles for these numbers of shards and microbatch sizes."""
        wanted = list(pairs)
        return [
            measure_model(
                self.model,
                self.inputs,
                microbatch=microbatch,
                tensor=shards,
                optimizer=self.optimizer,
                loss=self.loss,
                target=self.target,
                seconds=max(LEAST, BUDGET / len(wanted)),
                device=self.device,
                tensor_plan=self.tensor_plan,
            )
            for shards, microbatch in wanted
        ]


@dataclass(frozen=True)
class Figures:
    """All that was measured."""

    profiles: Profiles
    machine: Machine


def choose(strategy: Strategy, planned: PlannedModel, session: Session, batch: int | None = None) -> SearchResult:
    """The fastest strategy for a model in this job. All ranks call it, and get the same.

    Args:
        strategy: `Strategy.auto(...)`: its memory limit, mode and way count.
        planned: The model.
        session: The job.
        batch: The samples of a step of the whole job; by default those of the example.

    Returns:
        The choice, the second, and why.

    Raises:
        UsageError: None is possible, or none fits into the memory; on all ranks.
    """
    space = search_space(strategy, planned, session.size, batch, strategy.memory, session.job.spec)
    layers = planned.trained_layers()
    figures = measured_together(planned, session, needed_profiles(space, layers), space, layers)
    return search(space, figures.profiles, figures.machine)


def chosen_strategy(strategy: Strategy, result: SearchResult) -> Strategy:
    """The strategy that a search has found."""
    plan = result.best.plan
    return replace(
        strategy,
        automatic=False,
        memory=None,
        data=plan.mesh.data,
        pipe=plan.mesh.pipe,
        tensor=plan.mesh.tensor,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
    )


def decided(
    strategy: Strategy, planned: PlannedModel, session: Session, stages: object = None
) -> tuple[Strategy, tuple[int, ...]]:
    """What auto is for a model in this job, and the layers of each stage. Rank 0 says why."""
    if stages is not None:
        raise UsageError("strategy auto chooses the stages by itself; leave stages= out, or give data=, pipe= and tensor=")
    if planned.example is None:
        raise UsageError(
            "strategy auto measures the model; give an example of a step's inputs: distribute(..., example=(x,))"
        )
    result = choose(strategy, planned, session)
    if session.rank == 0:
        say(f"strategy auto: {result.why}")
    return chosen_strategy(strategy, result), result.best.plan.layers


def explain(
    strategy: Strategy,
    planned: PlannedModel,
    batch: int,
    memory: float | None = None,
    session: Session | None = None,
    world: int | None = None,
    stages: tuple[int, ...] | None = None,
) -> Explanation:
    """What a strategy costs, beside data, pipeline and tensor parallelism alone.

    Args:
        strategy: The strategy, or auto.
        planned: The model.
        batch: The samples of a step of the whole job.
        memory: The bytes that a worker has.
        session: The job, whose ranks all call this; None outside of one.
        world: Outside of a job: the number of workers.
        stages: The layers of each stage, where `distribute` is given them.

    Returns:
        The explanation, the same on all ranks.

    Raises:
        UsageError: The number of workers is not known, or none of the strategies is possible.
    """
    if session is not None and world in (None, session.size):
        size = session.size
    elif world is not None:
        size = world
    elif strategy.automatic or strategy.data is None:
        raise UsageError(f"expected the number of workers for strategy {strategy}; give world=4, or run it in a job")
    else:
        size = strategy.data * strategy.each
    job = session.job.spec if session is not None else Strategy().spec
    space = search_space(strategy, planned, size, batch, memory if memory is not None else strategy.memory, job)
    layers = planned.trained_layers()
    if strategy.automatic:
        figures = _measured(planned, session, needed_profiles(space, layers), space, layers)
        return explain_plan(space, figures.profiles, figures.machine, search(space, figures.profiles, figures.machine))
    plan, problem = given_plan(strategy, planned, space, layers, stages)
    alone = [Mesh(size), Mesh(1, size), Mesh(1, 1, size)]
    pairs = needed_profiles(space, layers, alone) + ([(plan.mesh.tensor, plan.microbatch)] if plan is not None else [])
    figures = _measured(planned, session, dict.fromkeys(pairs or [(1, batch)]), space, layers)
    if plan is None:
        return explain_impossible(space, figures.profiles, figures.machine, str(strategy), problem, strategy.schedule)
    return explain_plan(space, figures.profiles, figures.machine, plan, strategy.schedule)


def search_space(
    strategy: Strategy, planned: PlannedModel, world: int, batch: int | None, memory: float | None, job: Spec
) -> SearchSpace:
    """What a strategy for a model can be chosen from."""
    mode, found = strategy.spec if strategy.sync else job, dict[int, str | None]()

    def problem(mesh: Mesh) -> str | None:
        try:
            check_pair(mode, mesh.pipe, mesh.tensor, strategy.schedule)
        except UsageError as error:
            return str(error)
        if mesh.tensor not in found:
            found[mesh.tensor] = planned.split_problem(mesh.tensor) if mesh.tensor > 1 else None
        return found[mesh.tensor]

    samples = batch if batch is not None else rows(planned.inputs)
    if samples < 1:
        raise UsageError(f"expected a batch of at least 1 sample, got {samples}; give batch=, or an example with samples")
    found_space = SearchSpace(world, samples, memory, mode.text, strategy.via, problem=problem)
    if strategy.automatic and strategy.microbatches is not None:
        found_space = replace(found_space, microbatches=strategy.microbatches)
    if strategy.automatic and strategy.schedule != Strategy.schedule:
        found_space = replace(found_space, schedules=(strategy.schedule,))
    return found_space


def given_plan(
    strategy: Strategy, planned: PlannedModel, space: SearchSpace, layers: int, stages: tuple[int, ...] | None
) -> tuple[ParallelPlan | None, str]:
    """The plan of a strategy as `distribute` would make it; or why it is impossible."""
    try:
        resolved = strategy.resolved(space.world, space.sync)
        mesh = resolved.mesh(space.world)
    except UsageError as error:
        return None, str(error)
    count = resolved.microbatches or resolved.pipe
    found = mesh_problem(space, mesh, layers) or batch_problem(space.batch, mesh.data, count)
    if found:
        return None, found
    if stages is None:
        ends = balanced(planned.costs(), mesh.pipe)
        stages = tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))
    plan = ParallelPlan(mesh, stages, space.batch, count, resolved.schedule, space.sync, resolved.via)
    trained = planned.trained()
    for stage in range(mesh.pipe):
        if mesh.pipe > 1 and not any(trained[layer] for layer in plan.stage_layers(stage)):
            return None, f"stage {stage} of {mesh.pipe} has no parameters to train; give stages= with parameters in each"
    return plan, ""


def say(text: str) -> None:
    """On the output of the script, in one piece."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# Measuring.


def _measured(
    planned: PlannedModel, session: Session | None, pairs: Iterable[tuple[int, int]], space: SearchSpace, layers: int
) -> Figures:
    if session is not None and session.size == space.world:
        return measured_together(planned, session, pairs, space, layers)
    _check_possible(pairs, space, layers)
    machine = measured_machine(space.world)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // space.world))  # as the workers will have
    try:
        profiles = planned.measured(pairs)
    finally:
        torch.set_num_threads(threads)
    return Figures(_by_size(profiles), machine)


def measured_together(
    planned: PlannedModel, session: Session, pairs: Iterable[tuple[int, int]], space: SearchSpace, layers: int
) -> Figures:
    """In a job: the ranks measure what lies between them, and rank 0 the model."""
    _check_possible(pairs, space, layers)
    world = session.world()
    machine = measure_machine(world, session=session)
    group = world.new_group(range(session.size))
    assert group is not None
    told: dict[str, Any] = {}
    if group.rank == 0:
        try:
            told = as_data(planned.measured(pairs), machine)
        except UsageError as error:
            told = {"error": str(error)}
    told = broadcast_facts(group, told)
    if "error" in told:
        raise UsageError(told["error"])
    profiles, machine = from_data(told)
    return Figures(_by_size(profiles), machine)


def _check_possible(pairs: Iterable[tuple[int, int]], space: SearchSpace, layers: int) -> None:
    if not list(pairs):
        reasons = [mesh_problem(space, mesh, layers) for mesh in (Mesh(space.world), Mesh(1, space.world))]
        raise UsageError(f"no strategy is possible for {space.world} workers: {'; '.join(filter(None, reasons))}")


def _by_size(profiles: Iterable[ModelProfile]) -> Profiles:
    return {(profile.tensor, profile.microbatch): profile for profile in profiles}

"""`strategy="auto"`: of all ways to spread a model over the ranks of a job, the one with the least predicted step time.

All factorisations of the ranks into data x pipe x tensor, schedules that flush, and numbers of microbatches are candidates.
Each gets the best cut into stages. They are simulated in the order of the work of their busiest rank
or host, which no step is shorter than, until none that is left can be better than the two best. Of equal ones the first
counts, in the order data before pipe before tensor, fewer microbatches first.

Where a memory limit is given, only what fits counts. Alternatives of the same mesh differ in little; so the second is the
best of another mesh, where there is one.

In the best cut of a chain of layers the slowest stage is as fast as it can be, and each fits into memory. The time of a
stage is that of a whole step: forward and backward of all microbatches, recomputed forwards and collectives among them, the
exchange on the data axis, the update. What a stage keeps depends on its place in the schedule. Both are sums over its
layers, so the search is exact: for each stage and each end, the best of all places where it may begin. Of equally slow cuts
the one over which fewer bytes pass is taken. Each stage of a pipeline has parameters to train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from polytempo.errors import UsageError
from polytempo.mesh import Mesh
from polytempo.strategy.costs import Machine, ModelProfile, ShardedLayer
from polytempo.strategy.parallel_plan import ParallelPlan, batch_problem, divisors
from polytempo.strategy.prediction import HeldBytes, Prediction, held_memory, memory_needed, predict
from polytempo.strategy.step_time import collective_seconds
from polytempo.units import written_bytes, written_seconds

#: Slowest stage, bytes that pass between stages.
_Cost = tuple[float, float]
#: Of a stage with the layers from the first number up to the second.
StageCost = Callable[[int, int, int], float]


def balanced_stages(
    like: ParallelPlan, profile: ModelProfile, machine: Machine, memory: float | None = None
) -> tuple[int, ...] | None:
    """The layers of each stage for a plan that is otherwise like this one; None where no cut fits into memory."""
    sums = StageSums(like, profile, machine)

    def cost(stage: int, first: int, end: int) -> float:
        fits = memory is None or sums.memory(stage, first, end) <= memory
        return sums.seconds(stage, first, end) if fits else math.inf

    return _search(like, profile, sums.trained_only(cost))


def leanest_stages(like: ParallelPlan, profile: ModelProfile, machine: Machine) -> tuple[int, ...]:
    """The stages of which the largest needs the least memory."""
    sums = StageSums(like, profile, machine)
    found = _search(like, profile, sums.trained_only(sums.memory))
    if found is None:
        raise UsageError(f"expected {like.mesh.pipe} layers with parameters for {like.mesh.pipe} stages; take fewer stages")
    return found


def _search(like: ParallelPlan, profile: ModelProfile, cost: StageCost) -> tuple[int, ...] | None:
    count, stages = len(profile.layers), like.mesh.pipe
    best: dict[int, tuple[_Cost, tuple[int, ...]]] = {0: ((0.0, 0.0), ())}
    for stage in range(stages):
        ends = range(stage + 1, count - (stages - stage - 1) + 1) if stage < stages - 1 else range(count, count + 1)
        before = best
        best = {}
        for end in ends:
            found: tuple[_Cost, tuple[int, ...]] = ((math.inf, math.inf), ())
            for first, ((slowest, passed), cuts) in before.items():
                if first < end:
                    value = max(slowest, cost(stage, first, end))
                    through = passed + (profile.layers[first - 1].layer.activation_bytes if first else 0.0)
                    found = min(found, ((value, through), (*cuts, first) if first else cuts))
            best[end] = found
    (slowest, _), cuts = best[count]
    return None if slowest == math.inf else tuple(end - first for first, end in zip((0, *cuts), (*cuts, count), strict=True))


class StageSums:
    """Costs of stretches of layers, from running sums. Of parameters that several layers hold each counts its own."""

    def __init__(self, like: ParallelPlan, profile: ModelProfile, machine: Machine) -> None:
        self._like, self._profile, self._machine = like, profile, machine
        self._group = like.mesh.data_group(0)
        values: dict[str, list[float]] = {
            "seconds": [self._seconds(held) for held in profile.layers],
            "weights": [held.layer.weight_bytes for held in profile.layers],
            "gradients": [held.gradient_bytes for held in profile.layers],
            "state": [held.state_bytes for held in profile.layers],
            "kept": [held.layer.kept_bytes for held in profile.layers],
        }
        self._sums = {what: [0.0, *accumulate(those)] for what, those in values.items()}

    def _of(self, what: str, first: int, end: int) -> float:
        return self._sums[what][end] - self._sums[what][first]

    def _seconds(self, held: ShardedLayer) -> float:
        like, layer = self._like, held.layer
        again = 2 if like.actions.recompute and like.microbatches > 1 else 1
        group, passes = like.mesh.tensor_group(0), like.microbatches
        seconds = passes * (again * layer.forward_s + layer.backward_s) + held.update_s
        for call in held.calls if len(group) > 1 else ():
            times = passes * (1 if call.backward else again)
            seconds += times * collective_seconds("tensor", group, call.nbytes, self._machine)
        return seconds

    def trained_only(self, cost: StageCost) -> StageCost:
        """The same cost, without end for stages of a pipeline that have no parameters to train."""

        def checked(stage: int, first: int, end: int) -> float:
            trained = self._like.mesh.pipe == 1 or self._of("gradients", first, end) > 0
            return cost(stage, first, end) if trained else math.inf

        return checked

    def _loss(self, end: int) -> ShardedLayer | None:
        return self._profile.loss if end == len(self._profile.layers) else None

    def seconds(self, stage: int, first: int, end: int) -> float:
        """The work of a step in these layers."""
        loss = self._loss(end)
        whole = self._of("seconds", first, end) + (self._seconds(loss) if loss is not None else 0.0)
        if len(self._group) == 1 or self._like.exchange.servers:
            return whole
        nbytes = self._of("gradients", first, end)
        return whole + collective_seconds("data", self._group, nbytes, self._machine) / self._like.exchange.period

    def memory(self, stage: int, first: int, end: int) -> float:
        """The bytes of a rank with these layers."""
        loss = self._loss(end)
        passing = self._profile.layers[end - 1].passing_bytes if stage < self._like.mesh.pipe - 1 else 0.0
        held = HeldBytes(
            self._of("weights", first, end),
            self._of("gradients", first, end),
            self._of("state", first, end),
            self._of("kept", first, end) + (loss.layer.kept_bytes if loss is not None else 0.0) + passing,
            self._profile.layers[first - 1].layer.activation_bytes if first else self._profile.input_bytes,
        )
        return held_memory(held, self._like, stage).total


#: By the number of shards and the samples of a microbatch.
Profiles = Mapping[tuple[int, int], ModelProfile]
#: Microbatches for each stage that are tried.
PER_STAGE = (1, 2, 4)
#: Of a rank that is not part of a pipeline, where one microbatch does not fit.
ACCUMULATED = (1, 2, 4, 8)


@dataclass(frozen=True)
class SearchSpace:
    """What is to be chosen from."""

    world: int  #: ranks, all of which are used
    batch: int  #: samples of a step, of all replicas together
    memory: float | None = None  #: bytes of each rank
    sync: str = "bsp"
    via: str | None = None
    schedules: tuple[str, ...] = ("1f1b", "gpipe")
    microbatches: int | None = None  #: as given; None: to be chosen
    #: Why a mesh is impossible for this model and mode; None where it is possible.
    problem: Callable[[Mesh], str | None] = lambda mesh: None

    @property
    def limit(self) -> float:
        """The bytes that a rank may need."""
        return math.inf if self.memory is None else self.memory


@dataclass(frozen=True)
class ImpossibleMesh:
    """A mesh that cannot be, and why."""

    mesh: Mesh
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """The best, and what it was compared with."""

    best: Prediction
    second: Prediction | None  #: the best of another mesh
    candidates: int  #: plans that were possible
    refused: tuple[ImpossibleMesh, ...]
    too_large: Prediction | None = None  #: a faster one that does not fit
    memory: float | None = None

    @property
    def why(self) -> str:
        """The choice in one or two sentences."""
        text = f"{self.best.plan} has the least predicted step time of {self.candidates} possible plans, "
        text += written_seconds(self.best.seconds)
        if self.second is not None:
            text += f"; second is {self.second.plan}, {written_seconds(self.second.seconds)}"
            if self.best.seconds > 0:  # measured layers may be too small for the clock
                text += f" ({100 * (self.second.seconds / self.best.seconds - 1):.0f} % longer)"
            text += f": {difference(self.best, self.second)}"
        if self.too_large is not None and self.memory is not None:
            text += (
                f". {self.too_large.plan} would take {written_seconds(self.too_large.seconds)}, but needs "
                f"{written_bytes(self.too_large.largest_memory)} of memory on a rank, over {written_bytes(self.memory)}"
            )
        return f"{text}."


def difference(best: Prediction, other: Prediction) -> str:
    """What the other has more of."""
    work, more_work = max(best.time.occupied), max(other.time.occupied)
    waits, more_waits = best.seconds - work, other.seconds - more_work
    if more_work - work > more_waits - waits:
        moved, more_moved = best.most_moved, other.most_moved
        if more_moved > 1.2 * moved:
            return f"a rank hands over {written_bytes(more_moved)} a step, against {written_bytes(moved)}"
        return f"its busiest rank works {written_seconds(more_work)} a step, against {written_seconds(work)}"
    return f"its busiest rank waits {100 * other.waiting:.0f} % of the step, against {100 * best.waiting:.0f} %"


def meshes(world: int) -> Iterator[Mesh]:
    """All factorisations; those with more replicas first, then those with more stages."""
    for data in reversed(divisors(world)):
        for pipe in reversed(divisors(world // data)):
            yield Mesh(data, pipe, world // data // pipe)


def microbatch_counts(space: SearchSpace, mesh: Mesh) -> list[int]:
    """The numbers of microbatches to try."""
    if space.microbatches is not None:
        return [space.microbatches]
    samples = space.batch // mesh.data
    if mesh.pipe > 1:
        wanted = [mesh.pipe * count for count in PER_STAGE]
    else:
        wanted = list(ACCUMULATED if space.memory is not None else ACCUMULATED[:1])
    possible = divisors(samples)
    return sorted({max(count for count in possible if count <= most) for most in wanted})


def needed_profiles(space: SearchSpace, layers: int, only: Iterable[Mesh] | None = None) -> list[tuple[int, int]]:
    """The shards and microbatch sizes that have to be measured for a model that can have this number of stages. `only`: for
    these meshes, not for all."""
    found: dict[tuple[int, int], None] = {}
    for mesh in meshes(space.world) if only is None else only:
        if mesh_problem(space, mesh, layers) is None:
            for count in microbatch_counts(space, mesh):
                found[mesh.tensor, space.batch // mesh.data // count] = None
    return list(found)


def mesh_problem(space: SearchSpace, mesh: Mesh, layers: int) -> str | None:
    """Why a mesh is impossible; None where it is possible."""
    if mesh.pipe > layers:
        return f"{mesh.pipe} stages need {mesh.pipe} layers with parameters, the model has {layers}"
    return batch_problem(space.batch, mesh.data, space.microbatches or 1, space.world) or space.problem(mesh)


def cuttable_layers(profile: ModelProfile) -> int:
    """The most stages that a model can have: its layers with parameters to train."""
    return max(1, sum(held.gradient_bytes > 0 for held in profile.layers))


def plans(space: SearchSpace, mesh: Mesh, schedules: Sequence[str]) -> Iterator[ParallelPlan]:
    """The candidates of a mesh, with the stages still to be cut."""
    for count in microbatch_counts(space, mesh):
        for schedule in schedules if mesh.pipe > 1 else schedules[:1]:
            yield ParallelPlan(mesh, (1,) * mesh.pipe, space.batch, count, schedule, space.sync, space.via)


@dataclass(frozen=True)
class _Candidate:
    """A plan with its best stages: those that fit, or else those that need the least memory."""

    plan: ParallelPlan
    profile: ModelProfile
    bound: float  #: no step is shorter
    memory: float  #: of the rank that needs the most

    def predicted(self, machine: Machine) -> Prediction:
        return predict(self.plan, self.profile, machine)


def _candidate(space: SearchSpace, like: ParallelPlan, profiles: Profiles, machine: Machine) -> _Candidate:
    profile = profiles[like.mesh.tensor, like.microbatch]
    stages = balanced_stages(like, profile, machine, space.memory) or leanest_stages(like, profile, machine)
    plan = replace(like, layers=stages)
    sums, ends = StageSums(plan, profile, machine), [0, *accumulate(plan.layers)]
    bound = max(sums.seconds(stage, *ends[stage : stage + 2]) for stage in range(plan.mesh.pipe))
    return _Candidate(plan, profile, bound, max(one.total for one in memory_needed(plan, profile)))


def best_of_mesh(
    space: SearchSpace, mesh: Mesh, profiles: Profiles, machine: Machine, schedules: Sequence[str] | None = None
) -> Prediction:
    """The fastest plan of a possible mesh that fits; where none does, the one that needs the least memory."""
    found = [_candidate(space, like, profiles, machine) for like in plans(space, mesh, schedules or space.schedules)]
    fitting = [one for one in found if one.memory <= space.limit]
    if not fitting:
        return min(found, key=lambda one: one.memory).predicted(machine)
    return min((one.predicted(machine) for one in fitting), key=lambda one: one.seconds)


def search(space: SearchSpace, profiles: Profiles, machine: Machine) -> SearchResult:
    """The fastest of all plans that fit.

    Raises:
        UsageError: None is possible, or none fits; the text says the least memory that any needs.
    """
    layers = cuttable_layers(next(iter(profiles.values())))
    refused: list[ImpossibleMesh] = []
    found: list[_Candidate] = []
    for mesh in meshes(space.world):
        if problem := mesh_problem(space, mesh, layers):
            refused.append(ImpossibleMesh(mesh, problem))
        else:
            found += [_candidate(space, like, profiles, machine) for like in plans(space, mesh, space.schedules)]
    if not found:
        reasons = "; ".join(dict.fromkeys(one.reason for one in refused))
        raise UsageError(f"no strategy is possible for {space.world} ranks: {reasons}")
    fitting = [one for one in found if one.memory <= space.limit]
    if not fitting:
        least = min(found, key=lambda one: one.memory)
        raise UsageError(
            f"no strategy for {space.world} ranks fits into memory={written_bytes(space.memory or 0.0)}; the least that any "
            f"needs is {written_bytes(least.memory)} ({least.plan}); give that much, more ranks, or a smaller batch"
        )
    best, second = _best_two(fitting, machine)
    larger = [one for one in found if one.memory > space.limit and one.bound < best.seconds]
    nearest = min(larger, key=lambda one: one.bound, default=None)
    too_large = nearest.predicted(machine) if nearest is not None else None
    if too_large is not None and too_large.seconds >= best.seconds:
        too_large = None
    return SearchResult(best, second, len(fitting), tuple(refused), too_large, space.memory)


def _best_two(candidates: Sequence[_Candidate], machine: Machine) -> tuple[Prediction, Prediction | None]:
    """The best, and the best of another mesh (or else of the same)."""
    order = {one.plan: number for number, one in enumerate(candidates)}
    ranked: list[Prediction] = []
    others: list[Prediction] = []  # than the best, those of another mesh if there are any
    for one in sorted(candidates, key=lambda one: one.bound):
        if others and others[0].plan.mesh != ranked[0].plan.mesh and one.bound > others[0].seconds:
            break
        ranked = sorted([*ranked, one.predicted(machine)], key=lambda one: (one.seconds, order[one.plan]))
        others = [one for one in ranked[1:] if one.plan.mesh != ranked[0].plan.mesh] or ranked[1:]
    return ranked[0], others[0] if others else None

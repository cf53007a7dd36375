"""Where to cut a chain of layers into stages: the slowest stage is as fast as it can be, and each fits into memory.

The time of a stage is that of a whole step: forward and backward of all microbatches, recomputed forwards and collectives
among them, the exchange on the data axis, the update. What a stage keeps depends on its place in the schedule. Both are sums
over its layers, so the search is exact: for each stage and each end, the best of all places where it may begin. Of equally
slow cuts the one over which fewer bytes pass is taken. Each stage of a pipeline has parameters to train.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

from polytempo.errors import UsageError
from polytempo.strategy.costs import Machine, ModelProfile, ShardedLayer
from polytempo.strategy.memory import HeldBytes, held_memory
from polytempo.strategy.parallel_plan import ParallelPlan
from polytempo.strategy.step_time import collective_seconds

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
        best = {end: _best_end(best, end, stage, profile, cost) for end in ends}
    (slowest, _), cuts = best[count]
    return None if slowest == math.inf else tuple(end - first for first, end in zip((0, *cuts), (*cuts, count), strict=True))


def _best_end(
    best: dict[int, tuple[_Cost, tuple[int, ...]]],
    end: int,
    stage: int,
    profile: ModelProfile,
    cost: StageCost,
) -> tuple[_Cost, tuple[int, ...]]:
    found: tuple[_Cost, tuple[int, ...]] = ((math.inf, math.inf), ())
    for first, ((slowest, passed), cuts) in best.items():
        if first >= end:
            continue
        value = max(slowest, cost(stage, first, end))
        through = passed + (profile.layers[first - 1].layer.activation_bytes if first else 0.0)
        found = min(found, ((value, through), (*cuts, first) if first else cuts))
    return found


class StageSums:
    """Costs of stretches of layers, from running sums. Of parameters that several layers hold each counts its own."""

    def __init__(self, like: ParallelPlan, profile: ModelProfile, machine: Machine) -> None:
        self._like, self._profile, self._machine = like, profile, machine
        self._group = like.mesh.data_group(0)
        self._sums = {
            "seconds": self._running([self._seconds(held) for held in profile.layers]),
            "weights": self._running([held.layer.weight_bytes for held in profile.layers]),
            "gradients": self._running([held.gradient_bytes for held in profile.layers]),
            "state": self._running([held.state_bytes for held in profile.layers]),
            "kept": self._running([held.layer.kept_bytes for held in profile.layers]),
        }

    def _running(self, values: list[float]) -> list[float]:
        return [0.0, *accumulate(values)]

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

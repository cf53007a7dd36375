"""Where to cut a chain of layers into stages: the slowest stage is as fast as it can be, and each fits into memory.

The time of a stage is that of a whole step: forward and backward of all microbatches, recomputed forwards and collectives
among them, the exchange on the data axis, the update. What a stage keeps depends on its place in the schedule. Both are sums
over its layers, so the search is exact: for each stage and each end, the best of all places where it may begin. Of equally
slow cuts the one over which fewer bytes pass is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from polytempo.strategy.costs import Machine, ModelProfile, ShardedLayer
from polytempo.strategy.memory import held_memory
from polytempo.strategy.parallel_plan import ParallelPlan
from polytempo.strategy.step_time import collective_seconds, round_seconds

#: Slowest stage, bytes that pass between stages.
_Cost = tuple[float, float]


def balanced_stages(
    like: ParallelPlan, profile: ModelProfile, machine: Machine, memory: float | None = None
) -> tuple[int, ...] | None:
    """The layers of each stage for a plan that is otherwise like this one; None where no cut fits into memory."""
    sums = StageSums(like, profile, machine)
    fits = (lambda stage, first, last: True) if memory is None else lambda *part: sums.memory(*part) <= memory
    return _search(like, profile, lambda *part: sums.seconds(*part) if fits(*part) else math.inf)


def leanest_stages(like: ParallelPlan, profile: ModelProfile, machine: Machine) -> tuple[int, ...]:
    """The stages of which the largest needs the least memory."""
    found = _search(like, profile, StageSums(like, profile, machine).memory)
    assert found is not None
    return found


def _search(like: ParallelPlan, profile: ModelProfile, cost: Callable[[int, int, int], float]) -> tuple[int, ...] | None:
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
    cost: Callable[[int, int, int], float],
) -> tuple[_Cost, tuple[int, ...]]:
    found: tuple[_Cost, tuple[int, ...]] = ((math.inf, math.inf), ())
    for first, ((slowest, passed), cuts) in best.items():
        if first >= end:
            continue
        value = max(slowest, cost(stage, first, end))
        through = passed + (profile.layers[first - 1].layer.activation_bytes if first else 0.0)
        found = min(found, ((value, through), (*cuts, first) if first else cuts))
    return found


@dataclass(frozen=True)
class _LayerCost:
    """One layer in a step."""

    seconds: float
    weights: float
    kept: float
    state: float


class StageSums:
    """Costs of stretches of layers, from running sums."""

    def __init__(self, like: ParallelPlan, profile: ModelProfile, machine: Machine) -> None:
        self._like, self._profile, self._machine = like, profile, machine
        self._group = like.mesh.data_group(0)
        each = [self._layer(held) for held in profile.layers]
        self._loss = self._layer(profile.loss) if profile.loss is not None else _LayerCost(0.0, 0.0, 0.0, 0.0)
        self._seconds, self._weights, self._kept, self._state = (
            [0.0, *accumulate(getattr(one, name) for one in each)] for name in ("seconds", "weights", "kept", "state")
        )

    def _layer(self, held: ShardedLayer) -> _LayerCost:
        like, layer = self._like, held.layer
        again = 2 if like.actions.recompute else 1
        group, passes = like.mesh.tensor_group(0), like.microbatches
        seconds = passes * (again * layer.forward_s + layer.backward_s) + held.update_s
        if len(group) > 1:
            for call in held.calls:
                times = passes * (1 if call.backward else again)
                seconds += times * collective_seconds(call.nbytes, group, self._machine)
        return _LayerCost(seconds, layer.weight_bytes, layer.kept_bytes, held.state_bytes)

    def seconds(self, stage: int, first: int, end: int) -> float:
        """The work of a step in these layers."""
        loss = self._loss.seconds if end == len(self._profile.layers) else 0.0
        whole = self._seconds[end] - self._seconds[first] + loss
        if len(self._group) == 1 or self._like.exchange.servers:
            return whole
        weights = self._weights[end] - self._weights[first]
        return whole + round_seconds(weights, self._group, self._machine) / self._like.exchange.period

    def memory(self, stage: int, first: int, end: int) -> float:
        """The bytes of a rank with these layers."""
        weights, kept = self._weights[end] - self._weights[first], self._kept[end] - self._kept[first]
        state = self._state[end] - self._state[first]
        if end == len(self._profile.layers):
            kept += self._loss.kept
        given = self._profile.layers[first - 1].layer.activation_bytes if first else self._profile.input_bytes
        return held_memory(weights, kept, given, state, self._like, stage).total

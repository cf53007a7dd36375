"""Every plan there is, one by one, for models and topologies small enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from random import Random
from typing import TypeVar

from hypothesis import strategies as st

from polytempo.pipeline.layer_profile import Layer, Profile
from polytempo.pipeline.planner import Level, Topology

Drawn = TypeVar("Drawn")
Stages = list[tuple[int, int, int]]  # first layer, last layer, replicas
Combine = Callable[[float, float, int, float], float]


def paper(inside: float, weights: float, m: int, bandwidth: float) -> float:
    return max(inside, 2 * (m - 1) * weights / bandwidth) / m


def released(inside: float, weights: float, m: int, bandwidth: float) -> float:
    return (inside + 4 * (m - 1) / m * weights / bandwidth) / m


COMBINE: dict[str, Combine] = {"paper": paper, "released": released}


def _in_parts(first: int, last: int, parts: int) -> Iterator[list[tuple[int, int]]]:
    for cuts in combinations(range(first, last), parts - 1):
        starts, ends = [first, *(cut + 1 for cut in cuts)], [*cuts, last]
        yield list(zip(starts, ends, strict=True))


def _in_shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    yield from (shares for shares in product(range(1, total + 1), repeat=parts) if sum(shares) == total)


def every_plan(
    layers: Sequence[Layer], first: int, last: int, levels: Sequence[Level], combine: Combine
) -> Iterator[tuple[float, Stages]]:
    """Value and stages of all pipelines of these layers that use all devices of these levels."""
    if not levels:
        yield sum(layer.forward_s + layer.backward_s for layer in layers[first : last + 1]), [(first, last, 1)]
        return
    *below, level = levels
    for parts in range(1, min(level.count, last - first + 1) + 1):
        for ranges, shares in product(_in_parts(first, last, parts), _in_shares(level.count, parts)):
            cuts = [2 * layers[end].activation_bytes / level.bandwidth for _, end in ranges[:-1]]
            for chosen in product(*(list(every_plan(layers, a, b, below, combine)) for a, b in ranges)):
                values, stages = list(cuts), []
                for (a, b), share, (inside, inner) in zip(ranges, shares, chosen, strict=True):
                    weights = sum(layer.weight_bytes for layer in layers[a : b + 1])
                    values.append(combine(inside, weights, share, level.bandwidth))
                    stages += [(i, j, replicas * share) for i, j, replicas in inner]
                yield max(values), stages


def memory_of(layers: Sequence[Layer], stages: Stages) -> float:
    """Bytes on the fullest device."""
    most = 0.0
    for number, (first, last, replicas) in enumerate(stages):
        under_way = math.ceil(sum(r for _, _, r in stages[number:]) / replicas)
        each = sum(layer.weight_bytes + layer.kept_bytes for layer in layers[first : last + 1])
        most = max(most, under_way * (each + (layers[first - 1].activation_bytes if first else 0)))
    return most


def _drawn(build: Callable[[Random], Drawn]) -> st.SearchStrategy[Drawn]:
    """Drawn evenly: hypothesis by itself prefers one layer on one device."""
    return st.integers(0, 2**40).map(lambda seed: build(Random(seed)))


def _layer(dice: Random) -> Layer:
    times, passed = [float(dice.randint(0, 20)) for _ in range(2)], float(dice.randint(0, 20))
    made = dice.choice([None, float(dice.randint(0, 30))])
    return Layer("layer", times[0], times[1], passed, dice.choice([0, dice.randint(0, 180) / 2]), made)


def _many(dice: Random, most: int) -> int:
    """Rather more than fewer."""
    return max(dice.randint(1, most), dice.randint(1, most))


def profiles(most: int) -> st.SearchStrategy[Profile]:
    """Of at most so many layers."""
    return _drawn(lambda dice: Profile("drawn", tuple(_layer(dice) for _ in range(_many(dice, most))), 1))


def topologies(*most: int) -> st.SearchStrategy[Topology]:
    """Of as many levels as there are numbers, with at most so many components each."""
    return _drawn(lambda dice: Topology(tuple(Level(_many(dice, n), float(dice.randint(1, 50))) for n in most)))

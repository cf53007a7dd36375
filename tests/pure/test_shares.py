"""Shares by speed and by cost: whole, adding up, within bounds, and as good as a plain second implementation says."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.sync.shares import ROUNDS, WorkerSpeeds, cut, cut_by_cost, round_time, weights_by_speed

often = settings(max_examples=150, deadline=None, derandomize=True, database=None)
SPEED = st.floats(0.01, 100)
SPEEDS = st.lists(SPEED, min_size=1, max_size=7).map(lambda speeds: dict(enumerate(speeds)))
WEIGHTS = st.lists(st.floats(0.1, 3), min_size=1, max_size=7).map(lambda weights: tuple(enumerate(weights)))


# Weights.


def weights_by_bisection(speeds: dict[int, float], least: float, most: float) -> dict[int, float]:
    """The factor by which speeds become shares that are 1 on average, found by halving."""
    low, high = 0.0, most / min(speeds.values())
    for _ in range(200):
        middle = (low + high) / 2
        total = sum(min(max(middle * speed, least), most) for speed in speeds.values())
        low, high = (middle, high) if total < len(speeds) else (low, middle)
    return {worker: min(max(high * speed, least), most) for worker, speed in speeds.items()}


@often
@given(speeds=SPEEDS, least=st.sampled_from([0.05, 0.1, 0.5, 1.0]), most=st.sampled_from([1.0, 1.25, 2.0, 8.0]))
def test_weights_are_in_proportion_to_speed_within_bounds_and_one_on_average(
    speeds: dict[int, float], least: float, most: float
) -> None:
    weights = weights_by_speed(speeds, least, most)
    assert [worker for worker, _ in weights] == sorted(speeds)
    assert dict(weights) == pytest.approx(weights_by_bisection(speeds, least, most), abs=0.0006)
    assert sum(weight for _, weight in weights) == pytest.approx(len(speeds), abs=0.0006 * len(speeds))


@often
@given(speeds=st.lists(st.floats(0.5, 5), min_size=1, max_size=7).map(lambda speeds: dict(enumerate(speeds))))
def test_no_other_shares_make_a_round_shorter(speeds: dict[int, float]) -> None:
    """Within the bounds all workers end together; any other shares give one of them more."""
    weights = weights_by_speed(speeds, 0.01, 100.0)
    assert round_time(weights, speeds) == pytest.approx(len(speeds) / sum(speeds.values()), rel=0.01)


# Speeds.


def test_one_stall_does_not_move_a_speed_and_a_lasting_change_shows_after_three() -> None:
    speeds = WorkerSpeeds()
    for _ in range(ROUNDS):
        speeds.add(0, 12.0, 2.0)
    speeds.add(0, 12.0, 40.0)
    assert speeds.of([0]) == {0: 6.0}
    speeds.add(0, 12.0, 6.0)
    assert speeds.of([0]) == {0: 6.0}
    speeds.add(0, 12.0, 6.0)
    assert speeds.of([0]) == {0: 2.0}


def test_an_unknown_worker_is_an_average_one_and_what_is_no_speed_is_left_out() -> None:
    speeds = WorkerSpeeds()
    for work, computed in ((None, 1.0), (1.0, None), (0.0, 1.0), (1.0, 0.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf)):
        speeds.add(0, work, computed)
    assert speeds.of([0, 1]) == {}
    speeds.add(0, 2.0, 1.0)
    speeds.add(1, 4.0, 1.0)
    assert speeds.of([0, 1, 2]) == {0: 2.0, 1: 4.0, 2: 3.0}
    speeds.forget([1])
    assert speeds.of([0, 1]) == {0: 4.0, 1: 4.0}


# Whole shares.


def largest_remainder(total: int, weights: tuple[tuple[int, float], ...]) -> dict[int, int]:
    """Hamilton's method, one after the other."""
    whole = sum(weight for _, weight in weights)
    quotas = {worker: total * weight / whole for worker, weight in weights}
    parts = {worker: math.floor(quota) for worker, quota in quotas.items()}
    while sum(parts.values()) < total:
        parts[max(quotas, key=lambda worker: (quotas[worker] - parts[worker], -worker))] += 1
    return parts


@often
@given(total=st.integers(0, 400), weights=WEIGHTS)
def test_parts_are_whole_add_up_and_are_those_of_largest_remainder(
    total: int, weights: tuple[tuple[int, float], ...]
) -> None:
    parts, plain = cut(total, weights), largest_remainder(total, weights)
    assert sum(parts.values()) == total
    assert all(type(part) is int for part in parts.values())
    if total >= len(weights):
        assert min(parts.values()) >= 1
        plain = {worker: part or parts[worker] for worker, part in plain.items()}  # those below one get one
    whole = sum(weight for _, weight in weights)
    raised = sum(total * weight / whole < 1 for _, weight in weights) if total >= len(weights) else 0
    if not raised:
        assert parts == plain
        assert all(abs(parts[worker] - total * weight / whole) < 1 for worker, weight in weights)
    else:
        assert all(parts[worker] <= max(plain[worker], 1) for worker in parts), "the others pay for it"


def test_the_slowest_worker_gets_no_more_than_its_part() -> None:
    assert cut(32, ((0, 1.2), (1, 1.2), (2, 1.2), (3, 0.4))) == {0: 10, 1: 10, 2: 9, 3: 3}
    assert cut(3, ((0, 1.0), (1, 1.0), (2, 2.0), (3, 0.5))) == {0: 1, 1: 1, 2: 1, 3: 0}


# Shares by cost.


def finish(dealt: dict[int, list[int]], costs: list[float], weights: tuple[tuple[int, float], ...]) -> float:
    return max(sum(costs[place] for place in dealt[worker]) / weight for worker, weight in weights)


def best_finish(costs: list[float], weights: tuple[tuple[int, float], ...]) -> float:
    """Of all ways to deal them out."""
    best = math.inf
    for owners in product(range(len(weights)), repeat=len(costs)):
        loads = [0.0] * len(weights)
        for cost, owner in zip(costs, owners, strict=True):
            loads[owner] += cost
        best = min(best, max(load / weight for load, (_, weight) in zip(loads, weights, strict=True)))
    return best


def longest_first(costs: list[float], weights: tuple[tuple[int, float], ...]) -> dict[int, list[int]]:
    """LPT: one sample after the other to the worker that will have finished it first."""
    dealt: dict[int, list[int]] = {worker: [] for worker, _ in weights}
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        ends = [((sum(costs[p] for p in dealt[w]) + costs[place]) / weight, w) for w, weight in weights]
        dealt[min((round(end, 9), worker) for end, worker in ends)[1]].append(place)
    return dealt


@settings(often, max_examples=60)
@given(
    costs=st.lists(st.integers(1, 50).map(float), min_size=1, max_size=7),
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0]), min_size=1, max_size=3).map(lambda w: tuple(enumerate(w))),
)
def test_the_last_to_finish_is_within_the_bound_of_the_best_way_to_deal(
    costs: list[float], weights: tuple[tuple[int, float], ...]
) -> None:
    dealt, plain = cut_by_cost(costs, weights), longest_first(costs, weights)
    assert sorted(place for places in dealt.values() for place in places) == list(range(len(costs)))
    assert finish(plain, costs, weights) <= 2 * len(weights) / (len(weights) + 1) * best_finish(costs, weights) + 1e-9
    if all(plain.values()) or len(costs) < len(weights):
        assert finish(dealt, costs, weights) <= finish(plain, costs, weights) + 1e-9
    else:  # a worker that plain LPT leaves without one takes one
        assert all(dealt.values())
        taken = {w: dealt[w] for w, places in plain.items() if not places}
        assert all(len(places) == 1 for places in taken.values())
        others = tuple((worker, weight) for worker, weight in weights if worker not in taken)
        assert finish(dealt, costs, others) <= finish(plain, costs, weights) + 1e-9


@often
@given(seed=st.integers(0, 10**6), workers=st.integers(2, 6))
def test_with_many_samples_all_finish_together(seed: int, workers: int) -> None:
    """Sequences of 10 to 1000 tokens: each worker's cost is in proportion to its weight, to within one of the cheap ones."""
    costs = [float(10 + (seed * 7919 + place * 104729) % 991) for place in range(200)]
    weights = tuple((worker, 0.5 + (seed // (worker + 1)) % 7 / 4) for worker in range(workers))
    dealt, ideal = cut_by_cost(costs, weights), sum(costs) / sum(weight for _, weight in weights)
    assert finish(dealt, costs, weights) <= 1.02 * ideal

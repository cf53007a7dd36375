"""`auto`: the least of all predictions, within memory; the stages are cut as well as they can be."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategy_costs import layer, layers, links, machine, model

from polytempo.errors import UsageError
from polytempo.mesh import Mesh
from polytempo.strategy.costs import MeasuredLink, ModelProfile
from polytempo.strategy.parallel_plan import ParallelPlan
from polytempo.strategy.prediction import memory_needed, predict
from polytempo.strategy.search import (
    Profiles,
    SearchSpace,
    StageSums,
    balanced_stages,
    best_of_mesh,
    cuttable_layers,
    leanest_stages,
    mesh_problem,
    meshes,
    microbatch_counts,
    needed_profiles,
    plans,
    search,
)
from polytempo.units import written_bytes, written_seconds


def all_cuts(count: int, stages: int) -> list[tuple[int, ...]]:
    borders = [(0, *middle, count) for middle in combinations(range(1, count), stages - 1)]
    return [tuple(end - start for start, end in pairwise(one)) for one in borders]


@given(
    st.lists(layers(), min_size=2, max_size=7),
    st.integers(1, 4),
    st.sampled_from(["1f1b", "gpipe"]),
    st.integers(0, 30000),
    st.integers(1, 2),
)
@settings(max_examples=80, deadline=None)
def test_stages_are_cut_as_well_as_by_trying_all_cuts(chain, stages, schedule, memory, data) -> None:  # type: ignore[no-untyped-def]
    profile = model(*chain, loss=layer(weights=0.0))
    mesh = Mesh(data, min(stages, cuttable_layers(profile)))
    where = machine(mesh.size, reduce_inside=MeasuredLink(0.5, 1 / 4096))
    like = ParallelPlan(mesh, (1,) * mesh.pipe, 4 * data, 4, schedule)
    sums = StageSums(like, profile, where)

    def worst(cost: str, cut: tuple[int, ...]) -> float:
        return max(getattr(sums, cost)(stage, sum(cut[:stage]), sum(cut[: stage + 1])) for stage in range(mesh.pipe))

    def trains(cut: tuple[int, ...]) -> bool:
        borders = pairwise([0, *accumulate(cut)])
        return mesh.pipe == 1 or all(sum(one.gradient_bytes for one in chain[first:end]) for first, end in borders)

    every = [cut for cut in all_cuts(len(chain), mesh.pipe) if trains(cut)]
    for cut in every:  # the running sums are those of the whole prediction
        needed = max(one.total for one in memory_needed(replace(like, layers=cut), profile))
        assert worst("memory", cut) == pytest.approx(needed)
    assert worst("memory", leanest_stages(like, profile, where)) == pytest.approx(min(worst("memory", cut) for cut in every))
    fitting = [cut for cut in every if worst("memory", cut) <= memory]
    found = balanced_stages(like, profile, where, memory)
    if not fitting:
        assert found is None
        return
    assert found in fitting
    assert worst("seconds", found) == pytest.approx(min(worst("seconds", cut) for cut in fitting))


def test_of_equal_cuts_the_one_over_which_less_passes() -> None:
    chain = [layer(passes=640.0), layer(0.0, 0.0, passes=64.0), layer(passes=640.0)]
    like = ParallelPlan(Mesh(1, 2), (1, 1), 4, 4)
    assert balanced_stages(like, model(*chain), machine(2)) == (2, 1)


def profiles_for(space: SearchSpace, chain) -> dict[tuple[int, int], ModelProfile]:  # type: ignore[no-untyped-def]
    """Work in proportion to the samples, divided among shards."""
    found = {}
    for shards, samples in needed_profiles(space, cuttable_layers(model(*chain))):
        scaled = [
            replace(
                one,
                layer=replace(
                    one.layer,
                    forward_s=one.layer.forward_s * samples / shards,
                    backward_s=one.layer.backward_s * samples / shards,
                    made_bytes=one.layer.kept_bytes * samples / shards,
                ),
            )
            for one in chain
        ]
        found[shards, samples] = model(*scaled, tensor=shards, microbatch=samples)
    return found


@given(
    st.lists(layers(split=True), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4, 6]),
    st.sampled_from([4, 6, 8]),
    links,
    st.one_of(st.none(), st.integers(0, 90000)),
    st.integers(1, 4),
)
@example([layer(0.0, 0.0, weights=0.0)], 4, 4, MeasuredLink(0.0, 0.0), None, 1)  # nothing takes any time
@settings(max_examples=50, deadline=None)
def test_auto_is_the_least_of_all_that_fit(chain, world, batch, link, memory, cores) -> None:  # type: ignore[no-untyped-def]
    space = SearchSpace(world, batch, memory, problem=lambda mesh: "3 heads" if mesh.tensor == 2 else None)
    profiles, where = profiles_for(space, chain), machine(world, cores, link)
    cuttable = cuttable_layers(model(*chain))
    possible = [mesh for mesh in meshes(world) if mesh_problem(space, mesh, cuttable) is None]
    found = [predict_with(space, like, profiles, where) for mesh in possible for like in plans(space, mesh, space.schedules)]
    fitting = [one for one in found if one.largest_memory <= (memory if memory is not None else 1e99)]
    if not fitting:
        with pytest.raises(UsageError, match=r"no strategy (is possible|for \d+ ranks fits)"):
            search(space, profiles, where)
        return
    result = search(space, profiles, where)
    assert result.best.seconds == min(one.seconds for one in fitting)
    assert result.best.largest_memory <= (memory if memory is not None else 1e99)
    assert result.candidates == len(fitting)
    others = [one.seconds for one in fitting if one.plan.mesh != result.best.plan.mesh]
    if others:
        assert result.second is not None
        assert result.second.seconds == min(others)
    assert {one.mesh for one in result.refused} == set(meshes(world)) - set(possible)
    assert str(result.best.plan) in result.why
    best = best_of_mesh(space, result.best.plan.mesh, profiles, where)
    assert best.seconds == result.best.seconds


def predict_with(space: SearchSpace, like: ParallelPlan, profiles: Profiles, where):  # type: ignore[no-untyped-def]
    profile = profiles[like.mesh.tensor, like.microbatch]
    stages = balanced_stages(like, profile, where, space.memory) or leanest_stages(like, profile, where)
    return predict(replace(like, layers=stages), profile, where)


def test_the_least_memory_is_named_and_suffices() -> None:
    chain = [layer(weights=100000.0) for _ in range(4)]
    space = SearchSpace(4, 8, memory=10.0)
    profiles, where = profiles_for(replace(space, memory=1.0), chain), machine(4)
    with pytest.raises(UsageError, match="fits into memory=10 B; the least that any needs is") as problem:
        search(space, profiles, where)
    said = re.search(r"needs is ([0-9]+) kB \((.*?)\); give", str(problem.value))
    assert said is not None
    result = search(replace(space, memory=1000.0 * int(said[1]) + 500), profiles, where)
    assert str(result.best.plan) == said[2]
    assert result.too_large is not None
    assert "over" in result.why


def test_why_names_the_second_and_by_how_much() -> None:
    space = SearchSpace(2, 8)
    result = search(space, profiles_for(space, [layer(), layer()]), machine(2, reduce_inside=MeasuredLink(0.0, 1e-3)))
    assert result.why == (
        "tensor=2 has the least predicted step time of 8 possible plans, 24 s; second is data=2, 26 s (8 % longer): a rank "
        "hands over 2 kB a step, against 0 B."
    )


def test_meshes_and_microbatches() -> None:
    assert [(mesh.data, mesh.pipe, mesh.tensor) for mesh in meshes(4)] == [
        *((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)),
    ]
    assert microbatch_counts(SearchSpace(4, 32), Mesh(2, 2)) == [2, 4, 8]
    assert microbatch_counts(SearchSpace(4, 6), Mesh(1, 4)) == [3, 6]
    assert microbatch_counts(SearchSpace(4, 32), Mesh(4)) == [1]
    assert microbatch_counts(SearchSpace(4, 32, memory=1e9), Mesh(4)) == [1, 2, 4, 8]
    assert microbatch_counts(SearchSpace(4, 32, microbatches=16), Mesh(1, 4)) == [16]
    space = SearchSpace(4, 6)
    assert mesh_problem(space, Mesh(4), 3) == "a batch of 6 cannot be cut by data=4; nearest: data=2"
    assert mesh_problem(space, Mesh(1, 4), 3) == "4 stages need 4 layers with parameters, the model has 3"
    with pytest.raises(UsageError, match="no strategy is possible for 4 ranks: a batch of 7"):
        search(
            SearchSpace(4, 7, problem=lambda mesh: "no shards" if mesh.tensor > 1 else None),
            {(1, 1): model(layer())},
            machine(4),
        )


def test_figures_in_three_digits() -> None:
    assert [written_bytes(number) for number in (0, 999, 1000, 999_900, 12_345_678, 1.5e9, 5e12)] == [
        *("0 B", "999 B", "1 kB", "1 MB", "12.3 MB", "1.5 GB", "5 TB"),
    ]
    assert [written_seconds(number) for number in (0, 1.25e-5, 0.9999e-3, 0.12345, 1, 100.4)] == [
        *("0 µs", "12.5 µs", "1 ms", "123 ms", "1 s", "100 s"),
    ]

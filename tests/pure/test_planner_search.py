"""The search finds what trying everything finds."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_brute import COMBINE, Stages, every_plan, memory_of, profiles, topologies

from polytempo.errors import UsageError
from polytempo.pipeline.layer_profile import Layer, Profile
from polytempo.pipeline.planner import Level, StagePlan, Topology, parse_topology, plan

often = settings(max_examples=200, deadline=None, derandomize=True, database=None)
moderately = settings(max_examples=60, deadline=None, derandomize=True, database=None)
FORMULA = st.sampled_from(list(COMBINE))


def chain(times: tuple[float, ...], passed: tuple[float, ...], weights: tuple[float, ...]) -> Profile:
    layers = (Layer(f"layer{n}", t, 0, a, w) for n, (t, a, w) in enumerate(zip(times, passed, weights, strict=True)))
    return Profile("chain", tuple(layers), 1)


KNOWN = chain((4, 4, 4, 1), (2, 2, 1, 1), (1, 1, 1, 60))
FOUR = parse_topology("4:10B/s")


def stages_of(found: StagePlan) -> Stages:
    return [(stage.first, stage.last, stage.replicas) for stage in found.stages]


def check_equal(
    found: StagePlan, profile: Profile, topology: Topology, formula: str, memory: float = math.inf, straight: bool = False
) -> None:
    """The plan has the least value of all plans that are allowed, and its stages have that value."""
    tried = every_plan(profile.layers, 0, len(profile.layers) - 1, topology.levels, COMBINE[formula])
    allowed = [
        (value, stages)
        for value, stages in tried
        if memory_of(profile.layers, stages) <= memory and not (straight and any(r > 1 for _, _, r in stages))
    ]
    assert found.seconds == pytest.approx(min(value for value, _ in allowed), rel=1e-9, abs=1e-12)
    own = [value for value, stages in allowed if stages == stages_of(found)]
    assert own
    assert min(own) == pytest.approx(found.seconds, rel=1e-9, abs=1e-12)
    assert max(stage.memory for stage in found.stages) == memory_of(profile.layers, stages_of(found))


def test_the_known_case() -> None:
    found = plan(KNOWN, FOUR, formula="paper")
    assert found.seconds == 4.0
    assert found.config == "3-1"
    assert stages_of(found) == [(0, 2, 3), (3, 3, 1)]
    assert found.data_parallel_seconds == pytest.approx(2 * 3 * 63 / 10 / 4)
    first, last = found.stages
    assert (first.compute, first.send, last.time) == (4.0, 0.2, 1.0)
    assert first.exchange == pytest.approx(2 * 2 * 3 / 10 / 3)
    assert (first.memory, last.memory) == (2 * (3 + 2 + 2 + 1), 60 + 1 + 1)  # ceil(4 / 3) and 1 minibatches under way


@often
@given(profile=profiles(6), topology=topologies(5), formula=FORMULA)
def test_one_level_equals_trying_everything(profile: Profile, topology: Topology, formula: str) -> None:
    check_equal(plan(profile, topology, formula=formula), profile, topology, formula)


@moderately
@given(profile=profiles(4), topology=topologies(3, 3), formula=FORMULA)
def test_two_levels_equal_trying_everything(profile: Profile, topology: Topology, formula: str) -> None:
    check_equal(plan(profile, topology, formula=formula, whole_hosts=True), profile, topology, formula)


@moderately
@given(profile=profiles(3), topology=topologies(2, 2, 2), formula=FORMULA)
def test_three_levels_equal_trying_everything(profile: Profile, topology: Topology, formula: str) -> None:
    check_equal(plan(profile, topology, formula=formula, whole_hosts=True), profile, topology, formula)


@pytest.mark.long
@often
@given(
    profile=profiles(4),
    topology=topologies(5) | topologies(3, 3) | topologies(2, 4) | topologies(2, 2, 2),
    formula=FORMULA,
    which=st.integers(0, 1000),
)
def test_a_limit_of_memory_excludes_what_does_not_fit(
    profile: Profile, topology: Topology, formula: str, which: int
) -> None:
    """Every limit at which some plan begins to fit, and one below all of them."""
    tried = every_plan(profile.layers, 0, len(profile.layers) - 1, topology.levels, COMBINE[formula])
    needs = sorted({memory_of(profile.layers, stages) for _, stages in tried})
    if needs[0]:
        least = math.ceil(needs[0])
        with pytest.raises(UsageError, match=f"the least that any needs is {least} "):
            plan(profile, topology, needs[0] - 0.25, formula=formula, whole_hosts=True)
        assert max(stage.memory for stage in plan(profile, topology, least, whole_hosts=True).stages) <= least
    memory = needs[which % len(needs)]
    found = plan(profile, topology, max(memory, 0.5), formula=formula, whole_hosts=True)
    assert max(stage.memory for stage in found.stages) <= memory
    check_equal(found, profile, topology, formula, memory)


@moderately
@given(profile=profiles(5), topology=topologies(4) | topologies(2, 2), formula=FORMULA)
def test_straight_pipelines_equal_trying_everything(profile: Profile, topology: Topology, formula: str) -> None:
    if topology.devices > len(profile.layers):
        with pytest.raises(UsageError, match=f"take at most {len(profile.layers)} devices, or straight=False"):
            plan(profile, topology, formula=formula, straight=True, whole_hosts=True)
        return
    found = plan(profile, topology, formula=formula, straight=True, whole_hosts=True)
    assert all(stage.replicas == 1 for stage in found.stages)
    check_equal(found, profile, topology, formula, straight=True)


@moderately
@given(profile=profiles(4), topology=topologies(3, 2), formula=FORMULA)
def test_a_stage_may_have_a_part_of_a_host_where_that_is_faster(profile: Profile, topology: Topology, formula: str) -> None:
    levels, flat = (
        plan(profile, topology, formula=formula, whole_hosts=True),
        plan(profile, topology.flat(), formula=formula),
    )
    both = plan(profile, topology, formula=formula)
    assert both.seconds == min(levels.seconds, flat.seconds)
    assert both.data_parallel_seconds == min(levels.data_parallel_seconds, flat.data_parallel_seconds)
    assert stages_of(both) in (stages_of(levels), stages_of(flat))


@moderately
@given(profile=profiles(4), topology=topologies(3, 2), formula=FORMULA, memory=st.none() | st.integers(100, 400))
def test_fewer_devices_are_used_only_where_that_is_faster(
    profile: Profile, topology: Topology, formula: str, memory: int | None
) -> None:
    inner, outer = topology.levels
    tried = [
        (value, stages)
        for a in range(1, inner.count + 1)
        for b in range(1, outer.count + 1)
        for value, stages in every_plan(
            profile.layers,
            0,
            len(profile.layers) - 1,
            (Level(a, inner.bandwidth), Level(b, outer.bandwidth)),
            COMBINE[formula],
        )
        if memory is None or memory_of(profile.layers, stages) <= memory
    ]
    if not tried:
        with pytest.raises(UsageError, match="no plan"):
            plan(profile, topology, memory, formula=formula, use_all=False, whole_hosts=True)
        return
    found = plan(profile, topology, memory, formula=formula, use_all=False, whole_hosts=True)
    assert found.seconds == pytest.approx(min(value for value, _ in tried), rel=1e-9, abs=1e-12)
    assert stages_of(found) in [stages for _, stages in tried]


@often
@given(
    profile=profiles(6),
    topology=topologies(5) | topologies(3, 3),
    formula=FORMULA,
    level=st.integers(0, 1),
    factor=st.floats(1, 10),
)
def test_more_bandwidth_is_never_slower(
    profile: Profile, topology: Topology, formula: str, level: int, factor: float
) -> None:
    levels = list(topology.levels)
    which = level % len(levels)
    levels[which] = Level(levels[which].count, levels[which].bandwidth * factor)
    faster = plan(profile, Topology(tuple(levels)), formula=formula)
    assert faster.seconds <= plan(profile, topology, formula=formula).seconds * (1 + 1e-9)


@moderately
@given(
    profile=profiles(5),
    topology=topologies(4) | topologies(2, 3),
    formula=FORMULA,
    level=st.integers(0, 1),
    straight=st.booleans(),
)
def test_more_devices_are_never_slower_where_not_all_have_to_be_used(
    profile: Profile, topology: Topology, formula: str, level: int, straight: bool
) -> None:
    levels = list(topology.levels)
    which = level % len(levels)
    levels[which] = Level(levels[which].count + 1, levels[which].bandwidth)
    more, fewer = (
        plan(profile, one, formula=formula, use_all=False, straight=straight) for one in (Topology(tuple(levels)), topology)
    )
    assert more.seconds <= fewer.seconds * (1 + 1e-9)


@often
@given(profile=profiles(6), topology=topologies(5) | topologies(3, 3), formula=FORMULA)
def test_a_plan_covers_all_layers_with_all_devices_and_is_no_slower_than_data_parallelism(
    profile: Profile, topology: Topology, formula: str
) -> None:
    found = plan(profile, topology, formula=formula)
    assert [stage.first for stage in found.stages] == [0, *(stage.last + 1 for stage in found.stages[:-1])]
    assert found.stages[-1].last == len(profile.layers) - 1
    assert found.devices == topology.devices
    assert found.config == "-".join(str(stage.replicas) for stage in found.stages)
    assert found.seconds <= found.data_parallel_seconds * (1 + 1e-9)
    assert max(stage.time for stage in found.stages) <= found.seconds * (1 + 1e-9)
    if formula == "paper":
        slowest = max(max(stage.compute, stage.exchange, stage.send) for stage in found.stages)
        assert slowest == pytest.approx(found.seconds)


def test_replicas_of_a_pipeline_share_its_cuts() -> None:
    """Two hosts with the same pipeline of two: a cut is passed by every other minibatch."""
    slow_inside = parse_topology("2x2:1B/s,1kB/s")
    found = plan(chain((4, 4), (5, 0), (100, 100)), slow_inside, formula="paper", whole_hosts=True)
    assert stages_of(found) == [(0, 0, 2), (1, 1, 2)]
    assert (found.seconds, found.stages[0].send, found.stages[0].time) == (5.0, 5.0, 2.0)


def test_one_stage_is_preferred_to_an_equally_good_cut() -> None:
    even = chain((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0))
    for formula in COMBINE:
        assert plan(even, FOUR, formula=formula).config == "4"
        assert plan(even, parse_topology("2x2:5B/s,1B/s"), formula=formula).config == "4"


def test_too_little_memory_names_the_least_and_its_stages() -> None:
    text = (
        "no plan for chain fits into memory=10 bytes a device; the least that any needs is 62 (stages 2-1-1, say); give that"
    )
    with pytest.raises(UsageError, match=re.escape(text)):
        plan(KNOWN, FOUR, 10)
    assert max(stage.memory for stage in plan(KNOWN, FOUR, 62).stages) == 62
    with pytest.raises(UsageError, match="no plan"):
        plan(KNOWN, FOUR, 61)


def test_a_straight_pipeline_with_too_few_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="on 5 devices needs as many layers, and chain has 4; take at most 4 devices"):
        plan(KNOWN, parse_topology("5:1B/s"), straight=True)
    assert plan(KNOWN, parse_topology("5:1B/s"), straight=True, use_all=False).devices <= 4


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(UsageError, match="no formula 'papr'; nearest: paper; there are: paper, released"):
        plan(KNOWN, FOUR, formula="papr")
    for memory in (0, -1, math.inf, math.nan):
        with pytest.raises(UsageError, match="expected memory in bytes above 0"):
            plan(KNOWN, FOUR, memory)

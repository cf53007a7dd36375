"""The simulated step: equal to the timeline where that applies, never below the work of a rank or of a host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_costs import FREE, layer, layers, links, machine, model, seconds, working_links

from polytempo.mesh import Mesh
from polytempo.pipeline import timeline
from polytempo.strategy.bytes_moved import HEAD, message_bytes
from polytempo.strategy.costs import Machine, MeasuredLink, MeasuredReduction, ModelProfile, TensorCall, TiedWeights
from polytempo.strategy.parallel_plan import ParallelPlan
from polytempo.strategy.step_time import (
    Operation,
    RankSimulation,
    Work,
    block_of,
    collective_work,
    lower_bound,
    rank_programs,
    reduction_of,
    step_time,
)

SCHEDULES = st.sampled_from(["1f1b", "gpipe", "gpipe,recompute=0", "sequential"])


def single_step(plan: ParallelPlan, profile: ModelProfile, where: Machine) -> float:
    """The time of one step from its first action to the end of the last rank."""
    return max(ends[-1] for ends in RankSimulation(rank_programs(plan, profile, where, True), where, 1).ends)


def whole(mesh: Mesh, count: int, microbatches: int = 1, schedule: str = "1f1b", sync: str = "bsp") -> ParallelPlan:
    """A plan whose stages are as equal in layers as they can be, first stages first."""
    each, more = divmod(count, mesh.pipe)
    stages = tuple(each + (stage < more) for stage in range(mesh.pipe))
    return ParallelPlan(mesh, stages, mesh.data * microbatches, microbatches, schedule, sync)


@given(st.lists(layers(), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 5), SCHEDULES, links, layers())
@settings(max_examples=60, deadline=None)
def test_with_cores_for_all_it_is_the_timeline(chain, stages, microbatches, schedule, link, loss) -> None:  # type: ignore[no-untyped-def]
    mesh = Mesh(1, min(stages, len(chain)), 1)
    plan, profile = whole(mesh, len(chain), microbatches, schedule), model(*chain, loss=loss)
    held = [plan.held_layers(profile, stage) for stage in range(mesh.pipe)]
    forward = [sum(one.layer.forward_s for one in stage) for stage in held]
    cuts = [profile.layers[plan.stage_layers(stage)[-1]].layer.activation_bytes for stage in range(mesh.pipe - 1)]
    found = timeline.run(
        plan.actions,
        forward,
        [sum(one.layer.backward_s for one in stage) for stage in held],
        [link.seconds(message_bytes(nbytes)) for nbytes in cuts],
        forward,
        [sum(one.update_s for one in stage) for stage in held],
    )
    told = found.spans[-1][0][-1].end + (link.seconds(HEAD) if mesh.pipe > 1 else 0.0)  # all ranks have the loss
    assert single_step(plan, profile, machine(mesh.size, inside=link)) == pytest.approx(max(found.total, told), abs=1e-9)


@st.composite
def spread(draw: st.DrawFn):  # type: ignore[no-untyped-def]
    chain = draw(st.lists(layers(split=True), min_size=1, max_size=4))
    mesh = Mesh(draw(st.integers(1, 3)), min(draw(st.integers(1, 3)), len(chain)), draw(st.integers(1, 2)))
    both = len(chain) > 1 and min(chain[0].gradient_bytes, chain[-1].gradient_bytes) > 0
    tied = (TiedWeights((0, len(chain) - 1), 512.0, 512.0, 0.0),) if both and draw(st.booleans()) else ()
    sync = draw(st.sampled_from(["bsp", "local:3", "asp", "ssp:1"]))
    plan = whole(mesh, len(chain), draw(st.integers(1, 3)), draw(SCHEDULES), sync)
    return plan, model(*chain, tensor=mesh.tensor, tied=tied)


@given(spread(), st.integers(1, 12), working_links(), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_no_step_is_shorter_than_the_work_of_a_rank_or_a_host(case, cores, link, crowd) -> None:  # type: ignore[no-untyped-def]
    plan, profile = case
    where = machine(plan.mesh.size, cores, link, contention=1 + crowd / 4, action_s=0.25)
    programs = rank_programs(plan, profile, where, True)
    core = [sum(one.core for one in program if isinstance(one, Work)) for program in programs]
    one_step = single_step(plan, profile, where)
    assert one_step >= lower_bound(core, where) - 1e-9
    found = step_time(plan, profile, where)
    if plan.exchange.barrier or plan.mesh.data == 1:
        assert found.seconds >= max(found.busy) - 1e-9
    assert 0 < found.balance <= 1 + 1e-9
    assert all(held >= work - 1e-9 for held, work in zip(found.occupied, found.busy, strict=True))
    if not crowd:  # else ranks of two steps, on one core at the same time, slow each other down
        assert found.seconds <= one_step * (1 + 1e-9) + 1e-9  # steps overlap, and never get in each other's way


@given(spread(), links, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_slower_links_make_no_step_shorter(case, link, times) -> None:  # type: ignore[no-untyped-def]
    """With cores for all ranks. Where they share, a rank that waits longer leaves its core to one that matters more."""
    plan, profile = case
    slower = MeasuredLink(times * link.latency, times * link.per_byte)
    before, after = (single_step(plan, profile, machine(plan.mesh.size, inside=one)) for one in (link, slower))
    assert after >= before - 1e-9


@given(st.lists(layers(split=True), min_size=1, max_size=5), st.integers(1, 4), SCHEDULES, seconds)
@settings(max_examples=40, deadline=None)
def test_one_rank_takes_the_sum_of_its_work(chain, microbatches, schedule, action_s) -> None:  # type: ignore[no-untyped-def]
    plan = whole(Mesh(), len(chain), microbatches, schedule)
    again = len(plan.actions.recomputed(0, 0))
    forward = sum(one.layer.forward_s for one in chain)
    backward = sum(one.layer.backward_s for one in chain)
    update = sum(one.update_s for one in chain)
    expected = (microbatches + again) * forward + microbatches * (backward + 2 * action_s) + update
    found = step_time(plan, model(*chain), machine(1, action_s=action_s, inside=MeasuredLink(9.0, 9.0)))
    assert found.seconds == pytest.approx(expected, abs=1e-9)
    assert found.busy == (pytest.approx(expected, abs=1e-9),)


@given(spread(), st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 4), working_links())
@settings(max_examples=60, deadline=None)
def test_one_block_of_ranks_stands_for_all(case, each, cores, link) -> None:  # type: ignore[no-untyped-def]
    """The same step with all ranks simulated: a machine whose hosts are written in another order is not recognised."""
    plan, profile = case
    if plan.mesh.size % each:
        return
    hosts = tuple(tuple(range(first, first + each)) for first in range(0, plan.mesh.size, each))
    alike = Machine(hosts, (cores,) * len(hosts), link, MeasuredLink(2.0, 1 / 512), contention=1.25)
    shuffled = replace(alike, hosts=hosts[::-1])
    assert block_of(plan, shuffled) == plan.mesh.size or len(hosts) == 1
    assert plan.mesh.size % block_of(plan, alike) == 0
    one, all_of_them = step_time(plan, profile, alike), step_time(plan, profile, shuffled)
    assert one.seconds == pytest.approx(all_of_them.seconds)
    assert one.busy == pytest.approx(all_of_them.busy)
    assert one.occupied == pytest.approx(all_of_them.occupied)


def test_ranks_share_the_cores_of_their_host() -> None:
    programs: list[list[Operation]] = [[Work(float(seconds))] for seconds in (1, 2, 3)]
    assert RankSimulation(programs, machine(3, 2)).ends == [[1.5], [2.5], [3.5]]  # 2/3 of a core each; then one each
    assert RankSimulation(programs, machine(3, 3)).ends == [[1.0], [2.0], [3.0]]
    crowded = RankSimulation(programs, machine(3, 3, contention=2.0)).ends
    assert crowded == [[2.0], [3.5], [4.5]]  # three at 1/2, two at 2/3, one at full speed


def test_sleeping_layers_need_no_core() -> None:
    sleeping = replace(layer(forward=1.0, backward=3.0), core_share=0.0)
    assert step_time(whole(Mesh(4), 1), model(sleeping), machine(4, 1)).seconds == 4.0
    assert step_time(whole(Mesh(4), 1), model(layer(1.0, 3.0)), machine(4, 1)).seconds == 16.0


def test_a_tensor_group_meets_at_every_collective() -> None:
    calls = [TensorCall("all_reduce", 1000, False)] * 2 + [TensorCall("all_reduce", 1000, True)]
    link = MeasuredLink(0.25, 1 / 1000)
    plan = whole(Mesh(1, 1, 2), 1)
    found = step_time(plan, model(layer(1.0, 2.0, calls=calls), tensor=2), machine(2, reduce_inside=link))
    assert found.seconds == pytest.approx(1.0 + 2.0 + 3 * 1.25)


def test_without_a_barrier_a_replica_does_not_wait_for_the_others() -> None:
    profile, slow = model(layer(1.0, 1.0)), MeasuredLink(1.0, 0.0)
    asynchronous = step_time(whole(Mesh(2), 1, sync="asp"), profile, machine(2, inside=slow))
    assert asynchronous.seconds == 2.0 + 2 * 1.0  # pushed and pulled
    local = step_time(whole(Mesh(2), 1, sync="local:4"), profile, machine(2, reduce_inside=slow))
    assert local.seconds == 2.0 + 1.0 / 4


def test_reductions_are_those_measured_for_a_group_of_that_size() -> None:
    four = MeasuredReduction("data", 4, 1, MeasuredLink(3.0, 2.0))
    where = machine(4, 2, reduce_inside=MeasuredLink(1.0, 1.0), reductions=(four,))
    assert reduction_of("data", (0, 1, 2, 3), where) == four.link
    assert reduction_of("data", (0, 1), where) == MeasuredLink(1.0, 1.0)
    assert reduction_of("tensor", (0, 1, 2, 3), where).per_byte == pytest.approx(2.75 / 2.5)
    waits, works = collective_work("data", (0, 1, 2, 3), 10.0, where)
    assert (waits, works) == (Work(0.0, 3.0), Work(10.0))  # four ranks on two cores had half the speed when it was measured
    assert step_time(whole(Mesh(4), 1), model(layer(0.0, 0.0, weights=10.0)), where).seconds == pytest.approx(23.0)


def test_the_work_of_a_message_keeps_a_core_from_others() -> None:
    """One microbatch through two stages and back; both work for the messages, and each message still takes its latency."""
    link, plan = MeasuredLink(1.0, 0.0, core_s=0.25), whole(Mesh(1, 2), 2)
    profile = model(layer(1.0, 1.0), layer(1.0, 1.0))
    apart = step_time(plan, profile, machine(2, inside=link))
    assert apart.busy == (2.0 + 3 * 0.25, 2.0 + 3 * 0.25)  # activation, gradient, loss
    assert single_step(plan, profile, machine(2, inside=link)) == 4.0 + 2 * 1.0 + 0.25  # the loss is read at the end
    four = whole(Mesh(2, 2), 2, sync="asp")
    assert (
        step_time(four, profile, machine(4, 1, link)).seconds > step_time(four, profile, machine(4, 1, FREE)).seconds + 3.0
    )


def test_between_hosts_a_collective_is_time_and_no_work() -> None:
    far = Machine(((0,), (1,)), (1, 1), FREE, MeasuredLink(1.0, 0.5))
    assert collective_work("data", (0, 1), 10.0, far) == [Work(0.0, 6.0)]


def test_in_a_long_run_a_late_update_overlaps_with_the_next_step() -> None:
    """The middle stage updates for 3 s, while the first begins the next step: 7 s from one to the next, not 8."""
    profile, plan = model(layer(1.0, 1.0), layer(1.0, 1.0, update=3.0), layer(1.0, 1.0)), whole(Mesh(1, 3), 3)
    assert single_step(plan, profile, machine(3)) == 8.0
    assert step_time(plan, profile, machine(3)).seconds == 7.0

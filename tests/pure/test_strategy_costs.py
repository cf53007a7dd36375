"""Bytes and memory of each rank, against what the definitions say by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_costs import FREE, layer, machine, model

from polytempo.errors import UsageError
from polytempo.mesh import Mesh
from polytempo.strategy.bytes_moved import RankBytes, bytes_moved, collective_bytes, message_bytes
from polytempo.strategy.costs import Machine, MeasuredLink, TensorCall, TiedWeights
from polytempo.strategy.parallel_plan import DataExchange, ParallelPlan, batch_problem, data_exchange
from polytempo.strategy.prediction import memory_needed

TWO_HOSTS = Machine(((0, 1), (2, 3)), (2, 2), FREE, MeasuredLink(1e-4, 1e-9))
FOUR_HOSTS = Machine(((0,), (1,), (2,), (3,)), (1, 1, 1, 1), FREE, MeasuredLink(1e-4, 1e-9))


def test_messages_between_stages() -> None:
    profile = model(layer(passes=1000.0), layer(passes=64.0), layer(passes=5.0))
    plan = ParallelPlan(Mesh(1, 3), (1, 1, 1), 8, 4)
    first, second = 64 + 1024, 64 + 64
    assert [message_bytes(size) for size in (1000.0, 64.0, 0.0)] == [first, second, 64]
    moved = [one.pipe for one in bytes_moved(plan, profile, machine(3))]
    assert moved == [4 * first, 4 * (first + second), 4 * second + 2 * 64]  # the last tells both others the loss


def test_collectives_of_a_tensor_group() -> None:
    calls = [TensorCall("all_reduce", 4096, False), TensorCall("all_reduce", 4096, True)]
    plan = ParallelPlan(Mesh(1, 1, 2), (1,), 4, 2, "gpipe")
    assert plan.actions.recomputed(0, 0) == {0}
    moved = bytes_moved(plan, model(layer(calls=calls), tensor=2), machine(2))
    assert [one.tensor for one in moved] == [5 * 4096] * 2  # two forwards, one of them again, two backwards
    gathers = [TensorCall("all_gather", 4096, False)]
    moved = bytes_moved(plan, model(layer(calls=gathers), tensor=2), machine(2))
    assert [one.tensor for one in moved] == [3 * 2048] * 2


@given(st.integers(1, 1 << 20).map(lambda count: 4 * count))
@settings(max_examples=40, deadline=None)
def test_an_all_reduce_moves_what_its_plan_sends(nbytes: int) -> None:
    group = (0, 1, 2, 3)
    assert [collective_bytes("all_reduce", nbytes, group, rank, machine(4)) for rank in group] == [nbytes] * 4
    by_messages = [collective_bytes("all_reduce", nbytes, group, rank, FOUR_HOSTS) for rank in group]
    assert sum(by_messages) >= 2 * 3 * nbytes - 64  # no algorithm sends less
    assert collective_bytes("all_reduce", nbytes, (2,), 2, FOUR_HOSTS) == 0


def test_gradients_on_the_data_axis() -> None:
    profile = model(layer(weights=1 << 20), layer(weights=1 << 22))

    def moved(mesh: Mesh, where: Machine, sync: str = "bsp") -> list[float]:
        stages = (1,) * 2 if mesh.pipe == 2 else (2,)
        return [one.data for one in bytes_moved(ParallelPlan(mesh, stages, 8, 2, sync=sync), profile, where)]

    assert moved(Mesh(1, 2), machine(2)) == [0, 0]
    assert moved(Mesh(2, 2), machine(4)) == [1 << 20, 1 << 22] * 2  # each stage its own
    assert moved(Mesh(2), machine(2), "asp") == [2 * 5 << 20] * 2  # pushed and pulled
    assert moved(Mesh(2), machine(2), "local:4") == [5 * (1 << 20) / 4] * 2
    assert moved(Mesh(4), FOUR_HOSTS) == pytest.approx([2 * 3 / 4 * 5 * (1 << 20)] * 4, rel=1e-3)
    assert moved(Mesh(2, 2), TWO_HOSTS) == [1 << 20, 1 << 22] * 2  # two ranks: half each way


def test_tied_parameters_are_reduced_over_their_stages_and_count_once_on_a_rank() -> None:
    tied = (TiedWeights((0, 2), 800.0, 640.0, 1600.0),)
    profile = model(layer(weights=1000.0), layer(weights=500.0), layer(weights=1000.0), tied=tied)
    apart = ParallelPlan(Mesh(1, 2), (1, 2), 1)
    assert bytes_moved(apart, profile, machine(2))[0].pipe == message_bytes(640) + 640
    assert [one.parameters for one in memory_needed(apart, profile)] == [1000, 1500]
    together = memory_needed(ParallelPlan(Mesh(), (3,), 1), profile)[0]
    assert (together.parameters, together.gradients, together.state) == (1700, 1860, 3400)
    assert bytes_moved(ParallelPlan(Mesh(), (3,), 1), profile, machine(1)) == (RankBytes(),)


@pytest.mark.parametrize(
    ("schedule", "activations"),
    [
        ("gpipe,recompute=0", [4 * (3000 + 99), 4 * (3000 + 640), 4 * (3000 + 3000 + 640)]),
        ("gpipe", [3000 + 4 * 99, 3000 + 4 * 640, 6000 + 4 * 640]),
        ("1f1b", [3 * (3000 + 99), 2 * (3000 + 640), 6000 + 640]),
        ("sequential", [3000 + 99, 3000 + 640, 6000 + 640]),
    ],
)
def test_activations_are_those_of_the_microbatches_in_flight(schedule: str, activations: list[float]) -> None:
    profile = model(layer(), layer(), layer(), input_bytes=99.0, loss=layer(weights=0.0))
    found = memory_needed(ParallelPlan(Mesh(1, 3), (1, 1, 1), 4, 4, schedule), profile)
    assert [one.activations for one in found] == activations
    assert [one.total for one in found] == [1000 + 1000 + 2000 + more for more in activations]


def test_buffers_of_the_data_axis_and_stashed_versions() -> None:
    profile = model(layer(weights=1000.0), layer(weights=1000.0))

    def of(mesh: Mesh, schedule: str = "1f1b", sync: str = "bsp") -> list[tuple[float, float, float]]:
        plan = ParallelPlan(mesh, (2,) if mesh.pipe == 1 else (1, 1), 8, 4, schedule, sync)
        return [(one.buffers, one.state, one.stashed) for one in memory_needed(plan, profile)[: mesh.pipe]]

    assert of(Mesh()) == [(0, 4000, 0)]
    assert of(Mesh(2)) == [(2000, 4000, 0)]
    assert of(Mesh(2), sync="local:3") == [(4000, 4000, 0)]
    assert of(Mesh(2), sync="ssp:1") == [(0, 0, 0)]  # the servers hold the state
    assert of(Mesh(1, 2), "pipedream") == [(0, 2000, 1000), (0, 2000, 0)]


def test_what_a_mode_means_for_the_exchange() -> None:
    assert data_exchange("bsp") == DataExchange(servers=False, barrier=True)
    assert data_exchange("ssp:3") == data_exchange("asp") == DataExchange(servers=True, barrier=False)
    assert data_exchange("local:8") == DataExchange(servers=False, barrier=True, period=8, values=True)


def test_what_does_not_divide_is_refused_with_the_nearest() -> None:
    assert batch_problem(12, 5, 1) == "a batch of 12 cannot be cut by data=5; nearest: data=4"
    assert batch_problem(12, 8, 1, world=8) == "a batch of 12 cannot be cut by data=8; nearest: data=4"
    assert batch_problem(12, 2, 4) == "6 samples cannot be cut into 4 equal microbatches; nearest: microbatches=3"
    assert batch_problem(12, 2, 3) is None
    with pytest.raises(UsageError, match="nearest: microbatches=3"):
        ParallelPlan(Mesh(2), (1,), 12, 4)
    with pytest.raises(UsageError, match="for each of 2 stages"):
        ParallelPlan(Mesh(1, 2), (1,), 12)
    assert str(ParallelPlan(Mesh(2, 2), (1, 1), 8, 2, "gpipe")) == "data=2,pipe=2,schedule=gpipe,microbatches=2"
    assert str(ParallelPlan(Mesh(), (1,), 8)) == "data=1"

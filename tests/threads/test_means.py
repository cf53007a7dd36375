"""Means of numbers near the largest, and of what weighs nothing, in every way of travel."""

from __future__ import annotations

import fractions
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy
import pytest
import torch
from sessions import under
from torch import nn
from worlds import close_all, everywhere, open_worlds

from polytempo.collectives.group import RankGroup
from polytempo.collectives.plans import PLANS
from polytempo.collectives.world import World
from polytempo.errors import UsageError
from polytempo.launcher.job_facts import JobFacts
from polytempo.session.session import Session
from polytempo.tables.row_batches import RowBatch, combined
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

WAYS: dict[str, Callable[[int], AbstractContextManager[Any]]] = {
    "ps": lambda workers: ThreadJob(workers=workers),
    "ps-2": lambda workers: ThreadJob(workers=workers, servers=2),
    "allreduce": lambda workers: ThreadJob(workers=workers, via="allreduce"),
    "group": lambda workers: GroupJob(workers),
}
each_way = pytest.mark.parametrize("way", WAYS)
LARGE = (60000.0, 50000.0, 40000.0)


def stepped(job: Any, gradients: list[torch.Tensor], steps: int = 2, **about: Any) -> list[torch.Tensor]:
    """What all workers hold after steps of plain SGD with these gradients; `about`: for each worker what `step` is told."""

    def work(session: Session) -> torch.Tensor:
        grad = gradients[session.rank]
        param = nn.Parameter(torch.zeros_like(grad))
        optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=1.0), **about.get("options", {}))
        for _ in range(steps):
            param.grad = grad.clone()
            optimizer.step(samples=about["samples"][session.rank])
        return param.detach().clone()

    with job:
        return job.run(work)  # type: ignore[no-any-return]


@each_way
@pytest.mark.parametrize("samples", [(None, None, None), (32, 32, 32), (32, 32, 16)], ids=str)
def test_the_mean_of_large_float16_is_a_number(way: str, samples: tuple[int | None, ...]) -> None:
    gradients = [torch.full((5,), value, dtype=torch.float16) for value in LARGE]
    weights = torch.tensor([float(weight or 1) for weight in samples])
    mean = float((torch.tensor(LARGE) * weights).sum() / weights.sum())
    for got in stepped(WAYS[way](3), gradients, steps=1, samples=samples):
        torch.testing.assert_close(got, torch.full((5,), -mean, dtype=torch.float16), rtol=2e-3, atol=0)


@each_way
def test_buffers_of_large_float16_have_a_mean(way: str) -> None:
    def work(session: Session) -> torch.Tensor:
        model = nn.Module()
        model.register_buffer("seen", torch.full((3,), LARGE[session.rank], dtype=torch.float16))
        param = nn.Parameter(torch.zeros(1))
        model.register_parameter("own", param)
        DistributedOptimizer(torch.optim.SGD([param], lr=1.0), model, buffers="mean").consolidate()
        return model.seen.clone()

    with WAYS[way](3) as job:
        for got in job.run(work):
            torch.testing.assert_close(got, torch.full((3,), 50000.0, dtype=torch.float16), rtol=2e-3, atol=0)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_collectives_have_a_mean_of_large_float16(size: int) -> None:
    """By every plan there is. (Torch's own groups are not for threads of one process: gloo may abort it.)"""
    large = torch.full((9,), 60000.0, dtype=torch.float16)

    def made(group: RankGroup, rank: int, collective: str, algorithm: str) -> torch.Tensor:
        pieces = [large.clone() for _ in range(size)]
        own = torch.zeros_like(large) if collective == "reduce_scatter" else large.clone()
        if collective == "all_reduce":
            group.all_reduce([own], "mean", algorithm).wait()
        elif collective == "reduce":
            group.reduce(own, 0, "mean", algorithm).wait()
        else:
            group.reduce_scatter(own, pieces, "mean", algorithm).wait()
        assert all(torch.equal(piece, large) for piece in pieces), "inputs stay as they are"
        return own

    def work(world: World) -> list[torch.Tensor]:
        group = world.all_ranks
        plans = [plan for plan in PLANS if plan[0] in ("all_reduce", "reduce", "reduce_scatter")]
        return [made(group, world.rank, *plan) for plan in plans]

    worlds = open_worlds("unix", size)
    try:
        for results in everywhere(worlds, work):
            assert len(results) > 6
            assert all(torch.equal(result, large) for result in results)
    finally:
        close_all(worlds)


def test_rows_of_large_float16_have_a_mean() -> None:
    ids, values = torch.tensor([1, 4]), torch.full((2, 3), 60000.0, dtype=torch.float16)
    pushes = [RowBatch(ids, values, 2.0), RowBatch(ids, values, 2.0), RowBatch(ids, values * float("nan"), 0.0)]
    assert torch.equal(combined(pushes, "mean").values, values)


# What weighs nothing.


@pytest.mark.parametrize("way", [*WAYS, "delta"])
def test_a_gradient_of_weight_0_counts_for_nothing_whatever_it_holds(way: str) -> None:
    gradients = [torch.ones(4), torch.full((4,), float("nan"))]
    options = {"apply": "delta"} if way == "delta" else {}
    for got in stepped(WAYS.get(way, WAYS["ps"])(2), gradients, samples=(3, 0), options=options):
        assert torch.equal(got, torch.full((4,), -2.0))


@pytest.mark.parametrize("sync", ["asp", "downpour:push=1,fetch=1", "bsp"])
def test_a_step_of_weight_0_alone_changes_nothing(sync: str) -> None:
    (got,) = stepped(ThreadJob(workers=1, sync=sync), [torch.full((4,), float("nan"))], samples=(0,))
    assert torch.equal(got, torch.zeros(4))


def alone(**about: Any) -> torch.Tensor:
    session = Session(None, JobFacts(1, (), "bsp"), 0)
    param = nn.Parameter(torch.zeros(2))
    optimizer = under(session, DistributedOptimizer, torch.optim.SGD([param], lr=1.0))
    param.grad = torch.ones(2)
    optimizer.step(**about)
    return param.detach()


def test_a_job_of_one_without_servers_skips_a_step_of_weight_0_too() -> None:
    assert torch.equal(alone(samples=0), torch.zeros(2))
    assert torch.equal(alone(samples=1), -torch.ones(2))


@each_way
def test_only_who_weighs_something_says_which_gradients_there_are(way: str) -> None:
    """Momentum of a parameter whose gradient only a worker of weight 0 has stays as it is."""

    def work(session: Session) -> list[torch.Tensor]:
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=1.0, weight_decay=0.5))
        params[0].grad = torch.zeros(2)
        params[1].grad = torch.zeros(2) if session.rank else None
        optimizer.step(samples=1 - session.rank)
        return [param.detach().clone() for param in params]

    with WAYS[way](2) as job:
        for got in job.run(work):
            assert torch.equal(got[0], torch.full((2,), 0.5))
            assert torch.equal(got[1], torch.ones(2))


# What samples may be.

NUMBERS = [4, 4.0, numpy.int64(4), numpy.float32(4), torch.tensor(4), torch.tensor([4.0]), fractions.Fraction(4)]
REFUSED = [-1, float("nan"), float("inf"), True, numpy.bool_(True), torch.tensor(True), "4", torch.ones(2), 1j, [4]]


@each_way
def test_samples_are_numbers_of_any_kind(way: str) -> None:
    gradients = [torch.ones(2), torch.zeros(2)]

    def work(session: Session) -> torch.Tensor:
        param = nn.Parameter(torch.zeros(2))
        optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
        for number in NUMBERS:
            param.grad = gradients[session.rank].clone()
            optimizer.step(samples=number if session.rank else 12)
        for wrong in REFUSED:
            with pytest.raises(UsageError, match="expected samples to be a number, 0 or more, got"):
                optimizer.step(samples=wrong)
            with pytest.raises(UsageError, match="expected samples to be a number, 0 or more, got"):
                optimizer.synchronize(samples=wrong)
        return param.detach().clone()

    with WAYS[way](2) as job:
        for got in job.run(work):
            torch.testing.assert_close(got, torch.full((2,), -0.75 * len(NUMBERS)))


@pytest.mark.parametrize("wrong", REFUSED, ids=str)
def test_a_job_of_one_refuses_the_same(wrong: Any) -> None:
    with pytest.raises(UsageError, match="expected samples to be a number, 0 or more, got"):
        alone(samples=wrong)

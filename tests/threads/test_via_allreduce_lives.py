"""The life of a job whose workers average among themselves: start, end, states, records, refusals."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import STATEFUL, assert_same_state
from helpers import (
    assert_close,
    assert_equal,
    check_record,
    copied,
    joined,
    loss_of,
    made_gradients,
    made_params,
    set_gradients,
    small_batches,
    small_model,
    trained,
    trained_alone,
    until,
    weights,
)
from torch import nn

from polytempo.errors import UsageError
from polytempo.reducer.peers import PeerExchange
from polytempo.reducer.servers import ServerExchange
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

SHAPES = [(4, 3), (5,)]
START = made_params(SHAPES)


def test_all_workers_start_from_the_values_of_worker_0() -> None:
    starts = [made_params(SHAPES, seed=seed) for seed in (20, 21, 22)]
    for start in starts:
        start[1] = nn.Parameter(start[1].detach().float())

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(starts[session.rank])
        DistributedOptimizer(STATEFUL["adam"](params))
        return [param.detach().clone() for param in params]

    with ThreadJob(3, via="allreduce") as job:
        for result in job.run(work):
            assert_equal(result, [param.detach() for param in starts[0]])


def test_a_saved_state_goes_on_where_it_was() -> None:
    """All workers load what one has saved, before wrapping or afterwards; training goes on as in one process."""
    model, data = small_model(), small_batches(6, (4, 4))

    def first(session: Session) -> tuple[dict, dict]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(STATEFUL["adam"](list(mine.parameters())), mine)
        for step in data[:3]:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step()
        return copy.deepcopy(mine.state_dict()), copy.deepcopy(optimizer.state_dict())

    with ThreadJob(2, via="allreduce") as job:
        (saved_model, saved), (_, other) = job.run(first)
    assert_same_state(other, saved)
    assert saved["state"][0]["step"] == 3

    def second(session: Session, before: bool) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        mine.load_state_dict(saved_model)
        inner = STATEFUL["adam"](list(mine.parameters()))
        if before:
            inner.load_state_dict(copy.deepcopy(saved))
        optimizer = DistributedOptimizer(inner, mine)
        if not before:
            optimizer.load_state_dict(copy.deepcopy(saved))
        for step in data[3:]:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step()
        return weights(mine)

    wanted = trained_alone(model, STATEFUL["adam"], data)
    for before in (True, False):
        with ThreadJob(2, via="allreduce") as job:
            for got in job.run(lambda session, before=before: second(session, before)):
                assert_close(got, wanted, rtol=1e-9)


# Records, budgets, ends.


def test_the_record_keeps_its_promises_and_can_be_replayed(tmp_path: Path) -> None:
    model, data = small_model(), small_batches(5, (4, 4, 4))

    def work(session: Session) -> None:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(STATEFUL["momentum"](list(mine.parameters())))
        for number, step in enumerate(data):
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            if number == 2:
                optimizer.synchronize()
            optimizer.step()

    with ThreadJob(3, via="allreduce", record=tmp_path) as job:
        job.run(work)
    lines = check_record(tmp_path)
    assert sum(line["kind"] == "push" for line in lines) == 15
    assert job.summary["steps"] == 15


@pytest.mark.parametrize(("limit", "rounds"), [(9, 3), (10, 4)])
def test_all_workers_stop_after_the_round_that_uses_the_budget_up(limit: int, rounds: int) -> None:
    def work(session: Session) -> int:
        params, steps, client = copied(START), 0, session.client
        optimizer = DistributedOptimizer(STATEFUL["momentum"](params))
        assert client is not None
        while not client.stop:
            set_gradients(params, [torch.ones(shape) for shape in SHAPES])
            optimizer.step()
            steps += 1
            assert steps < 100
        return steps

    with ThreadJob(3, via="allreduce", limits=Limits(steps=limit)) as job:
        assert job.run(work) == [rounds] * 3
    assert job.summary["steps"] == 3 * rounds


@pytest.mark.parametrize("early", [0, 1, 2])
def test_when_a_worker_finishes_early_the_mean_is_of_the_rest(early: int) -> None:
    gradients = [made_gradients(SHAPES, 6, seed) for seed in range(3)]

    def work(session: Session) -> list[torch.Tensor]:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        for step in gradients[session.rank][: 2 if session.rank == early else 6]:
            set_gradients(params, step)
            optimizer.step()
        return [param.detach().clone() for param in params]

    with ThreadJob(3, via="allreduce") as job:
        results = job.run(work)
    values = [param.detach().clone() for param in START]
    for number in range(6):
        if number == 2:
            assert_close(results[early], values, rtol=1e-9)
        there = [own[number] for rank, own in enumerate(gradients) if number < 2 or rank != early]
        values = [value - 0.1 * sum(step[i] for step in there) / len(there) for i, value in enumerate(values)]
    for rank in {0, 1, 2} - {early}:
        assert_close(results[rank], values, rtol=1e-9)


def test_two_optimizers_have_a_clock_each() -> None:
    model, data = small_model(), small_batches(6, (4, 4))

    def run(mine: nn.Module, first: Any, second: Any, rank: int | None) -> list[torch.Tensor]:
        for number, step in enumerate(data):
            mine.zero_grad()
            loss_of(mine, joined(step) if rank is None else step[rank]).backward()
            first.step()
            if number % 2:
                second.step()
        return weights(mine)

    def make(mine: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return STATEFUL["adam"](list(mine[0].parameters())), STATEFUL["momentum"](list(mine[2].parameters()))

    def work(session: Session) -> tuple[list[torch.Tensor], int, int]:
        mine = copy.deepcopy(model)
        first, second = (DistributedOptimizer(optimizer, mine) for optimizer in make(mine))
        return run(mine, first, second, session.rank), first.stats["step"], second.stats["step"]

    alone = copy.deepcopy(model)
    wanted = run(alone, *make(alone), None)
    with ThreadJob(2, via="allreduce") as job:
        for got, first_step, second_step in job.run(work):
            assert_close(got, wanted, rtol=1e-9)
            assert (first_step, second_step) == (6, 3)


@pytest.mark.timeout(15)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("job_via", "own_via", "kind"), [("allreduce", "ps", ServerExchange), ("ps", "allreduce", PeerExchange)]
)
def test_an_optimizer_may_choose_another_way_than_its_job(job_via: str, own_via: str, kind: type, servers: int) -> None:
    model, data = small_model(), small_batches(4, (4, 4))

    def work(session: Session) -> list[torch.Tensor]:
        got, optimizer = trained(session, model, STATEFUL["adam"], data, via=own_via)
        assert type(optimizer._reducer) is kind
        return got

    with ThreadJob(2, servers, via=job_via) as job:
        for got in job.run(work):
            assert_close(got, trained_alone(model, STATEFUL["adam"], data), rtol=1e-9)


# Refusals.


def refused(sync: str, words: str, attempt: Callable[[Session], object]) -> None:
    with ThreadJob(1, 1, sync, via="allreduce") as job, pytest.raises(UsageError, match=words) as error:
        job.run(attempt)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sync", ["asp", "ssp:2", "bsp+backup:1", "every:2", "delay:2"])
def test_other_modes_cannot_go_without_servers(sync: str) -> None:
    words = rf"via='allreduce' needs sync='bsp', or averages of models, this is {sync.replace('+', '.')}; use via='ps'"
    refused(sync, words, lambda s: DistributedOptimizer(STATEFUL["adam"](copied(START)), via="allreduce"))


def test_lbfgs_is_refused_before_its_first_step() -> None:
    """It evaluates the loss as often as each worker likes."""

    def attempt(session: Session) -> None:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.LBFGS(params))
        optimizer.step(lambda: sum((param**2).sum() for param in params))

    refused("bsp", "LBFGS", attempt)


def second_is_refused(first: Callable[[Session], object], second: Callable[[Session], object]) -> str:
    """What worker 1 is told, who comes second."""
    errors: dict[int, UsageError] = {}
    with ThreadJob(2, via="allreduce") as job:

        def work(session: Session) -> None:
            if session.rank == 1:
                until(lambda: "0" in job.sequencer.clocks, "worker 0 registers")
            try:
                (first, second)[session.rank](session)
            except UsageError as error:
                errors[session.rank] = error
                session.close("failed")  # so that worker 0 starts without it

        job.run(work)
    assert list(errors) == [1]
    assert "\n" not in str(errors[1])
    return str(errors[1])


def sgd(shapes: list[tuple[int, ...]], **settings: float) -> Callable[[Session], object]:
    return lambda session: DistributedOptimizer(torch.optim.SGD(made_params(shapes), lr=0.1, **settings))


def test_workers_that_differ_are_refused_by_name() -> None:
    text = second_is_refused(sgd(SHAPES, momentum=0.8), sgd(SHAPES, momentum=0.9))
    assert "hyper-parameters differ: momentum is 0.9 at worker 1 and 0.8 at worker 0" in text
    text = second_is_refused(sgd(SHAPES), sgd([(4, 3), (6,)]))
    assert "parameter 1 is parameter 1 [6] float64 in group 0 here and parameter 1 [5] float64 in group 0 there" in text
    adam = lambda session: DistributedOptimizer(torch.optim.Adam(copied(START), lr=0.1))  # noqa: E731
    assert "the optimizer is 'Adam' at worker 1 and 'SGD' at worker 0" in second_is_refused(sgd(SHAPES), adam)


def test_an_optimizer_that_has_state_on_one_worker_only_is_refused() -> None:
    def stepped(session: Session) -> None:
        params = copied(START)
        inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        set_gradients(params, [torch.ones(shape) for shape in SHAPES])
        inner.step()
        DistributedOptimizer(inner)

    text = second_is_refused(sgd(SHAPES, momentum=0.9), stepped)
    assert re.search(r"the optimizer is 'SGD with state \w+' at worker 1 and 'SGD' at worker 0", text)


def test_a_rate_that_one_worker_changes_later_is_refused_at_that_step() -> None:
    def work(session: Session) -> str:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        set_gradients(params, [torch.ones(shape) for shape in SHAPES])
        optimizer.step()
        if session.rank == 1:
            optimizer.param_groups[0]["lr"] = 0.2
            until(lambda: job.sequencer.statistics[0].state == "waiting", "worker 0 has pushed")
        try:
            optimizer.step()
        except UsageError as error:
            session.close("failed")
            return str(error)
        return ""

    with ThreadJob(2, via="allreduce") as job:
        texts = job.run(work)
    assert texts[0] == ""
    assert "lr is 0.2 at worker 1 and 0.1 at worker 0" in texts[1]

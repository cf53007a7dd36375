"""A budget is the job's: every worker is told to stop, in rounds all of them at the same step."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import copied, made_params, set_gradients, small_model, until
from lossy import LossyJob, disturb, first_answers
from torch.utils.data import DataLoader, TensorDataset

from polytempo.errors import UsageError
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.prepare import prepare
from polytempo.train.sampler import DistributedBatchSampler, DistributedSampler

pytestmark = [pytest.mark.timeout(30), pytest.mark.both_wires]

START = made_params([(4,)])
EAGER = ["ssp:2", "dssp:1..4", "dssp-paper:1..4", "asp", "every:3", "every:3,wait=2", "delay:2"]


def until_told(session: Session, samples: float | None = None) -> int:
    """Step until the job's budget is used up; how often that was."""
    params = copied(START)
    optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    client, steps = session.client, 0
    assert client is not None
    while not client.stop:
        set_gradients(params, [torch.ones(4)])
        optimizer.step(samples=samples)
        steps += 1
        assert steps < 10_000
    return steps


@pytest.mark.parametrize(("limit", "rounds"), [(9, 3), (10, 4), (1, 1)])
def test_in_rounds_everybody_stops_after_the_round_that_uses_the_steps_up(limit: int, rounds: int) -> None:
    with ThreadJob(3, 2, "bsp", limits=Limits(steps=limit)) as job:
        assert job.run(until_told) == [rounds] * 3
    assert job.summary["steps"] == 3 * rounds


def test_samples_are_summed_over_workers() -> None:
    with ThreadJob(2, 1, "bsp", limits=Limits(samples=100)) as job:
        steps = job.run(lambda session: until_told(session, samples=(10, 15)[session.rank]))
    assert steps == [4, 4]
    assert job.summary["samples"] == 100


def test_seconds_end_a_round_for_everybody_at_once() -> None:
    with ThreadJob(3, 1, "bsp", limits=Limits(seconds=0.1), slow={1: 3.0}) as job:
        steps = job.run(until_told)
    assert len(set(steps)) == 1
    assert job.summary["seconds"] >= 0.1


@pytest.mark.parametrize("sync", EAGER)
def test_without_rounds_everybody_stops_at_its_next_answer(sync: str) -> None:
    limit, workers = 20, 3
    with ThreadJob(workers, 2, sync, limits=Limits(steps=limit), slow={1: 3.0}) as job:
        steps = job.run(until_told)
    ahead = 3 if sync == "delay:2" else 1  # pushes of each worker that may be under way
    assert limit <= sum(steps) <= limit + workers * ahead
    assert min(steps) >= 1


def test_with_backup_workers_a_discarded_push_uses_nothing_up() -> None:
    with ThreadJob(3, 1, "bsp+backup:1", limits=Limits(steps=30), slow={2: 5.0}) as job:
        steps = job.run(until_told)
    discarded = sum(account.discarded for account in job.sequencer.statistics)
    assert sum(steps) - discarded >= 30
    assert job.summary["steps"] == sum(steps) - discarded


def test_without_a_budget_nobody_is_told_to_stop() -> None:
    def work(session: Session) -> bool:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        for _ in range(30):
            set_gradients(params, [torch.ones(4)])
            optimizer.step()
        assert session.client is not None
        return session.client.stop

    with ThreadJob(2) as job:
        assert job.run(work) == [False, False]


@pytest.mark.parametrize("limits", [{"steps": 0}, {"samples": -1}, {"seconds": float("nan")}])
def test_a_budget_of_nothing_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="budget above 0"):
        Limits(**limits)


def test_a_worker_whose_answer_is_given_again_stops_with_the_others() -> None:
    """Worker 1 misses the answer to round 0; before it asks, worker 0's next push uses the budget up."""

    def work(session: Session) -> int:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        client, steps = session.client, 0
        assert client is not None

        if session.rank == 1:
            later = lambda: until(lambda: job.sequencer.budget.stopping, "worker 0 has pushed again")  # noqa: E731
            disturb(session, lambda shard: first_answers([0], later))
        while not client.stop:
            set_gradients(params, [torch.ones(4)])
            optimizer.step()
            steps += 1
        return steps

    with LossyJob(2, 1, "bsp", limits=Limits(steps=3), retry=0.05) as job:
        assert job.run(work) == [2, 2]


MODEL, DATA = small_model(), torch.randn(96, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def counted(session: Session, how: str) -> int:
    """A loop whose `step()` is not told how many samples it has: the number that it was given."""
    model, data = copy.deepcopy(MODEL), TensorDataset(DATA)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=4)
    if how == "prepare":
        model, optimizer, loader = prepare(model, optimizer, loader)
    else:
        optimizer = DistributedOptimizer(optimizer, model)
        if how == "sampler":
            loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
        elif how == "batch sampler":
            loader = DataLoader(data, batch_sampler=DistributedBatchSampler(data, 4))
    seen = 0
    for _ in range(4):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            seen += len(x)
            if session.should_stop():
                return seen
    return seen


EVEN, DEALT = ("bsp", "ssp:3", "local:2", "downpour:push=2,fetch=2"), ("bsp+balance", "anytime:auto")
HOW = [
    (sync, how) for how in ("prepare", "sampler", "batch sampler") for sync in (EVEN if how == "sampler" else EVEN + DEALT)
]


@pytest.mark.parametrize(("sync", "how"), HOW)
def test_a_budget_of_samples_counts_what_samplers_have_drawn_for_a_step(sync: str, how: str) -> None:
    with ThreadJob(2, sync=sync, limits=Limits(samples=80)) as job:
        seen = sum(job.run(lambda session: counted(session, how)))
    if sync == "anytime:auto":  # a round has as many micro-batches as there was time for, and some may be late
        assert 80 <= job.summary["samples"] <= seen
    else:
        assert 80 <= seen <= 80 + 2 * 2 * 8, "each worker may have made one more push, of two batches at most"
        assert job.summary["samples"] == seen
    assert job.notices == []


def test_steps_of_unknown_size_are_counted_as_samples_and_that_is_said_once() -> None:
    with ThreadJob(2, limits=Limits(samples=24)) as job:
        job.run(lambda session: counted(session, "no sampler"))
    said = [notice for notice in job.notices if "--samples" in notice]
    assert len(said) == 1
    assert "counts each step as one sample" in said[0]
    with ThreadJob(2, limits=Limits(steps=24)) as job:
        job.run(lambda session: counted(session, "no sampler"))
    assert not [notice for notice in job.notices if "--samples" in notice]

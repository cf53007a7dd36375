"""The modes that a job could not use, which the advice at its end leaves out: those that its own checks refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from spreading import sentences, spread, train
from torch import nn

import polytempo as pt
from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.strategy.job_options import JobOptions
from polytempo.sync.spec import compared
from polytempo.testing.threads import ThreadJob
from polytempo.train.server_embedding import ServerEmbedding

MakeOptimizer = Callable[[], torch.optim.Optimizer]


def linear(**options: object) -> pt.DistributedOptimizer:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)


def embedded(embedding: nn.Module) -> pt.DistributedOptimizer:
    model = nn.Sequential(embedding, nn.Linear(2, 2))
    return pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def full_batch() -> pt.DistributedOptimizer:
    model = nn.Linear(2, 2)
    return pt.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model, apply="delta")


def in_groups() -> pt.DistributedOptimizer:
    groups = [pt.new_group([0, 1]), pt.new_group([2])]
    return linear(group=groups[pt.rank() // 2])


#: Optimizers by what they have, each with a mode that takes it and one that must not be advised.
FEATURES: dict[str, tuple[MakeOptimizer, str, str]] = {
    "plain": (linear, "bsp", ""),
    "a ServerEmbedding": (lambda: embedded(ServerEmbedding(10, 2)), "bsp", "local:8"),
    "a sparse embedding": (lambda: embedded(nn.Embedding(10, 2, sparse=True)), "asp", ""),
    "means of buffers": (lambda: linear(buffers="mean"), "bsp", "anytime:auto"),
    "changes, not gradients": (lambda: linear(apply="delta", via="ps"), "bsp", "anytime:auto"),
    "compression": (lambda: linear(compression="bf16"), "asp", ""),
    "no server": (lambda: linear(via="allreduce"), "bsp", "asp"),
    "LBFGS": (full_batch, "asp", "bsp+balance"),
    "groups": (in_groups, "bsp", "bsp+balance"),
}


def summed_up(make: MakeOptimizer, sync: str) -> list[str]:
    """The refused modes of a job that makes its optimizer so, and leaves."""
    with ThreadJob(3 if make is in_groups else 2, sync=sync, via="auto") as job:
        job.run(lambda session: make() and None)
    refused: list[str] = job.summary["refused"]
    return refused


@pytest.mark.parametrize("feature", FEATURES)
def test_what_a_job_is_not_advised_is_what_its_optimizer_refuses(feature: str) -> None:
    make, taken, unfit = FEATURES[feature]
    told = summed_up(make, taken)
    truth = []
    for mode in compared():
        try:
            summed_up(make, mode)
        except UsageError:
            truth.append(mode)
    assert told == truth
    assert not unfit or unfit in told
    assert taken not in told


def test_arrays_are_advised_nothing() -> None:
    with ThreadJob(2) as job:
        job.run(lambda session: pt.tables.KV({"w": pt.tables.Array(10)})["w"].push(torch.ones(10)).result())
    assert job.summary["refused"] == list(compared())


@pytest.mark.parametrize(("strategy", "workers"), [("data=1,pipe=2", 2), ("data=2,pipe=2", 4)])
def test_a_model_in_stages_is_not_advised_what_its_strategy_refuses(strategy: str, workers: int) -> None:
    """One replica has no other to exchange with: no mode helps it. Of several, `run --strategy` refuses the rest."""

    def rank(session: Session) -> None:
        train(spread(f"{strategy},microbatches=2"), sentences(2))

    with ThreadJob(workers, via="auto") as job:
        job.run(rank)
    refused = []
    for mode in compared():
        try:
            JobOptions(strategy, sync=mode).settled()
        except UsageError:
            refused.append(mode)
    assert "bsp+balance" in refused
    assert job.summary["refused"] == (list(compared()) if workers == 2 else refused)

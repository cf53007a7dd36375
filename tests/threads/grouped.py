"""Four workers in two groups, (0, 2) and (1, 3), with models of different shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from helpers import Batch, MakeOptimizer, loss_of, made_from_seed, small_model, weights
from local_blocks import HostsJob
from torch import nn

from polytempo.mesh import ReplicaRanks
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

T = TypeVar("T")

#: Gradients over servers, through shared memory with a sequencer, by collectives with one and without.
WAYS = ("ps", "allreduce", "hosts", "collectives")
GROUPS = ((0, 2), (1, 3))
#: Of the groups. Everything random is made in the main thread.
MODELS: tuple[nn.Module, nn.Module] = (
    small_model(3),
    made_from_seed(4, lambda: nn.Sequential(nn.Linear(5, 11), nn.ReLU(), nn.Linear(11, 3))).double(),
)


def group_of(rank: int) -> int:
    return rank % 2


def ranks_of(rank: int, main: int = 0) -> ReplicaRanks:
    """The group of a rank; the main one is number `main`."""
    return ReplicaRanks(GROUPS[group_of(rank)], group_of(rank) == main)


def trained_in_groups(
    session: Session, make: MakeOptimizer, batches: Sequence[Sequence[Batch]], main: int = 0, **options: object
) -> tuple[list[torch.Tensor], DistributedOptimizer]:
    """A worker's plain loop over its own batches, together with its group."""
    model = copy.deepcopy(MODELS[group_of(session.rank)])
    inner = make(list(model.parameters()))
    optimizer = DistributedOptimizer(inner, model, group=ranks_of(session.rank, main), **options)  # type: ignore[arg-type]
    for step in batches:
        optimizer.zero_grad()
        loss_of(model, step[session.rank]).backward()
        optimizer.step()
    optimizer.consolidate()
    return weights(model), optimizer


def run_in(way: str, work: Callable[[Session], T], sync: str = "bsp", **options: Any) -> list[T]:
    """Four workers, over one of the ways."""
    if way == "collectives":
        with GroupJob(4, least=1) as group_job:
            return group_job.run(work)
    with HostsJob(4, sync, **options) if way == "hosts" else ThreadJob(4, 2, sync, via=way, **options) as job:
        return job.run(work)

"""Blocks of local steps by hand: what a job of n workers must compute, in one plain loop; and the jobs to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from helpers import Batch, MakeOptimizer, loss_of, small_model, weights
from torch import nn

from polytempo.launcher.job_facts import Way
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

#: The ways in which values travel.
WAYS = ("servers", "shared memory", "collectives")


def job_by(way: str, workers: int, sync: str, **options: Any) -> ThreadJob | GroupJob:
    if way == "collectives":
        return GroupJob(workers)
    return ThreadJob(workers, sync=sync, via="ps" if way == "servers" else "allreduce", **options)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


Train = Callable[[DistributedOptimizer, nn.Module, Session], Any]


def train_in_blocks(
    job: ThreadJob | GroupJob,
    sync: str,
    batches: Sequence[Sequence[Batch]],
    make: MakeOptimizer = sgd,
    at_end: Train | None = None,
    after_step: Train | None = None,
    model: Callable[[], nn.Module] = small_model,
    **options: Any,
) -> list[Any]:
    """Each worker's weights, or what `at_end` returns, after these batches."""

    models = [model() for _ in batches[0]]

    def train(session: Session) -> Any:
        own = models[session.rank]
        optimizer = DistributedOptimizer(make(list(own.parameters())), own, sync=sync, **options)
        for step in batches:
            batch = step[session.rank]
            optimizer.zero_grad()
            loss_of(own, batch).backward()
            optimizer.step(samples=len(batch[0]))
            if after_step is not None:
                after_step(optimizer, own, session)
        return weights(own) if at_end is None else at_end(optimizer, own, session)

    with job:
        return job.run(train)


class Blocks:
    """The plain loop: n models with an optimizer each, averaged after each block."""

    def __init__(self, workers: int, make: MakeOptimizer = sgd, model: Callable[[], nn.Module] = small_model) -> None:
        self.models = [model() for _ in range(workers)]
        self.optimizers = [make(list(own.parameters())) for own in self.models]
        self.samples = [0.0] * workers
        self.anchor = weights(self.models[0])
        self.momentum: list[torch.Tensor] = [torch.zeros_like(value) for value in self.anchor]

    def step(self, batches: Sequence[Batch]) -> None:
        for worker, (own, optimizer, batch) in enumerate(zip(self.models, self.optimizers, batches, strict=True)):
            optimizer.zero_grad()
            loss_of(own, batch).backward()
            optimizer.step()
            self.samples[worker] += len(batch[0])

    def mean(self, which: Sequence[int] | None = None) -> list[torch.Tensor]:
        total = sum(self.samples)
        shares = [samples / total for samples in self.samples]
        rows = zip(*(weights(own) for own in self.models), strict=True)
        return [sum(share * value for share, value in zip(shares, row, strict=True)) for row in rows]  # type: ignore[misc]

    def set_all(self, values: Sequence[torch.Tensor]) -> None:
        self.anchor = [value.clone() for value in values]
        self.samples = [0.0] * len(self.models)
        with torch.no_grad():
            for own in self.models:
                for param, value in zip(own.parameters(), values, strict=True):
                    param.copy_(value)

    # What an average does.

    def average(self) -> None:
        self.set_all(self.mean())

    def block_momentum(self, beta: float, lr: float) -> None:
        mean = self.mean()
        for index, (anchor, value) in enumerate(zip(self.anchor, mean, strict=True)):
            self.momentum[index] = beta * self.momentum[index] - (value - anchor) / lr
        self.set_all([anchor - lr * u for anchor, u in zip(self.anchor, self.momentum, strict=True)])
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def diloco(self, rate: float = 0.7, mu: float = 0.9) -> None:
        deltas = [anchor - value for anchor, value in zip(self.anchor, self.mean(), strict=True)]
        self.momentum = [mu * m + delta for m, delta in zip(self.momentum, deltas, strict=True)]
        steps = [delta + mu * m for delta, m in zip(deltas, self.momentum, strict=True)]
        self.set_all([anchor - rate * step for anchor, step in zip(self.anchor, steps, strict=True)])

    def run(self, batches: Sequence[Sequence[Batch]], period: int, end: Callable[[], None]) -> list[torch.Tensor]:
        """All batches in blocks; an unfinished block ends with the last."""
        for number, step in enumerate(batches, start=1):
            self.step(step)
            if number % period == 0 or number == len(batches):
                end()
        return copy.deepcopy(self.anchor)


class HostsJob(ThreadJob):
    """As between hosts: collectives make the means, and a sequencer decides and keeps the record."""

    def __init__(self, workers: int, sync: str, **options: Any) -> None:
        super().__init__(workers, sync=sync, via="allreduce", **options)
        self.job = replace(self.job, meeting="")

    def session(self, rank: int) -> Session:
        session = super().session(rank)
        session.way, session.least = Way("127.0.0.1", None, True), 1
        return session

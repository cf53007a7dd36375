"""Workers whose speed the test says: a step's seconds are the work of its batch over the worker's speed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers import loss_of, small_model, weights
from torch import nn

from polytempo.session.session import Session
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.sampler import DistributedBatchSampler

#: Samples a second of a worker, by its rank and the number of its step.
Speed = Callable[[int, int], float]

_generator = torch.Generator().manual_seed(7)
INPUTS = torch.randn(400, 5, generator=_generator, dtype=torch.float64)
TARGETS = torch.randn(400, 3, generator=_generator, dtype=torch.float64)
MODEL = small_model()


def uneven(rank: int, step: int) -> float:
    """The last of three is slow; from step 8 on the first is."""
    return [1.0, 1.0, 0.25][rank % 3] if step < 8 else [0.25, 1.0, 1.0][rank % 3]


@dataclass
class Seen:
    """What a worker took, and the values it ended with."""

    steps: list[list[int]] = field(default_factory=list)  #: for each call of `step()` the samples
    rounds: list[list[int]] = field(default_factory=list)  #: for each push
    values: list[torch.Tensor] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


def made_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass
class Trainee:
    """A worker that trains on batches of indices, in the time that its speed gives."""

    session: Session
    speed: Speed = uneven
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(MODEL)
        self.optimizer = DistributedOptimizer(made_optimizer(self.model), self.model, **self.options)
        self.seen = Seen()
        self._open: list[int] = []

    def train(self, batches: Iterable[Sequence[int]], steps: int | None = None) -> Seen:
        """Train on these; on `steps` of them where that is given."""
        rank, seen = self.session.rank, self.seen
        for number, batch in enumerate(batches):
            indices = [int(index) for index in batch]
            self.optimizer.zero_grad()
            loss_of(self.model, (INPUTS[indices], TARGETS[indices])).backward()
            took = len(indices) / self.speed(rank, self.optimizer.stats["step"])
            self.session.computed = lambda now, took=took: took  # type: ignore[method-assign,misc]
            before = self.optimizer.stats["step"]
            self.optimizer.step()
            seen.steps.append(indices)
            self._open += indices
            if self.optimizer.stats["step"] > before:
                seen.rounds.append(self._open)
                seen.shares.append(self.optimizer.stats.get("share", 1.0))
                self._open = []
            if steps is not None and number + 1 >= steps:
                break
        seen.values = weights(self.model)
        return seen


def trained(
    session: Session, length: int = 200, each: int = 6, epochs: int = 2, speed: Speed = uneven, **options: Any
) -> Seen:
    """Some epochs with a `DistributedBatchSampler`."""
    of_optimizer = {name: options.pop(name) for name in ("via", "apply", "clip_norm") if name in options}
    trainee = Trainee(session, speed, of_optimizer)
    sampler = DistributedBatchSampler(range(length), each, **options)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        trainee.train(sampler)
    return trainee.seen


def one_process(workers: Sequence[Seen], clip: float | None = None) -> list[torch.Tensor]:
    """One process that takes the same samples in the same rounds."""
    model = copy.deepcopy(MODEL)
    optimizer = made_optimizer(model)
    for parts in zip(*(seen.rounds for seen in workers), strict=True):
        indices = [index for part in parts for index in part]
        optimizer.zero_grad()
        loss_of(model, (INPUTS[indices], TARGETS[indices])).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model)


def samples_of(workers: Sequence[Seen]) -> list[int]:
    """All samples that workers have trained on, ascending."""
    return sorted(index for seen in workers for batch in seen.steps for index in batch)

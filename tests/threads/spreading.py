"""A small transformer, its data, and the same training in one process and spread by a strategy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.session.session import Session
from polytempo.strategy.distributed_model import DistributedModel
from polytempo.strategy.strategy import Strategy
from polytempo.testing.threads import GroupJob

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

WORDS, WIDTH = 16, 8
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}
MOMENTUM = OPTIMIZERS["momentum"]


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


_making = threading.Lock()  # threads have one random generator


def transformer(blocks: int = 2, seed: int = 0) -> nn.Sequential:
    """Embedding, blocks, head, in float64."""
    with _making, torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [
            nn.Embedding(WORDS, WIDTH),
            *(block() for _ in range(blocks)),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WORDS),
        ]
        return nn.Sequential(*layers).double()


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


def sentences(steps: int, rows: int = 16, seed: int = 1) -> list[Batch]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(WORDS, (rows, 3), generator=draw), torch.randint(WORDS, (rows, 3), generator=draw))
        for _ in range(steps)
    ]


def part_of(batch: Batch, replica: int, replicas: int) -> Batch:
    x, y = batch
    return x.chunk(replicas)[replica], y.chunk(replicas)[replica]


def trained_alone(
    data: Sequence[Batch], make: MakeOptimizer = MOMENTUM, clip: float | None = None, model: nn.Module | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One process, on the whole batches."""
    model = model if model is not None else transformer()
    optimizer = make(list(model.parameters()))
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, optimizer


def spread(strategy: Strategy | str, make: MakeOptimizer = MOMENTUM, seed: int = 0, **options: Any) -> DistributedModel:
    """This rank's part of the transformer."""
    strategy = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    options = {"loss": cross_entropy, "optimizer": make} | options
    return strategy.distribute(transformer(seed=seed), **options)


def train(model: DistributedModel, data: Sequence[Batch]) -> list[float]:
    """This rank's steps: its replica's part of each batch."""
    return [model.step(*part_of(batch, model.point.data, model.mesh.data)) for batch in data]


def everywhere(size: int, work: Callable[[Session], Any]) -> list[Any]:
    """On all ranks of a job without servers."""
    with GroupJob(size) as job:
        return job.run(work)


def size_of(strategy: str) -> int:
    found = Strategy.parse(strategy)
    return (found.data or 1) * found.each


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], atol: float = 1e-8) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")

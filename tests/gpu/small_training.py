"""The same small training in a job on the GPU and in a job on the CPU, so that their values can be compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from polytempo.train.optimizer import DistributedOptimizer

STEPS = 8
Params = Any
MakeOptimizer = Callable[[Params], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-3, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-3),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-3),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=1e-3),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
}


torch.manual_seed(0)
#: Made once: threads that train share torch's generator.
FIRST = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 10))


def exact() -> None:
    """Float32 as the CPU has it, and the same bits each time."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def network(device: str, layout: torch.memory_format = torch.contiguous_format) -> nn.Module:
    return copy.deepcopy(FIRST).to(device, memory_format=layout)


def batches(rank: int, size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a fixed set."""
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(32, 3, 8, 8, generator=generator), torch.randint(0, 10, (32,), generator=generator)
    return images[rank::size].to(device), labels[rank::size].to(device)


def trained(rank: int, size: int, device: str, make: MakeOptimizer, layout: str = "", **options: Any) -> list[torch.Tensor]:
    """The values after some steps, on the CPU."""
    model = network(device, torch.channels_last if layout else torch.contiguous_format)
    optimizer = DistributedOptimizer(make(model.parameters()), model, **options)
    images, labels = batches(rank, size, device)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    optimizer.consolidate()
    return [param.detach().cpu() for param in model.parameters()]

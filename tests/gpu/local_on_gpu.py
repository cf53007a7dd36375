"""Run by `test_cuda.py`: models on a GPU are averaged in blocks, and mixed with neighbours, as a plain loop does it."""

from __future__ import annotations

import copy
import sys

import torch
from torch.nn.functional import cross_entropy

import polytempo as pt

torch.backends.cudnn.deterministic = True
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
pt.init()
rank, size, sync = pt.rank(), pt.size(), sys.argv[1]
generator = torch.Generator().manual_seed(1)
images = torch.randn(64, 3, 8, 8, generator=generator).cuda()
labels = torch.randint(0, 10, (64,), generator=generator).cuda()
STEPS, PERIOD = 8, 4


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 10)
    return torch.nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)


def make(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, worker: int) -> None:
    optimizer.zero_grad()
    cross_entropy(model(images[worker::size]), labels[worker::size]).backward()
    optimizer.step()


def averaged_by_hand() -> torch.nn.Module:
    """All workers in this process, averaged after each block."""
    models = [network() for _ in range(size)]
    optimizers = [make(model) for model in models]
    for number in range(1, STEPS + 1):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(model, optimizer, worker)
        if number % PERIOD == 0:
            with torch.no_grad():
                for params in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(list(params)).mean(0)
                    for param in params:
                        param.copy_(mean)
    return models[0]


model = network()
before = copy.deepcopy(model)
optimizer = pt.DistributedOptimizer(make(model), model)
for _ in range(STEPS):
    step(model, optimizer, rank)
if sync.startswith("local"):
    pairs = zip(averaged_by_hand().parameters(), model.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert difference < 1e-5, difference
optimizer.consolidate()
assert all(param.is_cuda and bool(param.isfinite().all()) for param in model.parameters())
assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), model.parameters(), strict=True))
print(f"worker {rank}: as a plain loop")

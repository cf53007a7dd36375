"""Run by `test_cuda.py`: parameters on a GPU go through pinned memory and come out as one process would have them."""

from __future__ import annotations

import itertools

import torch
from torch.nn.functional import cross_entropy

import polytempo as pt

torch.backends.cudnn.deterministic = True
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
pt.init()
rank, size = pt.rank(), pt.size()
generator = torch.Generator().manual_seed(1)
images = torch.randn(64, 3, 8, 8, generator=generator).cuda()
labels = torch.randint(0, 10, (64,), generator=generator).cuda()

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-3),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}


def network(layout: torch.memory_format) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 10)
    return torch.nn.Sequential(*layers).cuda().to(memory_format=layout)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, mine: slice) -> None:
    for _ in range(20):
        optimizer.zero_grad()
        cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()


layouts = (torch.contiguous_format, torch.channels_last)
for (name, make), layout, apply in itertools.product(OPTIMIZERS.items(), layouts, ("server", "delta")):
    alone, together = network(layout), network(layout)
    train(alone, make(alone.parameters()), slice(None))
    train(together, pt.DistributedOptimizer(make(together.parameters()), together, apply=apply), slice(rank, None, size))
    pairs = zip(alone.parameters(), together.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert difference < 1e-5, (name, layout, apply, difference)

model, scaler = network(torch.contiguous_format), torch.amp.GradScaler("cuda")
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
for step in range(5):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = cross_entropy(model(images[rank::size]), labels[rank::size])
    overflow = float("inf") if (step, rank) == (2, 0) else 1.0
    scaler.scale(loss * overflow).backward()
    scaler.step(optimizer)
    scaler.update()
assert optimizer.stats["step"] == 5
assert all(bool(param.isfinite().all()) for param in model.parameters())
print(f"worker {rank}: as one process")

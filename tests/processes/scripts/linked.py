"""Trains a few steps on data of its own, and prints the model: the same numbers however the bytes travel."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed

import polytempo as pt

torch.set_num_threads(1)
torch.manual_seed(0)
pt.init()
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = pt.DistributedOptimizer(optimizer, model)
data = torch.Generator().manual_seed(pt.rank())
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 32, generator=data)).square().mean().backward()
    optimizer.step(samples=8)
total = torch.full((1000,), float(pt.rank() + 1))
pt.all_reduce(total)
torch.distributed.init_process_group("polytempo")
torch.distributed.all_reduce(total)
torch.distributed.destroy_process_group()
print(sum(p.double().square().sum().item() for p in model.parameters()).hex(), total.sum().item())
print("shares memory" if "/memfd:polytempo" in Path("/proc/self/maps").read_text() else "shares no memory")

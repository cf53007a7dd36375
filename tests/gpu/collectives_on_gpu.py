"""Ranks that share one GPU: tensors on it go through the CPU, and DDP over our back end trains as over one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import polytempo as pt

pt.init()
rank, size = pt.rank(), pt.size()
device = torch.device("cuda", 0)
for algorithm in ("auto", "ring", "tree", "halving-doubling", "double-tree"):
    x = torch.arange(1000.0, device=device) * (rank + 1)
    pt.all_reduce(x, algorithm=algorithm)
    assert x.is_cuda
    assert torch.equal(x.cpu(), torch.arange(1000.0) * sum(range(1, size + 1))), algorithm
parts = [torch.empty(5, device=device) for _ in range(size)]
pt.all_gather(parts, torch.full((5,), float(rank), device=device))
assert [part[0].item() for part in parts] == list(range(size))
if size == 1:
    x = torch.ones(1000, device=device)
    pt.all_reduce(x, op="mean", algorithm="native")  # NCCL, which takes one rank a GPU
    assert torch.equal(x, torch.ones(1000, device=device))
    print("native: NCCL")
else:
    dist.init_process_group("polytempo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3)).to(device)
    alone = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3)).to(device)
    alone.load_state_dict(model.state_dict())
    together = DistributedDataParallel(model, device_ids=[0])
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (together, alone)]
    inputs = torch.randn(4, size, 8, 20, generator=torch.Generator().manual_seed(1)).to(device)
    for step in inputs:
        for module, optimizer, batch in zip((together, alone), optimizers, (step[rank], step.flatten(0, 1)), strict=True):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    dist.destroy_process_group()
    print("DDP over polytempo on the GPU: as one process")
pt.shutdown()

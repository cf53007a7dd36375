"""Whoever started it: single messages, a group, and training with uneven data. The result of rank 0 goes to a file."""

from __future__ import annotations

import sys

import torch
from torch import nn

import polytempo as pt

BATCHES = (6, 4, 5)

pt.init()
rank, size = pt.rank(), pt.size()
assert (pt.local_rank(), pt.local_size()) == (rank, size)

if rank == 0:
    pt.send(torch.arange(5.0), dst=1)
elif rank == 1:
    received = torch.zeros(5)
    pt.recv(received, src=0)
    assert received.tolist() == [0, 1, 2, 3, 4]

handles = [pt.isend(torch.full((3,), float(rank)), (rank + 1) % size)]
received = torch.zeros(3)
handles.append(pt.irecv(received, (rank - 1) % size))
for handle in handles:
    handle.wait()
assert received.tolist() == [(rank - 1) % size] * 3

pair = pt.new_group([0, 1])
x = torch.full((2,), rank + 1.0)
pt.all_reduce(x, op=torch.distributed.ReduceOp.SUM, group=pair)
assert x.tolist() == ([3.0, 3.0] if rank < 2 else [3.0 + rank - 2] * 2)

torch.manual_seed(rank)  # all start from rank 0's
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
optimizer = pt.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
data = torch.Generator().manual_seed(5)
batches = [[(torch.randn(rows, 4, generator=data).double(), torch.randn(rows, 2, generator=data).double())
            for rows in (3, 5, 2)[:size]] for _ in range(max(BATCHES))]  # fmt: skip
for number in range(BATCHES[rank]):
    inputs, targets = batches[number][rank]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step(samples=len(inputs))
pt.shutdown()
torch.save([param.detach() for param in model.parameters()], f"{sys.argv[1]}/result-{rank}.pt")

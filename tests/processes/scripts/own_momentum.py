"""Two models in one job, of SGD with momentum and of Adam. What rank 0 has of their state at the start is printed."""

import torch
from torch import nn

import polytempo as pt

torch.set_num_threads(1)
pt.init()
torch.manual_seed(pt.rank())
models = nn.Linear(4, 2), nn.Linear(4, 2)
kinds = [lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), lambda params: torch.optim.Adam(params, lr=0.01)]
optimizers = [pt.DistributedOptimizer(kind(model.parameters()), model) for kind, model in zip(kinds, models, strict=True)]
if pt.rank() == 0:
    print("begins with", *(len(optimizer.state_dict()["state"]) for optimizer in optimizers), flush=True)
for _ in range(20):
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

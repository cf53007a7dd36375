"""Workers that end in different ways after their first step, by rank: well, and in three ways that are not."""

from __future__ import annotations

import sys

import torch

import polytempo as pt

pt.init()
model = torch.nn.Linear(3, 1)
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
pt.log(loss=torch.tensor(float("nan")), best=torch.ones(1))
if pt.rank() == 1:
    sys.exit(3)
elif pt.rank() == 2:
    raise SystemExit(4)
elif pt.rank() == 3:
    sys.excepthook = lambda *error: print("a hook of my own", file=sys.stderr)
    raise RuntimeError("this worker fails")

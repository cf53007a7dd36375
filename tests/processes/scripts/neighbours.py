"""Workers that learn one linear map from batches of their own, and look at the mean of their models at the end.

Usage: neighbours.py [steps=N] [pace=SECONDS] [die=RANK:STEP]
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import polytempo as pt

options = dict(argument.split("=") for argument in sys.argv[1:])
torch.set_num_threads(1)
pt.init()
torch.manual_seed(0)
truth = torch.randn(3, 6)
model = torch.nn.Linear(6, 3, bias=False)
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
torch.manual_seed(1 + pt.rank())
who, _, when = options.get("die", "-1:0").partition(":")
pace = float(options.get("pace", "0.002"))


def error() -> float:
    return (model.weight.detach() - truth).square().mean().item()


before = error()
for step in range(int(options.get("steps", "60"))):
    if (pt.rank(), step) == (int(who), int(when)):
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(16, 6)
    optimizer.zero_grad()
    (model(x) - x @ truth.T).square().mean().backward()
    time.sleep(pace)
    optimizer.step(samples=16)
optimizer.consolidate()
print(f"worker {pt.rank()}: error {before:.6f} before, {error():.6f} after {optimizer.stats['step']} steps")

"""A small regression by SGD with momentum 0.9, whose rate becomes far too high: once there is a checkpoint, where asked to.

Usage: diverging.py [rate=RATE] [after=FOLDER]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import polytempo as pt

options = dict(argument.split("=") for argument in sys.argv[1:])
torch.set_num_threads(1)
pt.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = pt.DistributedOptimizer(optimizer, model)
torch.manual_seed(pt.rank())
x, wanted = torch.randn(16, 5), torch.randn(16, 3)
deadline = time.monotonic() + 30
for step in range(80):
    if step == 20:
        while "after" in options and not any(Path(options["after"]).glob("step-*[0-9]")) and time.monotonic() < deadline:
            time.sleep(0.01)
        optimizer.param_groups[0]["lr"] = float(options.get("rate", "4"))
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), wanted).backward()
    optimizer.step(samples=len(x))
pt.shutdown()

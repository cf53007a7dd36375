"""A worker whose steps are sleeps: what is left to measure is synchronisation alone. Run by `prediction.py`."""

from __future__ import annotations

import random
import sys
import time

import torch

import polytempo as pt

torch.set_num_threads(1)
pt.init()
model = torch.nn.Linear(8, 8)
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
dice = random.Random(pt.rank())
for param in model.parameters():
    param.grad = torch.zeros_like(param)
while not pt.should_stop():
    time.sleep(float(sys.argv[1]) * dice.uniform(0.8, 1.2))
    optimizer.step()

"""Two passes over leased samples in micro-batches that take a while; each worker writes its process id first.

The second pass begins when the file `go` is there, so that a test can stop and continue a worker during the first.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import polytempo as pt

torch.set_num_threads(1)
pt.init()
model = torch.nn.Linear(4, 2)
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
data = TensorDataset(torch.randn(600, 4, generator=torch.Generator().manual_seed(0)))
sampler = pt.DistributedBatchSampler(data, 4)
Path(f"pid-{pt.rank()}.part").write_text(str(os.getpid()))
Path(f"pid-{pt.rank()}.part").rename(f"pid-{pt.rank()}")
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, batch_sampler=sampler):
        time.sleep(0.01 if epoch == 0 else 0.002)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step(samples=len(x))
    while epoch == 0 and not Path("go").exists():
        time.sleep(0.01)

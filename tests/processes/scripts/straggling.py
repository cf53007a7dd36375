"""A worker whose forward passes are sleeps in proportion to the length of its batches, with one trouble: its argument.

With `"own_clock"` in it, the worker measures what it sleeps, and nothing else: other load on the host is in no figure.
"""

from __future__ import annotations

import json
import math
import random
import sys
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

import polytempo as pt

WIDTH, ROWS = 200, 20


class Sleepy(torch.nn.Linear):
    """Takes as long as its input is."""

    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(batch) / ROWS)
        return super().forward(batch)


class Batches(Dataset):
    """Batches of drawn lengths; slow ones take a while to come."""

    def __init__(self, job: dict, dice: random.Random) -> None:
        self.sigma = job.get("sigma", 0.0)
        self.wait = job.get("wait", 0.0) if job.get("worker") == pt.rank() else 0.0
        self.dice = dice

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.wait:
            time.sleep(self.wait * self.dice.uniform(0.8, 1.2))
        length = max(2, round(ROWS * math.exp(self.dice.gauss(0, self.sigma)))) if self.sigma else ROWS
        return torch.randn(length, WIDTH)


job = json.loads(sys.argv[1])
if job.get("own_clock"):
    asleep, really_sleep = 0.0, time.sleep

    def sleep(seconds: float) -> None:
        global asleep
        really_sleep(seconds)
        if threading.current_thread() is threading.main_thread():
            asleep += seconds

    time.sleep, time.perf_counter = sleep, lambda: asleep

torch.set_num_threads(1)
pt.init()
dice = random.Random(f"{job['seed']}/{pt.rank()}")
torch.manual_seed(dice.randrange(1 << 30))
model = Sleepy(job["step"])
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)
mine = job.get("worker") in (None, pt.rank())
for batch in DataLoader(Batches(job, dice), batch_size=None):
    loss = model(batch).square().mean()
    if mine and dice.random() < job.get("stalls", 0.0):
        time.sleep(job["stall"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if pt.should_stop():
        break

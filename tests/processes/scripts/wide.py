"""Pushes a model of so many bytes a few times; asks after so many seconds without a byte: wide.py BYTES STEPS RETRY."""

from __future__ import annotations

import sys

import torch

from polytempo.launcher.job_facts import job_of_environment
from polytempo.session.session import as_current, open_session
from polytempo.train.optimizer import DistributedOptimizer

size, steps, retry = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
found = job_of_environment()
assert found is not None
session = open_session(*found, retry=retry)
param = torch.nn.Parameter(torch.zeros(size // 4))
with as_current(session):
    optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
for _ in range(steps):
    param.grad = torch.ones(size // 4)
    optimizer.step()
assert torch.equal(param.detach(), torch.full((size // 4,), -float(steps)))
print(f"took {optimizer.stats['step']} steps")
session.close()

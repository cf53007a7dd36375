"""A worker whose steps move one row of a `ServerEmbedding` by its own id, and another that all share; it says what it finds.

Usage: counting.py FOLDER [steps=N] [pace=SECONDS] [die=RANK:STEP]

Each step adds -1 to a row that only this worker has, and to row 0, which all have. Who comes to the end writes all rows to
FOLDER/rows-RANK.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import polytempo as pt

folder = Path(sys.argv[1])
options = dict(argument.split("=") for argument in sys.argv[2:])
torch.set_num_threads(1)
pt.init()
rank = pt.rank()
die_rank, _, die_at = options.get("die", "-1:-1").partition(":")

table = pt.tables.ServerEmbedding(None, 2, rule="sgd", lr=1.0, start="zeros", dtype=torch.float64)
model = torch.nn.ModuleDict({"table": table, "out": torch.nn.Linear(1, 1)})
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
ids = torch.tensor([0, 10**12 + rank])
for step in range(int(options.get("steps", "12"))):
    optimizer.zero_grad()
    table(ids).sum().backward()
    table.prefetch(ids)
    time.sleep(float(options.get("pace", "0.01")))
    if (rank, step) == (int(die_rank), int(die_at)):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    (folder / f"step-{rank}").write_text(str(step + 1))
size = pt.size()
rows = table.pull(torch.tensor([0, *(10**12 + other for other in range(size))]))
(folder / f"rows-{rank}").write_text(json.dumps(rows[:, 0].tolist()))

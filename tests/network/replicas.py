"""One rank of a job whose network breaks: rank r's gradient is 1 for parameter r, so the values say which ranks made them.

Usage: replicas.py FOLDER STEPS [PACE]

It writes its values after each step to a file, and in the end to another; a job by ballots goes on with MIN_WORKERS ranks,
and takes HOST_TIMEOUT from the environment, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import polytempo as pt

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
pace = float(sys.argv[3]) if len(sys.argv) > 3 else 0.1
torch.set_num_threads(1)
if "MIN_WORKERS" in os.environ:
    least, patience = int(os.environ["MIN_WORKERS"]), float(os.environ["HOST_TIMEOUT"])
    pt.init(sync=os.environ["SYNC"], min_workers=least, host_timeout=patience)
else:
    pt.init()
rank = pt.rank()
taken = (folder / f"taken-{rank}").open("w", buffering=1)
values = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))
optimizer = pt.DistributedOptimizer(torch.optim.SGD([values], lr=1.0), named_parameters=[("values", values)])
for _ in range(steps):
    optimizer.zero_grad()
    values[rank].backward()
    time.sleep(pace)
    optimizer.step(samples=1)
    taken.write(f"{json.dumps(values.tolist()[: pt.size()])}\n")
(folder / f"values-{rank}").write_text(json.dumps(values.tolist()[: pt.size()]))
pt.shutdown()

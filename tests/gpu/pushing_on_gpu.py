"""Run by `test_deaths_on_gpu.py`, `test_leaks.py` and `test_torn_reads.py` as a job: all elements have the same value.

Gradients are one number in all elements, added up by SGD with lr 1: a push or an answer of which a part is missing shows as
elements that differ. Values are whole numbers below 2**24, so sums are exact.

    pushing_on_gpu.py DEVICE MEGABYTES steps=N [die=RANK:STEP] [pause=STEP] [slow=RANK:MICROSECONDS] [shards]

die: the worker is killed in the middle of the push of that step: its stream sleeps, so that the copy is not made yet when it
ends. pause: all workers say so and sleep in the middle of that push, for a test that kills another process.
slow: the stream of that rank sleeps in each step, so that it reads its answer long after the server wrote it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import polytempo as pt

SECOND = 1_980_000_000  #: cycles of the GPU's clock, about
device, megabytes, *rest = sys.argv[1:]
options = dict(word.partition("=")[::2] for word in rest)
steps = int(options["steps"])
pt.init()
rank = pt.rank()
dying, death = (int(number) for number in options.get("die", "-1:-1").split(":"))
slow, microseconds = (int(number) for number in options.get("slow", "-1:0").split(":"))
model = nn.ParameterList(nn.Parameter(torch.zeros(int(float(megabytes) * (1 << 17)), device=device)) for _ in range(2))
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
weight = 1000.0 if rank == dying else 1.0
bad = torch.zeros((), dtype=torch.int64, device=device)
last = torch.zeros((), device=device)


def sleep(seconds: float) -> None:
    """Of the stream, so that what is given to it now is done later; of the process where there is no stream."""
    if device != "cpu":
        torch.cuda._sleep(int(seconds * SECOND))
    else:
        time.sleep(seconds)


for step in range(steps):
    optimizer.zero_grad()
    sum((param * weight).sum() for param in model).backward()  # type: ignore[union-attr]
    in_the_middle = step in (int(options.get("pause", "-1")), death if rank == dying else -1)
    if in_the_middle:
        if device != "cpu":
            torch.cuda.synchronize()
        if rank == dying:
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -KILL {os.getpid()}"])
        else:
            Path(f"middle-{rank}").touch()
        sleep(3.0)
    elif rank == slow:
        sleep(microseconds * 1e-6)
    optimizer.step()
    with torch.no_grad():  # on the device, without waiting for it
        low = torch.stack([param.min() for param in model]).min()
        high = torch.stack([param.max() for param in model]).max()
        bad += (low != high).long() + (high > last).long()
        last.copy_(low)
if dying < 0:
    pt.barrier()  # an asynchronous push counts by one over the number of workers: none leaves before all are done
optimizer.consolidate()
value = {float(x) for param in model for x in (param.min(), param.max())}
print(f"worker {rank}: {int(bad)} torn or stale reads in {steps} steps, values {sorted(value)}", flush=True)
pt.shutdown()

"""A worker whose steps take a given time, and which writes its own clocks: what it sent, what it started, and when.

Usage: paced.py FOLDER [steps=N] [until=FILE] [pace=SECONDS] [die=RANK:STEP:HOW] [lr=RANK:RATE] [model=RANK:WIDTH]
                [stop=SERVER]

stop=: when it is done, and has said so, it stops a server of its launcher with SIGSTOP.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch

import polytempo as pt

folder = Path(sys.argv[1])
options = dict(argument.split("=") for argument in sys.argv[2:])
torch.set_num_threads(1)
pt.init()
rank = pt.rank()


def mine(name: str, default: str) -> str:
    """The value of an option of the form RANK:VALUE, where this is the rank."""
    who, _, value = options.get(name, "").partition(":")
    return value if who == str(rank) else default


torch.manual_seed(0)
model = torch.nn.Linear(4, int(mine("model", "3")))
optimizer = torch.optim.SGD(model.parameters(), lr=float(mine("lr", "0.01")))
optimizer = pt.DistributedOptimizer(optimizer, model)
die_at, _, how = mine("die", "-1:").partition(":")
clocks = (folder / f"clock-{rank}").open("w", buffering=1)
pause = float(options.get("pace", "0.02"))

taken = 0


def is_done() -> bool:
    if "until" in options:
        return (folder / options["until"]).exists()
    return taken >= int(options.get("steps", "20"))


while not is_done() and not pt.should_stop():
    step = optimizer.stats["step"]
    clocks.write(f"start {step} {time.monotonic()}\n")
    if taken == int(die_at):
        clocks.write(f"die {step} {time.monotonic()}\n")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "hang":
            time.sleep(3600)
        elif how == "exit":
            sys.exit(7)
        raise RuntimeError(f"this worker was told to fail at step {step}")
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    time.sleep(pause)
    clocks.write(f"send {step} {time.monotonic()}\n")
    optimizer.step(samples=8)
    taken += 1
print(f"worker {rank} took {taken} steps")
if "stop" in options:
    pt.shutdown()
    siblings = psutil.Process(os.getppid()).children()
    servers = [p for p in siblings if "polytempo.launcher.server_process" in p.cmdline()]
    servers[int(options["stop"])].suspend()

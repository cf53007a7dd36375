"""A model that is spread by the job's `--strategy`; each rank writes down the losses of its replica.

Usage: spread.py FOLDER [steps=N] [die=RANK:STEP] [save=FOLDER] [resume=FOLDER] [init=SYNC]

FOLDER/losses-RANK holds the loss of each step. Replica d of D has every D-th sample of a batch, from d on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

WIDTH, BATCH = 8, 8


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))]
    return nn.Sequential(*layers).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def alone(steps: int, replicas: int) -> list[list[float]]:
    """For each replica the losses of its samples, of the model in one piece."""
    whole, losses = model(), [[] for _ in range(replicas)]
    optimizer = adam(list(whole.parameters()))
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        for replica in range(replicas):
            loss = nn.functional.mse_loss(whole(x[replica::replicas]), y[replica::replicas])
            (loss / replicas).backward()
            losses[replica].append(loss.item())
        optimizer.step()
    return losses


def main() -> None:
    import polytempo as pt

    folder = Path(sys.argv[1])
    options = dict(argument.split("=", 1) for argument in sys.argv[2:])
    torch.set_num_threads(1)
    pt.init()
    strategy = pt.Strategy.parse(options["strategy"]) if "strategy" in options else pt.Strategy.of_job()
    spread = strategy.distribute(model(), loss=nn.functional.mse_loss, optimizer=adam)
    if "resume" in options:
        spread.resume(options["resume"])
    rank, replica, replicas = pt.rank(), spread.point.data, spread.mesh.data
    die_rank, _, die_at = options.get("die", "-1:-1").partition(":")
    with (folder / f"losses-{rank}").open("w", buffering=1) as told:
        while spread.steps < int(options.get("steps", "4")) and not pt.should_stop():
            if (rank, spread.steps) == (int(die_rank), int(die_at)):
                layer = spread.pipeline.stage.part.module
                layer.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            x, y = batch(spread.steps)
            told.write(json.dumps(spread.step(x[replica::replicas], y[replica::replicas])) + "\n")
    if "save" in options:
        spread.save(options["save"])


if __name__ == "__main__":
    main()

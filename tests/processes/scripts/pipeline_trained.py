"""A stage of a model that three or so processes train together; it writes down the losses it was told.

Usage: pipeline_trained.py FOLDER [schedule=SPEC] [steps=N] [die=RANK:STEP] [checkpoint=FOLDER] [resume=FOLDER]

FOLDER/losses-RANK holds [step, loss] for each step; `alone` trains the same in one piece, with the same batches.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

WIDTH, BATCH, MICROBATCHES = 6, 8, 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def alone(steps: int) -> list[float]:
    """The losses of the model in one piece."""
    whole, losses = model(), []
    optimizer = adam(list(whole.parameters()))
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(whole(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    import polytempo as pt

    folder = Path(sys.argv[1])
    options = dict(argument.split("=", 1) for argument in sys.argv[2:])
    torch.set_num_threads(1)
    pt.init()
    rank = pt.rank()
    die_rank, _, die_at = options.get("die", "-1:-1").partition(":")
    pipe = pt.Pipeline(
        model(),
        loss=nn.functional.mse_loss,
        optimizer=adam,
        stages=[2] * pt.size(),
        schedule=options.get("schedule", "1f1b"),
        microbatches=MICROBATCHES,
        checkpoint=options.get("checkpoint"),
        checkpoint_every=1,
        resume=options.get("resume"),
    )
    with (folder / f"losses-{rank}").open("w", buffering=1) as told:
        for step in range(pipe.steps, int(options.get("steps", "6"))):
            if (rank, step) == (int(die_rank), int(die_at)):
                layer = pipe.stage.part.module
                layer.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            told.write(json.dumps([step, pipe.step(*batch(step))]) + "\n")
            if pt.should_stop():
                break


if __name__ == "__main__":
    main()

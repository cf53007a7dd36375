"""Joins its job three times, one after another, and says what came of each."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import polytempo as pt

DATA = torch.arange(24, dtype=torch.float64).reshape(2, 4, 3) / 10  # of two ranks


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2).double()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return model.weight.detach()


def train(life: int, rank: int) -> str:
    model = made(10 * life + rank)
    try:
        optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    except pt.UsageError as error:
        return f"refused: {error}"
    got = trained(model, optimizer, DATA[rank])
    alone = made(10 * life)
    wanted = trained(alone, torch.optim.SGD(alone.parameters(), lr=0.1), DATA[: pt.size()].reshape(-1, 3))
    return "trained" if torch.allclose(got, wanted, rtol=1e-12) else f"stale: {got} is not {wanted}"


def refusal_of_arrays() -> str:
    try:
        pt.tables.KV({"x": pt.tables.Array(4)})
    except pt.UsageError as error:
        return f"arrays refused: {error}"
    return "arrays"


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.01)


def main(folder: Path, launched: bool) -> None:
    for life in range(3):
        (folder / f"life-{life}-{os.environ.get('POLYTEMPO_RANK')}").touch()
        pt.init()
        total = torch.tensor([1.0 + life])
        pt.all_reduce(total)
        what = train(life, pt.rank()), refusal_of_arrays()
        sys.stdout.write(f"life {life} rank {pt.rank()} of {pt.size()}: sum {total.item():g}, {'; '.join(what)}\n")
        if launched and pt.rank() == 1 and life == 0:
            wait_for(folder / "life-1-0")  # rank 0 joins again while this one is still in its first life
        pt.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "POLYTEMPO_JOB" in os.environ)

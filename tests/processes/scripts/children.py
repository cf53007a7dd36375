"""A worker that starts processes: each imports the script, forks, inherits variables or claims a rank; none takes part.

Usage: children.py [as HOW]: what worker 0 starts runs this script again, `as child`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch.utils.data import DataLoader, Dataset

import polytempo as pt
from polytempo.launcher.job_facts import WORKER_VARIABLE

pt.init()  # a data loader's worker that is spawned comes through here, too
model = torch.nn.Linear(3, 1)


class Numbers(Dataset):  # type: ignore[type-arg]
    """Samples that know which rank the process had that made them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(pt.rank()), float(pt.size())])


def stepped(optimizer: pt.DistributedOptimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step(samples=len(x))


def forked() -> None:
    """The child is refused what is the worker's, and ends as scripts end."""
    child = os.fork()
    if child == 0:
        try:
            pt.log(accuracy=1.0)
        except pt.UsageError as error:
            print(f"forked, rank {pt.rank()} of {pt.size()}: {error}")
        pt.init()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0


def started(**changes: str) -> str:
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value}
    command = [sys.executable, __file__, "as", "child"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    return f"{done.returncode} {done.stdout.strip()} {(done.stderr.strip().splitlines() or [''])[-1]}"


if __name__ == "__main__" and sys.argv[1:] == ["as", "child"]:
    optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    stepped(optimizer, torch.ones(2, 3))
    print(f"rank {pt.rank()} of {pt.size()} took {optimizer.stats['step']} step")
elif __name__ == "__main__":
    optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    loader = DataLoader(
        Numbers(), batch_size=2, sampler=pt.DistributedSampler(Numbers()), num_workers=1, multiprocessing_context="spawn"
    )
    for x in loader:
        assert (x[:, 1] == pt.rank()).all()
        assert (x[:, 2] == pt.size()).all()
        stepped(optimizer, x)
    forked()
    stepped(optimizer, torch.ones(2, 3))
    if pt.rank() == 0:
        print("inherits:", started())
        print("claims:", started(**{WORKER_VARIABLE: ""}))
    stepped(optimizer, torch.ones(2, 3))
    print(f"worker {os.getpid()} took {optimizer.stats['step']} steps")

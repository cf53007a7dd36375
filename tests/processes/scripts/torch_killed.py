"""DDP over polytempo; rank 1 is killed. The others say what they were told, and how many seconds after."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import polytempo  # noqa: F401  tells torch the word

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def report(call: Callable[[], object], died: Path) -> None:
    try:
        call()
        print("no error")
    except RuntimeError as error:
        print(f"{time.time() - float(died.read_text()):.2f} {' '.join(str(error).split())}")


def train(died: Path) -> None:
    net = DistributedDataParallel(torch.nn.Linear(300, 300))
    for step in range(1000):
        if RANK == 1 and step == 3:
            died.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        net(torch.ones(4, 300)).sum().backward()


def main() -> None:
    dist.init_process_group("polytempo", init_method=f"file://{sys.argv[1]}", rank=RANK, world_size=SIZE)
    others, died = dist.new_group([0, 2]), Path(sys.argv[1] + "-died")
    report(lambda: train(died), died)
    report(lambda: dist.all_reduce(torch.ones(3)), died)
    report(dist.new_group, died)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=others)
    print("the others still have", tensor.item())


if __name__ == "__main__":
    main()

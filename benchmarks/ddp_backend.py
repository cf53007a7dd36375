"""DDP with one word changed: a training step of two processes over "gloo" and over "polytempo", measured in turn.

    python benchmarks/ddp_backend.py [--repeats 15] [--workers 2] [--views]

Prints JSON: the median seconds of a step with each, the ratio, and the same step without communication beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from rigs import Rig, Round, answer
from steps import MLP, VIEWS, _step, _task, plain_worker

BACKENDS = ("gloo", "polytempo")
LIMIT = "no communication"


def worker(pipe: Connection, rank: int, directory: str, size: int, backend: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from polytempo.torch_backend.register import register

    def make(work: str, variant: str) -> Round:
        model, optimizer, inputs, targets = _task(work, rank)
        together = DistributedDataParallel(model, gradient_as_bucket_view=variant == VIEWS)
        return _step(together, optimizer, inputs, targets)

    register()
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=size)
    answer(pipe, make)
    dist.destroy_process_group()


def start(stack: ExitStack, name: str, workers: int) -> Rig:
    rig = Rig()
    stack.callback(rig.close)
    if name == LIMIT:
        rig.add_workers(plain_worker, workers)
    else:
        rig.add_workers(worker, workers, str(rig.directory), workers, name)
    rig.pause()
    return rig


def measure(workers: int, repeats: int, variant: str) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in (*BACKENDS, LIMIT)}
    with ExitStack() as stack:
        rigs = {name: start(stack, name, workers) for name in seconds}
        for _ in range(repeats):
            for name, rig in rigs.items():
                with rig.awake():
                    seconds[name].append(rig.measure(MLP, variant))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--views", action="store_true", help="DDP with gradient_as_bucket_view")
    given = parser.parse_args()
    seconds = measure(given.workers, given.repeats, VIEWS if given.views else "")
    found: dict[str, Any] = {name: round(median(times), 4) for name, times in seconds.items()}
    pairs = zip(seconds["polytempo"], seconds["gloo"], strict=True)
    ratio = median(ours / theirs for ours, theirs in pairs)
    print(json.dumps({"step": MLP, "workers": given.workers, "views": given.views, **found, "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()

"""A process of `benchmarks/gpu.py`: joins its group, then takes turns that it is told over a socket, until that closes.

A turn is a number of steps of a model; the answer is the time at which the device had done each. All groups of a stage are
alive at once, so that plain PyTorch and the others are measured in turn, within seconds of each other.

    models: resnet50   `examples/resnet50.py`, its step and its clock
            mlp        10 layers of 32 x 32 in float32: nothing but overhead
            large      10 layers of 3200 x 3200 in float32: 410 MB of parameters
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from resnet50 import StepClock, resnet50, synthetic, training_step

#: Small enough that none diverges: labels are random.
RATE = 1e-4
LAYERS, WIDTH, LARGE = 10, 32, 3200
Step = Callable[[], None]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())))


class Worker:
    """One rank of a group.

    Args:
        kind: "plain", "ddp" or "ours".
        rank: Its number, by which it has data of its own.
        device: On which it trains.
        small: Sizes for a try without a GPU.
    """

    def __init__(self, kind: str, rank: int, device: torch.device, small: bool) -> None:
        self._kind, self._rank, self._device, self._small = kind, rank, device, small
        self._models: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}

    def turn(self, name: str, batch: int, steps: int) -> list[float]:
        """The times of these steps."""
        step = self._step(name, batch)
        clock = StepClock(self._device)
        for _ in range(steps):
            step()
            clock.tick()
        times = clock.finish()
        del step
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the other groups need room, too
        return times

    def _step(self, name: str, batch: int) -> Step:
        model, optimizer = self._models.get(name) or self._made(name)
        torch.manual_seed(1 + self._rank)
        batch = 2 if self._small else batch
        if name == "resnet50":
            images, labels = next(synthetic(batch, 32 if self._small else 224, self._device))
            return lambda: training_step(model, optimizer, images, labels)
        x = torch.randn(batch, self._width(name), device=self._device)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        return step

    def _width(self, name: str) -> int:
        return LARGE if name == "large" and not self._small else WIDTH

    def _made(self, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = resnet50() if name == "resnet50" else mlp(self._width(name))
        model = model.to(self._device, memory_format=torch.channels_last) if name == "resnet50" else model.to(self._device)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        if self._kind == "ours":
            import polytempo as pt

            optimizer = pt.DistributedOptimizer(optimizer, model)
        elif self._kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        self._models[name] = model, optimizer
        return model, optimizer


def join(kind: str, backend: str, meeting: str) -> int:
    """Join the group; the own rank."""
    if kind == "ours":
        import polytempo as pt

        pt.init()
        return pt.rank()
    rank = int(os.environ["RANK"])
    if kind == "ddp":
        import torch.distributed as dist

        import polytempo  # noqa: F401 - registers the back end

        dist.init_process_group(
            backend, init_method=f"file://{meeting}", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
        )
    return rank


def leave(kind: str) -> None:
    if kind == "ours":
        import polytempo as pt

        pt.shutdown()
    elif kind == "ddp":
        import torch.distributed as dist

        dist.destroy_process_group()


def serve(line: Connection, worker: Worker) -> None:
    """Take turns until there are no more."""
    while (request := line.recv()) is not None:
        line.send(("times", worker.turn(*request)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("plain", "ddp", "ours"))
    parser.add_argument("line", help="the socket over which turns are told")
    parser.add_argument("--backend", default="")
    parser.add_argument("--meeting", default="", help="a file where ranks of torch.distributed meet")
    parser.add_argument("--cpu", action="store_true", help="small models on the CPU: a try of the benchmark, no figures")
    given = parser.parse_args()
    device = torch.device("cpu" if given.cpu else "cuda:0")
    if given.cpu:
        torch.set_num_threads(1)
    with Client(given.line, "AF_UNIX") as line:
        try:
            rank = join(given.kind, given.backend, given.meeting)
            line.send(("ready", rank))
            serve(line, Worker(given.kind, rank, device, given.cpu))
            leave(given.kind)
        except Exception as error:
            line.send(("failed", f"{type(error).__name__}: {error}"))
            traceback.print_exc()
            raise


if __name__ == "__main__":
    main()

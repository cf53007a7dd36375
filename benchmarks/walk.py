"""Which source files one warm training step enters, in order: the walks of docs/architecture.md.

    python benchmarks/walk.py            # all walks
    python benchmarks/walk.py servers    # one of: servers, run-allreduce, allreduce, pipeline

A job of two workers runs in threads over Unix sockets, as the processes of one host do. After some warm-up steps one step
(forward, backward, update) is profiled: every call of a function of `polytempo`, in the thread of rank 0 and in the threads
of servers and progress engines. Printed are the files in the order of their first call, with the number of calls: first
those that the worker's own thread enters, then those that only other threads enter.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import polytempo
from polytempo.pipeline.pipeline import Pipeline
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

SOURCE = str(Path(polytempo.__file__).parent) + "/"
WARM = 5
WORKERS = 2


class Walk:
    """Counts calls by source file while `recording`, in all threads but those of the other workers."""

    def __init__(self) -> None:
        self.worker: Counter[str] = Counter()  # in the order of the first call
        self.others: Counter[str] = Counter()  # of servers and progress threads
        self.recording = False
        self._threads: dict[int, int] = {}  # of workers: thread to rank

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.recording or event != "call":
            return
        rank, path = self._threads.get(threading.get_ident()), frame.f_code.co_filename
        if not rank and path.startswith(SOURCE) and frame.f_code.co_name != "<module>":
            calls = self.others if rank is None else self.worker
            calls[path.removeprefix(SOURCE)] += 1

    def files(self) -> list[tuple[str, int, int]]:
        """Path, calls in the worker's thread, calls in other threads."""
        return [(path, self.worker[path], self.others[path]) for path in dict.fromkeys([*self.worker, *self.others])]

    def steps(self, rank: int, step: Callable[[], object], together: threading.Barrier) -> None:
        """Warm up, then one step that is recorded."""
        self._threads[threading.get_ident()] = rank
        for _ in range(WARM):
            step()
        together.wait()
        self.recording = True
        step()
        together.wait()
        self.recording = False


class HostJob(ThreadJob):
    """Servers and workers in threads, over Unix sockets and shared memory."""

    wire = "ipc"


class HostGroup(GroupJob):
    """Workers in threads without servers, over Unix sockets and shared memory."""

    wire = "ipc"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def train(walk: Walk, together: threading.Barrier) -> Callable[[Session], None]:
    """Data-parallel training, as a script writes it."""

    def work(session: Session) -> None:
        net = model()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net)
        x, y = torch.randn(16, 32), torch.randint(2, (16,))

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step(samples=len(x))

        walk.steps(session.rank, step, together)

    return work


def servers(walk: Walk, together: threading.Barrier) -> None:
    with HostJob(WORKERS, 1, "ssp:3") as job:
        job.run(train(walk, together))


def run_allreduce(walk: Walk, together: threading.Barrier) -> None:
    with HostJob(WORKERS, 1, "bsp", via="allreduce") as job:
        job.run(train(walk, together))


def allreduce(walk: Walk, together: threading.Barrier) -> None:
    with HostGroup(WORKERS) as job:
        job.run(train(walk, together))


def pipeline(walk: Walk, together: threading.Barrier) -> None:
    def work(session: Session) -> None:
        pipe = Pipeline(
            model(),
            loss=nn.functional.cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            stages=WORKERS,
            schedule="1f1b",
            microbatches=4,
        )
        x, y = torch.randn(16, 32), torch.randint(2, (16,))
        walk.steps(session.rank, lambda: pipe.step(x, y), together)

    with HostGroup(WORKERS) as job:
        job.run(work)


WALKS: dict[str, tuple[str, Callable[[Walk, threading.Barrier], None]]] = {
    "servers": ("a step over servers (ssp:3, one server, two workers)", servers),
    "run-allreduce": (
        "a step by all-reduce under polytempo run (bsp, shared memory, coordinator decides the round)",
        run_allreduce,
    ),
    "allreduce": ("a step by all-reduce under torchrun (bsp, collectives, ranks vote)", allreduce),
    "pipeline": ("a step of a pipeline (1f1b, two stages, four microbatches)", pipeline),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"some of {', '.join(WALKS)}; all by default")
    chosen = parser.parse_args().walks or list(WALKS)
    for unknown in set(chosen) - set(WALKS):
        parser.error(f"expected some of {', '.join(WALKS)}, got {unknown}")
    torch.set_num_threads(1)
    for name in chosen:
        title, run = WALKS[name]
        walk = Walk()
        threading.setprofile(walk.profile)
        try:
            run(walk, threading.Barrier(WORKERS))
        finally:
            threading.setprofile(None)
        files = walk.files()
        print(f"{name}: {title}: {len(files)} files, {walk.worker.total() + walk.others.total()} calls")
        print(f"      {'file':40} {'worker':>6} {'others':>6}")
        for place, (path, *counts) in enumerate(files, 1):
            print(f"{place:4}  {path:40} " + " ".join(f"{count or '':>6}" for count in counts))
        print()
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Whole training steps (forward, backward, optimizer): together with others, beside DDP; and alone, beside plain PyTorch.

SGD with momentum, one thread a process. The limit is the same step in as many processes at once that do not communicate. It
is no strict one: `zero_grad` gives the gradients' memory back, and 80 MB of fresh pages cost some 20 ms a step, which those
save that keep gradients in buckets. So DDP is shown as it comes and with `gradient_as_bucket_view`; the bar is on the first.
"""

from __future__ import annotations

import os
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from cases import Bar, Case, Cell, Ratio, Subject
from jobs import start_job
from rigs import Rig, Round, answer

MLP, CNN, SMALL = "MLP of 80 MB", "small CNN", "MLP of 20 MB"
VIEWS = "views"


def _mlp(width: int, batch: int) -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(batch, width), torch.randint(width, (batch,))


def _cnn(batch: int) -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
    rest = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(*convolutions, *rest), torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))


#: Model, inputs and targets. The batches make a step alone last about 150, 10 and 100 ms.
TASKS = {MLP: partial(_mlp, 2240, 64), CNN: partial(_cnn, 32), SMALL: partial(_mlp, 1120, 256)}
#: Of these megabytes, with a batch so small that most of a step is the exchange.
WIDTHS = {"10 MB": 809, "100 MB": 2560}
OPTIMIZERS = ("SGD", "Adam")
TASKS |= {f"{size}, {kind}": partial(_mlp, width, 8) for kind in OPTIMIZERS for size, width in WIDTHS.items()}


def task_of(work: str, rank: int) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, inputs and targets; every worker has data of its own."""
    import torch

    torch.manual_seed(rank)
    model, inputs, targets = TASKS[work]()
    if work.endswith("Adam"):
        return model, torch.optim.Adam(model.parameters(), lr=1e-5), inputs, targets
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), inputs, targets


def step_of(model: Any, optimizer: Any, inputs: Any, targets: Any) -> Round:
    """One training step."""
    from torch.nn.functional import cross_entropy

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def plain_worker(pipe: Connection, rank: int) -> None:
    answer(pipe, lambda work, _: step_of(*task_of(work, rank)))


def our_worker(pipe: Connection, rank: int, job_file: str | None, via: str | None) -> None:
    """The way is asked for by name, so that a job which cannot take it says so instead of taking another."""
    import polytempo as pt

    def make(work: str, variant: str) -> Round:
        model, optimizer, inputs, targets = task_of(work, rank)
        return step_of(model, pt.DistributedOptimizer(optimizer, model, via=via), inputs, targets)

    pt.init(job_file, rank if job_file else None)
    answer(pipe, make)
    pt.shutdown()


def ranked_worker(pipe: Connection, rank: int, directory: str, size: int) -> None:
    """As torchrun starts it: without servers and without a coordinator."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "TORCHELASTIC_RUN_ID": directory,
    }
    os.environ |= {name: str(value) for name, value in names.items()}
    our_worker(pipe, rank, None, None)


def ddp_worker(pipe: Connection, rank: int, directory: str, size: int, backend: str = "gloo") -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import polytempo  # noqa: F401  the name of its back end

    def make(work: str, variant: str) -> Round:
        model, optimizer, inputs, targets = task_of(work, rank)
        together = DistributedDataParallel(model, gradient_as_bucket_view=variant == VIEWS)
        return step_of(together, optimizer, inputs, targets)

    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=size)
    answer(pipe, make)
    dist.destroy_process_group()


def start_plain(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(plain_worker, workers)


def start_by_server(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(our_worker, workers, start_job(rig, workers, servers, "bsp"), "ps")


def start_with_momentum(kept: str, rig: Rig, workers: int, servers: int) -> None:
    """In mode asp, with momentum kept there."""
    rig.add_workers(our_worker, workers, start_job(rig, workers, servers, f"asp,momentum={kept}"), "ps")


def start_by_all_reduce(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(our_worker, workers, start_job(rig, workers, servers, "bsp", via="allreduce"), "allreduce")


def start_without_launcher(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(our_worker, 1, None, None)


def start_ddp_with_memory_kept(rig: Rig, workers: int, servers: int) -> None:
    """With the environment that our launcher gives its workers: what of our lead is only that?"""
    from polytempo.launcher.job_processes import KEEP_MEMORY

    rig.environment = KEEP_MEMORY
    start_ddp(rig, workers, servers)


def start_ddp(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(ddp_worker, workers, str(rig.directory), workers)


def start_ddp_on_ours(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(ddp_worker, workers, str(rig.directory), workers, "polytempo")


def start_ranked(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(ranked_worker, workers, str(rig.directory), workers)


OURS = ("ours, server", "ours, all-reduce")
OVER_DDP = Ratio("ours (best) / DDP", OURS, ("DDP",))
PLAIN = "limit: no communication"
KEPT = "DDP, our malloc settings"

BSP = Case(
    name="bsp",
    title="A BSP training step of 2 processes, milliseconds",
    cells=tuple(Cell(work, work, workers=2, servers=1) for work in (MLP, CNN)),
    subjects=(
        Subject(OURS[0], start_by_server),
        Subject(OURS[1], start_by_all_reduce),
        Subject("DDP", start_ddp),
        Subject("DDP, bucket views", start_ddp, VIEWS),
        Subject(KEPT, start_ddp_with_memory_kept),
        Subject(PLAIN, start_plain),
    ),
    ratios=(
        OVER_DDP,
        Ratio("ours (best) / bucket views", OURS, ("DDP, bucket views",)),
        Ratio("ours (best) / memory kept", OURS, (KEPT,)),
        Ratio("ours (best) / limit", OURS, (PLAIN,)),
    ),
    bars=(Bar(OVER_DDP, (MLP,), most=0.85), Bar(OVER_DDP, (CNN,), most=1.0)),
)

SERVER, ALONE, TORCH = "ours, a server", "ours, no launcher", "limit: plain PyTorch"
THROUGH_SERVER = Ratio("server / plain", (SERVER,), (TORCH,))
NO_LAUNCHER = Ratio("no launcher / plain", (ALONE,), (TORCH,))

JOB_OF_ONE = Case(
    name="alone",
    title="A training step in a job of one, milliseconds",
    cells=(Cell(SMALL, SMALL, workers=1, servers=1),),
    subjects=(
        Subject(SERVER, start_by_server),
        Subject(ALONE, start_without_launcher),
        Subject(TORCH, start_plain),
    ),
    ratios=(THROUGH_SERVER, NO_LAUNCHER),
    bars=(Bar(THROUGH_SERVER, (SMALL,), most=1.10), Bar(NO_LAUNCHER, (SMALL,), most=1.02)),
)

WORD = Ratio("DDP on polytempo / DDP on gloo", ("DDP on polytempo",), ("DDP on gloo",))
VIEWED = Ratio("same, with bucket views", ("DDP on polytempo, views",), ("DDP on gloo, views",))

BACKEND = Case(
    name="backend",
    title="DDP with one word changed: a training step of 2 processes, milliseconds",
    cells=tuple(Cell(work, work, workers=2) for work in (MLP, CNN)),
    subjects=(
        Subject("DDP on polytempo", start_ddp_on_ours),
        Subject("DDP on gloo", start_ddp),
        Subject("DDP on polytempo, views", start_ddp_on_ours, VIEWS),
        Subject("DDP on gloo, views", start_ddp, VIEWS),
        Subject("DistributedOptimizer, as torchrun starts it", start_ranked),
        Subject(PLAIN, start_plain),
    ),
    ratios=(
        WORD,
        VIEWED,
        Ratio("DistributedOptimizer / DDP on gloo", ("DistributedOptimizer, as torchrun starts it",), WORD.under),
    ),
    bars=(Bar(WORD, (MLP,), most=0.90),),
)

WHERE = {
    "on the server": partial(start_with_momentum, "server"),
    "at each worker": partial(start_with_momentum, "lookahead"),
}
MOVED = Ratio("at each worker / on the server", ("at each worker",), ("on the server",))


def _momentum_cells(workers: int) -> tuple[Cell, ...]:
    works = [f"{size}, {kind}" for kind in OPTIMIZERS for size in WIDTHS]
    return tuple(Cell(f"{work}, {workers} worker{'s' * (workers > 1)}", work, workers, servers=1) for work in works)


ALONE_OR_FOUR = (*_momentum_cells(1), *_momentum_cells(4))

MOMENTUM = Case(
    name="momentum",
    title="A training step in mode asp, SGD with momentum and Adam, by where momentum is kept, milliseconds",
    cells=ALONE_OR_FOUR,
    subjects=tuple(Subject(name, start) for name, start in WHERE.items()),
    ratios=(MOVED,),
    bars=(Bar(MOVED, tuple(cell.name for cell in ALONE_OR_FOUR if "SGD" in cell.name), most=1.05),),
    repeats=(15, 3),
)

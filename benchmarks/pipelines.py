"""A training step of a model that is cut in two, beside torch.distributed.pipelining, one process, and the ideal.

Eight linear layers with ReLU between, SGD, one thread a process; the batch in four microbatches, and nothing is computed
again in backward. The ideal is what one process needs for the whole batch, spread over K processes that wait for nothing but
the schedule: (M + K - 1) / (M K) of it. One process multiplies matrices of M times as many rows, which costs less a row, and
has the machine's memory and its caches for itself. So there is a second limit, "apart": both processes at once, each with
its stage's layers and the same microbatches, where no process waits for another; (M + K - 1) / M of that.
"""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from cases import Bar, Case, Cell, Ratio, Subject
from jobs import start_job
from pipelines_peer import torch_worker
from rigs import Rig, Round, answer

LAYERS, WIDTH, BATCH = 8, 1024, 256
STAGES, MICROBATCHES = 2, 4
CUTS = (LAYERS, LAYERS - 1)  #: a linear layer and its ReLU count as two; the last has none
GPIPE, ONE_F_ONE_B = "gpipe", "1f1b"
SPARE = f"{ONE_F_ONE_B}, one spare"  #: room for the activations of one microbatch more at each stage
SPECS = {GPIPE: "gpipe,recompute=0", ONE_F_ONE_B: "1f1b,recompute=0", SPARE: "1f1b,recompute=0,spare=1"}


def task(work: str) -> tuple[Any, Any, Any, int]:
    """Model, inputs, targets and how many microbatches."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,)), MICROBATCHES


def make_optimizer(params: Iterable[Any]) -> Any:
    """The same for all."""
    import torch

    return torch.optim.SGD(params, lr=1e-3)


def loss(found: Any, targets: Any) -> Any:
    """The mean over a microbatch."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(found, targets)


def our_worker(pipe: Connection, rank: int, job_file: str) -> None:
    import polytempo as pt

    def make(work: str, variant: str) -> Round:
        model, inputs, targets, microbatches = task(work)
        made = pt.Pipeline(
            model,
            loss=loss,
            optimizer=make_optimizer,
            stages=list(CUTS),
            schedule=SPECS[work],
            microbatches=microbatches,
        )
        return lambda: made.step(inputs, targets)

    pt.init(job_file, rank)
    answer(pipe, make)
    pt.shutdown()


def whole_worker(pipe: Connection, rank: int) -> None:
    """The whole model and the whole batch."""

    def make(work: str, variant: str) -> Round:
        model, inputs, targets, _ = task(work)
        optimizer = make_optimizer(model.parameters())

        def step() -> None:
            loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    answer(pipe, make)


def apart_worker(pipe: Connection, rank: int) -> None:
    """A stage's work on all microbatches, by autograd, with inputs and gradients that are there already."""

    def make(work: str, variant: str) -> Round:
        import torch

        model, inputs, targets, microbatches = task(work)
        stage = model[: CUTS[0]] if rank == 0 else model[CUTS[0] :]
        optimizer = make_optimizer(stage.parameters())
        pieces = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
        given = torch.randn(BATCH // microbatches, WIDTH)

        def step() -> None:
            for piece, target in pieces:
                if rank == 0:
                    stage(piece).backward(given)
                else:
                    (loss(stage(piece.detach().requires_grad_()), target) / microbatches).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    answer(pipe, make)


def start_ours(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(our_worker, workers, start_job(rig, workers, servers, "bsp", via="allreduce"))


def start_torch(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(torch_worker, workers, str(rig.directory), workers)


def start_torch_with_memory_kept(rig: Rig, workers: int, servers: int) -> None:
    """With the environment that our launcher gives its workers: what of a lead is only that?"""
    from polytempo.launcher.job_processes import KEEP_MEMORY

    rig.environment = KEEP_MEMORY
    start_torch(rig, workers, servers)


def start_one(rig: Rig, workers: int, servers: int) -> None:
    """However many work together elsewhere."""
    from polytempo.launcher.job_processes import KEEP_MEMORY

    rig.environment = KEEP_MEMORY
    rig.add_workers(whole_worker, 1)


def start_apart(rig: Rig, workers: int, servers: int) -> None:
    from polytempo.launcher.job_processes import KEEP_MEMORY

    rig.environment = KEEP_MEMORY
    rig.add_workers(apart_worker, workers)


def apart(rig: Rig, work: str, variant: str) -> float:
    return rig.measure(work, variant) * (MICROBATCHES + STAGES - 1) / MICROBATCHES


def ideal(rig: Rig, work: str, variant: str) -> float:
    return rig.measure(work, variant) * (MICROBATCHES + STAGES - 1) / (MICROBATCHES * STAGES)


OURS, TORCH, KEPT, IDEAL, APART = "ours", "torch", "torch, our malloc settings", "ideal", "apart"
OVER_TORCH = Ratio("ours / torch", (OURS,), (TORCH,))

CASE = Case(
    name="pipelines",
    title=f"A step of a model in {STAGES} stages, {MICROBATCHES} microbatches, beside torch.distributed.pipelining",
    cells=tuple(Cell(work, work, workers=STAGES, servers=1) for work in SPECS),
    subjects=(
        Subject(OURS, start_ours),
        Subject(TORCH, start_torch),
        Subject(KEPT, start_torch_with_memory_kept),
        Subject("one process", start_one),
        Subject(IDEAL, start_one, meter=ideal),
        Subject(APART, start_apart, meter=apart),
    ),
    ratios=(
        OVER_TORCH,
        Ratio("ours / memory kept", (OURS,), (KEPT,)),
        Ratio("ours / ideal", (OURS,), (IDEAL,)),
        Ratio("ours / apart", (OURS,), (APART,)),
    ),
    bars=(Bar(OVER_TORCH, (GPIPE, ONE_F_ONE_B), most=0.80),),
    repeats=(15, 5),  # matrix products alone differ by 15 % from one second to the next
)

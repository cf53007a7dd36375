"""A training step of a transformer spread over four processes, beside what torch composes for the same mesh over gloo.

    data=4            DistributedDataParallel
    data=2,pipe=2     torch.distributed.pipelining (1F1B), and one all-reduce of all gradients between the replicas
                      (with a stage in DistributedDataParallel its backward fails)
    data=2,tensor=2   DTensor (`parallelize_module`), and the same all-reduce

The model is the block of `tensor_parallel.py`, four times, and a head; AdamW; one thread a process. "alone": one process
with the whole model and the joint batch, the limit of a machine with one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import tensor_parallel
from cases import Bar, Case, Cell, Ratio, Subject
from jobs import start_job
from rigs import Rig, Round, answer

BLOCKS, BATCH, LENGTH, WIDTH, RANKS, CLASSES = 4, 16, 64, 512, 4, 64
STRATEGIES = ("data=4", "data=2,pipe=2", "data=2,tensor=2")
MICROBATCHES = 2


def task() -> tuple[Any, Any, Any, dict[str, Any]]:
    """Model, inputs, targets of the joint batch, and the plan of its split layers."""
    import torch
    from torch import nn

    blocks = [tensor_parallel.task(f"{tensor_parallel.LAYER}, {BATCH} x {LENGTH} x {WIDTH}") for _ in range(BLOCKS)]
    torch.manual_seed(0)
    model = nn.Sequential(*(block for block, _, _ in blocks), nn.Linear(WIDTH, CLASSES))
    plan = {f"{number}.{name}": style for number, (_, _, styles) in enumerate(blocks) for name, style in styles.items()}
    return model, torch.randn(BATCH, LENGTH, WIDTH), torch.randint(CLASSES, (BATCH, LENGTH)), plan


def loss(found: Any, targets: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(found.flatten(0, 1), targets.flatten())


def make_optimizer(params: Iterable[Any]) -> Any:
    import torch

    return torch.optim.AdamW(params, lr=1e-4)


def our_worker(pipe: Connection, rank: int, job_file: str) -> None:
    import polytempo as pt

    def make(work: str, variant: str) -> Round:
        strategy = pt.Strategy.parse(work)
        model, inputs, targets, plan = task()
        replicas = strategy.mesh(RANKS).data
        own = strategy.mesh(RANKS).point(rank).data
        x, y = inputs.chunk(replicas)[own], targets.chunk(replicas)[own]
        styles = {**plan, str(BLOCKS): "replicate"} if strategy.tensor > 1 else None
        made = strategy.distribute(model, loss=loss, optimizer=make_optimizer, tensor_plan=styles)
        return lambda: made.step(x, y)

    pt.init(job_file, rank)
    answer(pipe, make)
    pt.shutdown()


def torch_worker(pipe: Connection, rank: int, directory: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    pairs = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    inside = next(group for ranks, group in list(pairs.items())[:2] if rank in ranks)
    across = next(group for ranks, group in list(pairs.items())[2:] if rank in ranks)
    makers: dict[str, Callable[[], Round]] = {
        "data=4": lambda: _mirrored(rank),
        "data=2,pipe=2": lambda: _staged(rank, inside, across),
        "data=2,tensor=2": lambda: _sharded(rank, inside, across),
    }
    answer(pipe, lambda work, _: makers[work]())
    dist.destroy_process_group()


def _mirrored(rank: int) -> Round:
    from torch.nn.parallel import DistributedDataParallel

    model, inputs, targets, _ = task()
    whole = DistributedDataParallel(model)
    return _step(whole, inputs.chunk(RANKS)[rank], targets.chunk(RANKS)[rank], make_optimizer(model.parameters()))


def _step(model: Any, x: Any, y: Any, optimizer: Any, average: Callable[[], object] = lambda: None) -> Round:
    def one_round() -> None:
        loss(model(x), y).backward()
        average()
        optimizer.step()
        optimizer.zero_grad()

    return one_round


def _staged(rank: int, inside: Any, across: Any) -> Round:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, inputs, targets, _ = task()
    replica, number = divmod(rank, 2)
    layers = list(model)
    part = nn.Sequential(*(layers[: BLOCKS // 2] if number == 0 else layers[BLOCKS // 2 :]))
    optimizer = make_optimizer(part.parameters())
    schedule = Schedule1F1B(PipelineStage(part, number, 2, torch.device("cpu"), group=inside), MICROBATCHES, loss_fn=loss)
    x, y = inputs.chunk(2)[replica], targets.chunk(2)[replica]

    def one_round() -> None:
        schedule.step(x) if number == 0 else schedule.step(target=y, losses=[])
        _average(part.parameters(), across)
        optimizer.step()
        optimizer.zero_grad()

    return one_round


def _average(params: Iterable[Any], across: Any) -> None:
    """The mean of two replicas' gradients, in one all-reduce."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    local = [param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad for param in params]
    flat = torch.cat([gradient.flatten() for gradient in local])
    dist.all_reduce(flat, group=across)
    for gradient, mean in zip(local, flat.div_(2).split([gradient.numel() for gradient in local]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _sharded(rank: int, inside: Any, across: Any) -> Round:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    model, inputs, targets, plan = task()
    parallelize_module(model, DeviceMesh.from_group(inside, "cpu"), plan)
    params, replica = list(model.parameters()), rank // 2
    x, y = inputs.chunk(2)[replica], targets.chunk(2)[replica]
    return _step(model, x, y, make_optimizer(params), lambda: _average(params, across))


def alone_worker(pipe: Connection, rank: int) -> None:
    def make(work: str, variant: str) -> Round:
        model, inputs, targets, _ = task()
        return _step(model, inputs, targets, make_optimizer(model.parameters()))

    answer(pipe, make)


def start_ours(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(our_worker, workers, start_job(rig, workers, servers, "bsp", via="allreduce"))


def start_torch(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(torch_worker, workers, str(rig.directory))


def start_alone(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(alone_worker, 1)


CELLS = tuple(Cell(strategy, strategy, RANKS, servers=1) for strategy in STRATEGIES)
GAIN = Ratio("torch over gloo / ours", ("torch over gloo",), ("ours",))

CASE = Case(
    name="mesh",
    title=f"A training step on {RANKS} processes: {BLOCKS} transformer blocks, {BATCH} x {LENGTH} tokens",
    cells=CELLS,
    subjects=(
        Subject("ours", start_ours),
        Subject("torch over gloo", start_torch),
        Subject("alone", start_alone),
    ),
    ratios=(GAIN, Ratio("alone / ours", ("alone",), ("ours",))),
    bars=(Bar(GAIN, STRATEGIES, least=1, mean=True),),
    repeats=(5, 2),
)

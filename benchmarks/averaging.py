"""A block of four local steps and the average of the models after it, beside torch's `PeriodicModelAverager` over gloo.

The limit is the same four steps in as many processes that never average. SGD with momentum, one thread a process.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from cases import Bar, Case, Cell, Ratio, Subject
from jobs import start_job
from rigs import Rig, Round, answer
from steps import CNN, MLP, PLAIN, step_of, task_of

PERIOD = 4


def _block(step: Round) -> Round:
    def block() -> None:
        for _ in range(PERIOD):
            step()

    return block


def plain_worker(pipe: Connection, rank: int) -> None:
    answer(pipe, lambda work, _: _block(step_of(*task_of(work, rank))))


def our_worker(pipe: Connection, rank: int, job_file: str, via: str) -> None:
    import polytempo as pt

    def make(work: str, variant: str) -> Round:
        model, optimizer, inputs, targets = task_of(work, rank)
        return _block(step_of(model, pt.DistributedOptimizer(optimizer, model, via=via), inputs, targets))

    pt.init(job_file, rank)
    answer(pipe, make)
    pt.shutdown()


def torch_worker(pipe: Connection, rank: int, directory: str, size: int) -> None:
    import torch.distributed as dist
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    def make(work: str, variant: str) -> Round:
        model, optimizer, inputs, targets = task_of(work, rank)
        step, averager = step_of(model, optimizer, inputs, targets), PeriodicModelAverager(PERIOD)

        def step_and_average() -> None:
            step()
            averager.average_parameters(model.parameters())

        return _block(step_and_average)

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    answer(pipe, make)
    dist.destroy_process_group()


def start_plain(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(plain_worker, workers)


def start_by_all_reduce(rig: Rig, workers: int, servers: int) -> None:
    job = start_job(rig, workers, servers, f"local:{PERIOD}", via="allreduce")
    rig.add_workers(our_worker, workers, job, "allreduce")


def start_by_server(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(our_worker, workers, start_job(rig, workers, servers, f"local:{PERIOD}"), "ps")


def start_torch(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(torch_worker, workers, str(rig.directory), workers)


OURS, SERVER, TORCH = "ours, all-reduce", "ours, server", "torch's averager, gloo"
OVER_TORCH = Ratio("ours / torch's averager", (OURS,), (TORCH,))

CASE = Case(
    name="averaging",
    title=f"{PERIOD} local steps and an average, 2 processes, milliseconds",
    cells=tuple(Cell(work, work, workers=2, servers=1) for work in (MLP, CNN)),
    subjects=(
        Subject(OURS, start_by_all_reduce),
        Subject(SERVER, start_by_server),
        Subject(TORCH, start_torch),
        Subject(PLAIN, start_plain),
    ),
    ratios=(OVER_TORCH, Ratio("ours / limit", (OURS,), (PLAIN,))),
    bars=(Bar(OVER_TORCH, (MLP, CNN), most=1.0),),
)

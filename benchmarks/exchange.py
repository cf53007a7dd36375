"""Push and pull through a parameter server, plain SGD on both sides: ours, `torch.distributed.rpc` and a Ray actor.

Every worker holds a parameter of a given size, pushes a gradient, the server takes an SGD step, and the new values come back
into the parameter. Ours is what a user calls, `DistributedOptimizer.step()` in mode asp over `ipc://`, where the gradient
lies where the last backward left it; or, in a row of its own, is assigned anew each round, so that it must be copied.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from cases import Bar, Case, Cell, Ratio, Subject, bytes_of
from jobs import start_job
from limits import COPY
from ray_peer import start_ray
from rigs import Rig, RigFailed, Round, answer
from rpc_peer import GRADIENT, LR, start_rpc

ANEW = "anew"


def exchange_worker(pipe: Connection, rank: int, job_file: str) -> None:
    import torch

    import polytempo as pt

    def make(size: str, variant: str) -> Round:
        parameter = torch.nn.Parameter(torch.zeros(bytes_of(size) // 4))
        optimizer = pt.DistributedOptimizer(torch.optim.SGD([parameter], lr=LR))
        plain = torch.full_like(parameter, GRADIENT)
        (parameter * plain).sum().backward()
        optimizer.step()
        if not bool((parameter < 0).all()):
            raise RigFailed("a step that did not reach the parameter")

        def assigned_anew() -> None:
            parameter.grad = plain
            optimizer.step()

        return assigned_anew if variant == ANEW else optimizer.step

    pt.init(job_file, rank)
    answer(pipe, make)
    pt.shutdown()


def start_ours(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(exchange_worker, workers, start_job(rig, workers, servers, "asp"))


def _cells(workers: int, servers: int, sizes: tuple[str, ...]) -> tuple[Cell, ...]:
    def counted(count: int, noun: str) -> str:
        return f"{count} {noun}" + ("s" if count > 1 else "")

    who = f"{counted(workers, 'worker')}, {counted(servers, 'server')}"
    return tuple(Cell(f"{who}, {size}", size, workers, servers) for size in sizes)


SIZES = ("4 KB", "1 MB", "10 MB", "100 MB")
SINGLE, SEVERAL, CROWDED = _cells(1, 1, SIZES), _cells(4, 2, ("10 MB",)), _cells(4, 1, SIZES)
LARGE = tuple(cell.name for cell in SINGLE[1:])
OVER_RPC = Ratio("rpc / ours", ("rpc",), ("ours",))
OVER_RAY = Ratio("Ray / ours", ("Ray",), ("ours",))
UNDER_RPC = Ratio("ours / rpc", ("ours",), ("rpc",))

CASE = Case(
    name="exchange",
    title="Push and pull, plain SGD, milliseconds a round of a worker",
    cells=(*SINGLE, *SEVERAL, *CROWDED),
    subjects=(
        Subject("ours", start_ours),
        Subject("ours, gradient assigned anew", start_ours, ANEW),
        Subject("rpc", start_rpc),
        Subject("Ray", start_ray, groups=((1, 1),)),
        COPY,
    ),
    ratios=(OVER_RPC, OVER_RAY, UNDER_RPC, Ratio("ours / limit", ("ours",), (COPY.name,))),
    bars=(
        Bar(UNDER_RPC, (SINGLE[0].name,), most=0.4),
        Bar(OVER_RPC, LARGE, least=3),
        Bar(OVER_RAY, LARGE, least=6),
        Bar(OVER_RPC, (SEVERAL[0].name,), least=3),
        Bar(OVER_RPC, LARGE, least=4, mean=True),
    ),
)

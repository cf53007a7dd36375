"""All-reduce of 10 MB where one rank comes 20 ms late: milliseconds from its coming to the end, in the slowest process.

Ranks that wait add up what has come (`collectives/executor.py`), in the order of ranks. `ours, at the end` does all of it
after the last one has come. Nothing can be made before: of two ranks, and for a rank before which there are fewer than two.
The limit is one addition of as many numbers: what is left if nothing but that rank's own is missing, and nothing is copied.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cases import Bar, Case, Cell, Ratio, Subject, bytes_of
from rigs import Rig, Round, answer

LATE = 0.02
AT_THE_END = "at the end"


def _our_worker(pipe: Connection, rank: int, name: str, size: int) -> None:
    from polytempo.collectives import executor
    from polytempo.collectives.world import open_by_name

    world, waits = open_by_name(name, rank, size), executor.NEARLY_EVEN

    def make(work: str, variant: str) -> Round:
        def all_reduce(tensor: Any) -> None:
            executor.NEARLY_EVEN = math.inf if variant == AT_THE_END else waits
            world.all_ranks.all_reduce([tensor]).wait()

        return _late(all_reduce, work, rank)

    answer(pipe, make)
    world.close()


def _gloo_worker(pipe: Connection, rank: int, directory: str, size: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    answer(pipe, lambda work, _: _late(dist.all_reduce, work, rank))
    dist.destroy_process_group()


def _adder(pipe: Connection, rank: int) -> None:
    import torch

    def make(work: str, variant: str) -> Round:
        made = torch.ones(_size(work))
        own = torch.ones_like(made)
        return _late(lambda tensor: torch.add(made, own, out=tensor), work, rank)

    answer(pipe, make)


def _late(act: Callable[[Any], object], work: str, rank: int) -> Round:
    import torch

    tensor, late = torch.zeros(_size(work)), rank == int(work.rpartition(" ")[2])

    def one_round() -> None:
        if late:
            time.sleep(LATE)
        act(tensor)

    return one_round


def _size(work: str) -> int:
    return bytes_of(work.partition(", ")[0]) // 4


def _after(rig: Rig, work: str, variant: str) -> float:
    return rig.measure(work, variant) - LATE


def start_ours(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(_our_worker, workers, str(rig.directory), workers)


def start_gloo(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(_gloo_worker, workers, str(rig.directory), workers)


def start_adders(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(_adder, workers)


CELLS = tuple(
    Cell(f"{workers} processes, 10 MB, rank {rank} late", f"10 MB, rank {rank}", workers)
    for workers, rank in ((2, 1), (4, 3), (4, 2), (4, 0))
)
SOONER = Ratio("ours / at the end", ("ours",), ("ours, at the end",))

CASE = Case(
    name="late",
    title="All-reduce (sum, float32) where one rank comes 20 ms late, milliseconds after it has come",
    cells=CELLS,
    subjects=(
        Subject("ours", start_ours, meter=_after),
        Subject("ours, at the end", start_ours, AT_THE_END, meter=_after),
        Subject("gloo", start_gloo, meter=_after),
        Subject("limit: one add", start_adders, meter=_after),
    ),
    ratios=(SOONER, Ratio("ours / limit", ("ours",), ("limit: one add",))),
    bars=(Bar(SOONER, ("4 processes, 10 MB, rank 3 late",), most=1.0),),
)

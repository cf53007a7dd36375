"""All-reduce of plain tensors, ours and gloo's: the sum of float32 tensors, in place, one thread a process."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cases import Bar, Case, Cell, Ratio, Subject, bytes_of
from limits import COPY
from rigs import Rig, RigFailed, Round, answer


def _our_worker(pipe: Connection, rank: int, name: str, size: int) -> None:
    from polytempo.collectives.world import open_by_name

    world = open_by_name(name, rank, size)

    def make(work: str, algorithm: str) -> Round:
        return _checked(lambda tensor: world.all_ranks.all_reduce([tensor], "sum", algorithm).wait(), work, rank, size)

    answer(pipe, make)
    world.close()


def _gloo_worker(pipe: Connection, rank: int, directory: str, size: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    answer(pipe, lambda work, _: _checked(dist.all_reduce, work, rank, size))
    dist.destroy_process_group()


def _checked(all_reduce: Callable[[Any], object], work: str, rank: int, size: int) -> Round:
    """One round on a tensor of that size; the first result is looked at."""
    import torch

    tensor = torch.full((bytes_of(work) // 4,), rank + 1.0)
    all_reduce(tensor)
    if not bool((tensor == size * (size + 1) / 2).all()):
        raise RigFailed("a wrong sum")
    tensor.zero_()  # and it stays zero, however often it is summed
    return lambda: all_reduce(tensor)


def start_ours(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(_our_worker, workers, str(rig.directory), workers)


def start_gloo(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(_gloo_worker, workers, str(rig.directory), workers)


CELLS = tuple(
    Cell(f"{workers} processes, {size}", size, workers)
    for workers in (2, 4)
    for size in ("0.1 MB", "1 MB", "10 MB", "100 MB")
)
NAMES = tuple(cell.name for cell in CELLS)
GAIN = Ratio("gloo / ours", ("gloo",), ("ours",))

CASE = Case(
    name="allreduce",
    title="All-reduce (sum, float32), milliseconds",
    cells=CELLS,
    subjects=(
        Subject("ours", start_ours, "auto"),
        *(Subject(algorithm, start_ours, algorithm) for algorithm in ("ring", "halving-doubling", "tree", "double-tree")),
        Subject("gloo", start_gloo),
        COPY,
    ),
    ratios=(GAIN, Ratio("ours / limit", ("ours",), (COPY.name,))),
    bars=(Bar(GAIN, NAMES, least=2), Bar(GAIN, NAMES, least=3, mean=True)),
)

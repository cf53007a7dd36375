"""Run by `test_equal_to_cpu.py` as a job: each collective of tensors on the GPU has the result of that call on the CPU."""

from __future__ import annotations

import sys

import torch

import polytempo as pt

device = sys.argv[1]
pt.init()
rank, size = pt.rank(), pt.size()
LENGTH = 1003
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
ALGORITHMS = ("auto", "ring", "tree", "halving-doubling", "double-tree")
checked = 0


def values(dtype: torch.dtype, number: int = 0) -> torch.Tensor:
    """Whole numbers that no sum of some ranks rounds."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randint(0, 5, (LENGTH,), generator=generator).to(dtype)


def lists(dtype: torch.dtype, there: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What this rank gives to each, and room for what it gets."""
    given = [values(dtype, number).to(there) for number in range(size)]
    return given, [torch.zeros(LENGTH, dtype=dtype, device=there) for _ in range(size)]


def called(name: str, dtype: torch.dtype, there: str) -> list[torch.Tensor]:
    """The results of one call, with tensors on that device."""
    x, (given, room) = values(dtype).to(there), lists(dtype, there)
    if name.startswith("all_reduce"):
        op, algorithm = name.split()[1:]
        pt.all_reduce(x, op=op, algorithm=algorithm)
        room = [x]
    elif name == "reduce":
        pt.reduce(x, size - 1)
        room = [x] if rank == size - 1 else []  # elsewhere it may be anything
    elif name == "broadcast":
        pt.broadcast([x, given[0]], size - 1)
        room = [x, given[0]]
    elif name == "all_gather":
        pt.all_gather(room, x)
    elif name == "gather":
        pt.gather(x, room if rank == 0 else None)
    elif name == "scatter":
        pt.scatter(x, given if rank == 0 else None)
        room = [x]
    elif name == "reduce_scatter":
        pt.reduce_scatter(x, given)
        room = [x]
    elif name == "all_to_all":
        pt.all_to_all(room, given)
    elif name == "send":
        task = pt.isend(x, (rank + 1) % size)
        pt.recv(room[0], (rank - 1) % size)
        assert task is not None
        task.wait()
    assert all(tensor.device.type == there for tensor in room)
    return [tensor.cpu() for tensor in room]


sums = [f"all_reduce {op} {algorithm}" for op in ("sum", "max") for algorithm in ALGORITHMS]
others = ["reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "send"]
for name in (*sums, "all_reduce min auto", "all_reduce prod auto", *others):
    for dtype in DTYPES:
        for one, other in zip(called(name, dtype, device), called(name, dtype, "cpu"), strict=True):
            assert torch.equal(one, other), (name, dtype)
        checked += 1
print(f"rank {rank}: {checked} calls as on the CPU", flush=True)
pt.shutdown()

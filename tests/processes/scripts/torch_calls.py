"""Plain calls of torch.distributed, each as a function of the group: polytempo's (None) or gloo's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def mine(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(RANK))


def reduced(op: Any, tensor: torch.Tensor) -> Callable[[Any], Any]:
    def call(group: Any) -> Any:
        result = tensor.clone()
        dist.all_reduce(result, op, group)
        return result

    return call


def broadcast(group: Any) -> Any:
    tensor = mine(70_000)  # more than a small message
    dist.broadcast(tensor, SIZE - 1, group)
    return tensor


def reduce(group: Any) -> Any:
    tensor = mine(33)
    dist.reduce(tensor, 1, group=group)
    return tensor if RANK == 1 else None


def all_gather(group: Any) -> Any:
    parts = [torch.empty(3, 5) for _ in range(SIZE)]
    dist.all_gather(parts, mine(3, 5), group)
    return parts


def all_gather_single(group: Any) -> Any:
    whole = torch.empty(SIZE * 3, 5)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the first name came after torch 2.11
    gather(whole, mine(3, 5), group)
    return whole


def gather(group: Any) -> Any:
    parts = [torch.empty(4) for _ in range(SIZE)] if RANK == 0 else None
    dist.gather(mine(4), parts, 0, group)
    return parts


def gather_single(group: Any) -> Any:
    """By the group's method: `dist.gather_single`, which calls it, came with torch 2.14."""
    if group is not None:
        parts = gather(group)
        return torch.cat(parts) if RANK == 0 else None
    whole, options = torch.empty(4 * SIZE if RANK == 0 else 0), dist.GatherOptions()
    options.rootRank = 0
    dist.group.WORLD.gather_single(whole, mine(4), options).wait()
    return whole if RANK == 0 else None


def scatter(group: Any) -> Any:
    part = torch.empty(4)
    dist.scatter(part, [mine(4) * (rank + 1) for rank in range(SIZE)] if RANK == 0 else None, 0, group)
    return part


def reduce_scatter(group: Any) -> Any:
    part = torch.empty(6)
    dist.reduce_scatter(part, [mine(6) * (rank + 1) for rank in range(SIZE)], group=group)
    return part


def reduce_scatter_single(group: Any) -> Any:
    part = torch.empty(2, 6)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    scatter(part, mine(2 * SIZE, 6), group=group)
    return part


def all_to_all_single(group: Any) -> Any:
    whole = torch.empty(2 * SIZE, 3)
    dist.all_to_all_single(whole, mine(2 * SIZE, 3), group=group)
    return whole


def all_to_all_of_different_sizes(group: Any) -> Any:
    rows = [rank + 1 for rank in range(SIZE)]
    whole = torch.empty(SIZE * (RANK + 1), 3)
    dist.all_to_all_single(whole, mine(sum(rows), 3), [RANK + 1] * SIZE, rows, group=group)
    return whole


def objects(group: Any) -> Any:
    found: list[Any] = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK}, group)
    told = [{"from": RANK}, RANK]
    dist.broadcast_object_list(told, 1, group)
    return found, told


def batch(group: Any) -> Any:
    got, after, before = torch.empty(5), (RANK + 1) % SIZE, (RANK - 1) % SIZE
    pair = [dist.P2POp(dist.isend, mine(5), after, group), dist.P2POp(dist.irecv, got, before, group)]
    for request in dist.batch_isend_irecv(pair):
        request.wait()
    return got


def from_any_source(group: Any) -> Any:
    if RANK != 0:
        dist.send(torch.full((2,), RANK), 0, group, tag=7)
        return None
    heard = {}
    for _ in range(SIZE - 1):
        buffer = torch.empty(2, dtype=torch.int64)
        heard[dist.recv(buffer, group=group, tag=7)] = buffer
    return sorted(heard.items())


def under_inference_mode(group: Any) -> Any:
    with torch.inference_mode():
        tensor = mine(9)
        dist.all_reduce(tensor, group=group)
    return tensor


R = dist.ReduceOp
WHOLE = torch.arange(12) + 3 * RANK
CALLS: list[tuple[str, Callable[[Any], Any]]] = [
    ("sum", reduced(R.SUM, mine(1000))),
    ("product", reduced(R.PRODUCT, mine(5, 3))),
    ("min", reduced(R.MIN, mine(7))),
    ("max", reduced(R.MAX, mine(7).to(torch.float16))),
    ("band", reduced(R.BAND, WHOLE)),
    ("bor", reduced(R.BOR, WHOLE)),
    ("bxor", reduced(R.BXOR, WHOLE)),
    ("bfloat16", reduced(R.SUM, torch.arange(8).to(torch.bfloat16))),
    ("complex", reduced(R.SUM, torch.complex(mine(4), -mine(4)))),
    ("transposed", lambda group: reduced(R.SUM, mine(4, 3).t() if group is None else mine(4, 3).t().contiguous())(group)),
    *((call.__name__, call) for call in (broadcast, reduce, all_gather, all_gather_single, gather, scatter, reduce_scatter)),
    *((call.__name__, call) for call in (reduce_scatter_single, all_to_all_single, all_to_all_of_different_sizes)),
    *((call.__name__, call) for call in (gather_single, objects, batch, from_any_source, under_inference_mode)),
]

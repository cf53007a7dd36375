"""What a script calls to move tensors between workers: torch's names and meanings, over our own links and plans.

Tensors are changed in place; ranks are those of the job, also within a group; `async_op=True` returns a handle at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from polytempo.collectives import point_to_point
from polytempo.collectives.cost import Choice
from polytempo.collectives.group import RankGroup as Inner
from polytempo.collectives.native import Native
from polytempo.collectives.nested import Then
from polytempo.collectives.nested import exchange as exchange_records
from polytempo.collectives.tasks import Task
from polytempo.errors import UsageError
from polytempo.session.session import current


@dataclass(frozen=True)
class Group:
    """What `new_group` returns: some ranks. `inner` is None on ranks that are not among them; their calls do nothing."""

    ranks: tuple[int, ...]
    inner: Inner | None

    @property
    def rank(self) -> int:
        """This worker's number in the group; -1 outside."""
        return self.inner.rank if self.inner is not None else -1

    @property
    def size(self) -> int:
        """How many workers are in it."""
        return len(self.ranks)

    def index(self, rank: int) -> int:
        """The number in the group of a rank of the job."""
        if rank not in self.ranks:
            raise UsageError(f"rank {rank} is not in the group of ranks {', '.join(map(str, self.ranks))}")
        return self.ranks.index(rank)


AnyGroup: TypeAlias = Group | None
Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


def new_group(ranks: Sequence[int] | None = None) -> Group:
    """A group of some ranks. All workers call this for all groups, in the same order, whether they are in it or not."""
    world = current().world()
    chosen = tuple(sorted(ranks)) if ranks is not None else tuple(range(world.size))
    return Group(chosen, world.new_group(chosen))


def reform() -> Group:
    """After a worker was lost: a group of all that are left. All of them must call this."""
    group = current().world().reform()
    return Group(group.ranks, group)


def explain(collective: str, size: int, group: AnyGroup = None) -> Choice:
    """What `algorithm="auto"` takes for a tensor of so many bytes, and why."""
    found = _members(group)
    if found.inner is None:
        raise UsageError("this worker is not in the group")
    return found.inner.choice(collective, size)


def _members(group: AnyGroup) -> Group:
    if group is not None:
        return group
    all_ranks = current().world().all_ranks
    return Group(all_ranks.ranks, all_ranks)


def _list(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _by(inner: Inner, algorithm: str) -> Inner | Native:
    """Who carries it out."""
    return current().native(inner) if algorithm == "native" else inner


def _end(task: Task, async_op: bool) -> Any:
    return task if async_op else task.wait()


# Single messages.


def send(tensor: torch.Tensor, dst: int, group: AnyGroup = None, tag: int = 0) -> None:
    """Send a tensor to a rank; when it returns, the tensor may be changed."""
    members = _members(group)
    if members.inner is not None:
        point_to_point.send(members.inner, tensor, members.index(dst), tag).wait()


def recv(tensor: torch.Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0) -> int:
    """Receive a tensor from a rank, or from any; the rank it came from."""
    members = _members(group)
    if members.inner is None:
        return -1
    source = None if src is None else members.index(src)
    came_from: int = point_to_point.receive(members.inner, tensor, source, tag).wait()
    return members.ranks[came_from]


def isend(tensor: torch.Tensor, dst: int, group: AnyGroup = None, tag: int = 0) -> Task | None:
    """Start sending."""
    members = _members(group)
    return point_to_point.send(members.inner, tensor, members.index(dst), tag, True) if members.inner is not None else None


def irecv(tensor: torch.Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0) -> Task | None:
    """Start receiving; what `wait()` returns is the number of the sender in the group."""
    members = _members(group)
    if members.inner is None:
        return None
    return point_to_point.receive(members.inner, tensor, None if src is None else members.index(src), tag, True)


# Collectives.


def all_reduce(
    tensor: Tensors, op: object = "sum", group: AnyGroup = None, async_op: bool = False, algorithm: str = "auto"
) -> Any:
    """Make a tensor, or each of a list (fused), the sum over all ranks."""
    inner = _members(group).inner
    return inner and _end(_by(inner, algorithm).all_reduce(_list(tensor), op, algorithm, async_op), async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: object = "sum",
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Any:
    """Make the tensor of rank `dst` the sum over all ranks."""
    members = _members(group)
    inner = members.inner
    return inner and _end(_by(inner, algorithm).reduce(tensor, members.index(dst), op, algorithm, async_op), async_op)


def broadcast(tensor: Tensors, src: int, group: AnyGroup = None, async_op: bool = False, algorithm: str = "auto") -> Any:
    """Make a tensor, or each of a list (fused), that of rank `src`."""
    members = _members(group)
    inner = members.inner
    return inner and _end(_by(inner, algorithm).broadcast(_list(tensor), members.index(src), algorithm, async_op), async_op)


def all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Any:
    """Make `tensor_list[q]` the tensor of the group's rank q."""
    inner = _members(group).inner
    return inner and _end(_by(inner, algorithm).all_gather(tensor_list, tensor, algorithm, async_op), async_op)


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Any:
    """Make `gather_list[q]`, on rank `dst` alone, the tensor of the group's rank q."""
    members = _members(group)
    inner = members.inner
    return inner and _end(
        _by(inner, algorithm).gather(gather_list, tensor, members.index(dst), algorithm, async_op), async_op
    )


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Any:
    """Make the tensor what rank `src` has for this rank in its list."""
    members = _members(group)
    inner = members.inner
    return inner and _end(
        _by(inner, algorithm).scatter(tensor, scatter_list, members.index(src), algorithm, async_op), async_op
    )


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: object = "sum",
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Any:
    """Make `output` the sum over all ranks of what they have for this rank in their lists."""
    inner = _members(group).inner
    return inner and _end(_by(inner, algorithm).reduce_scatter(output, input_list, op, algorithm, async_op), async_op)


def all_to_all(
    output_list: Sequence[torch.Tensor],
    input_list: Sequence[torch.Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
    algorithm: str = "auto",
) -> Any:
    """Make `output_list[q]` what rank q has for this rank in its list. Sizes may differ, if both sides agree."""
    inner = _members(group).inner
    return inner and _end(_by(inner, algorithm).all_to_all(output_list, input_list, algorithm, async_op), async_op)


def barrier(group: AnyGroup = None, async_op: bool = False) -> Any:
    """Wait until all ranks are here."""
    inner = _members(group).inner
    return inner and _end(inner.barrier(async_op), async_op)


def exchange(record: torch.Tensor, then: Then, group: Group, background: bool) -> Task:
    """A call of several parts (`collectives/executor.py`): everybody's record, and what follows from it."""
    if group.inner is None:
        raise UsageError("this worker is not in the group")
    return exchange_records(group.inner, record, then, background)

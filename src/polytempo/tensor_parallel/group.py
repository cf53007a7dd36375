"""The ranks that hold shards of the same layers, and the two collectives that split layers need.

All ranks of a group must make the same calls in the same order. In forward that is the order of the program. In backward it
is autograd's: on the CPU it runs nodes in the calling thread, the latest first, so ranks with the same graph agree, also
where ranks are threads of one process. On a GPU it has one thread a device and process: there ranks must be processes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from polytempo.collectives.group import RankGroup


class TensorGroup(Protocol):
    """What split layers ask of their group. `backward` says where in a step the call is made; only a count needs it."""

    @property
    def rank(self) -> int:
        """The index of this rank's shards."""

    @property
    def size(self) -> int:
        """The number of shards."""

    def all_reduce(self, tensor: Tensor, op: str = "sum", backward: bool = False) -> None:
        """Make the tensor the sum (or "max") over all ranks, in place."""

    def all_gather(self, tensor: Tensor, dim: int, backward: bool = False) -> Tensor:
        """The tensors of all ranks, which have one shape, behind each other along a dimension."""


class RankTensorGroup:
    """A tensor group on Polytempo's collectives, which take CUDA tensors as they are."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    def __deepcopy__(self, memo: dict[int, Any]) -> RankTensorGroup:
        """A copied module is in the same group."""
        return self

    def all_reduce(self, tensor: Tensor, op: str = "sum", backward: bool = False) -> None:
        """Make the tensor the combination over all ranks, in place."""
        if self.size == 1:
            return
        self._group.all_reduce([tensor.detach()], op).wait()

    def all_gather(self, tensor: Tensor, dim: int, backward: bool = False) -> Tensor:
        """The tensors of all ranks behind each other."""
        if self.size == 1:
            return tensor
        mine = tensor.detach().contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._group.all_gather(parts, mine).wait()
        return torch.cat(parts, dim)


class CollectiveCall(NamedTuple):
    """A call that a `CountingGroup` noted."""

    op: str  #: "all_reduce" or "all_gather"
    nbytes: int  #: of the whole tensor: what is reduced, or what is there once it is gathered
    backward: bool


class CountingGroup:
    """A group that communicates nothing and notes each call: layers are profiled with it, as one rank of `size` has them.

    Values are of no use: a sum is this rank's term, and a gathered tensor repeats this rank's part.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = size, rank
        self.calls: list[CollectiveCall] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> CountingGroup:
        """A copied module is in the same group."""
        return self

    def all_reduce(self, tensor: Tensor, op: str = "sum", backward: bool = False) -> None:
        """Note the call."""
        if self.size > 1:
            self.calls.append(CollectiveCall("all_reduce", tensor.nbytes, backward))

    def all_gather(self, tensor: Tensor, dim: int, backward: bool = False) -> Tensor:
        """Note the call; this rank's part, as often as there are ranks."""
        if self.size == 1:
            return tensor
        self.calls.append(CollectiveCall("all_gather", tensor.nbytes * self.size, backward))
        return torch.cat([tensor.detach()] * self.size, dim)

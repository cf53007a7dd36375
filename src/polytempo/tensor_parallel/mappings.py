"""What passes between replicated and split tensors, forward and backward (Megatron-LM's f and g, and gather and split).

    name          forward                    backward
    copy_to       identity          (f)      all-reduce
    reduce_from   all-reduce        (g)      identity: every rank has the same gradient of the sum, and it is not divided
    gather_from   all-gather                 this rank's part
    split_to      this rank's part           all-gather

In a group of one rank all of them are the identity. Results are new tensors: neither inputs nor gradients are overwritten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polytempo.tensor_parallel.group import TensorGroup


def copy_to(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Into a split region: each rank computes with the whole tensor, and the gradients of all are added."""
    return tensor if group.size == 1 else _apply(_CopyTo, tensor, group)


def reduce_from(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Out of a split region: the sum of the ranks' terms."""
    return tensor if group.size == 1 else _apply(_ReduceFrom, tensor, group)


def gather_from(tensor: Tensor, group: TensorGroup, dim: int = -1) -> Tensor:
    """Out of a split region: the ranks' parts behind each other."""
    return tensor if group.size == 1 else _apply(_GatherFrom, tensor, group, dim)


def split_to(tensor: Tensor, group: TensorGroup, dim: int = -1) -> Tensor:
    """Into a split region: this rank's part, of parts of equal size."""
    return tensor if group.size == 1 else _apply(_SplitTo, tensor, group, dim)


def part_of(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """This rank's part, as a view."""
    each = tensor.shape[dim] // group.size
    return tensor.narrow(dim, group.rank * each, each)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def _summed(tensor: Tensor, group: TensorGroup, backward: bool) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total, backward=backward)
    return total


class _CopyTo(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _summed(grad, ctx.group, True), None


class _ReduceFrom(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        return _summed(tensor, group, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _GatherFrom(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(tensor, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return part_of(grad, ctx.group, ctx.dim), None, None


class _SplitTo(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return part_of(tensor, group, dim).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.group.all_gather(grad, ctx.dim, backward=True), None, None

"""What passes between replicated and split tensors, forward and backward (Megatron-LM's f and g, and gather and split).

    name          forward                    backward
    copy_to       identity          (f)      all-reduce
    reduce_from   all-reduce        (g)      identity: every rank has the same gradient of the sum, and it is not divided
    gather_from   all-gather                 this rank's part
    split_to      this rank's part           all-gather

In a group of one rank all of them are the identity. Results are new tensors: neither inputs nor gradients are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polytempo.tensor_parallel.group import TensorGroup


def copy_to(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Into a split region: each rank computes with the whole tensor, and the gradients of all are added."""
    return _mapped(tensor, group, -1, _same, _sum)


def reduce_from(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Out of a split region: the sum of the ranks' terms."""
    return _mapped(tensor, group, -1, _sum, _same)


def gather_from(tensor: Tensor, group: TensorGroup, dim: int = -1) -> Tensor:
    """Out of a split region: the ranks' parts behind each other."""
    return _mapped(tensor, group, dim, _gathered, _part)


def split_to(tensor: Tensor, group: TensorGroup, dim: int = -1) -> Tensor:
    """Into a split region: this rank's part, of parts of equal size."""
    return _mapped(tensor, group, dim, _part, _gathered)


#: What becomes of a tensor: (tensor, group, dimension, is it a gradient).
TensorMap = Callable[[Tensor, TensorGroup, int, bool], Tensor]


def _same(tensor: Tensor, group: TensorGroup, dim: int, backward: bool) -> Tensor:
    return tensor if backward else tensor.view_as(tensor)


def _sum(tensor: Tensor, group: TensorGroup, dim: int, backward: bool) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total, backward=backward)
    return total


def _gathered(tensor: Tensor, group: TensorGroup, dim: int, backward: bool) -> Tensor:
    return group.all_gather(tensor, dim, backward)


def _part(tensor: Tensor, group: TensorGroup, dim: int, backward: bool) -> Tensor:
    each = tensor.shape[dim] // group.size
    part = tensor.narrow(dim, group.rank * each, each)
    return part if backward else part.clone()  # a result is no view of what it was made of


class _Mapping(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int, there: TensorMap, back: TensorMap) -> Tensor:
        ctx.group, ctx.dim, ctx.back = group, dim, back
        return there(tensor, group, dim, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad, ctx.group, ctx.dim, True), None, None, None, None


def _mapped(tensor: Tensor, group: TensorGroup, dim: int, there: TensorMap, back: TensorMap) -> Tensor:
    if group.size == 1:
        return tensor
    result: Tensor = _Mapping.apply(tensor, group, dim, there, back)
    return result

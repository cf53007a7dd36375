"""`allgather`: what all ranks have, one after the other. First dimensions may differ: the record says how long each is."""

from __future__ import annotations

from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.horovod.ops import Average
from polytempo.horovod.pending import Pending, together
from polytempo.horovod.records import Call, Kind, digest, dtype_code, exchange
from polytempo.horovod.reduction import Reduction, Tensors, check_tensors, start
from polytempo.horovod.sets import ProcessSet, check_member, global_process_set
from polytempo.train import communicate


def _lengths(tensor: torch.Tensor, name: str | None, members: ProcessSet) -> list[int]:
    check_tensors([tensor], "allgather")
    check_member(members, "allgather")
    if tensor.dim() == 0:
        raise UsageError("allgather needs a tensor with a first dimension, got a single number; use tensor.reshape(1)")
    if members.size() == 1:
        return [len(tensor)]
    rest = digest("rest", *tensor.shape[1:])
    call = Call(Kind.ALLGATHER, dtype=dtype_code(tensor.dtype), shape=rest, name=digest(name), own=len(tensor))
    return [call.own for call in exchange(call, members)]


def _gather(tensor: torch.Tensor, lengths: list[int], members: ProcessSet) -> Pending[torch.Tensor]:
    mine = tensor.detach().contiguous()
    output = mine.new_empty((sum(lengths), *mine.shape[1:]))
    if members.size() == 1 or not output.numel():
        return Pending(lambda: output.copy_(mine) if output.numel() else output)
    handle = communicate.all_gather(list(output.split(lengths)), mine, group=members.group, async_op=True)

    def finish() -> torch.Tensor:
        handle.wait()
        return output

    return Pending(finish, [handle])


def gather_pieces(tensor: torch.Tensor, name: str | None, members: ProcessSet) -> list[torch.Tensor]:
    """Everybody's tensors, apart."""
    lengths = _lengths(tensor, name, members)
    return list(_gather(tensor, lengths, members).wait().split(lengths))


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, members: ProcessSet) -> torch.Tensor:
        ctx.lengths, ctx.members = _lengths(tensor, name, members), members
        return _gather(tensor, ctx.lengths, members).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The mean of everybody's gradient, as in Horovod since 0.21.3."""
        mean = start([grad], Reduction(Average, ctx.members), in_place=False).wait()[0]
        return mean.split(ctx.lengths)[ctx.members.rank()], None, None


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Everybody's tensors, one after the other along the first dimension."""
    gathered: torch.Tensor = _Gather.apply(tensor, name, process_set)
    return gathered


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending[torch.Tensor]:
    """The same, not waited for; only that everybody has called it is."""
    return _gather(tensor, _lengths(tensor, name, process_set), process_set)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Several, one by one."""
    return [allgather(tensor, name, process_set) for tensor in tensors]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending[list[torch.Tensor]]:
    """Several, not waited for."""
    return together([allgather_async(tensor, name, process_set) for tensor in tensors])

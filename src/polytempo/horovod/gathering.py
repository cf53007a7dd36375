"""`allgather`: what all ranks have, one after the other. First dimensions may differ: the record says how long each is."""

from __future__ import annotations

from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.horovod.negotiating import Steps, negotiator_of
from polytempo.horovod.ops import Average
from polytempo.horovod.pending import Pending, numbered, together
from polytempo.horovod.records import Call, Kind, call_of, digest, dtype_code
from polytempo.horovod.reduction import Reduction, Tensors, check_tensors, start
from polytempo.horovod.sets import ProcessSet, check_member, global_process_set

Gathered = tuple[torch.Tensor, list[int]]  # and how much of it is whose


def _gather(tensor: torch.Tensor, name: str | None, members: ProcessSet) -> Pending[Gathered]:
    check_tensors([tensor], "allgather")
    check_member(members, "allgather")
    if tensor.dim() == 0:
        raise UsageError("allgather needs a tensor with a first dimension, got a single number; use tensor.reshape(1)")
    mine = tensor.detach().contiguous()
    if members.size() == 1:
        return Pending(lambda: (mine.clone(), [len(mine)]))
    shape, code = digest("rest", *tensor.shape[1:]), dtype_code(tensor.dtype)

    def act(calls: dict[int, Call], inside: Any) -> Steps:
        lengths = [calls[rank].own for rank in members.ranks]
        output = mine.new_empty((sum(lengths), *mine.shape[1:]))
        if output.numel():
            yield from inside.all_gather(list(output.split(lengths)), mine)
        return output, lengths

    flight = negotiator_of(members).start(call_of(Kind.ALLGATHER, name, dtype=code, shape=shape, own=len(mine)), act)
    return Pending(flight.wait, [flight])


def gather_pieces(tensor: torch.Tensor, name: str | None, members: ProcessSet) -> list[torch.Tensor]:
    """Everybody's tensors, apart."""
    gathered, lengths = _gather(tensor, name, members).wait()
    return list(gathered.split(lengths))


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, members: ProcessSet) -> torch.Tensor:
        gathered, ctx.lengths = _gather(tensor, name, members).wait()
        ctx.members = members
        return gathered

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
    """The same, not waited for."""
    handle = _gather(tensor, name, process_set)
    return Pending(lambda: handle.wait()[0], handle._parts)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Several, one by one."""
    return [allgather(tensor, numbered(name, index), process_set) for index, tensor in enumerate(tensors)]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending[list[torch.Tensor]]:
    """Several, not waited for."""
    return together([allgather_async(tensor, numbered(name, index), process_set) for index, tensor in enumerate(tensors)])

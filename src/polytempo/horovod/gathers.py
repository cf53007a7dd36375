"""`allgather`: what all ranks have, one after the other. First dimensions may differ: the record says how long each is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polytempo.errors import UsageError, WrongType
from polytempo.horovod.handles import Handle, numbered, together
from polytempo.horovod.negotiation import CallSteps, negotiator_of
from polytempo.horovod.negotiation_records import Call, CallKind, call_of, digest, dtype_code
from polytempo.horovod.ops import Average, Op, Sum, check_op
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set
from polytempo.horovod.reductions import ReducedTensors, Reduction, check_tensors, start
from polytempo.train import communication

Gathered = tuple[torch.Tensor, list[int]]  # and how much of it is whose


def _gather(tensor: torch.Tensor, name: str | None, members: ProcessSet) -> Handle[Gathered]:
    check_tensors([tensor], "allgather")
    check_member(members, "allgather")
    if tensor.dim() == 0:
        raise UsageError("allgather needs a tensor with a first dimension, got a single number; use tensor.reshape(1)")
    mine = tensor.detach().contiguous()
    if members.size() == 1:
        return Handle(lambda: (mine.clone(), [len(mine)]))
    shape, code = digest("rest", *tensor.shape[1:]), dtype_code(tensor.dtype)

    def act(calls: dict[int, Call], inside: Any) -> CallSteps:
        lengths = [calls[rank].own for rank in members.ranks]
        output = mine.new_empty((sum(lengths), *mine.shape[1:]))
        if output.numel():
            yield from inside.all_gather(list(output.split(lengths)), mine)
        return output, lengths

    flight = negotiator_of(members).start(call_of(CallKind.ALLGATHER, name, dtype=code, shape=shape, own=len(mine)), act)
    return Handle(flight.wait, [flight])


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
        """The mean of all ranks' gradients, as in Horovod since 0.21.3."""
        mean = start([grad], Reduction(Average, ctx.members), in_place=False).wait()[0]
        return mean.split(ctx.lengths)[ctx.members.rank()], None, None


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Everybody's tensors, one after the other along the first dimension."""
    gathered: torch.Tensor = _Gather.apply(tensor, name, process_set)
    return gathered


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """The same, not waited for."""
    handle = _gather(tensor, name, process_set)
    return Handle(lambda: handle.wait()[0], handle._parts)


def grouped_allgather(
    tensors: ReducedTensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Several, one by one."""
    return [allgather(tensor, numbered(name, index), process_set) for index, tensor in enumerate(tensors)]


def grouped_allgather_async(
    tensors: ReducedTensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[torch.Tensor]]:
    """Several, not waited for."""
    return together([allgather_async(tensor, numbered(name, index), process_set) for index, tensor in enumerate(tensors)])


# Sparse tensors of all ranks as one: indices and values are gathered, and equal indices added up.


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """The mean, or the sum, of sparse tensors (COO), not waited for.

    Returns:
        A handle; calling it does what `synchronize` does, since Horovod's handle of this call is a function.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        got = f"layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise WrongType(f"sparse_allreduce_async needs a sparse tensor (torch.sparse_coo), got {got}; use allreduce_async")
    how = check_op(op)
    if how not in (Average, Sum):
        raise UsageError(f"expected op=Average or op=Sum for a sparse tensor, got {how}")
    mine = tensor.detach().coalesce()
    names = [None if name is None else f"{name}.{part}" for part in ("indices", "values")]
    indices = allgather_async(mine.indices().t().contiguous(), names[0], process_set)
    values = allgather_async(mine.values(), names[1], process_set)

    def finish() -> torch.Tensor:
        added, where = values.wait(), indices.wait()
        return _made(tensor, where, added / process_set.size() if how is Average else added)

    return Handle(finish, [*indices._parts, *values._parts])


def _made(like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    how = {"dtype": like.dtype, "device": like.device, "check_invariants": False}  # they come from sparse tensors
    return torch.sparse_coo_tensor(indices.t(), values, like.shape, **how).coalesce()


def gather_sparse(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], factor: float, group: communication.Group | None
) -> dict[torch.Tensor, torch.Tensor]:
    """The sum over all ranks of sparse gradients, times a factor; none for a parameter of which no rank has one.

    All ranks call it with the same parameters. A rank that has no gradient of one adds nothing.
    """
    if not params:
        return {}
    own = [None if grad is None else (grad if grad.is_sparse else grad.to_sparse(1)).detach().coalesce() for grad in grads]
    about = [(0, 0) if grad is None else (grad._nnz(), grad.sparse_dim()) for grad in own]
    mine = torch.tensor(about, dtype=torch.int64)
    size = group.size if group is not None else 1
    table = [torch.empty_like(mine) for _ in range(size)]
    communication.all_gather(table, mine, group=group)
    found = {}
    for index, (param, grad) in enumerate(zip(params, own, strict=True)):
        lengths, dims = [int(rows[index][0]) for rows in table], max(int(rows[index][1]) for rows in table)
        if not dims:
            continue
        shape = param.shape[dims:]
        indices, values = param.new_empty((0, dims), dtype=torch.int64), param.new_empty((0, *shape))
        if grad is not None:
            indices, values = grad.indices().t().contiguous(), grad.values().contiguous()
        where = indices.new_empty((sum(lengths), dims))
        added = values.new_empty((sum(lengths), *shape))
        for whole, piece in ((where, indices), (added, values)):
            if sum(lengths):
                communication.all_gather(list(whole.split(lengths)), piece, group=group)
        found[param] = _made(param.detach(), where, added * factor)
    return found

"""`allgather` and sparse reductions. First dimensions may differ: the record of each rank holds its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polytempo.errors import UsageError, WrongType
from polytempo.horovod.handles import Handle, numbered, together
from polytempo.horovod.negotiation import Call, CallKind, CallSteps, call_of, digest, dtype_code, negotiator_of
from polytempo.horovod.ops import Average, Op, Sum, check_op
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set
from polytempo.horovod.reductions import ReducedTensors, Reduction, check_tensors, start
from polytempo.train import communication

Gathered = tuple[torch.Tensor, list[int]]  # the concatenation, and the length of each rank's part


def _gather(tensor: torch.Tensor, name: str | None, members: ProcessSet) -> Handle[Gathered]:
    check_tensors([tensor], "allgather")
    check_member(members, "allgather")
    if tensor.dim() == 0:
        raise UsageError("allgather needs a tensor with a first dimension, got a single number; use tensor.reshape(1)")
    mine = tensor.detach().contiguous()
    if members.size() == 1:
        return Handle(lambda: (mine.clone(), [len(mine)]))
    shape, code = digest("rest", *tensor.shape[1:]), dtype_code(tensor.dtype)

    def body(calls: dict[int, Call], group: Any) -> CallSteps:
        lengths = [calls[rank].own for rank in members.ranks]
        output = mine.new_empty((sum(lengths), *mine.shape[1:]))
        if output.numel():
            yield from group.all_gather(list(output.split(lengths)), mine)
        return output, lengths

    call = call_of(CallKind.ALLGATHER, name, dtype=code, shape=shape, own=len(mine))
    pending = negotiator_of(members).start(call, body, tensors=[mine])
    return Handle(pending.wait, [pending])


def gather_pieces(tensor: torch.Tensor, name: str | None, members: ProcessSet) -> list[torch.Tensor]:
    """The tensors of all ranks, as a list."""
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
        """This rank's part of the mean of all ranks' gradients, as in Horovod since 0.21.3."""
        mean = start([grad], Reduction(Average, ctx.members), in_place=False).wait()[0]
        return mean.split(ctx.lengths)[ctx.members.rank()], None, None


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, whose length may differ; gradients flow through it.

    Args:
        tensor: The tensor of this rank.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The concatenation.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    gathered: torch.Tensor = _Gather.apply(tensor, name, process_set)
    return gathered


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Start an `allgather`, without gradients.

    Args:
        tensor: The tensor of this rank.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    handle = _gather(tensor, name, process_set)
    return Handle(lambda: handle.wait()[0], handle._parts)


def grouped_allgather(
    tensors: ReducedTensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """An `allgather` of each of several tensors.

    Args:
        tensors: The tensors of this rank, the same number on all ranks.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The concatenations.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    return [allgather(tensor, numbered(name, index), process_set) for index, tensor in enumerate(tensors)]


def grouped_allgather_async(
    tensors: ReducedTensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[torch.Tensor]]:
    """Start a `grouped_allgather`.

    Args:
        tensors: The tensors of this rank, the same number on all ranks.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    return together([allgather_async(tensor, numbered(name, index), process_set) for index, tensor in enumerate(tensors)])


# Sparse tensors: indices and values are gathered, and values of equal indices added.


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start the mean or the sum of sparse tensors (COO): indices and values are gathered, values of equal indices added.

    Args:
        tensor: A sparse tensor (torch.sparse_coo).
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        op: `Average` (default) or `Sum`.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A handle; calling it does what `synchronize` does, since the handle of this call is a function in Horovod.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
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
    """The sum over all ranks of sparse gradients, times a factor, by parameter; without those of which no rank has a
    gradient.

    Collective: all ranks call it with the same parameters.
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

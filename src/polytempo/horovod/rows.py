"""Calls that move rows: `allgather` and sparse reductions, for which first dimensions may differ (the record of each rank
holds its length), `reducescatter` (each rank gets its rows of the reduction), and `alltoall` (from each rank to each).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from polytempo.errors import UsageError, WrongType
from polytempo.horovod.compression import Compression, Compressor
from polytempo.horovod.handles import Handle, numbered, together
from polytempo.horovod.negotiation import Call, CallKind, CallSteps, call_of, digest, dtype_code, negotiator_of
from polytempo.horovod.ops import Average, Op, Sum, check_op
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set
from polytempo.horovod.reductions import ReducedTensors, Reduction, check_tensors, digest_of_factors, scale_, start
from polytempo.train import communication

Gathered = tuple[torch.Tensor, list[int]]  # the concatenation, and the length of each rank's part


def start_gather(tensor: torch.Tensor, name: str | None, members: ProcessSet) -> Handle[Gathered]:
    """Start to gather the tensors of all ranks, without gradients."""
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


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, members: ProcessSet) -> torch.Tensor:
        gathered, ctx.lengths = start_gather(tensor, name, members).wait()
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
    handle = start_gather(tensor, name, process_set)
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


# Rows of a reduction.


def _reduce_rows(tensor: torch.Tensor, how: Reduction) -> Handle[torch.Tensor]:
    check_tensors([tensor], "reducescatter")
    check_member(how.members, "reducescatter")
    size = how.members.size()
    if tensor.dim() == 0:
        raise UsageError("reducescatter needs a tensor with a first dimension, got a single number")
    each, more = divmod(len(tensor), size)
    rows = [each + (index < more) for index in range(size)]  # the first ranks get one more where it does not divide
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    scale_(whole, how.before)
    if size == 1:
        return Handle(lambda: scale_(whole, how.after))
    output = torch.empty_like(whole[: rows[how.members.rank()]])
    call = call_of(
        CallKind.REDUCESCATTER,
        how.name,
        op=how.op.code,
        dtype=dtype_code(whole.dtype),
        count=whole.numel(),
        shape=digest("shape", *whole.shape),
        scale=digest_of_factors(how),
    )

    def body(calls: dict[int, Call], group: Any) -> CallSteps:
        yield from group.reduce_scatter(output, list(whole.split(rows)), how.op.word)
        return scale_(output, how.after)

    pending = negotiator_of(how.members).start(call, body, tensors=[whole, output])
    return Handle(pending.wait, [pending])


class _ReduceScatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, how: Reduction) -> torch.Tensor:
        ctx.how = how
        return _reduce_rows(tensor, how).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The gradients of all ranks' rows, times the number of ranks for a sum, as in Horovod."""
        if ctx.how.op not in (Average, Sum):
            raise UsageError(f"reducescatter with op={ctx.how.op} has no gradient; use Average or Sum, or detach()")
        members, scale = ctx.how.members, ctx.how.before * ctx.how.after
        factor = scale * (members.size() if ctx.how.op is Sum else 1)
        return allgather(grad, process_set=members) * factor, None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks and keep the rows of this rank; gradients flow through it.

    Args:
        tensor: The tensor of this rank.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        compression: What is sent instead: `Compression.none`, `fp16` or `bf16`.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        process_set: The ranks that take part; all ranks by default.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        The rows of this rank; where the first dimension does not divide, the first ranks have one row more.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    check_tensors([tensor], "reducescatter")
    how = Reduction(check_op(op), process_set, name, prescale_factor, postscale_factor)
    small, ctx = compression.compress(tensor)
    return compression.decompress(_ReduceScatter.apply(small, how), ctx)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Start a `reducescatter`, without gradients.

    Args:
        tensor: The tensor of this rank.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        process_set: The ranks that take part; all ranks by default.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    return _reduce_rows(tensor, Reduction(check_op(op), process_set, name, prescale_factor, postscale_factor))


def grouped_reducescatter(
    tensors: ReducedTensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """A `reducescatter` of each of several tensors.

    Args:
        tensors: The tensors of this rank, the same number on all ranks.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        compression: What is sent instead: `Compression.none`, `fp16` or `bf16`.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        process_set: The ranks that take part; all ranks by default.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        The rows of this rank, of each.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    factors = (prescale_factor, postscale_factor)
    return [
        reducescatter(tensor, numbered(name, index), compression, op, process_set, *factors)
        for index, tensor in enumerate(tensors)
    ]


def grouped_reducescatter_async(
    tensors: ReducedTensors,
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Start a `grouped_reducescatter`.

    Args:
        tensors: The tensors of this rank, the same number on all ranks.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        process_set: The ranks that take part; all ranks by default.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    factors = (prescale_factor, postscale_factor)
    return together(
        [
            reducescatter_async(tensor, numbered(name, index), op, process_set, *factors)
            for index, tensor in enumerate(tensors)
        ]
    )


# Rows to and from each rank.

Splits: TypeAlias = torch.Tensor | np.ndarray | Sequence[int] | None


def _splits(tensor: torch.Tensor, splits: Splits, size: int) -> list[int]:
    if tensor.dim() == 0:
        raise UsageError("alltoall needs a tensor with a first dimension, got a single number; use tensor.reshape(1)")
    rows = len(tensor)
    if splits is None or (hasattr(splits, "__len__") and len(splits) == 0):
        if rows % size:
            raise UsageError(f"alltoall without splits needs a first dimension that {size} divides, got {rows}; give splits")
        return [rows // size] * size
    if not isinstance(splits, torch.Tensor | np.ndarray | Sequence):
        raise WrongType(f"expected splits to be a tensor or a list of {size} whole numbers, got {splits!r}")
    listed = [number.item() if hasattr(number, "item") else number for number in splits]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in listed):
        kind = splits.dtype if isinstance(splits, torch.Tensor | np.ndarray) else listed
        raise WrongType(f"expected splits to be {size} whole numbers, got {kind}; use splits.int()")
    if len(listed) != size or sum(listed) != rows or min(listed) < 0:
        raise UsageError(f"expected splits to be {size} numbers with the sum {rows}, got {listed}")
    return listed


def _exchange_rows(
    tensor: torch.Tensor, splits: list[int], name: str | None, members: ProcessSet
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    if members.size() == 1:
        return Handle(lambda: (tensor.detach().clone(), torch.tensor(splits, dtype=torch.int32)))
    rest, code = digest("rest", *tensor.shape[1:]), dtype_code(tensor.dtype)
    mine = tensor.detach().contiguous()

    def body(calls: dict[int, Call], group: Any) -> CallSteps:
        table = [torch.empty(len(splits), dtype=torch.int64) for _ in splits]
        yield from group.all_gather(table, torch.tensor(splits, dtype=torch.int64))
        received = [int(row[members.rank()]) for row in table]
        output = mine.new_empty((sum(received), *mine.shape[1:]))
        yield from group.all_to_all(list(output.split(received)), list(mine.split(splits)))
        return output, torch.tensor(received, dtype=torch.int32)

    pending = negotiator_of(members).start(call_of(CallKind.ALLTOALL, name, dtype=code, shape=rest), body, tensors=[mine])
    return Handle(pending.wait, [pending])


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: list[int], name: str | None, members: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = _exchange_rows(tensor, splits, name, members).wait()
        ctx.received, ctx.members = received.tolist(), members
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        """The rows of the gradient go back to the ranks they came from."""
        return _exchange_rows(grad, ctx.received, None, ctx.members).wait()[0], None, None, None


def _like(received: torch.Tensor, splits: Splits) -> torch.Tensor:
    """The numbers of rows in the dtype of `splits`."""
    return received.to(splits.dtype) if isinstance(splits, torch.Tensor) else received


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send rows to each rank and receive rows from each; gradients flow through it.

    Args:
        tensor: The tensor of this rank.
        splits: The number of rows for each rank; equal numbers by default.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The rows received, in the order of ranks; with `splits` a pair of these and the number from each rank.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    check_tensors([tensor], "alltoall")
    check_member(process_set, "alltoall")
    listed = _splits(tensor, splits, process_set.size())
    output, received = _AllToAll.apply(tensor, listed, name, process_set)
    return output if splits is None else (output, _like(received, splits))


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Any]:
    """Start an `alltoall`, without gradients.

    Args:
        tensor: The tensor of this rank.
        splits: The number of rows for each rank; equal numbers by default.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    check_tensors([tensor], "alltoall")
    check_member(process_set, "alltoall")
    handle = _exchange_rows(tensor, _splits(tensor, splits, process_set.size()), name, process_set)

    def finish() -> Any:
        output, received = handle.wait()
        return output if splits is None else (output, _like(received, splits))

    return Handle(finish, handle._parts)

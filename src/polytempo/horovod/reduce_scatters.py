"""`reducescatter`: each rank gets its rows of the reduction."""

from __future__ import annotations

from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.horovod.compression import Compression, Compressor
from polytempo.horovod.gathers import allgather
from polytempo.horovod.handles import Handle, numbered, together
from polytempo.horovod.negotiation import Call, CallKind, CallSteps, call_of, digest, dtype_code, negotiator_of
from polytempo.horovod.ops import Average, Op, Sum, check_op
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set
from polytempo.horovod.reductions import ReducedTensors, Reduction, check_tensors, digest_of_factors, scale_


def _rows(tensor: torch.Tensor, size: int) -> list[int]:
    """The number of rows for each rank; the first ranks get one more where it does not divide."""
    if tensor.dim() == 0:
        raise UsageError("reducescatter needs a tensor with a first dimension, got a single number")
    each, more = divmod(len(tensor), size)
    return [each + (index < more) for index in range(size)]


def _reduce_rows(tensor: torch.Tensor, how: Reduction) -> Handle[torch.Tensor]:
    check_tensors([tensor], "reducescatter")
    check_member(how.members, "reducescatter")
    size = how.members.size()
    rows = _rows(tensor, size)
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    scale_(whole, how.before)
    if size == 1:
        return Handle(lambda: _scaled(whole, how))
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
        return _scaled(output, how)

    pending = negotiator_of(how.members).start(call, body, tensors=[whole, output])
    return Handle(pending.wait, [pending])


def _scaled(tensor: torch.Tensor, how: Reduction) -> torch.Tensor:
    scale_(tensor, how.after)
    return tensor


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

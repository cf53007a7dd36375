"""`alltoall`: rows to each rank, and rows from each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from polytempo.errors import UsageError, WrongType
from polytempo.horovod.handles import Handle
from polytempo.horovod.negotiation import Call, CallKind, CallSteps, call_of, digest, dtype_code, negotiator_of
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set
from polytempo.horovod.reductions import check_tensors

Splits: TypeAlias = torch.Tensor | np.ndarray | Sequence[int] | None


def _splits(tensor: torch.Tensor, splits: Splits, size: int) -> list[int]:
    """The number of rows for each rank."""
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

"""`alltoall`: rows for each rank, and from each rank."""

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
    """How many rows go to each rank."""
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

    def act(calls: dict[int, Call], inside: Any) -> CallSteps:
        table = [torch.empty(len(splits), dtype=torch.int64) for _ in splits]
        yield from inside.all_gather(table, torch.tensor(splits, dtype=torch.int64))
        received = [int(row[members.rank()]) for row in table]
        output = mine.new_empty((sum(received), *mine.shape[1:]))
        yield from inside.all_to_all(list(output.split(received)), list(mine.split(splits)))
        return output, torch.tensor(received, dtype=torch.int32)

    pending = negotiator_of(members).start(call_of(CallKind.ALLTOALL, name, dtype=code, shape=rest), act)
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
        """Everything back to where it came from."""
        return _exchange_rows(grad, ctx.received, None, ctx.members).wait()[0], None, None, None


def _like(received: torch.Tensor, splits: Splits) -> torch.Tensor:
    """As whole numbers of the kind that was given."""
    return received.to(splits.dtype) if isinstance(splits, torch.Tensor) else received


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Rows for each rank, and from each rank; with `splits`, also how many came from each."""
    check_tensors([tensor], "alltoall")
    check_member(process_set, "alltoall")
    listed = _splits(tensor, splits, process_set.size())
    output, received = _AllToAll.apply(tensor, listed, name, process_set)
    return output if splits is None else (output, _like(received, splits))


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Any]:
    """The same, not waited for."""
    check_tensors([tensor], "alltoall")
    check_member(process_set, "alltoall")
    handle = _exchange_rows(tensor, _splits(tensor, splits, process_set.size()), name, process_set)

    def finish() -> Any:
        output, received = handle.wait()
        return output if splits is None else (output, _like(received, splits))

    return Handle(finish, handle._parts)

"""Sparse tensors of all ranks as one: indices and values are gathered, and equal indices added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.errors import UsageError, WrongType
from polytempo.horovod.gathering import allgather_async
from polytempo.horovod.ops import Average, Op, Sum, check_op
from polytempo.horovod.pending import Pending
from polytempo.horovod.sets import ProcessSet, global_process_set
from polytempo.train import communicate


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet = global_process_set,
) -> Pending[torch.Tensor]:
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

    return Pending(finish, [*indices._parts, *values._parts])


def _made(like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    how = {"dtype": like.dtype, "device": like.device, "check_invariants": False}  # they come from sparse tensors
    return torch.sparse_coo_tensor(indices.t(), values, like.shape, **how).coalesce()


def gather_sparse(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], factor: float, group: communicate.Group | None
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
    communicate.all_gather(table, mine, group=group)
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
                communicate.all_gather(list(whole.split(lengths)), piece, group=group)
        found[param] = _made(param.detach(), where, added * factor)
    return found

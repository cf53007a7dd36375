"""Calls of a group on tensors of GPUs that NCCL carries out: `all_reduce` and `broadcast`, of what NCCL has dtypes for.

Gradients and parameters go by these. The other collectives go by CUDA IPC or the host, as they do without NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from polytempo.collectives.flattening import fuse
from polytempo.collectives.reduce_ops import before_mean, divide
from polytempo.collectives.tasks import Steps

if TYPE_CHECKING:
    from polytempo.collectives.executor import ExecutionStage

WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, *WHOLE})
OPERATIONS = {"sum": "SUM", "mean": "AVG", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}


def nccl_takes(tensors: Sequence[torch.Tensor], how: Sequence[object]) -> bool:
    """Whether NCCL can: the same on all ranks, which have the same dtypes and operation. `how`: an operation, or a root."""
    return all(tensor.dtype in DTYPES for tensor in tensors) and all(
        isinstance(one, int) or one in OPERATIONS for one in how
    )


def all_reduce(native: Any, stage: ExecutionStage, tensors: Sequence[torch.Tensor], op: str) -> Steps:
    """Make each tensor the sum (or another combination) over all ranks."""
    size = len(stage.ranks)
    for fused in fuse(tensors, stays=True):
        whole, options = fused.whole, dist.AllreduceOptions()
        apart = op == "mean" and not whole.is_cuda  # gloo, in tests, has no mean
        options.reduceOp = getattr(dist.ReduceOp, OPERATIONS["sum" if apart else op])
        if apart:
            before_mean(op, whole, size)
        yield from native.within(stage, whole, lambda made, whole=whole, options=options: [made.allreduce([whole], options)])
        if apart:
            divide(op, whole, size)
        fused.scatter()


def broadcast(native: Any, stage: ExecutionStage, tensors: Sequence[torch.Tensor], root: int) -> Steps:
    """Make each tensor the root's."""
    for fused in fuse(tensors, stays=True):
        whole, options = fused.whole, dist.BroadcastOptions()
        options.rootRank = root
        yield from native.within(stage, whole, lambda made, whole=whole, options=options: [made.broadcast([whole], options)])
        fused.scatter()


NCCL_CALLS: dict[str, Callable[..., Steps]] = {"all_reduce": all_reduce, "broadcast": broadcast}

"""`broadcast`. Roots are ranks of the job, in a process set too."""

from __future__ import annotations

from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.horovod.handles import Handle
from polytempo.horovod.negotiation import Call, CallKind, CallSteps, call_of, digest, dtype_code, negotiator_of
from polytempo.horovod.ops import Average
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set
from polytempo.horovod.reductions import Reduction, check_tensors, start
from polytempo.session import session


def check_root(root_rank: int, members: ProcessSet, call: str) -> None:
    """Refuse a root that is not a member."""
    check_member(members, call)
    if root_rank not in members.ranks:
        raise UsageError(f"expected root_rank to be one of {members.ranks}, got {root_rank}")


def _broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, members: ProcessSet) -> Handle[torch.Tensor]:
    """In place."""
    check_tensors([tensor], "broadcast")
    check_root(root_rank, members, "broadcast")
    if members.size() == 1:
        return Handle(lambda: tensor)
    shape, code = digest("shape", *tensor.shape), dtype_code(tensor.dtype)
    call = call_of(CallKind.BROADCAST, name, dtype=code, count=tensor.numel(), shape=shape, root=root_rank)

    def body(calls: dict[int, Call], group: Any) -> CallSteps:
        yield from group.broadcast([tensor.detach()], members.ranks.index(root_rank))
        return tensor

    pending = negotiator_of(members).start(call, body, tensors=[tensor])
    return Handle(pending.wait, [pending])


class _Broadcast(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, members: ProcessSet) -> torch.Tensor:
        ctx.root, ctx.members = root, members
        return broadcast_async(tensor, root, name, members).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The mean of all ranks' gradients on the root, zeros elsewhere, as in Horovod since 0.21.3."""
        mean = start([grad], Reduction(Average, ctx.members), in_place=False).wait()[0]
        return (mean if session.rank() == ctx.root else torch.zeros_like(mean)), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of one rank, as a new tensor; gradients flow through it.

    Args:
        tensor: The tensor of this rank.
        root_rank: The rank of the job whose value all get.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The tensor of the root.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    sent: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return sent


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Start a `broadcast` into a new tensor, without gradients.

    Args:
        tensor: The tensor of this rank.
        root_rank: The rank of the job whose value all get.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    check_tensors([tensor], "broadcast")
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return _broadcast(copy, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Start a `broadcast` in place.

    Args:
        tensor: Read on the root, filled elsewhere.
        root_rank: The rank of the job whose value all get.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    return _broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Make a tensor that of one rank, in place.

    Args:
        tensor: Read on the root, filled elsewhere.
        root_rank: The rank of the job whose value all get.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The tensor.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    return _broadcast(tensor, root_rank, name, process_set).wait()

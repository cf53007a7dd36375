"""`broadcast`: what one rank has, to all. Ranks are those of the job, in a process set too."""

from __future__ import annotations

from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.horovod.handles import Handle
from polytempo.horovod.negotiation import CallSteps, negotiator_of
from polytempo.horovod.negotiation_records import Call, CallKind, call_of, digest, dtype_code
from polytempo.horovod.ops import Average
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set
from polytempo.horovod.reductions import Reduction, check_tensors, start
from polytempo.session import session


def check_root(root_rank: int, members: ProcessSet, call: str) -> None:
    """The one who has it must be among them."""
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

    def act(calls: dict[int, Call], inside: Any) -> CallSteps:
        yield from inside.broadcast([tensor.detach()], members.ranks.index(root_rank))
        return tensor

    flight = negotiator_of(members).start(call, act)
    return Handle(flight.wait, [flight])


class _Broadcast(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, members: ProcessSet) -> torch.Tensor:
        ctx.root, ctx.members = root, members
        return broadcast_async(tensor, root, name, members).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The mean of all ranks' gradients to the root, as in Horovod since 0.21.3."""
        mean = start([grad], Reduction(Average, ctx.members), in_place=False).wait()[0]
        return (mean if session.rank() == ctx.root else torch.zeros_like(mean)), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The root's tensor, as a new one."""
    sent: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return sent


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """The same, not waited for."""
    check_tensors([tensor], "broadcast")
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return _broadcast(copy, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """In place, not waited for."""
    return _broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """In place."""
    return _broadcast(tensor, root_rank, name, process_set).wait()

"""`broadcast`, and broadcasts of models, optimizers and plain data. Roots are ranks of the job, in a process set too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from polytempo.errors import UsageError, WrongType
from polytempo.horovod.handles import Handle
from polytempo.horovod.negotiation import Call, CallKind, CallSteps, call_of, digest, dtype_code, negotiator_of
from polytempo.horovod.ops import Average
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set
from polytempo.horovod.reductions import Reduction, check_tensors, pack, start
from polytempo.horovod.rows import start_gather
from polytempo.session import session
from polytempo.train.communication import load_in_place
from polytempo.train.safe_serialization import decode_from, encode, encode_for_all, is_refusal


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


#: Tensors are fused up to this number of bytes.
FUSED_BYTES = 16 << 20


def _fused(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    for alike in pack(list(tensors)):
        batch: list[torch.Tensor] = []
        size = 0
        for tensor in alike:
            batch.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= FUSED_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def _send(tensors: list[torch.Tensor], root: int, group: Any) -> CallSteps:
    """Broadcast in place; all ranks have tensors of the same sizes, in the same order."""
    for batch in _fused(tensors):
        yield from group.broadcast(batch, root)


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of a state_dict, of named parameters, or of parameters."""
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    named = [pair if isinstance(pair, tuple) else (str(index), pair) for index, pair in enumerate(pairs)]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise WrongType(f"broadcast_parameters needs tensors, got {kind} for {name}; use broadcast_object for it")
    return named


def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Make the tensors of a model those of one rank, in place.

    Args:
        params: A `state_dict()`, named parameters or parameters, the same on all ranks.
        root_rank: The rank of the job whose value all get.
        prefix: A name for the call.
        process_set: The ranks that take part; all ranks by default.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
        WrongType: A value is not a tensor; use `broadcast_object`.
    """
    check_root(root_rank, process_set, "broadcast_parameters")
    named = _named(params)
    if process_set.size() == 1 or not named:
        return
    about = [(name, tuple(tensor.shape), dtype_code(tensor.dtype)) for name, tensor in named]
    total, code = sum(tensor.numel() for _, tensor in named), about[0][2]
    call = call_of(CallKind.BROADCAST, prefix, dtype=code, count=total, shape=digest(*about), root=root_rank)
    root, tensors = process_set.ranks.index(root_rank), [tensor.detach() for _, tensor in named]
    negotiator_of(process_set).start(call, lambda calls, group: _send(tensors, root, group), False, tensors).wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Make the options and the state of an optimizer those of one rank, whatever state this rank's has.

    Args:
        optimizer: Plain, or wrapped by `DistributedOptimizer`.
        root_rank: The rank of the job whose state all get.
        model: Accepted as in Horovod, and not used.
        prefix: A name for the call.
        process_set: The ranks that take part; all ranks by default.

    Raises:
        UsageError: On all ranks, if the state of the root is not plain data.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise WrongType(f"expected model to be a torch.nn.Module, got {type(model).__name__}; a name goes into prefix=")
    check_root(root_rank, process_set, "broadcast_optimizer_state")
    if process_set.size() == 1:
        return
    aside: list[torch.Tensor] = []
    own = optimizer.state_dict() if session.rank() == root_rank else None
    received = _from_root(own, root_rank, prefix, process_set, aside)
    if session.rank() != root_rank:
        load_in_place(optimizer, received)


def _from_root(
    thing: Any, root_rank: int, name: str | None, members: ProcessSet, aside: list[torch.Tensor] | None = None
) -> Any:
    """The plain data of the root on all ranks, or its refusal on all. The record of the root holds the length."""
    mine, root = session.rank() == root_rank, members.ranks.index(root_rank)
    data, refusal = encode_for_all(thing, aside) if mine else (b"", None)

    def body(calls: dict[int, Call], group: Any) -> CallSteps:
        buffer = torch.empty(calls[root_rank].own, dtype=torch.uint8)
        if mine:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        yield from group.broadcast([buffer], root)
        received = buffer.numpy().tobytes()
        if is_refusal(received):
            return received, None
        found = None if mine else decode_from(root_rank, received, aside)
        if aside is not None:
            yield from _send([tensor.cpu() for tensor in aside], root, group)  # all on one device, as where they are made
        return b"", found

    call = call_of(CallKind.OBJECT, name, root=root_rank, own=len(data))
    refused, found = negotiator_of(members).start(call, body, background=False).wait()
    if refusal is not None:
        raise refusal
    if refused:
        decode_from(root_rank, refused)  # raises it
    return thing if mine else found


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The plain data of one rank, on all ranks.

    Args:
        obj: Plain data: numbers, texts, bytes, lists, dicts, tensors. Nothing is pickled.
        root_rank: The rank of the job whose value all get.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The data of the root.

    Raises:
        UsageError: On all ranks, if the data of the root is not plain.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    check_root(root_rank, process_set, "broadcast_object")
    if process_set.size() == 1:
        encode(obj)
        return obj
    return _from_root(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The plain data of all ranks, on all ranks.

    Args:
        obj: Plain data: numbers, texts, bytes, lists, dicts, tensors. Nothing is pickled.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A list by rank.

    Raises:
        UsageError: On all ranks, if the data of a rank is not plain.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    if process_set.size() == 1:
        encode(obj)
        return [obj]
    data, refusal = encode_for_all(obj)
    gathered, lengths = start_gather(torch.frombuffer(bytearray(data), dtype=torch.uint8), name, process_set).wait()
    if refusal is not None:
        raise refusal
    pieces = zip(process_set.ranks, gathered.split(lengths), strict=True)
    return [decode_from(rank, piece.numpy().tobytes()) for rank, piece in pieces]

"""Models, optimizers and plain data from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from polytempo.errors import WrongType
from polytempo.horovod.broadcasts import check_root
from polytempo.horovod.gathers import gather_pieces
from polytempo.horovod.negotiation import CallSteps, negotiator_of
from polytempo.horovod.negotiation_records import Call, CallKind, call_of, digest, dtype_code
from polytempo.horovod.process_sets import ProcessSet, global_process_set
from polytempo.horovod.reductions import pack
from polytempo.session import session
from polytempo.train.broadcast_state import load_in_place
from polytempo.train.safe_serialization import decode_from, encode, encode_for_all, is_refusal

#: Small tensors travel together, up to this number of bytes.
PARCEL = 16 << 20


def _parcels(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    for alike in pack(list(tensors)):
        parcel: list[torch.Tensor] = []
        size = 0
        for tensor in alike:
            parcel.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= PARCEL:
                yield parcel
                parcel, size = [], 0
        if parcel:
            yield parcel


def _send(tensors: list[torch.Tensor], root: int, inside: Any) -> CallSteps:
    """In place; all ranks have tensors of the same sizes, in the same order."""
    for parcel in _parcels(tensors):
        yield from inside.broadcast(parcel, root)


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    """Horovod takes a state_dict, named parameters, or parameters."""
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
    """Make the model of all ranks the root's: `model.state_dict()`, or `model.named_parameters()`."""
    check_root(root_rank, process_set, "broadcast_parameters")
    named = _named(params)
    if process_set.size() == 1 or not named:
        return
    about = [(name, tuple(tensor.shape), dtype_code(tensor.dtype)) for name, tensor in named]
    total, code = sum(tensor.numel() for _, tensor in named), about[0][2]
    call = call_of(CallKind.BROADCAST, prefix, dtype=code, count=total, shape=digest(*about), root=root_rank)
    root, tensors = process_set.ranks.index(root_rank), [tensor.detach() for _, tensor in named]
    negotiator_of(process_set).start(call, lambda calls, inside: _send(tensors, root, inside), False).wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Make the optimizer of all ranks the root's: options and state, whatever this rank's has or lacks.

    Args:
        optimizer: plain, or wrapped by `DistributedOptimizer`.
        root_rank: whose state it is.
        model: taken, as Horovod takes it to know sparse parameters; nothing need be known of them here.
        prefix: a name for the call.
        process_set: who takes part.

    Raises:
        UsageError: on all ranks, if the root's state is not plain data.
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
    """The root's plain data on all other ranks; where it is refused, on all. Its record says how long it is."""
    mine, root = session.rank() == root_rank, members.ranks.index(root_rank)
    data, refusal = encode_for_all(thing, aside) if mine else (b"", None)

    def act(calls: dict[int, Call], inside: Any) -> CallSteps:
        buffer = torch.empty(calls[root_rank].own, dtype=torch.uint8)
        if mine:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        yield from inside.broadcast([buffer], root)
        received = buffer.numpy().tobytes()
        if is_refusal(received):
            return received, None
        found = None if mine else decode_from(root_rank, received, aside)
        if aside is not None:
            yield from _send([tensor.cpu() for tensor in aside], root, inside)  # all on one device, as where they are made
        return b"", found

    call = call_of(CallKind.OBJECT, name, root=root_rank, own=len(data))
    refused, found = negotiator_of(members).start(call, act, background=False).wait()
    if refusal is not None:
        raise refusal
    if refused:
        decode_from(root_rank, refused)  # raises it
    return thing if mine else found


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's plain data (see `plain.py`), on all ranks; what is none is refused on all."""
    check_root(root_rank, process_set, "broadcast_object")
    if process_set.size() == 1:
        encode(obj)
        return obj
    return _from_root(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Everybody's plain data, as a list; what is none is refused on all ranks."""
    if process_set.size() == 1:
        encode(obj)
        return [obj]
    data, refusal = encode_for_all(obj)
    pieces = gather_pieces(torch.frombuffer(bytearray(data), dtype=torch.uint8), name, process_set)
    if refusal is not None:
        raise refusal
    return [decode_from(rank, piece.numpy().tobytes()) for rank, piece in zip(process_set.ranks, pieces, strict=True)]

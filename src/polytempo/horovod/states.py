"""Models, optimizers and plain data from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.horovod.broadcasting import check_root
from polytempo.horovod.gathering import gather_pieces
from polytempo.horovod.records import Call, Kind, digest, dtype_code, exchange
from polytempo.horovod.reduction import pack
from polytempo.horovod.sets import ProcessSet, global_process_set
from polytempo.train import communicate, session
from polytempo.train.plain import decode, encode
from polytempo.train.states import load_in_place

#: Small tensors travel together, up to so many bytes.
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


def _send(tensors: list[torch.Tensor], root_rank: int, members: ProcessSet) -> None:
    """In place; all ranks have tensors of the same sizes, in the same order."""
    for parcel in _parcels(tensors):
        if len(parcel) == 1:
            communicate.broadcast(parcel[0], src=root_rank, group=members.group)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in parcel])
        communicate.broadcast(flat, src=root_rank, group=members.group)
        if session.rank() != root_rank:
            for tensor, piece in zip(parcel, flat.split([tensor.numel() for tensor in parcel]), strict=True):
                tensor.copy_(piece.view(tensor.shape))


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    """Horovod takes a state_dict, named parameters, or parameters."""
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    named = [pair if isinstance(pair, tuple) else (str(index), pair) for index, pair in enumerate(pairs)]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise UsageError(f"broadcast_parameters needs tensors, got {kind} for {name}; use broadcast_object for it")
    return named


def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Make everybody's model the root's: `model.state_dict()`, or `model.named_parameters()`."""
    check_root(root_rank, process_set, "broadcast_parameters")
    named = _named(params)
    if process_set.size() == 1 or not named:
        return
    about = [(name, tuple(tensor.shape), dtype_code(tensor.dtype)) for name, tensor in named]
    total = sum(tensor.numel() for _, tensor in named)
    exchange(Call(Kind.BROADCAST, 0, about[0][2], total, digest(*about), root_rank, digest(prefix)), process_set)
    with torch.no_grad():
        _send([tensor.detach() for _, tensor in named], root_rank, process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Make everybody's optimizer the root's: options and state, whatever this rank's has or lacks."""
    check_root(root_rank, process_set, "broadcast_optimizer_state")
    if process_set.size() == 1:
        return
    aside: list[torch.Tensor] = []
    root = session.rank() == root_rank
    data = encode(optimizer.state_dict(), aside) if root else b""
    received = _send_bytes(data, root_rank, prefix, process_set)
    state = None if root else decode(received, aside)
    with torch.no_grad():
        _send([tensor.cpu() for tensor in aside], root_rank, process_set)  # all on one device, as where they are made
    if state is not None:
        load_in_place(optimizer, state)


def _send_bytes(data: bytes, root_rank: int, name: str | None, members: ProcessSet) -> bytes:
    """The root's bytes. Its record says how many they are."""
    calls = exchange(Call(Kind.OBJECT, root=root_rank, name=digest(name), own=len(data)), members)
    buffer = torch.empty(calls[members.ranks.index(root_rank)].own, dtype=torch.uint8)
    if session.rank() == root_rank:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    communicate.broadcast(buffer, src=root_rank, group=members.group)
    received: bytes = buffer.numpy().tobytes()
    return received


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's plain data (see `plain.py`), on all ranks."""
    check_root(root_rank, process_set, "broadcast_object")
    root = session.rank() == root_rank
    data = encode(obj) if root else b""
    if process_set.size() == 1:
        return obj
    received = _send_bytes(data, root_rank, name, process_set)
    return obj if root else decode(received)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Everybody's plain data, as a list."""
    data = torch.frombuffer(bytearray(encode(obj)), dtype=torch.uint8)
    if process_set.size() == 1:
        return [obj]
    return [decode(piece.numpy().tobytes()) for piece in gather_pieces(data, name, process_set)]

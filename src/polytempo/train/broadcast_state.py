"""Broadcasts of models and optimizers from one rank to all, in place. Nothing is pickled (`safe_serialization.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polytempo.server.optimizer_state import as_bytes, digest_of_bytes
from polytempo.session.session import current
from polytempo.train.communication import broadcast
from polytempo.train.safe_serialization import decode_from, encode_for_all


def broadcast_parameters(state: Any, root: int = 0) -> None:
    """Make the tensors of a model those of rank `root`, in place. Collective.

    `DistributedOptimizer` does this for its parameters by itself; this is for buffers and other models.

    Args:
        state: A `state_dict()` or `named_parameters()`, with the same names on all ranks.
        root: The rank whose values all get.

    Raises:
        UsageError: A tensor cannot be sent.
        PeerError: Ranks gave tensors of different shapes, or one is lost (`RankLost`).
    """
    items = dict(state)
    tensors = [items[name] for name in sorted(items) if isinstance(items[name], torch.Tensor)]
    if tensors:
        with _what_stays_is_no_change(tensors):
            broadcast([tensor.detach() for tensor in tensors], root)


@contextmanager
def _what_stays_is_no_change(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Values that were the same everywhere before are no change of the script's, though they were written; others are,
    though what comes over a link is written without torch."""
    watches = list(current().watches)
    clean = [watch for watch in watches if watch.is_clean()]
    before = [_digest(tensor) for tensor in tensors if watches]
    yield
    now = [_digest(tensor) for tensor in tensors if watches]
    changed = [tensor for tensor, old, new in zip(tensors, before, now, strict=False) if old != new]
    for watch in watches:
        if not watch.was_written(changed) and watch in clean:
            watch.record()


def _digest(tensor: torch.Tensor) -> bytes:
    return digest_of_bytes([as_bytes(tensor.detach().cpu())])


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Make the options and the state of an optimizer those of rank `root`, whatever state this rank's has. Collective.

    Args:
        optimizer: A torch optimizer, made over the same parameters on all ranks.
        root: The rank whose options and state all get.

    Raises:
        UsageError: The state holds an object that is neither a tensor nor plain data; nothing is pickled.
        PeerError: A rank does not take part, or is lost (`RankLost`).
    """
    current().check_part()
    if current().size == 1:
        return
    aside: list[torch.Tensor] = []
    mine = current().rank == root
    sent, refusal = encode_for_all(optimizer.state_dict(), aside) if mine else (b"", None)
    data = bytearray(sent)
    length = torch.tensor([len(data)])
    broadcast(length, root)
    text = torch.frombuffer(data, dtype=torch.uint8) if mine else torch.empty(int(length), dtype=torch.uint8)
    broadcast(text, root)
    if refusal is not None:
        raise refusal
    state = None if mine else decode_from(root, text.numpy().tobytes(), aside)
    if aside:
        broadcast([tensor.detach() for tensor in aside], root)
    if state is not None:
        load_in_place(optimizer, state)


def load_in_place(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state. Groups and state stay the objects they were: schedulers and wrappers hold on to them."""
    groups, kept = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state)
    for old, new in zip(groups, optimizer.param_groups, strict=True):
        old.update(new)
    entries = dict(optimizer.state)
    kept.clear()
    kept.update(entries)
    optimizer.param_groups, optimizer.state = groups, kept

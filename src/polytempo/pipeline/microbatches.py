"""A batch cut into microbatches: a tensor, or tuples, lists and dicts of them, along the first dimension."""

from __future__ import annotations

from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.pipeline.stage_message import StageMessage


def split(batch: Any, parts: int, device: torch.device, even: bool = True) -> list[Any]:
    """Equal parts, where a stage computes; about equal, some of them empty, where they need not be `even`. What is no
    tensor goes to each."""
    if isinstance(batch, torch.Tensor):
        if not even and batch.dim():
            return list(batch.to(device).tensor_split(parts))
        if batch.dim() == 0 or batch.shape[0] == 0 or batch.shape[0] % parts:
            raise UsageError(_uneven(batch, parts))
        return list(batch.to(device).chunk(parts))
    if isinstance(batch, dict):
        cut = {name: split(value, parts, device, even) for name, value in batch.items()}
        return [{name: pieces[part] for name, pieces in cut.items()} for part in range(parts)]
    if isinstance(batch, tuple | list):
        pieces = [split(value, parts, device, even) for value in batch]
        return [tuple(piece[part] for piece in pieces) for part in range(parts)]
    return [batch] * parts


def rows(batch: Any) -> int:
    """How many examples a batch has."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    return max(map(rows, values), default=0)


def inputs_of(batch: Any, parts: int, device: torch.device, even: bool = True) -> list[StageMessage]:
    """What goes into the first stage."""
    if batch is None:
        raise UsageError("the first stage needs the inputs of the batch, got None; call step(x, y) on every rank")
    pieces = split(batch, parts, device, even)
    return [
        StageMessage(list(piece)) if isinstance(piece, tuple) else StageMessage([piece], single=True) for piece in pieces
    ]


def _uneven(batch: torch.Tensor, parts: int) -> str:
    if batch.dim() == 0 or batch.shape[0] == 0:
        return f"expected a batch of examples, got a tensor of shape {tuple(batch.shape)}"
    size = batch.shape[0]
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    near = min(divisors, key=lambda number: (abs(number - parts), number))
    return f"a batch of {size} examples cannot be cut into {parts} equal microbatches; nearest: microbatches={near}"

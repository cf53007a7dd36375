"""Rows by their slots, in and out. Many are copied as blocks of bytes, which NumPy does faster than torch; for few rows
torch is faster, as there is less to prepare.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

MANY = 4096
#: Rows of these sizes are plain numbers to NumPy; others are blocks.
NUMBERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def _items(rows: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """Each row of a contiguous tensor as one item."""
    size = rows.shape[1] * rows.element_size()
    items: numpy.ndarray[Any, Any] = rows.view(torch.uint8).numpy().view(NUMBERS.get(size, f"V{size}")).reshape(-1)
    return items


def gathered(whole: torch.Tensor, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The rows of these slots, which must be of the table."""
    if slots.numel() < MANY:
        return torch.index_select(whole, 0, slots, out=out)
    result = torch.empty((slots.numel(), whole.shape[1]), dtype=whole.dtype) if out is None else out
    numpy.take(_items(whole), slots.numpy(), out=_items(result), mode="clip")  # else `out` would be buffered
    return result


def scatter(whole: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows to slots, each of which stands once."""
    if slots.numel() < MANY:
        whole.index_copy_(0, slots, rows.to(whole.dtype))
    else:
        numpy.put(_items(whole), slots.numpy(), _items(rows.to(whole.dtype).contiguous()))

"""Memory of rows: pages that cost nothing until a row is written, and copies of rows by their slots.

Pages of an anonymous mapping are zero and exist only once they are written to. `torch.zeros` writes all of them, and NumPy
asks for huge pages, of which every scattered row would claim a whole one. So huge pages are switched off, except for small
tables, which are soon filled, and whose rows are found twice as fast in huge pages.

Many rows are copied as blocks of bytes, which NumPy does faster than torch; for few rows torch is faster.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy
import torch

from polytempo.errors import UsageError

#: Bytes up to which a table may be committed as a whole.
SMALL = 128 << 20
#: Do not set memory aside for pages that may never be written.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)


def lazy_zeros(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of which the system holds only the pages that were written."""
    nbytes = rows * width * dtype.itemsize
    if not nbytes:
        return torch.zeros((rows, width), dtype=dtype)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except OSError as error:
        raise UsageError(f"{nbytes >> 30} GB for {rows} rows cannot be had ({error.strerror}); use rows=None") from None
    with suppress(OSError):  # a system that has no huge pages
        pages.madvise(mmap.MADV_HUGEPAGE if nbytes <= SMALL else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=rows * width).view(rows, width)


def grown(rows: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
    """The first `used` rows in room for `capacity`; the same tensor where it has that room."""
    if capacity <= rows.shape[0]:
        return rows
    larger = lazy_zeros(capacity, rows.shape[1], rows.dtype)
    larger[:used] = rows[:used]
    return larger


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

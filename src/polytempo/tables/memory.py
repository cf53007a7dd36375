"""Memory for rows that costs nothing until a row is written.

Pages of an anonymous mapping are zero and exist only once they are written to. `torch.zeros` writes them all, and NumPy asks
for huge pages, of which every scattered row would claim a whole one. Here the system is asked not to use them, but for small
tables, which are soon all there, and whose rows are found twice as fast in huge pages.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

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

"""Row pushes through a filter: which rows go now, and which wait.

What is pushed is added to what earlier pushes left over; the rows that are large enough ("significant") or largest ("topk"),
by their largest number, are sent, as they are or in two bytes a number; the rest waits. So sent + residual = produced. The
residual is as large as the array, on every worker.

What is no number (infinities and NaN) is sent before all else and leaves 0 behind, as in `compression/encoding.py`.
"""

from __future__ import annotations

from math import ceil

import torch

from polytempo.compression.chain import CASTS, ChainSpec
from polytempo.compression.encoding import Dense, NumberFormat, clear, narrow
from polytempo.compression.sparsification import Significant, TopK
from polytempo.errors import UsageError
from polytempo.protocol.values import TableInfo
from polytempo.server.optimizer_state import dtype_name


class RowFilter:
    """The filter of one array at one worker."""

    def __init__(self, chain: ChainSpec, info: TableInfo) -> None:
        if not isinstance(chain.code, Dense | TopK | Significant):
            raise UsageError(f"array {info.name!r}: the filter {chain} is for dense pushes; use topk, significant or a cast")
        if not info.rows:
            raise UsageError(
                f"array {info.name!r}: a filter keeps what it does not send, so the array needs a bound of rows"
            )
        self.chain = chain
        cast, dtype = CASTS.get(chain.cast), getattr(torch, info.dtype)
        self.form = dtype_name(cast) if cast is not None else ""
        self._form = NumberFormat(info.rows * info.dim, dtype, cast or dtype)
        self.residual = torch.zeros(info.rows, info.dim, dtype=self._form.wide)

    def choose(self, ids: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows to send now; ids are unique and ascend."""
        whole = self.residual[ids] + values
        kept = self._choice(_sizes(whole))
        said = narrow(whole[kept], self._form).to(self._form.dtype)
        whole[kept] -= said
        clear(whole)
        self.residual[ids] = whole
        return ids[kept], said

    def _choice(self, sizes: torch.Tensor) -> torch.Tensor:
        code = self.chain.code
        if isinstance(code, Significant):
            return sizes > code.threshold
        if isinstance(code, TopK) and sizes.numel():
            kept = torch.zeros(sizes.numel(), dtype=torch.bool)
            kept[torch.sort(sizes, descending=True, stable=True)[1][: max(1, ceil(code.share * sizes.numel()))]] = True
            return kept
        return torch.ones(sizes.numel(), dtype=torch.bool)


def _sizes(rows: torch.Tensor) -> torch.Tensor:
    """The largest number of each row; what is no number counts as the largest of all."""
    return rows.abs().nan_to_num(nan=float("inf"), posinf=float("inf")).amax(1) if rows.numel() else rows.new_empty(0)

"""Arrays in this process: a `KV` in a job of one without a launcher."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.tables.combine import RowPush
from polytempo.tables.table import Table
from polytempo.train.arrays import ArrayTable
from polytempo.train.row_traffic import SpanOfRows


class LocalArrays:
    """The same tables as on a server, and nobody else."""

    def __init__(self, tables: Sequence[ArrayTable]) -> None:
        self._pairs = [(table, Table(table.info, 0, 1)) for table in tables]
        self._version = 0

    def step(self) -> int:
        """Carry out what was staged; the version that it made."""
        self._version += 1
        for table, here in self._pairs:
            some = table.pushed()
            if isinstance(some, SpanOfRows):
                push = RowPush(None, some.values, 1.0, 0, self._version - 1, some.span)
            elif some is not None:
                push = RowPush(*some, 1.0, 0, self._version - 1)
            else:
                continue
            here.update([push], table.hyper(), 1.0, self._version)
        return self._version

    def pull(self, number: int, ids: torch.Tensor | None, span: tuple[int, int]) -> torch.Tensor:
        """Rows as they are."""
        table, here = self._pairs[number]
        return table.shaped(here.pull_range(*span) if ids is None else here.pull(ids))

    def clock(self, number: int, span: tuple[int, int]) -> tuple[int, dict[int, int]]:
        """The version and clock of a span."""
        here = self._pairs[number][1]
        return here.version_of(*span), here.clock(*span)

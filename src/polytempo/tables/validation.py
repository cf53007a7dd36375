"""Validation of tables, and of pushes and pulls that another process sends.

Wrong descriptions are the caller's mistake (`UsageError`), wrong rows another process's (`PeerError`). Both are found before
anything is changed.
"""

from __future__ import annotations

import math

import torch

from polytempo.errors import PeerError, UsageError, nearest
from polytempo.protocol.layout import ITEM_SIZES
from polytempo.protocol.values import TableInfo
from polytempo.tables.initializers import check_start
from polytempo.tables.routing import range_slots
from polytempo.tables.row_batches import RowPush
from polytempo.tables.row_optimizers import rule

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def is_count(given: object) -> bool:
    """Is it a whole number from 1 on?"""
    return isinstance(given, int) and not isinstance(given, bool) and given >= 1


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse rows of a dtype that messages do not carry."""
    if str(dtype).removeprefix("torch.") not in ITEM_SIZES:
        raise UsageError(f"expected dtype to be one of {', '.join(ITEM_SIZES)}, got {dtype}")


def check_table(info: TableInfo) -> None:
    """Refuse an impossible description of a table."""
    where = f"table {info.name!r}"
    if info.rows < 0 or info.dim < 1:
        raise UsageError(f"{where}: expected rows from 0 on and dim from 1 on, got rows={info.rows}, dim={info.dim}")
    if info.dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise UsageError(f"{where}: expected a dtype of {known}, got {info.dtype!r}{nearest(info.dtype, DTYPES)}")
    try:
        check_start(info.start)
        rule(info.rule)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if info.rule == "ftrl" and info.start != "zeros":
        raise UsageError(f"{where}: rule 'ftrl' works its rows out anew, so they start as 'zeros', got {info.start!r}")


class Checks:
    """Checks of the calls of one shard of a table."""

    def __init__(self, info: TableInfo, shard: int, shards: int) -> None:
        check_table(info)
        if not 0 <= shard < shards:
            raise UsageError(f"table {info.name!r}: expected a shard from 0 to below {shards}, got {shard}")
        self.info, self.shard, self.shards = info, shard, shards

    def push(self, push: RowPush) -> None:
        """Refuse a push that does not fit."""
        if (push.ids is None) == (push.span is None):
            raise self._error("either ids or a span in a push", f"ids={push.ids} and span={push.span}")
        if not (math.isfinite(push.weight) and push.weight >= 0):
            raise self._error("a weight from 0 on", push.weight)
        if push.worker < -1 or push.step < 0:
            raise self._error("a worker from -1 on and a step from 0 on", f"worker {push.worker}, step {push.step}")
        if push.ids is not None:
            self.rows(push.ids, push.values)
        elif push.span is not None:
            self.span(*push.span)
            slots = range_slots(*push.span, self.shard, self.shards)
            self.values(push.values, slots.stop - slots.start)

    def rows(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Refuse rows under ids that do not fit."""
        self.ids(ids)
        self.values(values, ids.numel())

    def ids(self, ids: torch.Tensor) -> None:
        """Refuse ids that are not this shard's."""
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise self._error("flat int64 ids", f"{ids.dtype} of shape {list(ids.shape)}")
        if not ids.numel():
            return
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < 0 or (self.info.rows and high >= self.info.rows):
            limit = f"to {self.info.rows - 1}" if self.info.rows else "on"
            raise self._error(f"ids from 0 {limit}", low if low < 0 else high)
        if self.shards > 1:
            strange = ids[ids % self.shards != self.shard]
            if strange.numel():
                owner = int(strange[0]) % self.shards
                raise self._error("only ids that live here", f"{int(strange[0])}, which lives on shard {owner}")

    def values(self, values: torch.Tensor, count: int) -> None:
        """Refuse values that are not `count` rows of this table."""
        if values.dtype != DTYPES[self.info.dtype] or list(values.shape) != [count, self.info.dim]:
            wanted = f"{count} rows of {self.info.dim} numbers of {self.info.dtype}"
            raise self._error(wanted, f"{str(values.dtype).removeprefix('torch.')} of shape {list(values.shape)}")

    def span(self, start: int, stop: int) -> None:
        """Refuse a range that is not in this table."""
        if not self.info.rows:
            raise self._error("ids, because it has no bound", f"the range {start} to {stop}")
        if not 0 <= start <= stop <= self.info.rows:
            raise self._error(f"a range inside 0 to {self.info.rows}", f"{start} to {stop}")

    def _error(self, wanted: str, got: object) -> PeerError:
        return PeerError(f"table {self.info.name!r} on shard {self.shard}: expected {wanted}, got {got}")

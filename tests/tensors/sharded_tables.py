"""A table on several shards, as a worker sees it: ids go to their shards, rows come back in the order of the ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from polytempo.protocol.values import TableInfo
from polytempo.tables.routing import cut_range, join_range, route
from polytempo.tables.row_batches import RowPush
from polytempo.tables.table_shard import TableShard

Some = tuple[list[int], torch.Tensor] | tuple[list[int], torch.Tensor, float]


class Sharded:
    """All shards of one table, in one process."""

    def __init__(self, info: TableInfo, shards: int = 1) -> None:
        self.info, self.shards = info, shards
        self.tables = [TableShard(info, shard, shards) for shard in range(shards)]
        self.version = 0

    def pull(self, ids: Sequence[int]) -> torch.Tensor:
        routing = route(torch.tensor(ids, dtype=torch.int64), self.shards)
        return routing.join([table.pull(part) for table, part in zip(self.tables, routing.parts, strict=True)])

    def pull_range(self, start: int, stop: int) -> torch.Tensor:
        return join_range([table.pull_range(start, stop) for table in self.tables], start, stop, self.shards)

    def push(self, *pushes: Some, hyper: Mapping[str, float] | None = None, rate: float = 1.0) -> None:
        """One update of these pushes: (ids, rows) or (ids, rows, weight)."""
        self.version += 1
        cuts = []
        for worker, (ids, values, *weight) in enumerate(pushes):
            routing = route(torch.tensor(ids, dtype=torch.int64), self.shards)
            parts = zip(routing.parts, routing.cut(values), strict=True)
            cuts.append([RowPush(own, rows, *(weight or [1.0]), worker, self.version) for own, rows in parts])
        for shard, table in enumerate(self.tables):
            table.update([cut[shard] for cut in cuts], hyper or {}, rate, self.version)

    def push_range(
        self, start: int, values: torch.Tensor, hyper: Mapping[str, float] | None = None, worker: int = 0
    ) -> None:
        self.version += 1
        span = (start, start + len(values))
        for table, cut in zip(self.tables, cut_range(values, start, self.shards), strict=True):
            table.update([RowPush(None, cut, 1.0, worker, self.version, span)], hyper or {}, 1.0, self.version)


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers, the same for the same seed in every dtype but for rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))

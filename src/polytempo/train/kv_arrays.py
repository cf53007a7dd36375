"""Arrays of a `KV` at their worker: what they are, what a step pushes to them, and futures of what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from polytempo.client.row_traffic import SomeRows, SpanOfRows, WorkerTable
from polytempo.compression.chain import parse_chain
from polytempo.errors import UsageError
from polytempo.protocol.layout import ITEM_SIZES
from polytempo.protocol.values import TableInfo
from polytempo.server.optimizer_state import dtype_name
from polytempo.tables.row_batches import RowPush, checked_ids, coalesce
from polytempo.tables.row_optimizers import checked_hyper, rule
from polytempo.tables.table_shard import TableShard
from polytempo.tables.validation import check_table
from polytempo.train.row_compression import RowFilter

T = TypeVar("T")


class Future(Generic[T]):
    """The result of a push or a pull under way. `result()` receives it: there is no background thread."""

    def __init__(self, done: Callable[[], bool], result: Callable[[], T]) -> None:
        self._done, self._get = done, result
        self._result: list[T] = []

    def done(self) -> bool:
        """Whether the result has arrived."""
        return bool(self._result) or self._done()

    def result(self) -> T:
        """Wait for the result and return it."""
        if not self._result:
            self._result.append(self._get())
        return self._result[0]


class Array:
    """The description of an array of a `KV`: its shape, and what a push does to it.

    Args:
        rows: The number of rows; None for any id from 0 to 2**63 - 1.
        dim: The length of a row; None where a row is one number.
        rule: What a push does: `"add"`, `"assign"`, `"min"`, `"max"`, or a row optimizer for gradients (`"sgd"`,
            `"adagrad"`, `"rowwise-adagrad"`, `"adam"`, `"prox"`, `"ftrl"`).
        dtype: Of the rows.
        start: Initial values: `"zeros"`, `"uniform:A"`, `"normal:S"`.
        seed: Of the initial values.
        compression: Which part of a push is sent now (`"significant:1e-3"`, `"topk:0.1+bf16"`); the rest goes later.
        cache_keys: Lists of rows repeat, and need not be sent each time.
        **options: Options of the rule, such as `lr` and `l1`.

    Raises:
        UsageError: An argument is out of range or unknown.
    """

    def __init__(
        self,
        rows: int | None,
        dim: int | None = None,
        *,
        rule: str = "add",
        dtype: torch.dtype = torch.float32,
        start: str = "zeros",
        seed: int = 0,
        compression: str = "none",
        cache_keys: bool = False,
        **options: float,
    ) -> None:
        for name, given in (("rows", rows), ("dim", dim)):
            if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
                raise UsageError(f"expected {name} to be a number from 1 on, got {given!r}")
        if dtype_name(dtype) not in ITEM_SIZES:
            raise UsageError(f"expected dtype to be one of {', '.join(ITEM_SIZES)}, got {dtype}")
        self.rows, self.dim, self.rule, self.dtype, self.start, self.seed = rows, dim, rule, dtype, start, seed
        self.options = checked_hyper(rule, options)
        self.compression, self.cache_keys = parse_chain(compression), cache_keys


class ArrayTable(WorkerTable):
    """One array as its worker sees it."""

    def __init__(self, name: str, array: Array) -> None:
        dtype = dtype_name(array.dtype)
        self.info = TableInfo(name, array.rows or 0, array.dim or 1, dtype, array.start, array.seed, array.rule)
        check_table(self.info)
        self.cached = array.cache_keys
        self._options, self._flat, self._dtype = array.options, array.dim is None, array.dtype
        self._filter = None if array.compression.is_lossless else RowFilter(array.compression, self.info)
        if self._filter is not None and rule(array.rule).combine in ("min", "max", "last"):
            raise UsageError(f"array {name!r}: rule {array.rule!r} cannot wait for a part of a push; leave compression out")
        self.form = self._filter.form if self._filter is not None else ""
        self._staged: SomeRows | SpanOfRows | None = None

    @property
    def residual(self) -> torch.Tensor | None:
        """What the filter has not sent yet."""
        return None if self._filter is None else self.shaped(self._filter.residual.clone())

    def load_residual(self, residual: torch.Tensor) -> None:
        """Go on with what was held back."""
        if self._filter is None or residual.numel() != self._filter.residual.numel():
            raise UsageError(
                f"array {self.info.name!r}: {residual.numel()} numbers held back do not fit its compression and size"
            )
        self._filter.residual.copy_(residual.view_as(self._filter.residual))

    def hyper(self) -> dict[str, Any]:
        return self._options

    def shaped(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the caller sees them."""
        return rows.view(-1) if self._flat else rows

    def span(self, start: int, stop: int | None) -> tuple[int, int]:
        """A range of rows, checked."""
        if not self.info.rows:
            raise UsageError(f"array {self.info.name!r} has no bound, so there are no ranges of it; name rows=")
        end = self.info.rows if stop is None else stop
        if not 0 <= start <= end <= self.info.rows:
            raise UsageError(
                f"array {self.info.name!r}: expected a range within 0 to {self.info.rows}, got {start} to {end}"
            )
        return start, end

    def some(self, values: Any, rows: Any) -> SomeRows | SpanOfRows:
        """What the caller wants to push, checked: a list of rows, a range from a start on, or everything (None)."""
        given = torch.as_tensor(values, dtype=self._dtype).detach().cpu()
        if given.dim() != (1 if self._flat else 2) or (not self._flat and given.shape[1] != self.info.dim):
            wanted = "(n,)" if self._flat else f"(n, {self.info.dim})"
            raise UsageError(f"array {self.info.name!r}: expected values of shape {wanted}, got {tuple(given.shape)}")
        given = given.reshape(-1, self.info.dim)
        if rows is None or (isinstance(rows, int) and not isinstance(rows, bool)):
            start, _ = self.span(rows or 0, (rows or 0) + len(given))
            if rows is None and len(given) != self.info.rows:
                raise UsageError(f"array {self.info.name!r}: {len(given)} values came for {self.info.rows} rows; say which")
            return SpanOfRows(start, given)
        ids = checked_ids(rows, self.info)
        if ids.numel() != len(given):
            raise UsageError(f"array {self.info.name!r}: {len(given)} values came for {ids.numel()} rows")
        how = rule(self.info.rule).combine
        return coalesce(ids, given, "sum" if how == "mean" else how)

    def stage(self, some: SomeRows | SpanOfRows, copied: bool) -> None:
        """The next step pushes this; as a copy where it may have to be sent again after the caller has changed it."""
        if self._filter is not None:
            both = (torch.arange(*some.span), some.values) if isinstance(some, SpanOfRows) else some
            some = self._filter.choose(*both)
        elif copied and isinstance(some, SpanOfRows):
            some = SpanOfRows(some.start, some.values.clone())
        elif copied and not isinstance(some, SpanOfRows):
            some = some[0].clone(), some[1].clone()
        self._staged = some

    def pushed(self) -> SomeRows | SpanOfRows | None:
        staged, self._staged = self._staged, None
        return staged


# Arrays in this process: a `KV` in a job of one without a launcher.


class LocalArrays:
    """The same tables as on a server, and nobody else."""

    def __init__(self, tables: Sequence[ArrayTable]) -> None:
        self._pairs = [(table, TableShard(table.info, 0, 1)) for table in tables]
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

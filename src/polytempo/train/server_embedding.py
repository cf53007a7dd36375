"""`ServerEmbedding`: an embedding whose table lives on the servers only.

    forward    the batch's ids, each once, are pulled, looked up and differentiated as a small matrix of their own
    backward   leaves one gradient for each id in it
    step()     of the `DistributedOptimizer` that was given the model pushes them, in its own step of its clock

So a worker's memory and a step's bytes depend on the ids of the batch. `prefetch(ids)` before `step()` names the next batch:
its rows come with the answer to the push, as the mode has them then. A row begins at its first touch, from the table's seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from polytempo.client.row_traffic import SomeRows, WorkerTable
from polytempo.errors import UsageError, WrongType
from polytempo.protocol.layout import ITEM_SIZES
from polytempo.protocol.values import TableInfo
from polytempo.server.optimizer_state import dtype_name
from polytempo.tables.row_batches import checked_ids, coalesce
from polytempo.tables.row_optimizers import checked_hyper, rule
from polytempo.tables.validation import check_table

MODES = (None, "sum", "mean")


class EmbeddingTable(WorkerTable):
    """What a `ServerEmbedding` tells the optimizer that carries it."""

    def __init__(self, info: TableInfo, hyper: dict[str, Any], cached: bool) -> None:
        self.info, self.cached = info, cached
        self._hyper = hyper
        self.rate: Callable[[], float] | None = None  #: where the learning rate comes from that was not given
        self.source: Callable[[torch.Tensor], torch.Tensor] | None = None  #: rows of unique ids, from wherever they are
        self._used: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids and their rows, since the last push
        self._collected: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids and gradients that `zero_grad` leaves alone
        self._next: torch.Tensor | None = None
        self._ready: SomeRows | None = None

    def hyper(self) -> dict[str, Any]:
        if "lr" in self._hyper or self.rate is None or "lr" not in rule(self.info.rule).defaults:
            return self._hyper
        return {**self._hyper, "lr": float(self.rate())}

    def use(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """These rows take part in what will be differentiated."""
        self._used.append((ids, rows))

    def drop(self) -> None:
        """Forget what was differentiated (`zero_grad`)."""
        self._used.clear()

    def collect(self) -> None:
        """Keep the gradients until they are pushed: local steps go on without them."""
        self._collected += [(ids, rows.grad.detach().cpu().clone()) for ids, rows in self._used if rows.grad is not None]
        self._used.clear()

    def is_finite(self) -> bool:
        """Are all gradients numbers?"""
        return all(bool(rows.grad.isfinite().all()) for _, rows in self._used if rows.grad is not None)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for _, rows in self._used:
            if rows.grad is not None:
                rows.grad.mul_(factor)

    def pushed(self) -> SomeRows | None:
        self.collect()
        collected, self._collected = self._collected, []
        if not collected:
            return None
        return coalesce(torch.cat([ids for ids, _ in collected]), torch.cat([grad for _, grad in collected]))

    def want(self, ids: torch.Tensor) -> None:
        """The next step will need these."""
        self._next = torch.unique(ids)

    def wanted(self) -> torch.Tensor | None:
        wanted, self._next = self._next, None
        self._ready = None  # what came before is of an earlier place of the log, and good for one step, skipped or not
        return wanted

    def take_wanted(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self._ready = ids, rows.clone()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of unique, ascending ids: those that came already, and the others from the servers."""
        assert self.source is not None
        if self._ready is None or not self._ready[0].numel():
            return self.source(ids)
        have, values = self._ready
        if torch.equal(have, ids):
            return values.detach()  # a leaf of its own for each forward
        place = torch.searchsorted(have, ids).clamp_(max=have.numel() - 1)
        here = have[place] == ids
        result = torch.empty(ids.numel(), self.info.dim, dtype=values.dtype)
        result[here] = values[place[here]]
        missing = ids[~here]
        if missing.numel():
            result[~here] = self.source(missing)
        return result


class ServerEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Like `nn.Embedding`, or with `mode` like `nn.EmbeddingBag`, for tables too large for a worker: rows live on the
    servers.

    Make it part of a model and give the model to `DistributedOptimizer`: forward pulls the rows of a batch, `step()` pushes
    their gradients.

    Args:
        rows: The number of rows; None for any id from 0 to 2**63 - 1.
        dim: The length of a row.
        rule: The row optimizer: `"sgd"`, `"adagrad"`, `"rowwise-adagrad"` or `"adam"`.
        lr: The learning rate of the rows; by default that of the wrapped optimizer's first group.
        start: Initial values: `"uniform"` (within 1/sqrt(dim)), `"uniform:A"`, `"normal:S"` or `"zeros"`.
        seed: Of the initial values.
        dtype: Of the rows.
        padding_idx: The id whose row is zero and is not trained.
        mode: None, `"sum"` or `"mean"`: one row for each bag, as `nn.EmbeddingBag`.
        cache_keys: Batches repeat, so that their lists of ids need not be sent each time.
        **options: Further options of the row optimizer, such as `eps`.

    Raises:
        UsageError: An argument is out of range or unknown.

    Example:
        ```python
        self.user = pt.tables.ServerEmbedding(100_000_000, 16)
        ```
    """

    def __init__(
        self,
        rows: int | None,
        dim: int,
        *,
        rule: str = "rowwise-adagrad",
        lr: float | None = None,
        start: str = "uniform",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        padding_idx: int | None = None,
        mode: str | None = None,
        cache_keys: bool = False,
        **options: float,
    ) -> None:
        super().__init__()
        _check(rows, dim, rule, dtype, mode)
        hyper = checked_hyper(rule, {**options, **({} if lr is None else {"lr": lr})})
        if lr is None:
            hyper.pop("lr", None)
        self.rows, self.dim, self.mode, self.padding_idx = rows, dim, mode, padding_idx
        self._seed = seed
        info = TableInfo("ServerEmbedding", rows or 0, dim, dtype_name(dtype), start, seed, rule)
        check_table(info)
        self.table = EmbeddingTable(info, hyper, cache_keys)
        self._device = torch.nn.Buffer(torch.empty(0), persistent=False)  # moves with the module

    def named(self, name: str) -> EmbeddingTable:
        """Name the table after its place in the model; tables of different names get different initial values.

        Args:
            name: The name of the module in the model.

        Returns:
            The table.
        """
        info = self.table.info
        seed = zlib.crc32(name.encode()) ^ self._seed  # not the table's: a refused optimizer may have named it before
        self.table.info = TableInfo(name, info.rows, info.dim, info.dtype, info.start, seed, info.rule)
        return self.table

    def prefetch(self, ids: torch.Tensor) -> None:
        """Name the ids of the next batch, before `step()`: their rows come with the answer to the push.

        Args:
            ids: A tensor of ids of any shape.
        """
        self.table.want(self._ids(ids)[0])

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """Look up rows.

        Args:
            ids: A tensor of ids of any shape.
            offsets: With `mode` and one-dimensional ids, where each bag starts.

        Returns:
            A row for each id; with `mode`, one row for each bag.

        Raises:
            UsageError: The model was not given to a `DistributedOptimizer`, or an id is out of range.
        """
        if self.table.source is None:
            raise UsageError(
                "this ServerEmbedding belongs to no optimizer yet; give the model: DistributedOptimizer(optimizer, model)"
            )
        flat, padding = self._ids(ids)
        unique, places = torch.unique(flat, return_inverse=True)
        rows = self.table.rows(unique).to(self._device.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self.table.use(unique, rows)
        table = rows
        if padding is not None:  # one row more, of zeros, that is not trained
            table = torch.cat([rows, rows.new_zeros(1, self.dim)])
            places = torch.full(padding.shape, unique.numel()).masked_scatter_(~padding, places)
        places = places.view(ids.shape).to(self._device.device)
        if self.mode is None:
            return functional.embedding(places, table)
        index = None if padding is None else unique.numel()
        return functional.embedding_bag(places, table, offsets, mode=self.mode, padding_idx=index)

    def _ids(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The ids that are none of padding, checked; and where padding is."""
        if not isinstance(ids, torch.Tensor):
            raise WrongType(f"expected a tensor of ids, got {type(ids).__name__}; use torch.as_tensor(ids)")
        if self.padding_idx is None:
            return checked_ids(ids, self.table.info), None
        padding = ids.detach().reshape(-1).cpu() == self.padding_idx
        return checked_ids(ids.detach().reshape(-1).cpu()[~padding], self.table.info), padding

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """The current rows of the servers, without gradients.

        Args:
            ids: A tensor of ids.

        Returns:
            A row for each id, in their order.
        """
        if self.table.source is None:
            raise UsageError("this ServerEmbedding belongs to no optimizer yet, so there are no rows to pull")
        unique, places = torch.unique(checked_ids(ids, self.table.info), return_inverse=True)
        return self.table.source(unique)[places]

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"{self.rows if self.rows else 'unbounded'}, {self.dim}, rule={self.table.info.rule!r}"


def _check(rows: int | None, dim: int, name: str, dtype: torch.dtype, mode: str | None) -> None:
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise UsageError(f"expected rows to be a number from 1 on, or None for any id, got {rows!r}")
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise UsageError(f"expected dim to be a number from 1 on, got {dim!r}")
    if rule(name).combine != "mean":
        raise UsageError(f"rule {name!r} does not learn from gradients; use sgd, adagrad, rowwise-adagrad or adam")
    if dtype_name(dtype) not in ITEM_SIZES:
        raise UsageError(f"expected dtype to be one of {', '.join(ITEM_SIZES)}, got {dtype}")
    if mode not in MODES:
        raise UsageError(f"expected mode to be None, 'sum' or 'mean', got {mode!r}")

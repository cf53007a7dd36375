"""`ServerEmbedding`: an embedding whose table lives on the servers only.

    forward    the batch's ids, each once, are pulled, looked up and differentiated as a small matrix of their own
    backward   leaves one gradient for each id in it
    step()     of the `DistributedOptimizer` that was given the model pushes them, in its own step of its clock

So a worker's memory and a step's bytes depend on the ids of the batch. `prefetch(ids)` before `step()` names the next batch:
its rows come with the answer to the push, as the mode has them then. A row begins at its first touch, from the table's seed.

On a GPU the ids of a batch are made unique where they are, and rows and gradients pass through pinned memory on a stream
beside the one that computes (`RowCopies`): prefetched rows are there when `forward` asks for them. Ids must reach the
host, since they are sent: those on a GPU cost a wait for it, in `prefetch` or in `forward`, but not in both.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from polytempo.client.row_traffic import SomeRows, WorkerTable
from polytempo.device.side_stream import FetchedTensor
from polytempo.errors import UsageError, WrongType
from polytempo.protocol.values import TableInfo
from polytempo.server.optimizer_state import dtype_name
from polytempo.tables.row_batches import checked_ids, coalesce
from polytempo.tables.row_optimizers import checked_hyper
from polytempo.tables.row_optimizers import rule as rule_of
from polytempo.tables.validation import check_dtype, check_table, is_count
from polytempo.train.sparse_embedding import RowCopies

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
        self._fetched: tuple[torch.Tensor, FetchedTensor] | None = None  # the sum of those, on its way from a GPU
        self._next: torch.Tensor | None = None
        self._ready: SomeRows | None = None  # ids in the host's memory, and their rows where they are used
        self.place = torch.device("cpu")  #: where rows are used
        self.copies = RowCopies()

    def hyper(self) -> dict[str, Any]:
        if "lr" in self._hyper or self.rate is None or "lr" not in rule_of(self.info.rule).defaults:
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
        found = [(ids, rows.grad.detach()) for ids, rows in self._used if rows.grad is not None]
        self._collected += [(ids, grad if grad.is_cuda else grad.clone()) for ids, grad in found]
        self._used.clear()

    def is_finite(self) -> bool:
        found = [rows.grad.isfinite().all() for _, rows in self._used if rows.grad is not None]
        return not found or bool(torch.stack(found).all())

    def scale(self, factor: float) -> None:
        for _, rows in self._used:
            if rows.grad is not None:
                rows.grad.mul_(factor)

    def start_copying(self) -> None:
        self.collect()
        if self._collected and all(grad.is_cuda for _, grad in self._collected):
            self._fetched = self.copies.fetched(self._collected)
            self._collected = []

    def pushed(self) -> SomeRows | None:
        if self._fetched is not None:
            (ids, values), self._fetched = self._fetched, None
            return ids, values.wait()
        self.collect()
        collected, self._collected = self._collected, []
        if not collected:
            return None
        return coalesce(torch.cat([ids for ids, _ in collected]), torch.cat([grad.cpu() for _, grad in collected]))

    def want(self, ids: torch.Tensor) -> None:
        """The next step will need these, each once."""
        self._next = ids

    def wanted(self) -> torch.Tensor | None:
        wanted, self._next = self._next, None
        self._ready = None  # what came before is of an earlier place of the log, and good for one step, skipped or not
        return wanted

    def take_wanted(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        on_gpu = self.place.type == "cuda"
        self._ready = ids, self.copies.stream(self.place).brought(rows) if on_gpu else rows.clone()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of unique, ascending ids, where they are used: those that came already, and the others from the servers."""
        assert self.source is not None
        if self._ready is None or not self._ready[0].numel():
            return self.copies.placed(self.source(ids), self.place)
        have, values = self._ready
        if values.device == self.place:
            self.copies.stream(self.place).join(values)
        values = values.to(self.place)
        if torch.equal(have, ids):
            return values.detach()  # a leaf of its own for each forward
        place = torch.searchsorted(have, ids).clamp_(max=have.numel() - 1)
        here = have[place] == ids
        result = torch.empty(ids.numel(), self.info.dim, dtype=values.dtype, device=self.place)
        if bool(here.any()):
            result[self._index(here.nonzero().squeeze(1))] = values[self._index(place[here])]
        if not bool(here.all()):
            result[self._index((~here).nonzero().squeeze(1))] = self.copies.placed(self.source(ids[~here]), self.place)
        return result

    def _index(self, index: torch.Tensor) -> torch.Tensor:
        return self.copies.placed(index, self.place)


@dataclass(frozen=True)
class Lookup:
    """The ids of a batch, each once and ascending, in the host's memory; and for each id its place among them, where the
    rows are used. `padded`: the place behind the last stands for padding."""

    unique: torch.Tensor
    places: torch.Tensor
    padded: bool


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
        if rows is not None and not is_count(rows):
            raise UsageError(f"expected rows to be a number from 1 on, or None for any id, got {rows!r}")
        if not is_count(dim):
            raise UsageError(f"expected dim to be a number from 1 on, got {dim!r}")
        if rule_of(rule).combine != "mean":
            raise UsageError(f"rule {rule!r} does not learn from gradients; use sgd, adagrad, rowwise-adagrad or adam")
        check_dtype(dtype)
        if mode not in MODES:
            raise UsageError(f"expected mode to be None, 'sum' or 'mean', got {mode!r}")
        hyper = checked_hyper(rule, {**options, **({} if lr is None else {"lr": lr})})
        if lr is None:
            hyper.pop("lr", None)
        self.rows, self.dim, self.mode, self.padding_idx = rows, dim, mode, padding_idx
        self._seed = seed
        info = TableInfo("ServerEmbedding", rows or 0, dim, dtype_name(dtype), start, seed, rule)
        check_table(info)
        self.table = EmbeddingTable(info, hyper, cache_keys)
        self._named: tuple[weakref.ref[torch.Tensor], object, Lookup] | None = None  # by `prefetch`
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
        """Name the ids of the next batch, before `step()`: their rows come with the answer to its push, as a pull would
        bring them then, so with what that push has changed. Where answers do not wait for pushes, rows may be of an earlier
        moment (`downpour`), or come too late and are pulled (`delay:N`). `forward` with the same tensor does not look up
        its ids again.

        Args:
            ids: A tensor of ids of any shape, on any device.
        """
        self.table.place = self._device.device
        lookup = self._look_up(ids)
        self._named = weakref.ref(ids), _version(ids), lookup
        self.table.want(lookup.unique)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """Look up rows.

        Args:
            ids: A tensor of ids of any shape, on any device.
            offsets: With `mode` and one-dimensional ids, where each bag starts.

        Returns:
            A row for each id; with `mode`, one row for each bag; on the device of this module.

        Raises:
            UsageError: The model was not given to a `DistributedOptimizer`, or an id is out of range.
        """
        if self.table.source is None:
            raise UsageError(
                "this ServerEmbedding belongs to no optimizer yet; give the model: DistributedOptimizer(optimizer, model)"
            )
        self.table.place = place = self._device.device
        lookup = self._known(ids) or self._look_up(ids)
        rows = self.table.rows(lookup.unique)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self.table.use(lookup.unique, rows)
        table = rows
        if lookup.padded:  # one row more, of zeros, that is not trained
            table = torch.cat([rows, rows.new_zeros(1, self.dim)])
        places = lookup.places.view(ids.shape)
        if self.mode is None:
            return functional.embedding(places, table)
        index = lookup.unique.numel() if lookup.padded else None
        offsets = offsets.to(place) if offsets is not None else None
        return functional.embedding_bag(places, table, offsets, mode=self.mode, padding_idx=index)

    def _known(self, ids: torch.Tensor) -> Lookup | None:
        """What `prefetch` has found out about these ids, if it was given this tensor and nothing has changed it."""
        named = self._named
        if named is None or named[0]() is not ids or named[1] != _version(ids):
            return None
        return named[2] if named[2].places.device == self._device.device else None

    def _look_up(self, ids: torch.Tensor) -> Lookup:
        if not isinstance(ids, torch.Tensor):
            raise WrongType(f"expected a tensor of ids, got {type(ids).__name__}; use torch.as_tensor(ids)")
        place, info, padding_idx = self._device.device, self.table.info, self.padding_idx
        if ids.is_cuda and place.type == "cuda" and ids.numel():
            return self._look_up_there(ids, place)
        flat, padding = checked_ids(ids, info) if padding_idx is None else ids.detach().reshape(-1).cpu(), None
        if padding_idx is not None:
            padding = flat == padding_idx
            flat = checked_ids(flat[~padding], info)
        unique, places = torch.unique(flat, return_inverse=True)
        if padding is not None:
            places = torch.full(padding.shape, unique.numel()).masked_scatter_(~padding, places)
        return Lookup(unique, self.table.copies.placed(places, place), padding is not None)

    def _look_up_there(self, ids: torch.Tensor, place: torch.device) -> Lookup:
        """The same on a GPU, of which only unique ids come to the host."""
        if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
            checked_ids(ids, self.table.info)  # which refuses them
        flat = ids.detach().reshape(-1).to(place, torch.int64)
        unique, places = torch.unique(flat, return_inverse=True)
        host = self.table.copies.stream(place).fetched(unique).wait()
        padded = self.padding_idx is not None
        if padded:
            at = int(torch.searchsorted(host, torch.tensor([self.padding_idx])))
            if at < host.numel() and int(host[at]) == self.padding_idx:
                host = torch.cat([host[:at], host[at + 1 :]])
                places = torch.where(places == at, host.numel(), places - (places > at).long())
        rows = self.table.info.rows
        if host.numel() and (int(host[0]) < 0 or (rows and int(host[-1]) >= rows)):
            checked_ids(flat[flat != self.padding_idx] if padded else flat, self.table.info)  # which refuses them
        return Lookup(host, places, padded)

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


def _version(ids: torch.Tensor) -> object:
    """Differs after each change in place; that of an inference tensor, which does not tell, is never the same."""
    return object() if ids.is_inference() else ids._version

"""The tables of a model: which there are, where their rows are, and how state converts between servers and torch.

Rows of a `ServerEmbedding` are on the servers or, in a job of one without a launcher, in this process. Servers keep an
optimizer's state in flat segments; torch's `state_dict` has it by the number of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from polytempo.client.row_traffic import WorkerTable
from polytempo.errors import UsageError
from polytempo.optim.worker_momentum import OF_WORKERS
from polytempo.protocol.layout import lay_out
from polytempo.protocol.values import TensorInfo
from polytempo.reducer.servers import ServerExchange
from polytempo.server.optimizer_state import OF_TABLES, SegmentState, of_tensor
from polytempo.tables.row_batches import RowPush
from polytempo.tables.table_shard import TableShard
from polytempo.train.server_embedding import EmbeddingTable, ServerEmbedding
from polytempo.train.sparse_embedding import SparseEmbeddingTable, rows_of_torch, torch_rows

Params = Sequence[torch.nn.Parameter]

#: State that is one element for the whole parameter, in torch's own optimizers. A parameter may have one element, too.
SINGLE = ("step", "mu_product", "eta", "mu")


class ModelTables:
    """All tables of one optimizer's model: those that workers mirror, then those that live on the servers."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        modules = [] if model is None else model.named_modules()
        found = [(name, module) for name, module in modules if isinstance(module, ServerEmbedding)]
        for name, module in found:
            if module.table.source is not None:
                raise UsageError(
                    f"{name} belongs to another DistributedOptimizer already; one optimizer takes the whole model"
                )
        self.embeddings: list[EmbeddingTable] = [module.named(name) for name, module in found]
        self.mirrored: list[SparseEmbeddingTable] = []
        self.dense: list[int] = []  #: numbers of the parameters that are no tables
        self._here: list[tuple[EmbeddingTable, TableShard]] = []  # in a job of one
        self._version = 0

    @property
    def all(self) -> list[WorkerTable]:
        """In the order in which servers number them."""
        return [*self.mirrored, *self.embeddings]

    def mirror(self, mirrored: list[SparseEmbeddingTable], params: Sequence[torch.nn.Parameter]) -> None:
        """These sparse embeddings are tables that workers mirror."""
        self.mirrored = mirrored
        rows = {id(table.weight) for table in self.mirrored}
        self.dense = [index for index, param in enumerate(params) if id(param) not in rows]

    def attach(self, servers: ServerExchange | None, rate: Callable[[], float]) -> None:
        """Set where rows are read: from servers, or from this process.

        Args:
            servers: The optimizer's; None where none hold its values.
            rate: The learning rate of tables without one of their own.
        """
        for number, table in enumerate(self.embeddings, start=len(self.mirrored)):
            table.rate = rate
            table.source = servers.held.row_source(number) if servers is not None else None
            if table.source is None:
                here = TableShard(table.info, 0, 1)
                self._here.append((table, here))
                table.source = here.pull

    def step_alone(self) -> None:
        """In a job of one: apply what was differentiated."""
        self._version += 1
        for table, here in self._here:
            pushed = table.pushed()
            table.wanted()
            if pushed is not None:
                here.update([RowPush(*pushed)], table.hyper(), 1.0, self._version)

    # State, as torch numbers it.

    def torch_state(self, segments: Sequence[SegmentState], tensors: Sequence[TensorInfo], params: Params) -> dict[int, Any]:
        """The servers' state by parameter number."""
        dense = dense_state([one for one in segments if one.dtype != OF_TABLES], tensors, self.dense)
        shards = [one.state for one in segments if one.dtype == OF_TABLES]
        places = {id(param): index for index, param in enumerate(params)}
        rows = {places[id(t.weight)]: torch_rows(number, t, shards) for number, t in enumerate(self.mirrored)}
        return dict(sorted({**dense, **{index: state for index, state in rows.items() if state}}.items()))

    def segments_of(self, state: dict[int, Any], tensors: Sequence[TensorInfo], params: Params) -> list[SegmentState]:
        """The same the other way."""
        places = {id(param): index for index, param in enumerate(params)}
        given: dict[str, Any] = {}
        for number, table in enumerate(self.mirrored):
            given |= rows_of_torch(number, table, state.get(places[id(table.weight)], {}))
        return [*dense_segments(state, tensors, self.dense), *([SegmentState(OF_TABLES, 0, 0, given)] if given else [])]

    def check_unchanged(self) -> None:
        """Refuse tables that the script has written to: only rows with gradients travel."""
        for table in self.mirrored:
            table.check_unchanged()

    # Gradients of rows, on servers.

    def collect(self) -> None:
        """Keep the gradients of rows until they are pushed, whatever becomes of the dense ones."""
        for table in self.embeddings:
            table.collect()

    def is_finite(self) -> bool:
        return all(table.is_finite() for table in self.embeddings)

    def scale(self, factor: float) -> None:
        for table in self.embeddings:
            table.scale(factor)

    def drop(self) -> None:
        for table in self.embeddings:
            table.drop()


# State of dense parameters.


def dense_state(
    segments: Sequence[SegmentState], tensors: Sequence[TensorInfo], numbers: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """State by parameter number, as torch's `state_dict()["state"]`; `numbers` are those of the tensors.

    Servers have no state of a parameter without elements. It gets what a neighbour in its group has: Adagrad makes state
    only when it is built, and could not go on from a dictionary that lacks some.
    """
    result, of_group = {}, {}
    places = lay_out(tensors, 1).places
    for place in places:
        state = of_tensor(segments, place.info.dtype, place.start, place.stop, place.info.shape)
        if state:
            result[numbers[place.index]] = state
            of_group[place.info.group] = state, place.info
    for place in places:
        if place.start == place.stop and place.info.group in of_group:
            state, info = of_group[place.info.group]
            result[numbers[place.index]] = {name: _emptied(name, value, info, place.info) for name, value in state.items()}
    return dict(sorted(result.items()))


def _emptied(name: str, value: Any, info: TensorInfo, empty: TensorInfo) -> Any:
    """A neighbour's state, for a parameter that has no elements."""
    if not isinstance(value, torch.Tensor):
        return value
    each = value.numel() == prod(info.shape) and name not in SINGLE
    return torch.empty(tuple(empty.shape), dtype=getattr(torch, empty.dtype)) if each else value.clone()


def dense_segments(
    state: dict[int, dict[str, Any]], tensors: Sequence[TensorInfo], numbers: Sequence[int]
) -> list[SegmentState]:
    """The same the other way: one segment for each parameter that has state. What only workers use is left out."""
    segments = []
    for place in lay_out(tensors, 1).places:
        given = {name: value for name, value in state.get(numbers[place.index], {}).items() if name not in OF_WORKERS}
        own = {name: _on_cpu(name, value, place.info) for name, value in given.items()}
        segments.append(SegmentState(place.info.dtype, place.start, place.stop, own))
    return segments


def _on_cpu(name: str, value: Any, info: TensorInfo) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.reshape(-1) if value.numel() == prod(info.shape) and name not in SINGLE else value

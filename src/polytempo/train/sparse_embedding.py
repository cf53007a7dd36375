"""`nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)`: every worker holds the whole table, and only rows travel.

A push carries the rows that have a gradient, an answer the rows that any worker has changed since this worker's last answer.
On the servers the wrapped optimizer's own rule runs on those rows, as torch runs it on sparse gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polytempo.client.row_traffic import SomeRows, WorkerTable
from polytempo.device.side_stream import FetchedTensor, SideStream
from polytempo.errors import UsageError
from polytempo.protocol.values import TableInfo
from polytempo.server.optimizer_state import dtype_name, is_same
from polytempo.tables.row_optimizers import checked_hyper

#: Ids (in the host's memory) and gradients of their rows.
RowGradients = tuple[torch.Tensor, torch.Tensor]


class RowCopies:
    """Copies of a table's rows between the host's memory and a GPU: through pinned memory, on a stream beside the one that
    computes. A table may be moved to another device between steps.

    Rows that come are copied when they come, and the stream that computes waits for them where they are used. Gradients of
    several forwards are added up on the GPU, in the order of the forwards, so that one copy brings them to the host: ids are
    unique within a forward, so the sums do not depend on the order in which a kernel adds.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, SideStream] = {}

    def stream(self, place: torch.device) -> SideStream:
        if place not in self._streams:
            self._streams[place] = SideStream(place)
        return self._streams[place]

    def placed(self, tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
        """A host tensor on a device, where the current stream may use it; no host waits for the copy."""
        if place.type != "cuda":
            return tensor.to(place)
        moved = self.stream(place).brought(tensor)
        self.stream(place).join(moved)
        return moved

    def fetched(self, gradients: Sequence[RowGradients]) -> tuple[torch.Tensor, FetchedTensor]:
        """The sums of gradients on a device, each id once and ascending, on their way to the host."""
        place = gradients[0][1].device
        if len(gradients) == 1:
            return gradients[0][0], self.stream(place).fetched(gradients[0][1])
        ids, places = torch.unique(torch.cat([ids for ids, _ in gradients]), return_inverse=True)
        total = gradients[0][1].new_zeros((ids.numel(), gradients[0][1].shape[1]))
        index = self.placed(places, place)
        for part, (_, values) in zip(index.split([ids.numel() for ids, _ in gradients]), gradients, strict=True):
            total.index_add_(0, part, values)
        return ids, self.stream(place).fetched(total)


@dataclass(frozen=True)
class SparseRule:
    """How servers do what an optimizer does with sparse gradients: by their rule, where its other options are plain."""

    name: str
    options: tuple[str, ...]  #: of a parameter group, which the rule takes as they are
    plain: dict[str, object]  #: options that change what the optimizer does, and the values at which they do not

    def options_of(self, group: dict[str, Any], kind: str) -> dict[str, float]:
        for option, value in self.plain.items():
            if group[option] != value:
                raise UsageError(
                    f"{kind} with {option}={group[option]} cannot take the sparse gradients of an embedding; "
                    f"give the embedding a group with {option}={value}, or use sparse=False"
                )
        betas = dict(zip(("beta1", "beta2"), map(float, group.get("betas", ())), strict=False))
        return {name: float(group[name]) for name in self.options} | betas


#: The optimizers that take sparse gradients.
RULES: dict[type, SparseRule] = {
    torch.optim.SGD: SparseRule("sgd", ("lr",), {"momentum": 0, "weight_decay": 0, "maximize": False}),
    torch.optim.Adagrad: SparseRule(
        "adagrad", ("lr", "lr_decay", "eps", "initial_accumulator_value"), {"weight_decay": 0, "maximize": False}
    ),
    torch.optim.SparseAdam: SparseRule("sparse-adam", ("lr", "eps"), {"maximize": False}),
}


class SparseEmbeddingTable(WorkerTable):
    """One sparse embedding of a model."""

    def __init__(self, name: str, weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, group: int) -> None:
        self._rule = RULES[type(optimizer)]
        rows, dim = weight.shape
        self.info = TableInfo(name, rows, dim, dtype_name(weight.dtype), "zeros", 0, self._rule.name, mirrored=True)
        self.weight, self._optimizer, self._group = weight, optimizer, group
        self._version = weight._version  # when this library wrote to it last
        self._held = weight.detach()  # where it lay then
        self._copies = RowCopies()
        self._fetched: tuple[FetchedTensor, FetchedTensor] | None = None
        self.hyper()

    def hyper(self) -> dict[str, Any]:
        group = self._optimizer.param_groups[self._group]
        return checked_hyper(self.info.rule, self._rule.options_of(group, type(self._optimizer).__name__))

    def first_values(self) -> torch.Tensor:
        return self.weight.detach().cpu()

    def start_copying(self) -> None:
        grad = self.weight.grad
        if grad is None or not grad.is_cuda:
            return
        stream, grad = self._copies.stream(grad.device), grad.detach()
        if grad.layout != torch.strided:
            grad = grad.coalesce()
            self._fetched = stream.fetched(grad.indices()[0]), stream.fetched(grad.values())
        else:
            self._fetched = FetchedTensor(torch.arange(self.info.rows), None), stream.fetched(grad)

    def pushed(self) -> SomeRows | None:
        if self._fetched is not None:
            (ids, values), self._fetched = self._fetched, None
            return ids.wait(), values.wait()
        grad = self.weight.grad
        if grad is None:
            return None
        if grad.layout == torch.strided:  # something dense was added to it
            return torch.arange(self.info.rows), grad.detach().cpu()
        grad = grad.detach().coalesce()
        return grad.indices()[0].cpu(), grad.values().cpu()

    def take_changed(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        with torch.no_grad():
            weight = self.weight.detach()
            if weight.is_cuda:
                ids, rows = self._copies.placed(ids, weight.device), self._copies.placed(rows, weight.device)
            weight[ids] = rows
        self._version = self.weight._version

    def check_unchanged(self) -> None:
        """Refuse what something else has written to it, or another form."""
        weight, info = self.weight, self.info
        if tuple(weight.shape) != (info.rows, info.dim) or dtype_name(weight.dtype) != info.dtype:
            raise UsageError(
                f"{info.name} was {info.dtype}[{info.rows}, {info.dim}] when the optimizer was wrapped and is "
                f"{dtype_name(weight.dtype)}{list(weight.shape)} now; cast and reshape a model before DistributedOptimizer()"
            )
        moved = weight.data_ptr() != self._held.data_ptr()
        if weight._version != self._version or (moved and not is_same(weight.detach(), self._held)):
            raise UsageError(
                f"{info.name} was changed in place, and of a sparse embedding only rows with gradients travel; change it "
                "before DistributedOptimizer(), or use sparse=False"
            )
        self._held = weight.detach()


def sparse_embedding_tables(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter], groups: Sequence[int]
) -> list[SparseEmbeddingTable]:
    """The sparse embeddings of a model that this optimizer updates."""
    group_of = {id(param): group for param, group in zip(params, groups, strict=True)}
    found: dict[int, SparseEmbeddingTable] = {}
    for name, module in model.named_modules():
        sparse = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        if not sparse or id(module.weight) not in group_of or id(module.weight) in found:
            continue
        if module.max_norm is not None:
            raise UsageError(
                f"{name}: max_norm changes rows on this worker alone, where servers do not see it; leave it out"
            )
        if type(optimizer) not in RULES:
            known = ", ".join(kind.__name__ for kind in RULES)
            raise UsageError(f"{name} has sparse gradients, which {type(optimizer).__name__} does not take; use {known}")
        found[id(module.weight)] = SparseEmbeddingTable(
            f"{name}.weight".lstrip("."), module.weight, optimizer, group_of[id(module.weight)]
        )
    return list(found.values())


# Between the servers' state and torch's.


def torch_rows(number: int, table: SparseEmbeddingTable, shards: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """What torch keeps beside a sparse embedding, from what all shards have saved of its table."""
    prefix = f"{number}.state."
    names = sorted({name.removeprefix(prefix) for shard in shards for name in shard if name.startswith(prefix)})
    steps = max((int(shard[f"{number}.steps"]) for shard in shards), default=0)
    if not names or not steps:
        return {}
    state: dict[str, Any] = {"step": torch.tensor(float(steps)) if table.info.rule == "adagrad" else steps}
    for name in names:
        state[name] = torch.full_like(table.first_values(), table.hyper().get("initial_accumulator_value", 0.0))
        for shard in shards:
            if f"{prefix}{name}" in shard:
                state[name][shard[f"{number}.ids"]] = shard[f"{prefix}{name}"].to(state[name].dtype)
    return state


def rows_of_torch(number: int, table: SparseEmbeddingTable, state: Mapping[str, Any]) -> dict[str, Any]:
    """The same the other way."""
    kept = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim() == 2}
    if not kept:
        return {}
    ids = torch.arange(table.info.rows)
    rows = {f"{number}.state.{name}": value.detach().cpu() for name, value in kept.items()}
    return {f"{number}.ids": ids, f"{number}.steps": int(state["step"]), **rows}

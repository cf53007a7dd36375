"""The model, loss, optimizer and first batch of a script that trains by a pipeline, a strategy or `pt.fit`.

The script is run as a job of one, up to its first step, which raises `Stepped`. While it is inspected, a strategy of any
size is at home in that job: `scope()` changes nothing, and `explain()` says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from polytempo.mesh import Mesh, MeshPoint
from polytempo.pipeline import pipeline
from polytempo.pipeline.stage_message import rows
from polytempo.session.session import is_initialized, shutdown
from polytempo.strategy import fit
from polytempo.strategy.strategy import Strategy

#: The batch of `fit` where a script does not say.
DEFAULT_BATCH = 32


@dataclass(frozen=True)
class Found:
    """A model, an example of its inputs, and the number of microbatches of a batch where the script sets it. What follows is
    for plans of strategies: loss, optimizer, an example of the targets, the samples of a step."""

    model: Any
    example: Any
    microbatches: int | None = None
    loss: Any = None
    optimizer: Any = None
    target: Any = None
    batch: int | None = None
    tensor_plan: Any = None


class Stepped(BaseException):
    """A pipeline has received its first batch. Not an `Exception`, so that the script does not catch it."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found = found


class _PipelineProbe:
    """Replaces `pt.Pipeline` while a script is inspected."""

    def __init__(
        self, model: Any, *_: Any, microbatches: int | None = None, loss: Any = None, optimizer: Any = None, **__: Any
    ) -> None:
        self.microbatches = microbatches
        self._model, self._loss, self._optimizer = model, loss, optimizer

    def step(self, x: Any = None, y: Any = None) -> None:
        count = self.microbatches or 1
        inputs, targets = _part(x, count), _part(y, count)
        raise Stepped(Found(self._model, inputs, self.microbatches, self._loss, self._optimizer, targets, rows(x)))


def _part(value: Any, parts: int) -> Any:
    """One of the microbatches of a batch."""
    if isinstance(value, tuple | list):
        return type(value)(_part(one, parts) for one in value)
    return value[: max(1, len(value) // parts)] if getattr(value, "shape", ()) else value


class _SpreadProbe:
    """What `distribute` gives while a script is inspected."""

    def __init__(self, strategy: Strategy, model: Any, **given: Any) -> None:
        self.strategy, self.mesh, self.point = strategy, Mesh(), MeshPoint(0, 0, 0)
        self.steps = self.samples = 0
        self._model, self._given = model, given

    def step(self, x: Any = None, y: Any = None) -> None:
        batch = rows(x) * (self.strategy.data or 1)
        given = {name: self._given.get(name) for name in ("loss", "optimizer", "tensor_plan")}
        raise Stepped(Found(self._model, x, self.strategy.microbatches, target=y, batch=batch, **given))

    def resume(self, *_: Any, **__: Any) -> None:
        """There is nothing to go on from."""

    def explain(self, *_: Any, **__: Any) -> None:
        """That is what is being done."""


def _fit_probe(model: Any, data: Any, loss: Any = None, **given: Any) -> None:
    batch = given.get("batch_size")
    size = batch or DEFAULT_BATCH
    if isinstance(data, DataLoader):
        x, y = next(iter(data))
        size = batch or rows(x)
    elif isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data[0][:size], data[1][:size]
    elif isinstance(data, IterableDataset):
        x, y = default_collate(list(islice(iter(data), size)))
    else:
        x, y = default_collate([data[index] for index in range(min(size, len(data)))])
    named = {name: given.get(name) for name in ("optimizer", "tensor_plan")}
    raise Stepped(Found(model, x, loss=loss, target=y, batch=size, **named))


@contextmanager
def _no_scope(strategy: Strategy) -> Iterator[Strategy]:
    yield strategy


def _distribute_probe(strategy: Strategy, model: Any, **given: Any) -> _SpreadProbe:
    return _SpreadProbe(strategy, model, **given)


def _no_explanation(strategy: Strategy, *_: Any, **__: Any) -> str:
    return ""


@contextmanager
def training_stops_at_its_first_batch() -> Iterator[None]:
    """Here nothing is trained: the first step of a pipeline or a distributed model, and `fit`, raise `Stepped`. A job that
    the script joins is left again."""
    probes: list[tuple[Any, str, Any]] = [
        (pipeline, "Pipeline", _PipelineProbe),
        (fit, "fit", _fit_probe),
        (Strategy, "distribute", _distribute_probe),
        (Strategy, "scope", _no_scope),
        (Strategy, "explain", _no_explanation),
    ]
    real = [(owner, name, getattr(owner, name)) for owner, name, _ in probes]
    for owner, name, probe in probes:
        setattr(owner, name, probe)
    try:
        yield
    finally:
        for owner, name, before in real:
            setattr(owner, name, before)
        leave_job()


def leave_job() -> None:
    """End the job that a script has joined, if it has."""
    if is_initialized():
        shutdown()

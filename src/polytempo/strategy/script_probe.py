"""The model, loss, optimizer and first batch of a script that trains by a strategy or by `pt.fit`.

The script is run as a job of one (`pipeline/first_batch.py`). While it is inspected, a strategy of any size is at home in
that job: `scope()` changes nothing, `distribute()` gives a model whose first step raises `Stepped`, and so does `fit`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from typing import Any

from polytempo.mesh import Mesh, MeshPoint
from polytempo.pipeline.first_batch import Found, Stepped
from polytempo.pipeline.stage_message import rows
from polytempo.strategy.strategy import Strategy

#: The batch of `fit` where a script does not say.
DEFAULT_BATCH = 32
FIT = "polytempo.strategy.fit"


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
    batch, (x, y) = _first(data, given.get("batch_size"))
    named = {name: given.get(name) for name in ("optimizer", "tensor_plan")}
    raise Stepped(Found(model, x, loss=loss, target=y, batch=batch, **named))


def _first(data: Any, batch: int | None) -> tuple[int, tuple[Any, Any]]:
    """The samples of a step, and inputs and targets of the first."""
    from torch import Tensor
    from torch.utils.data import DataLoader, IterableDataset, default_collate

    if isinstance(data, DataLoader):
        x, y = next(iter(data))
        return batch or rows(x), (x, y)
    size = batch or DEFAULT_BATCH
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return size, (data[0][:size], data[1][:size])
    if isinstance(data, IterableDataset):
        found = list(islice(iter(data), size))
    else:
        found = [data[index] for index in range(min(size, len(data)))]
    x, y = default_collate(found)
    return size, (x, y)


@contextmanager
def _no_scope(strategy: Strategy) -> Iterator[Strategy]:
    yield strategy


def _distribute_probe(strategy: Strategy, model: Any, **given: Any) -> _SpreadProbe:
    return _SpreadProbe(strategy, model, **given)


def _no_explanation(strategy: Strategy, *_: Any, **__: Any) -> str:
    return ""


@contextmanager
def strategies_stop_at_their_first_batch() -> Iterator[None]:
    """Here strategies do not train: the first step of a distributed model, and `fit`, raise `Stepped`."""
    probes = {"distribute": _distribute_probe, "scope": _no_scope, "explain": _no_explanation}
    real = {name: getattr(Strategy, name) for name in probes}
    module: Any = import_module(FIT) if importlib.util.find_spec(FIT) is not None else None
    fit = module.fit if module is not None else None
    for name, probe in probes.items():
        setattr(Strategy, name, probe)
    if module is not None:
        module.fit = _fit_probe
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(Strategy, name, method)
        if module is not None:
            module.fit = fit

"""Running statistics of batch norm for evaluation, where every worker has its own.

Weights belong to the job; the running mean and variance of batch norm belong to each worker, which saw its own share of the
data at weights of its own staleness. There are three ways to evaluate: with the statistics of one worker, with those of all
merged (`optim/several_workers.py`), or with new ones, recalibrated at the current weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from polytempo.collectives.group import RankGroup
from polytempo.errors import UsageError, nearest
from polytempo.optim.several_workers import merged, norm_layers
from polytempo.session.session import Session, current

WAYS = ("worker", "merged", "recalibrated")


def evaluation_statistics(
    model: torch.nn.Module,
    how: str,
    *,
    batches: Iterable[Any] | None = None,
    worker: int = 0,
) -> AbstractContextManager[None]:
    """A context in which the model has running statistics for evaluation; on exit this worker's own are restored exactly.

    Args:
        model: The model. Only its normalisation layers are touched.
        how: `"worker"` takes the statistics of rank `worker`. `"merged"` takes the mean of all workers' means and the
            variance of all their samples together, without workers that have seen no batch. Both are collective: every
            worker must make the call. `"recalibrated"` averages over `batches`, one forward pass each with only the
            normalisation layers in training mode, and needs no other worker.
        batches: For `"recalibrated"`: inputs, or (input, target) pairs.
        worker: For `"worker"`: the rank.

    Returns:
        The context manager.

    Raises:
        UsageError: `how` is unknown, `worker` is not a rank, or batches are missing.

    Example:
        ```python
        with pt.evaluation_statistics(model, "merged"):
            accuracy = evaluate(model)
        ```
    """
    if how not in WAYS:
        raise UsageError(f"unknown statistics {how!r}; known: {', '.join(WAYS)}{nearest(str(how), WAYS)}")
    if how == "recalibrated":
        if batches is None:
            raise UsageError('evaluation_statistics(model, "recalibrated") needs batches=..., an iterable of inputs')
        return _replaced(model, partial(_recalibrate, model, batches=batches))
    here = current()
    if worker not in range(here.size):
        raise UsageError(f"worker must be one of the ranks 0 to {here.size - 1}, not {worker!r}")
    return _replaced(model, partial(_collect, session=here, worker=worker if how == "worker" else None))


@contextmanager
def _replaced(model: torch.nn.Module, replace: Callable[[list[torch.nn.Module]], None]) -> Iterator[None]:
    layers = norm_layers(model)
    kept = [tensor.clone() for tensor in _tensors(layers)]
    try:
        with torch.no_grad():
            if layers:
                replace(layers)
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(_tensors(layers), kept, strict=True):
                tensor.copy_(value)


def _tensors(layers: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Means, variances and counts of batches, where there are counts."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    found = (getattr(layer, name, None) for layer in layers for name in names)
    return [tensor for tensor in found if tensor is not None]


def _collect(layers: list[torch.nn.Module], session: Session, worker: int | None) -> None:
    """Load a worker's statistics, or without one those of all, merged."""
    if session.size == 1:
        return
    group = session.world().all_ranks
    if worker is not None:
        group.broadcast(_tensors(layers), worker).wait()
        return
    moments = [_gathered(group, [getattr(layer, name) for layer in layers]) for name in ("running_mean", "running_var")]
    counts = _gathered(group, [getattr(layer, "num_batches_tracked", None) for layer in layers])
    for layer, means, variances, seen in zip(layers, *moments, counts, strict=True):
        some = any(bool(count) for count in seen)
        mean, variance = merged(means, variances, [float(count > 0) for count in seen] if some else None)
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)
        if getattr(layer, "num_batches_tracked", None) is not None:
            layer.num_batches_tracked.fill_(int(sum(seen)))


def _gathered(group: RankGroup, tensors: list[torch.Tensor | None]) -> list[list[torch.Tensor]]:
    """For each tensor, those of all workers. A missing count is a 1: a layer that does not count may have seen something."""
    there = [torch.ones(1) if tensor is None else tensor.reshape(-1) for tensor in tensors]
    device = there[0].device
    mine = torch.cat([tensor.to(device, torch.float64) for tensor in there])
    every = [torch.empty_like(mine) for _ in range(group.size)]
    group.all_gather(every, mine).wait()
    sizes = [tensor.numel() for tensor in there]
    return [list(parts) for parts in zip(*(flat.split(sizes) for flat in every), strict=True)]


def _recalibrate(model: torch.nn.Module, layers: list[torch.nn.Module], batches: Iterable[Any]) -> None:
    """Averages over these batches, all counting alike."""
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(layer, layer.momentum) for layer in layers]
    try:
        model.eval()
        for layer in layers:
            layer.reset_running_stats()
            layer.train()
        seen = 0
        for batch in batches:
            seen += 1
            for layer in layers:  # None is a cumulative average for batch norm alone
                layer.momentum = None if isinstance(layer, _BatchNorm) else 1 / seen
            model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        if not seen:
            raise UsageError(
                'evaluation_statistics(model, "recalibrated") got no batches; a generator can be used only once'
            )
    finally:
        for module, training in modes:
            module.training = training
        for layer, momentum in momenta:
            layer.momentum = momentum

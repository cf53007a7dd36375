"""Evaluation of the job's model: replicas share the batches, sums are over all samples in the order of the batches.

The table of sums has a place for each batch, filled by the one rank that has the outputs; an all-reduce adds zeros to it. So
the result is that of one process, whatever the strategy and the size of the last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from polytempo.pipeline.stage_message import rows
from polytempo.strategy.batches import SampleSource
from polytempo.strategy.distributed_model import DistributedModel
from polytempo.summation import in_order
from polytempo.train.communication import all_reduce

#: A function of outputs and targets: the mean over the batch, or a value for each sample.
Metric = Callable[[Any, Any], Any]


def evaluate(
    model: DistributedModel,
    data: Any,
    loss: Callable[[Any, Any], torch.Tensor],
    *,
    metrics: Mapping[str, Metric] | Sequence[Metric] | None = None,
    batch_size: int | None = None,
) -> dict[str, float]:
    """Evaluate the job's model: replicas share the batches, and sums are over all samples. All ranks call it.

    Args:
        model: The distributed model, such as `history.model`.
        data: As for `fit`; all samples are taken, in their order.
        loss: A function of outputs and targets.
        metrics: As for `fit`.
        batch_size: Samples that a replica evaluates at once.

    Returns:
        The loss and each metric by name, the same on all ranks.
    """
    source = SampleSource(data, batch_size, False, 0, otherwise=False)
    return mean_over(model, source, {"loss": loss, **named_metrics(metrics)})


def mean_over(model: DistributedModel, source: SampleSource, functions: Mapping[str, Metric]) -> dict[str, float]:
    """The mean of each function over all samples, summed in the order of the batches: the same under every strategy."""
    replica, replicas = model.point.data, model.mesh.data
    model.consolidate()
    found: list[list[float]] = []
    for x, y in source.evaluation(replica, replicas):
        outputs = model.predict(x)
        if has_outputs(model):
            with torch.no_grad():
                found.append([part for function in functions.values() for part in _sum_and_count(function, outputs, y)])
    most = torch.tensor([len(found)])
    all_reduce(most, op="max")
    table = torch.zeros(int(most), replicas, 2 * len(functions), dtype=torch.float64)
    if found:
        table[: len(found), replica] = torch.tensor(found, dtype=torch.float64)
    all_reduce(table)  # one rank has a batch, the others add nothing
    columns = [in_order(column) for column in table.flatten(0, 1).T.tolist()]
    return {name: columns[2 * i] / max(columns[2 * i + 1], 1.0) for i, name in enumerate(functions)}


def _sum_and_count(function: Metric, outputs: Any, y: Any) -> tuple[float, float]:
    """The sum of a function over a batch, and over how many values: of a mean, the samples of the batch."""
    if isinstance(y, torch.Tensor) and isinstance(outputs, torch.Tensor):
        y = y.to(outputs.device)
    value = function(outputs, y)
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return float(value.sum(dtype=torch.float64)), float(value.numel())
    samples = rows(y)
    return float(value) * samples, float(samples)


def has_outputs(model: DistributedModel) -> bool:
    """Of each replica, the one rank that has the outputs."""
    return model.point.pipe == model.mesh.pipe - 1 and model.point.tensor == 0


def named_metrics(metrics: Mapping[str, Metric] | Sequence[Metric] | None) -> dict[str, Metric]:
    """Metrics by name; a function in a list has its own."""
    if metrics is None or isinstance(metrics, Mapping):
        return dict(metrics or {})
    return {getattr(metric, "__name__", type(metric).__name__): metric for metric in metrics}

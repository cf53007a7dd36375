"""Evaluation of the job's model: replicas share the batches, sums are over all samples in the order of the batches.

The table of sums has a place for each batch, filled by the one rank that has the outputs; an all-reduce adds zeros to it. So
the result is that of one process, whatever the strategy and the size of the last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from polytempo.pipeline.stage_message import rows
from polytempo.strategy.sample_source import SampleSource
from polytempo.summation import in_order
from polytempo.train.communication import all_reduce

if TYPE_CHECKING:
    from polytempo.strategy.distributed_model import DistributedModel

#: A function of outputs and targets: the mean over the batch, or a value for each sample.
Metric = Callable[[Any, Any], Any]


def evaluate(
    model: DistributedModel,
    data: Any,
    *,
    metrics: Mapping[str, Metric] | Sequence[Metric] | None = None,
    batch_size: int | None = None,
) -> dict[str, float]:
    """Evaluate the job's model: replicas share the batches, and means are over all samples. All ranks call it.

    Args:
        model: The distributed model, such as `history.model`.
        data: As for `fit`; all samples are taken, in their order.
        metrics: Functions of outputs and targets, by name or in a list. Each returns a mean over its batch, or a tensor of
            values, of which the mean is taken over all batches.
        batch_size: Samples that a replica evaluates at once; the loader's, or 32.

    Returns:
        `loss` and each metric by name, the same on all ranks.

    Example:
        ```python
        pt.evaluate(history.model, held_out, metrics={"accuracy": lambda out, y: out.argmax(1) == y})
        ```
    """
    return mean_over(model, SampleSource(data, batch_size, False, 0, otherwise=False), named_metrics(metrics))


def mean_over(model: DistributedModel, source: SampleSource, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The means of the loss and of each metric over all samples, summed in the order of the batches."""
    replica, replicas = model.point.data, model.mesh.data
    model.consolidate()
    found: list[list[float]] = []
    for x, y in source.evaluation(replica, replicas):
        samples = rows(y)
        sums = [model.evaluate(x, y) * samples, float(samples)]
        outputs = model.predict(x) if metrics else None
        for metric in metrics.values():
            sums += _sum_and_count(metric, outputs, y, samples)
        found.append(sums)
    most = torch.tensor([len(found)])
    all_reduce(most, op="max")
    table = torch.zeros(int(most), replicas, 2 + 2 * len(metrics), dtype=torch.float64)
    if found and first_of_replica(model):
        table[: len(found), replica] = torch.tensor(found, dtype=torch.float64)
    all_reduce(table)  # one rank has the sums of a batch, the others add zeros
    columns = [in_order(column) for column in table.flatten(0, 1).T.tolist()]
    pairs = zip(columns[::2], columns[1::2], strict=True)
    return {name: total / max(count, 1.0) for name, (total, count) in zip(("loss", *metrics), pairs, strict=True)}


def _sum_and_count(metric: Metric, outputs: Any, y: Any, samples: int) -> tuple[float, float]:
    """The sum of a metric over a batch and the number of its values; a mean counts for all samples."""
    if isinstance(y, torch.Tensor) and isinstance(outputs, torch.Tensor):
        y = y.to(outputs.device)
    with torch.no_grad():
        value = metric(outputs, y)
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return float(value.sum(dtype=torch.float64)), float(value.numel())
    return float(value) * samples, float(samples)


def first_of_replica(model: DistributedModel) -> bool:
    """Whether this rank speaks for its replica."""
    return model.point.pipe == 0 and model.point.tensor == 0


def named_metrics(metrics: Mapping[str, Metric] | Sequence[Metric] | None) -> dict[str, Metric]:
    """Metrics by name; a function in a list has its own."""
    if metrics is None or isinstance(metrics, Mapping):
        return dict(metrics or {})
    return {getattr(metric, "__name__", type(metric).__name__): metric for metric in metrics}

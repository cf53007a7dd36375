"""Cross-entropy of logits whose classes are split over ranks: the logits are never gathered.

Three small all-reduces, of one number for each sample: the largest logit, the sum of exponentials, and the logit of the
target (with it, for label smoothing, the sum of all logits). Backward needs none: the gradient of this rank's logits is its
part of softmax - target.

    cross_entropy(logits, target, ...)    `F.cross_entropy`; the split form inside `split_logits`
    split_logits(group, classes)          inside the block, logits that are given to `cross_entropy` are this rank's part
    parallel_loss(loss, group, classes)   a user's loss, called with split logits
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.errors import UsageError
from polytempo.tensor_parallel.group import TensorGroup
from polytempo.tensor_parallel.layers import check_ids
from polytempo.tensor_parallel.mappings import reduce_from

LossFunction = Callable[..., Tensor]
REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class SplitLogits:
    """Whose logits are split, and how many classes there are on all ranks together."""

    group: TensorGroup
    classes: int


_split: ContextVar[SplitLogits | None] = ContextVar("polytempo-split-logits", default=None)


@contextmanager
def split_logits(group: TensorGroup, classes: int) -> Iterator[None]:
    """Inside the block, logits that are given to `cross_entropy` are this rank's part of `classes`, along the last
    dimension."""
    token = _split.set(SplitLogits(group, classes))
    try:
        yield
    finally:
        _split.reset(token)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    dim: int = 1,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`, also for logits whose classes are split over the ranks of a tensor group.

    As the loss of a model whose output layer is split (`Strategy(tensor=2)`), or inside such a loss, it computes from each
    rank's part of the logits, without gathering them. Elsewhere it is torch's function.

    Args:
        logits: Unnormalised scores, classes along `dim`. Where they are split, this must be the last dimension.
        target: The class of each sample.
        weight: The weight of each class; of all classes, also where logits are split.
        ignore_index: Samples of this class do not count.
        reduction: `"mean"`, `"sum"` or `"none"`.
        label_smoothing: From 0 to 1: how much of each target goes to all classes alike.
        dim: The dimension of the classes: 1 as in torch, or -1 for sequences, (batch, length, classes).

    Returns:
        The loss, alike on all ranks.

    Raises:
        UsageError: Logits are split and the classes are not the last dimension, or targets are probabilities.
        IndexError: A target is no class.

    Example:
        ```python
        loss = functools.partial(pt.cross_entropy, dim=-1)  # logits (batch, length, classes), targets (batch, length)
        ```
    """
    split = _split.get()
    if split is None or split.group.size == 1:
        moved = logits if logits.dim() < 2 or dim == 1 else logits.movedim(dim, 1)
        return functional.cross_entropy(
            moved, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    if logits.dim() > 1 and dim % logits.dim() != logits.dim() - 1:
        raise UsageError(
            f"expected split logits with classes along the last dimension, got dim={dim} of shape {tuple(logits.shape)}; "
            "pass dim=-1, or name the output layer 'column-gather' in tensor_plan"
        )
    if target.is_floating_point():
        raise UsageError("expected a class for each sample, got probabilities; name the output layer 'column-gather'")
    if reduction not in REDUCTIONS:
        raise UsageError(f"expected reduction to be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    return _split_cross_entropy(logits, target, split, weight, ignore_index, reduction, label_smoothing)


def _split_cross_entropy(
    logits: Tensor,
    target: Tensor,
    split: SplitLogits,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> Tensor:
    group, ignored = split.group, target == ignore_index
    check_ids(target, split.classes, ignored)
    start = group.rank * logits.shape[-1]
    count = max(0, min(logits.shape[-1], split.classes - start))  # without the padding
    own = logits.narrow(-1, 0, count)
    own = own.float() if own.element_size() < 4 else own
    largest = _largest(own, group)
    shifted = own - largest.unsqueeze(-1)
    log_sum = reduce_from(shifted.exp().sum(-1), group).log()
    index = target - start
    elsewhere = (index < 0) | (index >= count)
    at = index.masked_fill(elsewhere, 0).unsqueeze(-1)
    chosen = shifted.gather(-1, at).squeeze(-1) if count else shifted.sum(-1)
    terms = [chosen.masked_fill(elsewhere, 0)]
    weights = None if weight is None else weight.narrow(0, start, count) if count else weight[:0]
    if smoothing:
        terms.append((shifted if weights is None else shifted * weights).sum(-1))
    sums = reduce_from(torch.stack(terms), group)
    known = target.masked_fill(ignored, 0)
    scale = torch.ones_like(log_sum) if weight is None else weight[known].to(log_sum.dtype)
    scale = scale.masked_fill(ignored, 0)
    loss = scale * (log_sum - sums[0])
    if smoothing:
        total = split.classes if weight is None else weight.sum()
        smooth = (total * log_sum - sums[1]).masked_fill(ignored, 0)
        loss = (1 - smoothing) * loss + smoothing / split.classes * smooth
    loss = loss.masked_fill(ignored, 0)
    if reduction == "none":
        return loss.to(logits.dtype)
    return (loss.sum() if reduction == "sum" else loss.sum() / scale.sum()).to(logits.dtype)


def _largest(own: Tensor, group: TensorGroup) -> Tensor:
    """The largest logit of each sample, on any rank; it only keeps exponentials small, and has no gradient."""
    with torch.no_grad():
        empty = own.new_full(own.shape[:-1], float("-inf"))
        largest = own.max(-1).values if own.shape[-1] else empty
        group.all_reduce(largest, "max")
    return largest


def gather_logits(logits: Tensor, group: TensorGroup, classes: int) -> Tensor:
    """The logits of all classes, on all ranks; without gradients."""
    return group.all_gather(logits, logits.dim() - 1).narrow(-1, 0, classes) if group.size > 1 else logits


def as_cross_entropy(loss: Any) -> LossFunction | None:
    """A user's loss as a call of `cross_entropy`; None where it is any other function."""
    if isinstance(loss, functools.partial):
        inner = as_cross_entropy(loss.func)
        return None if inner is None else functools.partial(inner, *loss.args, **loss.keywords)
    if loss is functional.cross_entropy or loss is cross_entropy:
        return cross_entropy
    if type(loss) is nn.CrossEntropyLoss:
        return _CrossEntropyModule(loss)
    return None


class _CrossEntropyModule:
    """`nn.CrossEntropyLoss` with its options as they are when it is called."""

    def __init__(self, module: nn.CrossEntropyLoss) -> None:
        self._module = module

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        told = self._module
        return cross_entropy(
            logits, target, told.weight, told.ignore_index, told.reduction, label_smoothing=told.label_smoothing
        )


def parallel_loss(loss: LossFunction, group: TensorGroup, classes: int) -> LossFunction:
    """A user's loss that is one of torch's or our cross-entropies, to be called with this rank's logits of `classes`."""
    known = as_cross_entropy(loss)
    if known is None:
        raise UsageError(
            "expected F.cross_entropy, nn.CrossEntropyLoss or pt.cross_entropy for an output layer that stays split, "
            f"got {getattr(loss, '__name__', type(loss).__name__)}; name the layer 'column-gather' in tensor_plan"
        )

    def with_split_logits(logits: Tensor, target: Tensor) -> Tensor:
        with split_logits(group, classes):
            return known(logits, target)

    return with_split_logits

"""Sums of lists of tensors with weights: of gradients, of changes and of values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)


def weighted_sum(terms: Iterable[tuple[Sequence[MaybeTensor], float]]) -> list[MaybeTensor]:
    """Add up lists of tensors, each times its weight, in their order.

    Args:
        terms: Lists of one form, with a weight each. They are taken one by one, and none is changed. A list that counts
            alone and whole gives its own tensors, bit for bit.

    Returns:
        The sums; None where all terms have None, which is what an unused parameter has for a gradient.
    """
    total: list[MaybeTensor] = []
    for tensors, weight in terms:
        part = [tensor if tensor is None or weight == 1 else tensor * weight for tensor in tensors]
        total = [_plus(one, other) for one, other in zip(total, part, strict=True)] if total else part
    return total


def _plus(one: MaybeTensor, other: MaybeTensor) -> MaybeTensor:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def with_change(
    values: Sequence[torch.Tensor], new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Values that were `old`, and became others, with the change from `old` to `new` on top. Where they are still `old`,
    they become `new`, bit for bit."""
    return [
        after if torch.equal(value, before) else value + (after - before)
        for value, after, before in zip(values, new, old, strict=True)
    ]

"""Pushes to a table, and how those of one round become one.

Each push first names each of its rows once. Then the rows of all pushes are combined as the rule says. In a mean, a row that
a worker did not push counts as zero, with that worker's weight: it is the mean of the dense gradients, in their arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polytempo.tables.ids import coalesce

#: What a row holds before the first push of a round is combined into it.
NEUTRAL = {"sum": 0.0, "mean": 0.0, "last": 0.0, "min": float("inf"), "max": float("-inf")}


@dataclass(frozen=True)
class RowPush:
    """One worker's push to one shard of a table: rows under ids, or this shard's rows of a range of ids."""

    ids: torch.Tensor | None
    values: torch.Tensor
    weight: float = 1.0
    worker: int = -1  #: whose clock it sets; -1: nobody's, it only counts in a mean
    step: int = 0
    span: tuple[int, int] | None = None  #: start and stop, in ids of the table


@dataclass(frozen=True)
class Rows:
    """Rows under ids, each once and ascending, and their weight in a mean."""

    ids: torch.Tensor
    values: torch.Tensor
    weight: float


def squeezed(ids: torch.Tensor, values: torch.Tensor, weight: float, how: str) -> Rows:
    """A push in which each row stands once."""
    return Rows(*coalesce(ids, values, "sum" if how == "mean" else how), weight)


def combined(pushes: Sequence[Rows], how: str) -> Rows:
    """The pushes of a round as one; a single push stays what it is, to the bit."""
    if how == "mean":  # what weighs nothing may hold anything
        pushes = [push for push in pushes if push.weight] or pushes
    if len(pushes) == 1:
        return pushes[0]
    factors, after = _weights(pushes) if how == "mean" else ([1.0] * len(pushes), 1.0)
    if all(torch.equal(push.ids, pushes[0].ids) for push in pushes[1:]):
        ids, places = pushes[0].ids, [slice(None)] * len(pushes)
    else:
        ids, back = torch.cat([push.ids for push in pushes]).unique(return_inverse=True)
        places = list(back.split([push.ids.numel() for push in pushes]))
    first = pushes[0].values
    total = torch.full((ids.numel(), first.shape[1]), NEUTRAL[how], dtype=first.dtype)
    for push, place, factor in zip(pushes, places, factors, strict=True):
        total[place] = _with(total[place], push.values, how, factor)
    return Rows(ids, total if after == 1.0 else total.mul_(after), sum(push.weight for push in pushes))


def _weights(pushes: Sequence[Rows]) -> tuple[list[float], float]:
    """What each push is multiplied with, and what the sum of them is: as for dense gradients, equal weights come last."""
    weights = [push.weight for push in pushes]
    narrow = pushes[0].values.dtype == torch.float16  # in which a sum may be too large
    if all(weight == weights[0] for weight in weights) and not narrow:
        return [1.0] * len(pushes), 1 / len(pushes)
    return [weight / sum(weights) for weight in weights], 1.0


def _with(sofar: torch.Tensor, values: torch.Tensor, how: str, factor: float) -> torch.Tensor:
    if how == "last":
        return values
    if how in ("min", "max"):
        return torch.minimum(sofar, values) if how == "min" else torch.maximum(sofar, values)
    return torch.add(sofar, values, alpha=factor)

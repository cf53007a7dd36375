"""Batches of rows: ids that a caller may give, pushes in which each row occurs once, and the pushes of a round as one.

In a mean, a row that a worker did not push counts as zero, with that worker's weight: it is the mean of the dense gradients,
in their arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from polytempo.errors import UsageError, WrongType
from polytempo.protocol.values import TableInfo
from polytempo.summation import in_order


def checked_ids(ids: object, info: TableInfo) -> torch.Tensor:
    """These ids as a flat int64 tensor: of a tensor or array of integers, in whatever shape, or of a list of ints."""
    given = _as_tensor(ids, info)
    if given.numel() and (given.dtype == torch.bool or given.is_floating_point() or given.is_complex()):
        raise _refusal(info, given[0].item(), 0, f"of {given.dtype}; use ids.long()")
    flat = given.to("cpu", torch.int64)
    wrong = (flat < 0) | (flat >= info.rows) if info.rows else flat < 0
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        raise _refusal(info, given[position].item(), position, f"of {flat.numel()}; {_advice(info, int(flat[position]))}")
    return flat


def _as_tensor(ids: object, info: TableInfo) -> torch.Tensor:
    if isinstance(ids, torch.Tensor):
        return ids.detach().reshape(-1)
    if isinstance(ids, (numpy.ndarray, numpy.integer)):
        if ids.dtype.kind not in "iufcb":
            raise UsageError(f"table {info.name!r}: expected ids of an integer dtype, got an array of {ids.dtype}")
        return torch.from_numpy(numpy.ascontiguousarray(ids, dtype=ids.dtype.newbyteorder("=")).reshape(-1).copy())
    if isinstance(ids, (list, tuple, range)):
        return _of_list(ids, info)
    raise WrongType(
        f"table {info.name!r}: expected a tensor or an array of integers, or a list of ints, got {type(ids).__name__}"
    )


def _of_list(ids: Sequence[Any], info: TableInfo) -> torch.Tensor:
    for position, one in enumerate(ids):
        if isinstance(one, bool) or not isinstance(one, (int, numpy.integer)):
            raise _refusal(info, one, position, f"of {len(ids)}, a {type(one).__name__}")
        if not -(2**63) <= one < 2**63:  # would not fit into the tensor
            raise _refusal(info, one, position, f"of {len(ids)}; {_advice(info, int(one))}")
    return torch.tensor(ids, dtype=torch.int64)


def _refusal(info: TableInfo, found: object, position: int, more: str) -> UsageError:
    wanted = f"ids from 0 to {info.rows - 1}" if info.rows else "ids from 0 to 2**63 - 1"
    return UsageError(f"table {info.name!r}: expected {wanted}, got {found!r} at position {position} {more}")


def _advice(info: TableInfo, one: int) -> str:
    if one < 0 or not info.rows:
        return "leave padding out, and map other ids to numbers from 0 on"
    return "give the table more rows, or rows=None for any id"


def ascending(ids: torch.Tensor) -> bool:
    """Does each id stand once, and in order?"""
    return bool((ids[1:] > ids[:-1]).all())


def coalesce(ids: torch.Tensor, values: torch.Tensor, how: str = "sum") -> tuple[torch.Tensor, torch.Tensor]:
    """Each id once, ascending, and the sum (or "min", "max", "last") of its rows, added up in the order given."""
    if ascending(ids):
        return ids, values
    ordered, order = torch.sort(ids, stable=True)
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    if unique.numel() == ids.numel():
        return unique, values.index_select(0, order)
    lasts = counts.cumsum(0) - 1
    if how == "last":
        return unique, values.index_select(0, order[lasts])
    firsts = lasts - counts + 1
    later = torch.ones(ids.numel(), dtype=torch.bool)
    later[firsts] = False
    result = values.index_select(0, order[firsts])
    groups = torch.repeat_interleave(torch.arange(unique.numel()), counts)[later]
    reduce_rows(result, groups, values.index_select(0, order[later]), how)
    return unique, result


def reduce_rows(into: torch.Tensor, places: torch.Tensor, values: torch.Tensor, how: str) -> None:
    """Combine each row of `values` into the row of `into` that `places` says, one after another."""
    if how == "sum":
        into.index_add_(0, places, values)
        return
    index = places.unsqueeze(1).expand(-1, into.shape[1])
    into.scatter_reduce_(0, index, values, {"min": "amin", "max": "amax"}[how])


#: What a row holds before the first push of a round is combined into it.
NEUTRAL = {"sum": 0.0, "mean": 0.0, "last": 0.0, "min": float("inf"), "max": float("-inf")}


@dataclass(frozen=True)
class RowPush:
    """One worker's push to one shard of a table: rows under ids, or this shard's rows of a range of ids."""

    ids: torch.Tensor | None
    values: torch.Tensor
    weight: float = 1.0
    worker: int = -1  #: the worker whose clock it sets; -1: none, it only counts in a mean
    step: int = 0
    span: tuple[int, int] | None = None  #: start and stop, in ids of the table


@dataclass(frozen=True)
class RowBatch:
    """Rows under ids, each once and ascending, and their weight in a mean."""

    ids: torch.Tensor
    values: torch.Tensor
    weight: float


def squeezed(ids: torch.Tensor, values: torch.Tensor, weight: float, how: str) -> RowBatch:
    """A push in which each row stands once."""
    return RowBatch(*coalesce(ids, values, "sum" if how == "mean" else how), weight)


def combined(pushes: Sequence[RowBatch], how: str) -> RowBatch:
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
    return RowBatch(ids, total if after == 1.0 else total.mul_(after), in_order(push.weight for push in pushes))


def _weights(pushes: Sequence[RowBatch]) -> tuple[list[float], float]:
    """What each push is multiplied with, and what the sum of them is: as for dense gradients, equal weights come last."""
    weights = [push.weight for push in pushes]
    narrow = pushes[0].values.dtype == torch.float16  # in which a sum may be too large
    if all(weight == weights[0] for weight in weights) and not narrow:
        return [1.0] * len(pushes), 1 / len(pushes)
    total = in_order(weights)
    return [weight / total for weight in weights], 1.0


def _with(sofar: torch.Tensor, values: torch.Tensor, how: str, factor: float) -> torch.Tensor:
    if how == "last":
        return values
    if how in ("min", "max"):
        return torch.minimum(sofar, values) if how == "min" else torch.maximum(sofar, values)
    return torch.add(sofar, values, alpha=factor)

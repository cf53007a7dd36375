"""What a caller may give as ids, and how pushes that name a row twice become pushes that name it once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from polytempo.errors import UsageError, WrongType
from polytempo.protocol.values import TableInfo


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

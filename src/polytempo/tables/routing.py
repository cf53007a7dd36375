"""Routing of rows to shards, and the joining of their answers.

Row `id` lives on shard `id % shards`: neighbours lie on different servers, so that small hot ids spread, and a range of ids
is on every shard a range of slots. Lists of ids are split by index, ranges by strided slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polytempo.errors import PeerError


@dataclass(frozen=True)
class Routing:
    """Ids split by shard."""

    parts: list[torch.Tensor]  #: the ids for each shard, in the order given
    places: list[torch.Tensor]  #: the position of each of them in the list

    def cut(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Rows in the order of the ids, split like them."""
        return [values] if len(self.parts) == 1 else [values.index_select(0, places) for places in self.places]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The shards' rows, back in the order of the ids."""
        _check_counts([len(part) for part in parts], [len(ids) for ids in self.parts])
        if len(parts) == 1:
            return parts[0]
        result = parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))
        for places, part in zip(self.places, parts, strict=True):
            result.index_copy_(0, places, part)
        return result


def route(ids: torch.Tensor, shards: int) -> Routing:
    """Split ids by shard; they may repeat and be in any order."""
    if shards == 1:
        return Routing([ids], [torch.arange(ids.numel())])
    owners = ids % shards
    places = [(owners == shard).nonzero().squeeze(1) for shard in range(shards)]
    return Routing([ids[own] for own in places], places)


def _offset(start: int, shard: int, shards: int) -> int:
    """How far behind `start` the first row of a shard is."""
    return (shard - start) % shards


def range_ids(start: int, stop: int, shard: int, shards: int) -> torch.Tensor:
    """The ids from `start` to `stop` that live on a shard."""
    return torch.arange(min(start + _offset(start, shard, shards), stop), stop, shards)


def range_slots(start: int, stop: int, shard: int, shards: int) -> slice:
    """The slots of a bounded table in which a shard holds its rows of a range."""
    first, end = (-((shard - key) // shards) for key in (start, stop))  # rounded up
    return slice(first, end)


def cut_range(values: torch.Tensor, start: int, shards: int) -> list[torch.Tensor]:
    """The rows of a range that begins at `start`, for each shard; views."""
    return [values[_offset(start, shard, shards) :: shards] for shard in range(shards)]


def join_range(parts: Sequence[torch.Tensor], start: int, stop: int, shards: int) -> torch.Tensor:
    """The rows of a range from each shard's part of it."""
    wanted = [len(range(start + _offset(start, shard, shards), stop, shards)) for shard in range(shards)]
    _check_counts([len(part) for part in parts], wanted)
    if shards == 1:
        return parts[0]
    result = parts[0].new_empty((stop - start, *parts[0].shape[1:]))
    for shard, part in enumerate(parts):
        result[_offset(start, shard, shards) :: shards] = part
    return result


def _check_counts(got: Sequence[int], wanted: Sequence[int]) -> None:
    if len(got) != len(wanted):
        raise PeerError(f"expected rows from {len(wanted)} shards, got them from {len(got)}")
    for shard, (count, expected) in enumerate(zip(got, wanted, strict=True)):
        if count != expected:
            raise PeerError(f"expected {expected} rows from shard {shard}, got {count}")

"""Conversion between the servers' flat segments and torch's `state_dict`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from polytempo.protocol.layout import lay_out
from polytempo.protocol.values import TensorInfo
from polytempo.server.optimizer_state import SegmentState, of_tensor


def torch_state(
    segments: Sequence[SegmentState], tensors: Sequence[TensorInfo], numbers: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """State by parameter number, as torch's `state_dict()["state"]`; `numbers` are those of the tensors.

    Servers have no state of a parameter without elements. It gets what a neighbour in its group has: Adagrad makes state
    only when it is built, and could not go on from a dictionary that lacks some.
    """
    result, of_group = {}, {}
    places = lay_out(tensors, 1).places
    for place in places:
        state = of_tensor(segments, place.info.dtype, place.start, place.stop, place.info.shape)
        if state:
            result[numbers[place.index]] = state
            of_group[place.info.group] = state, place.info
    for place in places:
        if place.start == place.stop and place.info.group in of_group:
            state, info = of_group[place.info.group]
            result[numbers[place.index]] = {name: _emptied(name, value, info, place.info) for name, value in state.items()}
    return dict(sorted(result.items()))


def _emptied(name: str, value: Any, info: TensorInfo, empty: TensorInfo) -> Any:
    """A neighbour's state, for a parameter that has no elements."""
    if not isinstance(value, torch.Tensor):
        return value
    each = value.numel() == prod(info.shape) and name not in SINGLE
    return torch.empty(tuple(empty.shape), dtype=getattr(torch, empty.dtype)) if each else value.clone()


def segments_of(
    state: dict[int, dict[str, Any]], tensors: Sequence[TensorInfo], numbers: Sequence[int]
) -> list[SegmentState]:
    """The same the other way: one segment for each parameter that has state."""
    segments = []
    for place in lay_out(tensors, 1).places:
        own = {name: _on_cpu(name, value, place.info) for name, value in state.get(numbers[place.index], {}).items()}
        segments.append(SegmentState(place.info.dtype, place.start, place.stop, own))
    return segments


#: State that is one number for the whole parameter, in torch's own optimizers. A parameter may be one number, too.
SINGLE = ("step", "mu_product", "eta", "mu")


def _on_cpu(name: str, value: Any, info: TensorInfo) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.reshape(-1) if value.numel() == prod(info.shape) and name not in SINGLE else value

"""Between the servers' runs and torch's `state_dict`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from polytempo.parameter_server.state import RunState, of_tensor
from polytempo.protocol.layout import lay_out
from polytempo.protocol.values import TensorInfo


def torch_state(
    runs: Sequence[RunState], tensors: Sequence[TensorInfo], numbers: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """State by parameter number, as torch's `state_dict()["state"]`; `numbers` are those of the tensors."""
    result = {}
    for place in lay_out(tensors, 1).places:
        state = of_tensor(runs, place.info.dtype, place.start, place.stop, place.info.shape)
        if state:
            result[numbers[place.index]] = state
    return dict(sorted(result.items()))


def runs_of(state: dict[int, dict[str, Any]], tensors: Sequence[TensorInfo], numbers: Sequence[int]) -> list[RunState]:
    """The same the other way: one run for each parameter that has state."""
    runs = []
    for place in lay_out(tensors, 1).places:
        own = {name: _on_cpu(name, value, place.info) for name, value in state.get(numbers[place.index], {}).items()}
        runs.append(RunState(place.info.dtype, place.start, place.stop, own))
    return runs


#: State that is one number for the whole parameter, in torch's own optimizers. A parameter may be one number, too.
SINGLE = ("step", "mu_product", "eta", "mu")


def _on_cpu(name: str, value: Any, info: TensorInfo) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.reshape(-1) if value.numel() == prod(info.shape) and name not in SINGLE else value

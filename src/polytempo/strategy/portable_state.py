"""Optimizer state by the names of parameters, in the form that any strategy and plain PyTorch can load.

    {"state": {"blocks.0.weight": {"step": ..., "exp_avg": ...}, ...},
     "param_groups": [{"lr": 0.1, ..., "params": ["blocks.0.weight", ...]}]}

It is the form of `torch.distributed.checkpoint.state_dict`, whose `set_optimizer_state_dict` loads it into an optimizer of
the unsplit model. Torch's own `state_dict()` numbers parameters instead, in the order of the groups.

Each rank has the state of its shard of its stage. Shards are joined as the parameters are (`Sharding`), where a tensor has
the parameter's shape; figures such as `step` are equal on all shards. Stages are put together, and groups with the same
settings are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.tensor_parallel.sharding import Sharding

NamedState = dict[str, Any]
Shardings = Mapping[str, Sharding]


def by_name(state: NamedState, names: Sequence[str]) -> NamedState:
    """Torch's state of an optimizer with parameters of these names, in the order of its groups, by name."""
    return {
        "state": {names[number]: dict(entries) for number, entries in state["state"].items()},
        "param_groups": [
            _settings(group) | {"params": [names[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def by_number(state: NamedState, names: Sequence[str], groups: Sequence[NamedState]) -> NamedState:
    """The state of an optimizer with these parameters, as torch takes it. `groups`: its own, as in its `state_dict()`."""
    of_name = {name: group for group in state["param_groups"] for name in group["params"]}
    missing = [name for name in names if name not in of_name]
    if missing:
        raise UsageError(f"expected the state of an optimizer of the whole model; it has no parameter {missing[0]}")
    made = []
    for group in groups:
        found = [_settings(of_name[names[number]]) for number in group["params"]]
        if any(other != found[0] for other in found):
            own = [names[number] for number in group["params"]]
            raise UsageError(
                f"the saved optimizer has {own[0]} and {own[-1]} in groups with different settings; make it alike"
            )
        made.append({**_settings(group), **(found[0] if found else {}), "params": list(group["params"])})
    numbered = {number: dict(state["state"][name]) for number, name in enumerate(names) if name in state["state"]}
    return {"state": numbered, "param_groups": made}


def joined(shares: Sequence[NamedState], shardings: Shardings) -> NamedState:
    """The state of a stage, from that of all its shards."""
    first = shares[0]
    whole = {
        name: {key: _joined(name, key, [share["state"][name][key] for share in shares], shardings) for key in entries}
        for name, entries in first["state"].items()
    }
    return {"state": whole, "param_groups": first["param_groups"]}


def _joined(name: str, key: str, values: list[Any], shardings: Shardings) -> Any:
    sharding = shardings.get(name)
    if sharding is None or len(values) == 1 or not isinstance(values[0], torch.Tensor) or values[0].ndim == 0:
        return values[0]
    if tuple(values[0].shape) != sharding.shard_shape(len(values)):
        raise UsageError(
            f"the optimizer keeps {key} of shape {tuple(values[0].shape)} for a shard of {name} of shape "
            f"{sharding.shard_shape(len(values))}, which cannot be joined; use an optimizer whose state is like its "
            "parameters (SGD, Adam, AdamW), or tensor=1"
        )
    return sharding.join(values)


def sharded(state: NamedState, shardings: Shardings, rank: int, size: int) -> NamedState:
    """The state of one shard: tensors of the shape of a parameter that is cut are cut alike."""
    if size == 1:
        return state

    def share(name: str, value: Any) -> Any:
        sharding = shardings.get(name)
        fits = sharding is not None and isinstance(value, torch.Tensor) and tuple(value.shape) == sharding.shape
        return sharding.shard(value, rank, size) if sharding is not None and fits else value

    cut = {name: {key: share(name, value) for key, value in own.items()} for name, own in state["state"].items()}
    return {"state": cut, "param_groups": state["param_groups"]}


def merged(parts: Sequence[NamedState], names: Sequence[str]) -> NamedState:
    """The state of the whole model, from that of its stages. `names`: of its parameters, in their order."""
    found: dict[str, NamedState] = {}
    groups: list[NamedState] = []
    for part in parts:
        found |= part["state"]
        for group in part["param_groups"]:
            same = next((other for other in groups if _settings(other) == _settings(group)), None)
            if same is None:
                groups.append(_settings(group) | {"params": list(group["params"])})
            else:
                same["params"] += [name for name in group["params"] if name not in same["params"]]
    order = {name: place for place, name in enumerate(names)}
    for group in groups:
        group["params"].sort(key=lambda name: order.get(name, len(order)))
    return {"state": {name: found[name] for name in names if name in found}, "param_groups": groups}


def renamed(state: NamedState, canonical: Mapping[str, str]) -> NamedState:
    """The same state with other names: those of a tied parameter become its first."""
    return {
        "state": {canonical.get(name, name): entries for name, entries in state["state"].items()},
        "param_groups": [
            group | {"params": list(dict.fromkeys(canonical.get(name, name) for name in group["params"]))}
            for group in state["param_groups"]
        ],
    }


def _settings(group: Mapping[str, Any]) -> NamedState:
    """The hyper-parameters of a group, as plain data: a tensor of one element is a number."""
    return {
        name: float(value) if isinstance(value, torch.Tensor) else tuple(value) if isinstance(value, list) else value
        for name, value in group.items()
        if name != "params"
    }

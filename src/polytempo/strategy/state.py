"""The state of a model that is spread: gathered as that of the unsplit model on every rank, loaded from it, on any mesh.

A rank holds a shard of a stage. Its tensors are first exchanged with the other shards of the stage (all t) and joined, then
with the other stages of its lane (all k); after that each rank has all. Replicas (all d) have states of their own in modes
in which they differ; `DistributedModel.consolidate` makes them agree.

The optimizer's state is by the names of parameters, in the form that any strategy and plain PyTorch can load:

    {"state": {"blocks.0.weight": {"step": ..., "exp_avg": ...}, ...},
     "param_groups": [{"lr": 0.1, ..., "params": ["blocks.0.weight", ...]}]}

It is the form of `torch.distributed.checkpoint.state_dict`, whose `set_optimizer_state_dict` loads it into an optimizer of
the unsplit model. Torch's own `state_dict()` numbers parameters instead, in the order of the groups.

Each rank has the state of its shard of its stage. Shards are joined as the parameters are (`Sharding`), where a tensor has
the parameter's shape; figures such as `step` are equal on all shards. Stages are put together, and groups with the same
settings are one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.collectives.group import RankGroup
from polytempo.errors import UsageError
from polytempo.tensor_parallel.sharding import Sharding
from polytempo.train.safe_serialization import decode, encode

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


def exchanged(group: RankGroup | None, mine: Any) -> list[Any]:
    """The plain data, with tensors, of all ranks of a group, in their order. Tensors come back on the CPU."""
    if group is None or group.size == 1:
        return [mine]
    tensors: list[Tensor] = []
    head = encode(mine, tensors)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size)]
    group.all_gather(lengths, torch.tensor([len(head)])).wait()
    found = []
    for index, length in enumerate(lengths):
        letters = torch.zeros(int(length), dtype=torch.uint8)
        if index == group.rank:
            letters = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        group.broadcast([letters], index).wait()
        theirs: list[Tensor] = []
        data = decode(letters.numpy().tobytes(), theirs)
        if index == group.rank:
            for tensor, own in zip(theirs, tensors, strict=True):
                tensor.copy_(own.detach())
        if theirs:
            group.broadcast(theirs, index).wait()
        found.append(data)
    return found


@dataclass(frozen=True)
class UnsplitModel:
    """What is known of the model before it is split: the names and forms of its state, in their order."""

    forms: dict[str, tuple[tuple[int, ...], torch.dtype]]
    canonical: dict[str, str]  #: each name of a parameter to the first name of the same one
    parameters: tuple[str, ...]  #: the first names

    @classmethod
    def of(cls, model: nn.Module) -> UnsplitModel:
        """Of a model that is whole."""
        state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        first: dict[nn.Parameter, str] = {}
        canonical = {name: first.setdefault(param, name) for name, param in model.named_parameters(remove_duplicate=False)}
        forms = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
        return cls(forms, canonical, tuple(first.values()))

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Refuse a state with other names or shapes.

        Raises: UsageError, naming them."""
        missing = [name for name in self.forms if name not in state]
        unknown = [name for name in state if name not in self.forms]
        if missing or unknown:
            raise UsageError(
                f"expected the names of the whole model; missing: {missing[:4] or 'none'}, unknown: {unknown[:4] or 'none'}"
            )
        for name, (shape, _) in self.forms.items():
            if tuple(state[name].shape) != shape:
                raise UsageError(f"{name} has shape {shape}; got one of shape {tuple(state[name].shape)}")


@dataclass(frozen=True)
class SpreadState:
    """This rank's share in the state of the unsplit model."""

    unsplit: UnsplitModel
    own: Callable[[], dict[str, Tensor]]  #: this rank's tensors, by their names in the unsplit model
    lane: RankGroup | None  #: the stages of this replica, at this rank's shard
    shards: RankGroup | None  #: the ranks of this rank's stage in this replica
    shardings: Mapping[str, Sharding] = field(default_factory=dict)  #: of the parameters that are cut
    unused: Mapping[str, Tensor] = field(default_factory=dict)  #: tensors that no stage holds

    def gather(self) -> dict[str, Tensor]:
        """The state of the unsplit model, on the CPU. All ranks of the replica call this."""
        mine = {name: value.detach().cpu().clone() for name, value in self.own().items()}
        cut = sorted(name for name in mine if name in self.shardings)
        shares = exchanged(self.shards, {name: mine[name] for name in cut})
        if len(shares) > 1:
            mine |= {name: self.shardings[name].join([share[name] for share in shares]) for name in cut}
        found = {name: value.detach().cpu().clone() for name, value in self.unused.items()}
        for stage in exchanged(self.lane, mine):
            found |= stage
        return {name: found[name] for name in self.unsplit.forms}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's share of the state of an unsplit model."""
        self.unsplit.check(state)
        with torch.no_grad():
            for name, value in self.unused.items():
                value.copy_(state[name])
            for name, value in self.own().items():
                share = state[name]
                if self.shards is not None and name in self.shardings:
                    share = self.shardings[name].shard(share, self.shards.rank, self.shards.size)
                value.copy_(share)

    # The optimizer.

    def gather_optimizer(self, state: NamedState, names: list[str]) -> NamedState:
        """The optimizer state of the unsplit model, by parameter name, from this rank's. `names`: of its parameters.

        All ranks of the replica call this."""
        mine = renamed(by_name(state, names), self.unsplit.canonical)
        mine["state"] = {
            name: {key: value.detach().cpu().clone() if isinstance(value, Tensor) else value for key, value in own.items()}
            for name, own in mine["state"].items()
        }
        stage = joined(exchanged(self.shards, mine), self._canonical_shardings())
        return merged(exchanged(self.lane, stage), self.unsplit.parameters)

    def optimizer_share(self, state: NamedState, names: list[str], groups: list[NamedState]) -> NamedState:
        """This rank's share of the optimizer state of an unsplit model, as torch numbers it. `groups`: its own."""
        known = [self.unsplit.canonical.get(name, name) for name in names]
        if self.shards is not None:
            state = sharded(state, self._canonical_shardings(), self.shards.rank, self.shards.size)
        return by_number(state, known, groups)

    def _canonical_shardings(self) -> dict[str, Sharding]:
        return {self.unsplit.canonical.get(name, name): sharding for name, sharding in self.shardings.items()}

"""Optimizer state by name: numbers and names, shards and joins, stages and unions are inverses; replicas in their data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from polytempo.errors import UsageError
from polytempo.strategy.state import by_name, by_number, joined, merged, renamed, sharded
from polytempo.sync.epoch_parts import WHOLE, parts_of
from polytempo.tensor_parallel.sharding import Sharding


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Sharding], int]:
    """The state of a whole model, how some parameters are cut, and into how many shards."""
    size = draw(st.sampled_from([1, 2, 4]))
    state: dict[str, Any] = {}
    shardings: dict[str, Sharding] = {}
    names = [f"layer.{number}.weight" for number in range(draw(st.integers(1, 5)))]
    for name in names:
        blocks = draw(st.sampled_from([1, 3]))
        shape = tuple(draw(st.integers(1, 3)) * (size * blocks if dim == 0 else 1) for dim in range(draw(st.integers(1, 3))))
        if draw(st.booleans()):
            shardings[name] = Sharding(shape, 0, blocks)
        entries = {"exp_avg": torch.rand(shape), "step": torch.tensor(float(draw(st.integers(0, 9)))), "note": 3}
        if draw(st.booleans()):  # a parameter without a gradient has no state
            state[name] = entries
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.99), "params": names[::2]},
        {"lr": 0.2, "betas": (0.9, 0.99), "params": names[1::2]},
    ]
    return {"state": state, "param_groups": groups}, shardings, size


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert sorted(found["state"]) == sorted(wanted["state"])
    for name, entries in wanted["state"].items():
        assert set(found["state"][name]) == set(entries)
        assert all(torch.equal(torch.as_tensor(found["state"][name][key]), torch.as_tensor(v)) for key, v in entries.items())


@given(states())
def test_shards_join_to_the_whole(made: tuple[dict[str, Any], dict[str, Sharding], int]) -> None:
    state, shardings, size = made
    shares = [sharded(state, shardings, rank, size) for rank in range(size)]
    for name in set(shardings) & set(state["state"]):
        assert tuple(shares[0]["state"][name]["exp_avg"].shape) == shardings[name].shard_shape(size)
    assert_equal(joined(shares, shardings), state)


@given(states(), st.data())
def test_stages_make_the_whole(made: tuple[dict[str, Any], dict[str, Sharding], int], data: st.DataObject) -> None:
    """Of any cut of the parameters; groups with the same settings are one again."""
    state, _, _ = made
    names = [name for group in state["param_groups"] for name in group["params"]]
    stage_of = {name: data.draw(st.integers(0, 2)) for name in names}
    parts = []
    for stage in range(3):
        own = {name for name in names if stage_of[name] == stage}
        groups = [group | {"params": [name for name in group["params"] if name in own]} for group in state["param_groups"]]
        kept = {name: entries for name, entries in state["state"].items() if name in own}
        parts.append({"state": kept, "param_groups": [group for group in groups if group["params"]]})
    found = merged(parts, names)
    assert {group["lr"]: group["params"] for group in found["param_groups"]} == {
        group["lr"]: group["params"] for group in state["param_groups"] if group["params"]
    }
    assert_equal(found | {"param_groups": []}, state | {"param_groups": []})


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_numbers_and_names_are_inverses(make: type[torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": list(model[1].parameters()), "lr": 0.3}, {"params": list(model[0].parameters()), "lr": 0.1}]
    optimizer = make(groups)  # type: ignore[call-arg]
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    names = ["1.weight", "1.bias", "0.weight", "0.bias"]
    named = by_name(optimizer.state_dict(), names)
    assert [group["params"] for group in named["param_groups"]] == [names[:2], names[2:]]
    again = make([{"params": [param], "lr": 9.0} for param in model.parameters()])  # type: ignore[call-arg]
    own = [name for name, _ in model.named_parameters()]
    again.load_state_dict(by_number(named, own, again.state_dict()["param_groups"]))
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.1, 0.3, 0.3]
    assert_equal(by_name(again.state_dict(), own) | {"param_groups": []}, named | {"param_groups": []})


def test_what_cannot_be_is_refused() -> None:
    named = {"state": {}, "param_groups": [{"lr": 0.1, "params": ["a"]}, {"lr": 0.2, "params": ["b"]}]}
    with pytest.raises(UsageError, match="it has no parameter c"):
        by_number(named, ["a", "c"], [{"params": [0, 1]}])
    with pytest.raises(UsageError, match="a and b in groups with different settings"):
        by_number(named, ["a", "b"], [{"params": [0, 1]}])
    share = {"state": {"a": {"row_var": torch.ones(2, 1)}}, "param_groups": []}
    with pytest.raises(UsageError, match=r"keeps row_var of shape \(2, 1\) for a shard of a of shape \(2, 4\)"):
        joined([share, share], {"a": Sharding((4, 4))})
    assert renamed(named, {"b": "a"})["param_groups"][1]["params"] == ["a"]


# Positions in the data.


def test_positions_of_replicas_make_a_part_for_each_sampler_and_epoch_that_is_not_over() -> None:
    earlier = [
        {"sampler": "train", "epoch": 2, "size": 4, "taken": [1, 1, 1, 1]},
        {"sampler": "train", "epoch": 1, "size": 4, "taken": [9, 9, 9, 9]},
        {"sampler": "other", "epoch": 0, "size": 2, "taken": [3, 3]},
    ]
    assert parts_of({"train": [(2, 8), (1, 20), (2, 4)]}, earlier) == [
        earlier[2],
        earlier[1],
        {"sampler": "train", "epoch": 1, "size": 3, "taken": [WHOLE, 20, WHOLE]},
        earlier[0],
        {"sampler": "train", "epoch": 2, "size": 3, "taken": [8, 0, 4]},
    ]
    assert parts_of({}, earlier) == earlier

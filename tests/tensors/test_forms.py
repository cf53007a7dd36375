"""Which form of torch's optimizers a server runs: plain where bits are promised, fused where one pass is a gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from shards import Plain, Stores

from polytempo.server import optimizer_state
from polytempo.server.optimizer_state import ELEMENTWISE, FUSED, settle
from polytempo.server.shard import Shard

SHAPES = ((31, 7), (5,), (11, 3))
LARGE_FROM = 100  # elements, in these tests

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        {"weight_decay": 0.1},
        {"maximize": True},
        {"momentum": 0.9, "dampening": 0.2},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ],
    "Adam": [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True, "betas": (0.5, 0.7)}],
    "AdamW": [{}, {"amsgrad": True, "weight_decay": 0.3}, {"maximize": True}],
    "NAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "Adamax": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adadelta": [{}, {"rho": 0.5, "weight_decay": 0.1}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1}, {"eps": 0.01, "maximize": True}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}, {"weight_decay": 0.1}],
    "Rprop": [{}, {"etas": (0.4, 1.3)}],
    "ASGD": [{}, {"t0": 2, "weight_decay": 0.1}],
}
CASES = [(name, setting) for name, settings in SETTINGS.items() for setting in settings]
IN_FUSED_FORM = [(name, setting) for name, setting in CASES if getattr(torch.optim, name) in FUSED]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(optimizer_state, "FUSED_FROM", LARGE_FROM)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def some(seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice, dtype=torch.float64).to(dtype) for shape in SHAPES]


def hyper_of(name: str, setting: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """All hyper-parameters, as a worker sends them."""
    group = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(1))], lr=0.05, **setting).param_groups[0]
    return ({key: value for key, value in group.items() if key != "params"},)


def store_of(name: str, start: Sequence[torch.Tensor], hyper: tuple[dict[str, Any], ...], alone: bool) -> Stores:
    stores = Stores(start, 1, name, hyper)
    stores.stores = [Shard(stores.optimizer_spec, 0, 1, alone=alone)]
    stores.stores[0].seed(stores.cut(start, 0))
    return stores


def group_of(stores: Stores) -> dict[str, Any]:
    optimizer = stores.stores[0].optimizer
    assert optimizer is not None
    group: dict[str, Any] = optimizer.inner.param_groups[0]
    return group


def differences(stores: Stores, plain: Plain) -> list[float]:
    return [float((a - b).abs().max()) for a, b in zip(stores.values(), plain.values(), strict=True)]


def test_every_elementwise_class_is_tried_here() -> None:
    assert set(SETTINGS) == set(ELEMENTWISE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("name", "setting"), CASES, ids=str)
def test_who_is_alone_gets_plain_pytorchs_bits(name: str, setting: dict[str, Any], dtype: torch.dtype) -> None:
    start, hyper = some(0, dtype), hyper_of(name, setting)
    stores, plain = store_of(name, start, hyper, alone=True), Plain(start, name, hyper, [0] * 3)
    for step in range(1, 6):
        stores.step(some(step, dtype))
        plain.step(some(step, dtype))
    assert differences(stores, plain) == [0.0] * 3
    assert not any(torch.equal(a, b) for a, b in zip(stores.values(), start, strict=True))


@pytest.mark.parametrize(("name", "setting"), CASES, ids=str)
def test_among_others_a_step_is_fused_where_there_is_such_a_form(
    name: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = spy_on_fused(monkeypatch)
    start, hyper = some(0), hyper_of(name, setting)
    stores, plain = store_of(name, start, hyper, alone=False), Plain(start, name, hyper, [0] * 3)
    for step in range(1, 6):
        stores.step(some(step))
        plain.step(some(step))
    assert len(calls) == (5 if (name, setting) in IN_FUSED_FORM else 0)
    for got, wanted in zip(stores.values(), plain.values(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def spy_on_fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused kernels that were called."""
    calls: list[str] = []

    def watched(name: str) -> Any:
        plain = getattr(torch, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return plain(*arguments, **named)

        return call

    for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"):
        monkeypatch.setattr(torch, name, watched(name))
    return calls


def test_a_small_model_is_updated_in_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "FUSED_FROM", sum(torch.Size(shape).numel() for shape in SHAPES) + 1)
    calls = spy_on_fused(monkeypatch)
    store_of("SGD", some(0), hyper_of("SGD", {}), alone=False).step(some(1))
    assert calls == []


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    "choice", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"foreach": False, "fused": False}], ids=str
)
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_the_users_own_choice_is_respected(
    name: str, choice: dict[str, bool], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = spy_on_fused(monkeypatch)
    start, hyper = some(0), hyper_of(name, choice)
    stores, plain = store_of(name, start, hyper, alone), Plain(start, name, hyper, [0] * 3)
    stores.step(some(1))
    wanted = choice.get("fused", False)
    assert len(calls) == int(wanted)
    group = group_of(stores)
    assert (bool(group["foreach"]), bool(group["fused"])) == (choice.get("foreach", False), wanted)
    plain.step(some(1))
    assert max(differences(stores, plain)) < 1e-12


@pytest.mark.parametrize("value", [None, True])
def test_nothing_is_captured_in_a_graph_and_pairs_are_tuples(value: bool | None) -> None:
    settled = settle({"lr": 0.1, "betas": [0.9, 0.99], "capturable": value})
    assert settled == {"lr": 0.1, "betas": (0.9, 0.99), "capturable": False}


def test_a_differentiable_optimizer_stays_in_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spy_on_fused(monkeypatch)
    store_of("SGD", some(0), hyper_of("SGD", {"differentiable": True}), alone=False).step(some(1))
    assert calls == []


# Hyper-parameters that change between pushes.

CHANGES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "rate": ("SGD", [{"lr": 0.1}, {"lr": 0.01}, {"lr": 0.1}, {"lr": 0.0}, {"lr": 0.3}]),
    "momentum": ("SGD", [{"momentum": 0.9}, {"momentum": 0.5}, {"momentum": 0.9}]),
    "momentum from nothing": ("SGD", [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.0}, {"momentum": 0.9}]),
    "betas": ("Adam", [{"betas": (0.9, 0.99)}, {"betas": (0.5, 0.6)}, {"betas": (0.9, 0.99)}]),
    "betas as lists": ("Adam", [{"betas": [0.9, 0.99]}, {"betas": [0.5, 0.6]}, {"betas": [0.9, 0.99]}]),
    "decay": ("AdamW", [{"weight_decay": 0.1}, {"weight_decay": 0.0}, {"weight_decay": 0.1}]),
}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("what", CHANGES)
def test_hyper_parameters_that_change_take_effect_with_the_push_they_come_with(what: str, alone: bool) -> None:
    name, changes = CHANGES[what]
    start, hyper = some(0), hyper_of(name, {})
    stores, plain = store_of(name, start, hyper, alone), Plain(start, name, hyper, [0] * 3)
    for step, change in enumerate(changes * 2, 1):
        stores.step(some(step), hyper=({**hyper[0], **change},))
        plain.optimizer.param_groups[0].update(change)
        plain.step(some(step))
        for got, wanted in zip(stores.values(), plain.values(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0 if alone else 1e-12, atol=0 if alone else 1e-12)


@pytest.mark.parametrize("alone", [True, False])
def test_a_modes_rate_is_of_one_update_only(alone: bool) -> None:
    stores = store_of("SGD", [torch.zeros(200)], hyper_of("SGD", {}), alone)
    for rate in (1.0, 0.5, 1.0):
        stores.update((1.0, [torch.ones(200)]), rate=rate)
    torch.testing.assert_close(stores.values()[0], torch.full((200,), -0.05 * 2.5))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("name", "setting"), CASES, ids=str)
def test_parameters_that_get_their_first_gradient_later_join_the_others(
    name: str, setting: dict[str, Any], alone: bool
) -> None:
    """Then the runs of one update are of different age: one has state already, one has none."""
    start, hyper = some(0), hyper_of(name, setting)
    stores, plain = store_of(name, start, hyper, alone), Plain(start, name, hyper, [0] * 3)
    for step, missing in enumerate([(1,), (0, 1), (), (2,), ()], 1):
        gradients = [None if index in missing else gradient for index, gradient in enumerate(some(step))]
        stores.step(gradients)
        plain.step(gradients)
    for got, wanted in zip(stores.values(), plain.values(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)

"""A shard's store against torch itself, and what is promised about memory, weights and state."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from shards import Plain, Stores, Tensors

from polytempo.errors import UsageError
from polytempo.protocol.messages import Push
from polytempo.protocol.push import PushedGradient
from polytempo.protocol.values import PushId
from polytempo.server.optimizer_state import ELEMENTWISE, WHOLE, build, of_tensor

counts = pytest.mark.parametrize("shards", [1, 2, 3])

SHAPES = ((5, 3), (4,), (), (7, 2), (0,), (3, 3))
GROUPS = (0, 1, 0, 0, 1, 1)


def some(seed: int, shapes: tuple[tuple[int, ...], ...] = SHAPES, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice, dtype=dtype) for shape in shapes]


def hyper_for(optimizer: str) -> tuple[dict[str, Any], ...]:
    first: dict[str, Any] = {"lr": 0.05}
    if optimizer in ("SGD", "RMSprop"):
        first["momentum"] = 0.9
    return first, {**first, "lr": 0.02}


def close(ours: Tensors, theirs: Tensors, exact: bool = False) -> bool:
    if exact:
        return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(ours, theirs, strict=True))


def pair(optimizer: str, shards: int) -> tuple[Stores, Plain]:
    start, hyper = some(0), hyper_for(optimizer)
    return Stores(start, shards, optimizer, hyper, GROUPS), Plain(start, optimizer, hyper, GROUPS)


# The same as torch.


@counts
@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_every_elementwise_optimizer_does_what_torch_does(optimizer: str, shards: int) -> None:
    stores, plain = pair(optimizer, shards)
    for step in range(1, 6):
        stores.step(some(step))
        plain.step(some(step))
        assert close(stores.values(), plain.values())
    assert not close(stores.values(), some(0))


@counts
def test_sgd_is_the_same_to_the_last_bit(shards: int) -> None:
    stores, plain = pair("SGD", shards)
    for step in range(1, 6):
        stores.step(some(step))
        plain.step(some(step))
    assert close(stores.values(), plain.values(), exact=True)


@counts
@pytest.mark.parametrize("optimizer", WHOLE)
def test_optimizers_of_whole_tensors_do_what_torch_does(optimizer: str, shards: int) -> None:
    if not hasattr(torch.optim, optimizer):
        pytest.skip(f"this torch has no {optimizer}")
    shapes = ((5, 3), (4, 4), (2, 6), (3, 1))
    hyper = ({"lr": 0.05},)
    stores, plain = Stores(some(0, shapes), shards, optimizer, hyper), Plain(some(0, shapes), optimizer, hyper, [0] * 4)
    for step in range(1, 4):
        stores.step(some(step, shapes))
        plain.step(some(step, shapes))
        assert close(stores.values(), plain.values())
    again = Stores(stores.values(), 4 - shards, optimizer, hyper)
    for store in again.stores:
        store.load_state(stores.state())
    again.step(some(9, shapes))
    plain.step(some(9, shapes))
    assert close(again.values(), plain.values()), "its state moved to another number of shards"


@counts
def test_dtypes_are_kept_apart(shards: int) -> None:
    start = [torch.arange(5, dtype=torch.float64), torch.arange(6, dtype=torch.float32), torch.ones(3, dtype=torch.bfloat16)]
    stores, plain = Stores(start, shards), Plain(start, "SGD", ({"lr": 0.1},), [0] * 3)
    stores.step([torch.ones_like(t) for t in start])
    plain.step([torch.ones_like(t) for t in start])
    assert close(stores.values(), plain.values(), exact=True)


def test_the_rate_scales_the_learning_rate_of_the_push() -> None:
    stores = Stores([torch.zeros(4)], 2)
    stores.step([torch.ones(4)], rate=0.25, hyper=({"lr": 4.0},))
    assert torch.equal(stores.values()[0], -torch.ones(4))


def test_a_class_that_is_not_in_the_table_is_never_built() -> None:
    with pytest.raises(UsageError, match="not 'Optimizer'"):
        build("Optimizer", [{"lr": 0.1}], [[torch.nn.Parameter(torch.zeros(1))]])


# Runs.


def test_a_step_is_one_call_a_group_and_dtype_until_a_gradient_is_missing() -> None:
    stores, plain = pair("Adam", 1)
    (store,) = stores.stores
    stores.step(some(1))
    plain.step(some(1))
    assert store.optimizer is not None
    assert len(store.optimizer.segments) == 2
    assert [run.stop - run.start for run in store.optimizer.segments] == [15 + 1 + 14, 4 + 9]
    missing: list[torch.Tensor | None] = [*some(2)]
    missing[2] = None  # stands between two others
    stores.step(missing)
    plain.step(missing)
    assert [run.stop - run.start for run in store.optimizer.segments] == [15, 1, 14, 13]
    assert close(stores.values(), plain.values())


@counts
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad", "ASGD"])
def test_a_parameter_without_a_gradient_is_left_alone_and_its_state_too(optimizer: str, shards: int) -> None:
    stores, plain = pair(optimizer, shards)
    for step, without in enumerate([(), (0,), (3, 1), (0, 1, 2, 3, 4, 5), (), (3,)], start=1):
        gradients = [None if index in without else gradient for index, gradient in enumerate(some(step))]
        before = stores.values()
        stores.step(gradients)
        plain.step(gradients)
        assert close(stores.values(), plain.values())
        assert all(torch.equal(stores.values()[index], before[index]) for index in without)
    for place in stores.layout.places:
        if place.start < place.stop:
            mine = of_tensor(stores.state(), place.info.dtype, place.start, place.stop, place.info.shape)
            theirs = plain.optimizer.state[plain.params[place.index]]
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                same = torch.allclose(mine[name], value) if isinstance(value, torch.Tensor) else mine[name] == value
                assert same, f"{name} of parameter {place.index}"


def test_a_gradient_that_only_some_pushes_lack_is_a_gradient() -> None:
    stores = Stores([torch.zeros(2), torch.zeros(2)], 1, hyper=({"lr": 1.0},))
    (store,) = stores.stores
    push = pack_push(stores, [torch.ones(2), torch.zeros(2)], absent=(1,)), pack_push(stores, [torch.ones(2)] * 2, absent=())
    store.update(push, 1.0, True, lambda square: square)
    assert [value.tolist() for value in stores.values()] == [[-1.0, -1.0], [-0.5, -0.5]]


def pack_push(stores: Stores, tensors: Tensors, absent: tuple[int, ...]) -> Any:
    return Push(id=PushId("0", 0, 0, 0), body=PushedGradient(hyper=stores.hyper, absent=absent)), 1.0, stores.cut(tensors, 0)


# Means.


@counts
@pytest.mark.parametrize("weights", [(1.0, 2.0, 1.0), (8.0, 8.0, 8.0), (0.0, 4.0, 4.0), (1.0, 1.0, 6.0)])
def test_the_mean_is_weighted_by_samples_and_does_not_depend_on_the_order(weights: tuple[float, ...], shards: int) -> None:
    """Numbers whose sums are exact, so that only the weights can make a difference."""
    gradients = [torch.arange(7.0) * 24, torch.ones(7) * 48, torch.arange(7.0).flip(0) * 96]
    wanted = sum((w * g for w, g in zip(weights, gradients, strict=True)), torch.zeros(7)) / sum(weights)
    for order in permutations(range(3)):
        stores = Stores([torch.zeros(7)], shards, hyper=({"lr": 1.0},))
        stores.update(*((weights[i], [gradients[i]]) for i in order))
        assert torch.allclose(stores.values()[0], -wanted, rtol=1e-6)


@counts
def test_the_gradient_is_clipped_by_its_norm_over_all_shards(shards: int) -> None:
    start, gradients = some(0), some(1)
    stores = Stores(start, shards, clip_norm=0.5)
    plain = Plain(start, "SGD", ({"lr": 0.1},), [0] * len(start))
    square = sum(float(gradient.double().square().sum()) for gradient in gradients)
    stores.update((1.0, gradients), square=square)
    for parameter, gradient in zip(plain.params, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(plain.params, 0.5)
    plain.optimizer.step()
    assert close(stores.values(), plain.values())


def test_every_shard_tells_its_own_part_of_the_norm_even_an_empty_one() -> None:
    stores = Stores([torch.zeros(2)], 3, clip_norm=1.0)
    told: list[float] = []

    def total(own: float) -> float:
        told.append(own)
        return 25.0

    for shard, store in enumerate(stores.stores):
        push, samples, _ = pack_push(stores, [torch.tensor([3.0, 4.0])], ())
        store.update([(push, samples, stores.cut([torch.tensor([3.0, 4.0])], shard))], 1.0, True, total)
    assert sorted(told) == pytest.approx([0.0, 9.0, 16.0])
    assert stores.values()[0].tolist() == pytest.approx([-0.06, -0.08], rel=1e-5)


@pytest.mark.parametrize(("barrier", "limit"), [(True, 100.0), (False, 0.5)], ids=["small enough", "clipped by the worker"])
def test_what_needs_no_clipping_is_not_clipped(barrier: bool, limit: float) -> None:
    stores = Stores([torch.zeros(2)], 1, clip_norm=limit)
    stores.update((1.0, [torch.tensor([3.0, 4.0])]), barrier=barrier)
    assert stores.values()[0].tolist() == pytest.approx([-0.3, -0.4])

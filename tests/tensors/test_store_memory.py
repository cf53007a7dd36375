"""A store's memory: what is being sent does not change, what does not fit is refused, state moves between shard counts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy
import pytest
import torch
from shards import Plain, Stores

from polytempo.errors import PeerError
from polytempo.protocol.messages import Push
from polytempo.protocol.push import Content, PushedChange, PushedGradient, PushedValues
from polytempo.protocol.values import PushId
from polytempo.server.optimizer_state import SegmentState, as_tensor, pack, unpack

ONES = torch.ones(8)
ADAM = ({"lr": 0.1},)
SHAPES = ((5, 3), (4,), (7, 2))


def some(seed: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice) for shape in SHAPES]


def one(**fields: Any) -> Stores:
    return Stores([torch.zeros(8)], 1, hyper=({"lr": 1.0},), **fields)


# Lending.


@pytest.mark.parametrize("kind", [PushedGradient, PushedChange, PushedValues, None])
def test_what_is_being_sent_does_not_change(kind: type[Content] | None) -> None:
    stores = one()
    (store,) = stores.stores
    (lent,), back = store.lend()
    if kind is None:
        store.seed(stores.cut([ONES], 0))
    else:
        stores.update((1.0, [ONES]), kind=kind)
    assert as_tensor(lent, "float32").tolist() == [0.0] * 8
    assert stores.values()[0].abs().tolist() == [1.0] * 8
    back()


def test_what_is_not_being_sent_is_changed_in_place() -> None:
    """Copying costs as much as the update itself."""
    stores = one()
    (store,) = stores.stores
    (lent,), back = store.lend()
    where = store.values["float32"].data_ptr()
    assert lent.__array_interface__["data"][0] == where, "it is lent, not copied"
    back()
    stores.update((1.0, [ONES]))
    assert store.values["float32"].data_ptr() == where
    assert as_tensor(lent, "float32").tolist() == [-1.0] * 8


def test_memory_is_free_when_the_last_of_its_borrowers_has_sent_it() -> None:
    stores = one()
    (store,) = stores.stores
    loans = [store.lend() for _ in range(3)]
    where = store.values["float32"].data_ptr()
    loans[0][1]()
    loans[2][1]()
    stores.update((1.0, [ONES]))
    assert store.values["float32"].data_ptr() != where
    assert as_tensor(loans[1][0][0], "float32").tolist() == [0.0] * 8


def test_an_old_loan_that_comes_back_late_says_nothing_of_the_new_memory() -> None:
    stores = one()
    (store,) = stores.stores
    _, old = store.lend()
    stores.update((1.0, [ONES]))
    (lent,), back = store.lend()
    old()
    stores.update((1.0, [ONES]))
    assert as_tensor(lent, "float32").tolist() == [-1.0] * 8
    back()
    assert stores.values()[0].tolist() == [-2.0] * 8


def test_after_a_copy_the_optimizer_goes_on_with_the_copy() -> None:
    start = some(0)
    stores, plain = Stores(start, 2, "Adam", ADAM), Plain(start, "Adam", ADAM, [0] * 3)
    for step in range(1, 6):
        for store in stores.stores:
            store.lend()
        stores.step(some(step))
        plain.step(some(step))
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(stores.values(), plain.values(), strict=True))


# What does not fit.


@pytest.mark.parametrize(
    "sizes",
    [[], [28], [36], [32, 32], [33], [0]],
    ids=["nothing", "too short", "too long", "one too many", "odd", "empty"],
)
def test_buffers_that_do_not_fit_are_refused_and_change_nothing(sizes: list[int]) -> None:
    stores = one()
    (store,) = stores.stores
    buffers = [numpy.ones(size, dtype=numpy.uint8) for size in sizes]
    push = Push(id=PushId("0", 0, 0, 0), body=PushedGradient(hyper=stores.hyper))
    with pytest.raises(PeerError, match=r"bytes came, this shard holds \[32\]"):
        store.update([(push, 1.0, buffers)], 1.0, True, lambda square: square)
    with pytest.raises(PeerError, match=r"bytes came, this shard holds \[32\]"):
        store.seed(buffers)
    assert stores.values()[0].tolist() == [0.0] * 8


# Other kinds of update.


def test_a_delta_is_added_at_its_rate() -> None:
    stores = Stores([ONES], 2, apply="delta", optimizer="")
    stores.update((1.0, [ONES * 4]), kind=PushedChange, rate=0.25)
    assert stores.values()[0].tolist() == [2.0] * 8
    assert stores.state() == []


@pytest.mark.parametrize(("apply", "kind"), [("server", PushedValues), ("mean", PushedGradient)])
def test_values_are_replaced_by_their_mean(apply: str, kind: type[Content]) -> None:
    stores = Stores([ONES], 3, apply=apply, optimizer="SGD" if apply == "server" else "")
    stores.update((1.0, [ONES * 2]), (3.0, [ONES * 6]), kind=kind)
    assert stores.values()[0].tolist() == [5.0] * 8


@pytest.mark.parametrize(("samples", "skip"), [(1.0, True), (0.0, False)], ids=["said so", "no samples"])
def test_a_skipped_update_counts_and_changes_nothing(samples: float, skip: bool) -> None:
    stores = Stores([ONES], 1, "Adam", ADAM)
    (store,) = stores.stores
    stores.update((samples, [ONES]), skip=skip)
    assert (store.version, store.skipped) == (1, True)
    assert stores.values()[0].tolist() == [1.0] * 8
    assert all(not run.state for run in store.state()), "Adam does not count the step either"
    stores.update((1.0, [ONES]))
    assert (store.version, store.skipped) == (2, False)
    assert stores.values()[0].tolist() != [1.0] * 8


# State between jobs.


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "NAdam", "Adagrad", "ASGD", "Rprop"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (4, 4)])
def test_training_goes_on_with_another_number_of_shards(optimizer: str, before: int, after: int) -> None:
    start, hyper = some(0), ({"lr": 0.05, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.05},)
    stores, plain = Stores(start, before, optimizer, hyper), Plain(start, optimizer, hyper, [0] * 3)
    games: list[list[torch.Tensor | None]] = [list(some(1)), [some(2)[0], None, some(2)[2]], list(some(3))]
    for gradients in games:
        stores.step(gradients)
        plain.step(gradients)
    moved = Stores(stores.values(), after, optimizer, hyper)
    description, buffers = pack(stores.state())
    for store in moved.stores:
        store.load_state(unpack(description, buffers))
    for step in (4, 5):
        moved.step(some(step))
        plain.step(some(step))
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(moved.values(), plain.values(), strict=True))


def test_loaded_state_is_a_copy() -> None:
    stores, other = Stores(some(0), 2, "Adam", ADAM), Stores(some(0), 2, "Adam", ADAM)
    stores.step(some(1))
    kept = [msgspec.msgpack.encode([bytes(buffer) for buffer in pack(stores.state())[1]])]
    for store in other.stores:
        store.load_state(stores.state())
    other.step(some(2))
    assert kept == [msgspec.msgpack.encode([bytes(buffer) for buffer in pack(stores.state())[1]])]


def test_state_of_a_fresh_optimizer_takes_away_what_was_there() -> None:
    stores, fresh = Stores(some(0), 1, "Adam", ADAM), Stores(some(0), 1, "Adam", ADAM)
    stores.step(some(1))
    stores.stores[0].load_state(fresh.state())
    assert all(not run.state for run in stores.state())


@pytest.mark.parametrize("optimizer", ["SGD", "Adafactor"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
def test_saved_values_are_found_again_by_any_number_of_shards(optimizer: str, before: int, after: int) -> None:
    stores = Stores(some(5), before, optimizer)
    flats = {"float32": torch.full((sum(t.numel() for t in some(5)),), torch.nan)}
    for store in stores.stores:
        for dtype, start, values in store.saved_values():
            flats[dtype][start : start + values.numel()] = values
    other = Stores([torch.zeros(shape) for shape in SHAPES], after, optimizer)
    for store in other.stores:
        for stretch, values in zip(store.stretches, store.cut.of_model(flats), strict=True):
            store.values[stretch.dtype].copy_(values)
    assert all(torch.equal(a, b) for a, b in zip(other.values(), some(5), strict=True))


def test_state_comes_out_of_its_bytes_as_it_went_in() -> None:
    state = {
        "exp_avg": torch.arange(3.0),
        "step": torch.tensor(4.0),
        "eta": 0.5,
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    (run,) = unpack(*pack([SegmentState("float32", 2, 5, state)]))
    assert (run.dtype, run.start, run.stop) == ("float32", 2, 5)
    assert run.state.keys() == state.keys()
    for name, value in state.items():
        same = torch.equal(run.state[name], value) if isinstance(value, torch.Tensor) else run.state[name] == value
        assert same
        assert not isinstance(value, torch.Tensor) or run.state[name].dtype == value.dtype


def described(**value: Any) -> bytes:
    return msgspec.msgpack.encode([["float32", 0, 3, {"exp_avg": value}]])


@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"\xff",
        b"\x80",
        msgspec.msgpack.encode([["float32", 0, 3]]),
        msgspec.msgpack.encode([["float32", 0, "3", {}]]),
        described(),
        described(dtype="float32", shape=[3], buffer=1),
        described(dtype="float32", shape=[4], buffer=0),
        described(dtype="float32", shape="3", buffer=0),
        described(dtype="save", shape=[3], buffer=0),
        described(dtype="nothing", shape=[3], buffer=0),
        described(dtype=3, shape=[3], buffer=0),
        described(dtype="float64", shape=[3], buffer=0),
        described(dtype="float32", shape=[3], buffer="0"),
        described(dtype="float32", shape=[2**62, 2**62], buffer=0),
        described(dtype="float32", shape=[2**64 - 1], buffer=0),
        b"\x91\x94\xa7floa\xff32\x00\x03\x80",
    ],
)
def test_state_that_cannot_be_read_is_refused(description: bytes) -> None:
    with pytest.raises(PeerError):
        unpack(description, [numpy.zeros(12, dtype=numpy.uint8)])

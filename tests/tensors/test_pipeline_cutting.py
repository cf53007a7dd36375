"""Cutting a model: costs, names, tied parameters; and what passes between parts, as bytes and back."""

from __future__ import annotations

import gc
import weakref
from itertools import combinations
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from polytempo.errors import UsageError
from polytempo.pipeline.partition import ModelPart, balanced, cut, layers_of, tied
from polytempo.pipeline.stage_message import MessageForm, StageMessage, described, pack, unpacked

CPU = torch.device("cpu")


# Costs.


def dearest(costs: list[int], ends: Any) -> int:
    return max(sum(costs[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True))


@settings(max_examples=200, deadline=None)
@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=9), data=st.data())
def test_the_dearest_part_is_as_cheap_as_possible(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    ends = balanced(costs, parts)
    assert len(ends) == parts
    assert ends == sorted(set(ends))
    assert ends[-1] == len(costs)
    every = ([*inner, len(costs)] for inner in combinations(range(1, len(costs)), parts - 1))
    assert dearest(costs, ends) == min(dearest(costs, one) for one in every)


# Names and values.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4))
        self.side = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return (self.side(y) + x * self.scale) * self.scale + self.passing


@pytest.mark.parametrize("stages", range(1, 9))
def test_parts_of_a_traced_module_make_the_module(stages: int) -> None:
    model = Net()
    x = torch.randn(3, 4)
    parts = cut(model, stages)
    assert len(parts) == stages
    value: Any = (x,)
    for part in parts:
        value = part.module(*(value if isinstance(value, tuple) else (value,)))
    model.body[2].num_batches_tracked.zero_()
    assert torch.equal(value, model(x))
    whole = model.state_dict()
    held = {name: tensor for part in parts for name, tensor in part.state().items()}
    assert set(held) == {name for name in whole if stages == 1 or not name.startswith("unused")}, "one part is the model"
    assert all(tensor.data_ptr() == whole[name].data_ptr() for name, tensor in held.items())


def test_weights_do_not_pass() -> None:
    """`scale` is used at both ends: both parts hold it."""
    parts = cut(Net(), 8)
    holders = [index for index, part in enumerate(parts) if "scale" in part.state()]
    assert len(holders) == 2
    assert list(tied(parts)) == [tuple(holders)]


def test_layers_of_a_traced_module_are_where_one_value_passes() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.relu(x + block(x))
            return x

    layers = layers_of(Residual())
    assert layers.costs == [22, 1, 22, 1, 22, 1]
    assert layers.names == ["blocks_0", "relu", "blocks_1", "relu_1", "blocks_2", "relu_2"]


def test_costs_count_each_parameter_once() -> None:
    shared = nn.Linear(4, 4)
    assert layers_of(nn.Sequential(shared, nn.ReLU(), nn.Linear(4, 2))).costs == [21, 1, 11]
    operations = 8
    assert sum(layers_of(Net()).costs) == 20 + 8 + 20 + 4 + operations


def test_names_of_sequences_in_sequences_are_kept() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 4))
    assert layers_of(model).names == ["0.0", "0.1.0", "0.1.1", "1"]
    held = [name for part in cut(model, 3) for name in part.state()]
    assert held == list(model.state_dict())


def test_a_sequence_with_a_hook_stays_whole() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    inner.register_forward_hook(lambda module, inputs, output: output * 2)
    model = nn.Sequential(inner, nn.Linear(4, 4))
    assert layers_of(model).names == ["0", "1"]


def test_tied_parameters_are_found_in_the_order_of_the_model() -> None:
    first, second, alone = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    parts = cut(nn.Sequential(first, second, alone, second, first), [2, 1, 2])
    assert tied(parts) == {(0, 2): [first.weight, first.bias, second.weight, second.bias]}
    assert tied(cut(nn.Sequential(first, first), 1)) == {}


def test_more_stages_than_operations_are_refused() -> None:
    with pytest.raises(UsageError, match=r"expected 1 to \d+ stages, .* got 99; nearest: \d+"):
        cut(Net(), 99)


# By an example.


class Chooses(nn.Module):
    """Its code asks for a shape, which symbols do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[1]):
            x = torch.tanh(self.one(x))
        return self.two(x)  # type: ignore[no-any-return]


def through(parts: list[ModelPart], x: torch.Tensor) -> Any:
    value: Any = (x,)
    for part in parts:
        value = part.module(*(value if isinstance(value, tuple) else (value,)))
    return value


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_what_checks_the_inputs_is_no_layer(stages: int) -> None:
    model, example = Chooses(), torch.randn(6, 2, 4)
    layers = layers_of(model, (example,))
    assert layers.names == ["linear", "tanh", "linear_1", "tanh_1", "linear_2"]
    assert layers.costs == [21, 1, 1, 1, 21]
    parts = cut(model, stages, (example,))
    assert torch.equal(through(parts, example), model(example))
    names = [name for part in parts for name, _ in part.module.named_modules()]
    assert not [name for name in names if "guard" in name], "nor is it called by a part's graph"


def test_inputs_unlike_the_example_are_refused_and_other_batches_are_not() -> None:
    model = Chooses()
    parts = cut(model, 2, (torch.randn(6, 2, 4),))
    for samples in (6, 3, 1, 6):
        x = torch.randn(samples, 2, 4)
        assert torch.equal(through(parts, x), model(x))
    for shape in ((6, 3, 4), (6, 1, 4), (6, 3, 4)):  # they could be computed, but with the example's number of layers
        with pytest.raises(UsageError, match=r"these inputs are not like it: Guard failed: x.size\(\)\[1\] == 2"):
            through(parts, torch.randn(shape))


# What passes.

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.complex64]


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 4), max_size=3)
    return st.builds(lambda shape, dtype: (torch.randn(shape) * 5).to(dtype), shapes, st.sampled_from(DTYPES))


def sent(message: StageMessage) -> StageMessage:
    """As bytes, and back."""
    form = MessageForm(described(message))
    data = numpy.empty(form.size, dtype=numpy.uint8)
    pack(message, form, data)
    return unpacked(data, form, CPU)


plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.just(torch.Size([2, 3]))
)


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.one_of(tensors(), plain), max_size=5), number=st.integers(0, 2**60), figure=st.floats(allow_nan=False)
)
def test_a_message_comes_back_as_it_was(values: list[Any], number: int, figure: float) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    message = StageMessage(values, len(values) == 1, number, 7, figure)
    back = sent(message)
    assert (back.single, back.number, back.version, back.figure) == (message.single, number, 7, figure)
    for was, now in zip(values, back.values, strict=True):
        if isinstance(was, torch.Tensor):
            assert (now.dtype, now.shape, now.requires_grad, now.is_leaf) == (was.dtype, was.shape, was.requires_grad, True)
            assert torch.equal(now, was)
        else:
            assert now == was
            assert type(now) is type(was)


def test_tensors_that_are_not_in_one_piece() -> None:
    strange = [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(6.0)[::2],
        torch.tensor([1 + 2j]).conj(),
        torch.ones(1).expand(5),
    ]
    message = StageMessage(strange)
    back = sent(message)
    assert all(torch.equal(now, was) for now, was in zip(back.values, strange, strict=True))


def test_memory_is_held_as_long_as_anything_that_came_in_it() -> None:
    message = StageMessage([torch.ones(50_000), torch.ones(3)])
    form = MessageForm(described(message))
    data = numpy.empty(form.size, dtype=numpy.uint8)
    memory = weakref.ref(data)
    pack(message, form, data)
    back = unpacked(data, form, CPU)
    kept = back.values[1][1:]
    del back, data
    gc.collect()
    assert memory() is not None
    del kept
    gc.collect()
    assert memory() is None


def test_a_model_in_one_part_that_cannot_be_traced_stays_as_it_is() -> None:
    class Branching(nn.Module):
        """Its code depends on values: it cannot be traced."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x) if x.sum() > 0 else -self.layer(x)
            return result

    model = Branching()
    (part,) = cut(model, 1)
    assert part.module is model
    assert part.state().keys() == model.state_dict().keys()

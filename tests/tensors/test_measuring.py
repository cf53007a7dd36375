"""A measured model: bytes that can be counted by hand, and a model that stays as it was."""

from __future__ import annotations

import copy
import functools
import time
from dataclasses import astuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from polytempo.errors import UsageError
from polytempo.strategy.costs import TensorCall
from polytempo.strategy.measure import measure_model, taken
from polytempo.tensor_parallel.cross_entropy import cross_entropy

pytestmark = pytest.mark.timeout(60)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def test_bytes_of_weights_gradients_and_optimizer_state() -> None:
    model = small()
    model[2].bias.requires_grad_(False)
    found = measure_model(model, torch.ones(3, 8), microbatch=6, optimizer=torch.optim.Adam, repeats=1)
    first, second = 4 * (8 * 16 + 16), 4 * (16 * 4 + 4)
    assert (found.model, found.tensor, found.microbatch, found.input_bytes) == ("Sequential", 1, 6, 4 * 6 * 8)
    assert [layer.layer.weight_bytes for layer in found.layers] == [first, 0, second]
    assert [layer.layer.activation_bytes for layer in found.layers] == [4 * 6 * 16, 4 * 6 * 16, 4 * 6 * 4]
    assert [layer.gradient_bytes for layer in found.layers] == [first, 0, second - 16]
    assert [layer.state_bytes for layer in found.layers] == [2 * first + 8, 0, 2 * (second - 16) + 4]  # and a step for each
    assert [layer.update_s > 0 for layer in found.layers] == [True, False, True]
    assert (found.loss, found.tied, found.layers[0].calls) == (None, (), ())
    plain = measure_model(model, torch.ones(3, 8), microbatch=1, repeats=1)
    assert all(layer.update_s == layer.state_bytes == 0 for layer in plain.layers)


def test_an_output_that_no_backward_needs_only_passes() -> None:
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Tanh(), nn.Linear(16, 4), nn.Flatten(0)]
    found = measure_model(layers, torch.ones(6, 8), microbatch=6, repeats=1).layers
    wide, narrow = 4 * 6 * 16, 4 * 6 * 4
    assert [one.layer.kept_bytes for one in found] == [0, wide, wide, 0, 0]  # tanh keeps what it gives
    assert [one.passing_bytes for one in found] == [wide, 0, 0, narrow, 0]  # the last is a view of what came in


def test_the_loss_is_measured_behind_the_last_layer() -> None:
    inputs, target = torch.ones(2, 8), torch.tensor([1, 3])
    found = measure_model(small(), inputs, microbatch=8, loss=functional.cross_entropy, target=target, repeats=1)
    assert found.loss is not None
    assert found.loss.layer.forward_s > 0
    assert found.loss.layer.backward_s > 0
    assert found.loss.layer.kept_bytes == 4 * 8 * 4 + 4 + 4  # log-probabilities, sum of weights, loss; not the targets
    assert found.layers[2].passing_bytes == 4 * 8 * 4
    assert len(found.layers) == 3


def test_tied_weights_have_their_bytes_once() -> None:
    embedding, out = nn.Embedding(10, 4), nn.Linear(4, 10)
    out.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Tanh(), out)
    (tied,) = measure_model(model, torch.arange(6), microbatch=6, optimizer=torch.optim.Adam, repeats=1).tied
    assert (tied.layers, tied.weight_bytes, tied.gradient_bytes, tied.state_bytes) == ((0, 2), 160, 160, 324)


def test_the_model_stays_as_it_was() -> None:
    model = small()
    model[0].weight.grad = torch.ones(16, 8)
    before, drawn, gradient = copy.deepcopy(model.state_dict()), torch.get_rng_state(), model[0].weight.grad
    loss = functional.cross_entropy
    measure_model(
        model, torch.ones(2, 8), microbatch=2, optimizer=torch.optim.Adam, loss=loss, target=torch.zeros(2, dtype=torch.long)
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state())
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(16, 8))
    assert model[2].weight.grad is None


def test_a_layer_that_sleeps_leaves_its_core_free() -> None:
    class Sleeper(nn.Identity):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return super().forward(x)

    (found,) = measure_model([Sleeper()], torch.ones(2, 8), microbatch=2, repeats=2).layers
    assert found.core_share < 0.5


def test_rows_of_an_example_are_taken_from_the_front_and_repeated() -> None:
    example = (torch.arange(3), {"mask": torch.tensor(5), "none": None})
    assert taken(example, 2)[0].tolist() == [0, 1]
    assert taken(example, 7)[0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert taken(example, 7)[1] == {"mask": torch.tensor(5), "none": None}


def test_numbers_below_one_are_refused() -> None:
    for name in ("microbatch", "tensor", "repeats"):
        with pytest.raises(UsageError, match=f"expected {name} to be at least 1, got 0"):
            measure_model(small(), torch.ones(2, 8), **{"microbatch": 2, name: 0})


def test_split_layers_have_their_share_and_their_collectives() -> None:
    block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(12, 16), block, nn.Linear(16, 12))
    inputs = torch.arange(10).view(2, 5)
    before = copy.deepcopy(model.state_dict())
    loss = functools.partial(cross_entropy, dim=-1)
    options = {"loss": loss, "target": inputs, "optimizer": torch.optim.Adam, "repeats": 2, "tensor_plan": {"0": "vocab"}}
    one, two, four = (measure_model(model, inputs, microbatch=2, tensor=size, **options) for size in (1, 2, 4))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    hidden = 4 * 2 * 5 * 16
    assert all(layer.calls == () for layer in one.layers)
    assert two.layers[0].calls == (TensorCall("all_reduce", hidden, False),)
    assert sorted(map(astuple, two.layers[1].calls)) == [
        ("all_reduce", hidden, where) for where in (False, False, True, True)
    ]
    assert two.layers[2].calls == (TensorCall("all_reduce", hidden, True),)  # logits stay split
    assert two.loss is not None
    assert [call.nbytes for call in two.loss.calls] == [40, 40, 40]  # largest, sum and target of each of ten tokens
    whole = 4 * 16 * 12
    assert [found.layers[0].gradient_bytes for found in (one, two, four)] == [whole, whole / 2, whole / 4]
    replicated = 4 * (16 + 16 + 4 * 16)  # biases behind the reductions, and norms
    blocks = [found.layers[1] for found in (one, two, four)]
    split = [layer.gradient_bytes - replicated for layer in blocks]
    assert split == [split[0], split[0] / 2, split[0] / 4]
    assert blocks[0].state_bytes > blocks[1].state_bytes > blocks[2].state_bytes
    assert blocks[0].layer.kept_bytes > blocks[1].layer.kept_bytes > blocks[2].layer.kept_bytes


def test_layers_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(UsageError, match="tensor=3"):
        measure_model(small(), torch.ones(2, 8), microbatch=2, tensor=3, tensor_plan={"0": "column", "2": "row"})

"""A measured model: bytes that can be counted by hand, and a model that stays as it was."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.nn import functional

from polytempo.errors import UsageError
from polytempo.strategy.measure import measure_model, taken

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


def test_the_loss_is_measured_behind_the_last_layer() -> None:
    inputs, target = torch.ones(2, 8), torch.tensor([1, 3])
    found = measure_model(small(), inputs, microbatch=8, loss=functional.cross_entropy, target=target, repeats=1)
    assert found.loss is not None
    assert found.loss.layer.forward_s > 0
    assert found.loss.layer.backward_s > 0
    assert found.loss.layer.kept_bytes >= 4 * 8 * 4  # the log-probabilities
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

"""Backwards in two halves, beside autograd's in one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from polytempo.pipeline.weight_gradients import SplitBackward, WeightGradient, may_split

X = torch.randn(4, 6, dtype=torch.float64)
PICTURES = torch.randn(4, 3, 7, 6, dtype=torch.float64)


class Twice(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(torch.tanh(self.layer(x))) + x


class Heads(nn.Module):
    """What a transformer has."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        rows = x.unsqueeze(0)
        return self.out(self.attention(rows, rows, rows)[0])


def halves(module: nn.Module, x: torch.Tensor) -> tuple[Any, list[torch.Tensor | None], list[WeightGradient], list[bool]]:
    """The gradient of the input after the first half, those of the parameters after the second, the pieces, and whether
    each parameter had a gradient in between."""
    split, pieces = SplitBackward(), list[WeightGradient]()
    x = x.clone().requires_grad_()
    with split:
        out = module(x)
    split.deferred = pieces
    out.square().sum().backward()
    split.deferred = None
    between = [param.grad is not None for param in module.parameters()]
    for piece in pieces:
        piece.compute()
    return x.grad, [param.grad for param in module.parameters()], pieces, between


def whole(module: nn.Module, x: torch.Tensor) -> tuple[Any, list[torch.Tensor | None]]:
    """By autograd."""
    x = x.clone().requires_grad_()
    module(x).square().sum().backward()
    return x.grad, [param.grad for param in module.parameters()]


def assert_equal(make: Callable[[], nn.Module], x: torch.Tensor, pieces: int) -> list[bool]:
    """Both ways, twice: gradients are added up."""
    torch.manual_seed(0)
    module = make().double()
    other = copy.deepcopy(module)
    for _ in range(2):
        found, gradients, left, _ = halves(module, x)
        wanted, expected = whole(other, x)
        assert len(left) == pieces
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)
    for param in module.parameters():
        param.grad = None
    return halves(module, x)[3]


@pytest.mark.parametrize(
    ("make", "pieces"),
    [
        (lambda: nn.Linear(6, 3), 1),
        (lambda: nn.Linear(6, 3, bias=False), 1),
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), 2),
        (Twice, 2),
    ],
    ids=["linear", "no-bias", "layers", "one-weight-twice"],
)
def test_linear_layers_owe_the_gradients_of_their_weights(make: Callable[[], nn.Module], pieces: int) -> None:
    assert not any(assert_equal(make, X, pieces))
    assert not any(assert_equal(make, X.view(2, 2, 6), pieces))
    assert not any(assert_equal(make, X[0], pieces))


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"stride": 2, "padding": (1, 2)}, {"dilation": 2}, {"groups": 3}], ids=str
)
def test_convolutions_owe_them_too(options: dict[str, Any]) -> None:
    assert not any(assert_equal(lambda: nn.Conv2d(3, 6, 2, **options), PICTURES, 1))
    assert not any(
        assert_equal(lambda: nn.Conv1d(3, 6, 2, **{k: v for k, v in options.items() if k != "padding"}), PICTURES[..., 0], 1)
    )
    assert not any(assert_equal(lambda: nn.Conv3d(3, 6, 2, bias=False), PICTURES.unsqueeze(2).expand(-1, -1, 3, -1, -1), 1))


def test_what_is_traced_owes_as_much() -> None:
    traced = torch.export.export(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).double(), (X,)).module()
    *_, pieces, between = halves(traced, X)
    assert (len(pieces), any(between)) == (2, False)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Conv2d(3, 6, 3, padding="same"), PICTURES),
        (lambda: nn.Conv2d(3, 6, 2), PICTURES[0]),
        (lambda: nn.Bilinear(6, 6, 2), None),
        (lambda: nn.LayerNorm(6), X),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), X),
    ],
    ids=["same", "no-batch", "bilinear", "norm", "weights-of-weights"],
)
def test_other_layers_are_autograds(make: Callable[[], nn.Module], x: torch.Tensor | None) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, given: torch.Tensor) -> Any:
            return self.inner(given, given) if x is None else self.inner(given)

    assert all(assert_equal(Both, X if x is None else x, 0))


def test_attention_keeps_its_own_and_the_rest_owes() -> None:
    between = assert_equal(Heads, X, 1)
    assert between == [True, True, True, True, False, False]


def test_who_looks_at_a_parameter_sees_its_gradient_in_time() -> None:
    seen: list[Any] = []
    module = nn.Linear(6, 3).double()
    module.weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    assert halves(module, X)[3] == [True, True]
    assert len(seen) == 1
    after = nn.Linear(6, 3).double()
    after.bias.register_post_accumulate_grad_hook(lambda param: seen.append(param))
    assert halves(after, X)[3] == [True, True]
    assert len(seen) == 2


def test_frozen_weights_owe_nothing() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    module[1].weight.requires_grad_(False)
    *_, pieces, between = halves(module, X)
    assert len(pieces) == 1
    assert between == [False, False, False, True], "a layer whose weight is frozen is autograd's"
    assert module[1].weight.grad is None


def test_a_frozen_bias_gets_no_gradient() -> None:
    module = nn.Linear(6, 3).double()
    module.bias.requires_grad_(False)
    *_, pieces, between = halves(module, X)
    assert (len(pieces), between) == (1, [False, False])
    assert module.bias.grad is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_a_layer_are_left_alone(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6))

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    assert all(assert_equal(Checkpointed, X, 0))


def test_autocast_is_left_alone() -> None:
    module, split = nn.Linear(6, 3), SplitBackward()
    with split, torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(X.float().requires_grad_())
    assert out.dtype == torch.bfloat16
    split.deferred = []
    out.float().sum().backward()
    assert not split.deferred
    assert module.weight.grad is not None


def test_transforms_are_left_alone() -> None:
    module = nn.Linear(6, 1).double()
    with SplitBackward():
        found = torch.func.vmap(torch.func.grad(lambda x: functional.linear(x, module.weight, module.bias).sum()))(X)
    torch.testing.assert_close(found, module.weight.expand(4, 6))


def test_gradients_inside_a_forward_are_whole() -> None:
    """A penalty on a gradient: it can be differentiated again."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> Any:
            out = torch.tanh(self.inner(x))
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            return out + slope

    assert_equal(Penalised, X, 1)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch, while it loads its compiler
def test_compiled_modules_are_not_split() -> None:
    assert may_split(nn.Sequential(nn.Linear(2, 2)))
    assert not may_split(nn.Sequential(torch.compile(nn.Linear(2, 2))))
    own = nn.Linear(2, 2)
    own.compile()
    assert not may_split(nn.Sequential(own))


def test_without_a_list_both_halves_are_done_at_once() -> None:
    module, split = nn.Linear(6, 3).double(), SplitBackward()
    with split:
        out = module(X.clone().requires_grad_())
    out.square().sum().backward()
    other = copy.deepcopy(module)
    other.zero_grad()
    torch.testing.assert_close([p.grad for p in module.parameters()], whole(other, X)[1])

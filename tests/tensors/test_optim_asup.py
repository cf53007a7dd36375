"""The rule of ASU-P against the formula, element by element, and against what torch expects of an optimizer."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.optim import asup
from polytempo.optim.asup import AsuP

moderately = settings(max_examples=60, deadline=None, derandomize=True, database=None)
numbers = st.floats(-100, 100, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-6)


def param(values: list[float] | torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.as_tensor(values, dtype=dtype).clone())


def stepped(optimizer: AsuP, params: list[torch.nn.Parameter], gradients: list[torch.Tensor]) -> None:
    for one, gradient in zip(params, gradients, strict=True):
        one.grad = gradient
    optimizer.step()


def by_hand(
    w: float, gradients: list[float], lr: float, momentum: float, rho: float, eps: float, initial: float, decay: float
) -> float:
    s, v = initial, 0.0
    for g in gradients:
        g = g + decay * w
        s = rho * s + (1 - rho) * g * g
        v = momentum * v + lr * g / math.sqrt(s + eps)
        w = w - v
    return w


@moderately
@given(
    start=st.lists(numbers, min_size=1, max_size=5),
    gradients=st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=1, max_size=6),
    lr=st.floats(0, 1),
    momentum=st.floats(0, 0.99),
    rho=st.floats(0, 0.999),
    eps=st.floats(1e-12, 1),
    initial=st.floats(0, 2),
    decay=st.floats(0, 0.5),
)
def test_each_element_goes_by_the_formula(
    start: list[float],
    gradients: list[list[float]],
    lr: float,
    momentum: float,
    rho: float,
    eps: float,
    initial: float,
    decay: float,
) -> None:
    w = param(start)
    optimizer = AsuP([w], lr, momentum, rho, eps, initial, decay)
    for gradient in gradients:
        stepped(optimizer, [w], [torch.tensor(gradient[: len(start)], dtype=torch.float64)])
    for index, found in enumerate(w.tolist()):
        wanted = by_hand(start[index], [g[index] for g in gradients], lr, momentum, rho, eps, initial, decay)
        assert math.isclose(found, wanted, rel_tol=1e-10, abs_tol=1e-12)


@given(st.lists(numbers, min_size=1, max_size=20))
@moderately
def test_without_memory_a_step_is_the_sign_times_the_rate(gradient: list[float]) -> None:
    w, g = param([0.5] * len(gradient)), torch.tensor(gradient, dtype=torch.float64)
    stepped(AsuP([w], lr=0.1, momentum=0.0, rho=0.0), [w], [g])
    torch.testing.assert_close(w.detach(), 0.5 - 0.1 * g / torch.sqrt(g * g + 1e-10), rtol=0, atol=1e-15)


def test_eps_is_inside_the_root_and_the_rate_inside_the_velocity() -> None:
    w = param([1.0])
    optimizer = AsuP([w], lr=0.1, momentum=0.5, rho=0.0, eps=3.0)
    stepped(optimizer, [w], [torch.ones(1, dtype=torch.float64)])
    assert w.item() == 1.0 - 0.1 / 2
    optimizer.param_groups[0]["lr"] = 0.0
    stepped(optimizer, [w], [torch.ones(1, dtype=torch.float64)])
    assert w.item() == 1.0 - 0.05 - 0.025  # the old rate still acts


def test_the_first_step_depends_on_what_the_square_begins_with() -> None:
    steps = {}
    for initial in (0.0, 1.0):
        w = param([0.0])
        stepped(AsuP([w], lr=0.01, initial=initial), [w], [torch.tensor([1e-3], dtype=torch.float64)])
        steps[initial] = -w.item()
    assert steps[0.0] == pytest.approx(0.01 / math.sqrt(0.1), rel=1e-3)
    assert steps[1.0] == pytest.approx(0.01 * 1e-3 / math.sqrt(0.9), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [8, 100, 1 << 17])
def test_a_flat_stretch_is_the_separate_tensors_to_the_bit(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asup, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    shapes = [(33, 7), (5,), (1,), (64, 3, 3)]
    pieces = [param(torch.randn(shape, generator=generator, dtype=dtype), dtype) for shape in shapes]
    flat = param(torch.cat([piece.detach().reshape(-1) for piece in pieces]), dtype)
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.01}
    one, many = AsuP([flat], **options), AsuP(pieces, **options)
    for _ in range(4):
        gradients = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
        stepped(many, pieces, gradients)
        stepped(one, [flat], [torch.cat([gradient.reshape(-1) for gradient in gradients])])
    assert torch.equal(flat.detach(), torch.cat([piece.detach().reshape(-1) for piece in pieces]))


def test_a_tensor_that_is_not_contiguous_is_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asup, "BLOCK", 1)
    generator = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(6, 4, generator=generator) for _ in range(2))
    plain, turned = param(values, torch.float32), torch.nn.Parameter(values.t().contiguous().t())
    assert not turned.is_contiguous()
    stepped(AsuP([plain]), [plain], [gradient])
    stepped(AsuP([turned]), [turned], [gradient])
    assert torch.equal(plain, turned)


def test_a_state_that_is_saved_and_loaded_goes_on_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    first = param(torch.randn(50, generator=generator))
    optimizer = AsuP([first], lr=0.03)
    gradients = [torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(6)]
    for gradient in gradients[:3]:
        stepped(optimizer, [first], [gradient])
    second = param(first.detach())
    resumed = AsuP([second], lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert set(optimizer.state_dict()["state"][0]) == {"square", "velocity"}
    for gradient in gradients[3:]:
        stepped(optimizer, [first], [gradient])
        stepped(resumed, [second], [gradient])
    assert torch.equal(first, second)


def test_groups_have_options_of_their_own_and_no_gradient_is_no_step() -> None:
    first, second, third = param([1.0]), param([1.0]), param([1.0])
    optimizer = AsuP([first, third], lr=0.1, rho=0.0, momentum=0.0)
    optimizer.add_param_group({"params": [second], "lr": 0.2})
    first.grad, second.grad = torch.ones(1).double(), torch.ones(1).double()
    optimizer.step()
    found = [first.item(), second.item(), third.item()]
    assert found == [pytest.approx(0.9), pytest.approx(0.8), 1.0]
    assert third not in optimizer.state


def test_a_closure_computes_gradients_and_its_loss_comes_back() -> None:
    w = param([2.0])
    optimizer = AsuP([w], lr=0.1, rho=0.0, momentum=0.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w * 3).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    assert w.item() == pytest.approx(1.9)
    assert w.requires_grad
    assert w.is_leaf


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, "lr must be a number, at least 0, not -1.0"),
        ({"lr": math.nan}, "lr must be a number, at least 0, not nan"),
        ({"lr": "fast"}, "lr must be a number, at least 0, not 'fast'"),
        ({"momentum": 1.0}, "momentum must be a number, at least 0 and less than 1, not 1.0"),
        ({"rho": 1.5}, "rho must be a number, at least 0 and less than 1, not 1.5"),
        ({"eps": 0.0}, "eps must be a number, more than 0, not 0.0"),
        ({"initial": -0.1}, "initial must be"),
        ({"weight_decay": math.inf}, "weight_decay must be"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        AsuP([param([1.0])], **options)
    optimizer = AsuP([param([1.0])])
    with pytest.raises(UsageError, match=said):
        optimizer.add_param_group({"params": [param([1.0])], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # of torch 2.11, once
def test_what_it_cannot_work_on_is_refused() -> None:
    with pytest.raises(UsageError, match=r"eps 1e-10 is nothing in torch.float16; use eps=6e-05 or more"):
        AsuP([param([1.0], torch.float16)])
    with pytest.raises(UsageError, match=r"floating point, not torch.complex64"):
        AsuP([param([1.0], torch.complex64)])
    w = param([1.0, 2.0])
    w.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1).double(), (2,), check_invariants=True)
    with pytest.raises(UsageError, match="dense gradients"):
        AsuP([w]).step()

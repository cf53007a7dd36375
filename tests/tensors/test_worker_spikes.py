"""Gradients that are far longer than usual, on tensors: on the CPU and as on a device, in the state, and beside torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from test_worker_momentum import copies, numbers, parameters, small_pieces

from polytempo.errors import UsageError
from polytempo.optim.worker_momentum import SAMPLED, USUAL, GradientMomentum
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.virtual_training import settled_spec, train_virtually
from polytempo.tasks import digits

__all__ = ["small_pieces"]  # a fixture of each test here, too
GROUPS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
#: How long the gradients of each step are: with spikes, none at all, one that is not a number, a rise that lasts.
SIZES = [0.0, 1.0, 1.2, 40.0, 1.0, 0.0, math.nan, 1.0, 1e-3, 1.0, math.inf, 3.0, *[9.0] * 6, 0.5, 1e4]


def gradients(params: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """In the form of each parameter, or plain."""
    found = []
    for place, param in enumerate(params):
        like = torch.empty_like(param) if place % 2 else torch.empty(param.shape, dtype=param.dtype)
        found.append(like.copy_(numbers(50 * step + place, *param.shape, dtype=param.dtype)).mul_(SIZES[step]))
    return found


def usual(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> list[float]:
    return [float(optimizer.state[param][USUAL]) for param in params]


def pushed_each(momentum: GradientMomentum, params: Sequence[torch.Tensor], keeps: bool = True) -> list[torch.Tensor]:
    out = [torch.full_like(param, math.nan) for param in params]
    for param, target in zip(params, out, strict=True):
        momentum.push(param, param.grad, target, keeps)
    return out


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("large", [False, True])
def test_a_device_does_what_the_cpu_does(dtype: torch.dtype, close: float, large: bool) -> None:
    """Tensors of the CPU stand for it. A parameter without a gradient in some steps keeps what it has."""
    params = parameters(dtype, large)
    others, steps = copies(params), range(len(SIZES))
    first, second = (torch.optim.SGD(of, **GROUPS) for of in (params, others))
    ours, theirs = (GradientMomentum(of, True, 1.5) for of in (first, second))
    shortened = 0
    for step in steps:
        for one, other, grad in zip(params, others, gradients(params, step), strict=True):
            one.grad, other.grad = grad, grad.clone()
        kept = [other.grad.clone() for other in others]
        before = usual(first, params) if step else []
        each, together = pushed_each(ours, params), theirs.pushes(others)
        for place, (one, other) in enumerate(zip(each, others, strict=True)):
            torch.testing.assert_close(together[id(other)], one, rtol=close, atol=close, equal_nan=True)
            torch.testing.assert_close(other.grad, kept[place], rtol=0, atol=0, equal_nan=True)
        assert usual(second, others) == pytest.approx(usual(first, params), rel=min(close, 0.01))
        assert all(first.state[param][USUAL].dtype == torch.float32 for param in params)
        shortened += sum(now > was * 1.0249 for now, was in zip(usual(first, params), before, strict=bool(before)) if was)
        if not math.isfinite(SIZES[step]):
            for optimizer, of in ((first, params), (second, others)):  # the job skips such a step, or ends
                for param in of:
                    optimizer.state[param]["momentum_buffer"].zero_()
    assert shortened > 5 * len(params) - 5, "spikes are there"


def test_what_is_pushed_is_the_gradient_at_most_as_long_as_let_through() -> None:
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    sgd = torch.optim.SGD([param], lr=0.1, momentum=0.5)
    momentum, out = GradientMomentum(sgd, True, 1.5), torch.empty(3, dtype=torch.float64)
    for grad, velocity, length in [
        ([3.0, 0.0, 4.0], [3.0, 0.0, 4.0], 5.0),
        ([0.0, 30.0, 40.0], [1.5, 4.5, 8.0], 5.125),  # at 7.5
        ([0.0, 0.0, 0.0], [0.75, 2.25, 4.0], 5.125),
    ]:
        momentum.push(param, torch.tensor(grad, dtype=torch.float64), out)
        assert sgd.state[param]["momentum_buffer"].tolist() == pytest.approx(velocity)
        assert usual(sgd, [param]) == pytest.approx([length])
    param.data.fill_(1.0)
    sgd.param_groups[0]["weight_decay"] = 100.0
    momentum.push(param, torch.tensor([5.0, 0.0, 0.0], dtype=torch.float64), out)
    assert sgd.state[param]["momentum_buffer"].tolist() == pytest.approx([105.375, 101.125, 102.0]), "decay is not shortened"


def test_a_look_that_is_not_the_step_leaves_what_is_usual() -> None:
    params = parameters(large=True)
    sgd = torch.optim.SGD(params, **GROUPS)
    momentum = GradientMomentum(sgd, True, 1.5)
    for step, keeps in [(1, False), (1, True), (3, False), (3, True)]:
        for param, grad in zip(params, gradients(params, step), strict=True):
            param.grad = grad
        before = {param: copy.deepcopy(own) for param, own in sgd.state.items()}
        out = pushed_each(momentum, params, keeps)
        if not keeps:
            ahead = out
            assert set(sgd.state) == set(before)
            assert all(torch.equal(sgd.state[p][name], own[name]) for p, own in before.items() for name in own)
        else:
            assert all(torch.equal(one, other) for one, other in zip(ahead, out, strict=True))


@pytest.mark.parametrize("shape", [(400, 600), (3, SAMPLED + 1)])
def test_a_large_gradient_is_as_long_whatever_its_form(shape: tuple[int, int]) -> None:
    """Of one that lies in a row a part is looked at, of another all."""
    gradient = numbers(0, *shape)
    found = []
    for form in (gradient, gradient.t().contiguous().t()):
        param = torch.nn.Parameter(torch.zeros_like(form))
        sgd = torch.optim.SGD([param], lr=0.1, momentum=0.9)
        GradientMomentum(sgd, True, 1.5).push(param, form, torch.empty_like(form))
        param.grad, together = form, GradientMomentum(other := torch.optim.SGD([param], lr=0.1, momentum=0.9), True, 1.5)
        together.pushes([param])
        found += [*usual(sgd, [param]), *usual(other, [param])]
    assert found == pytest.approx([float(gradient.norm())] * 4, rel=0.03)
    assert found[0] != found[2], "a part is not all"


@pytest.mark.parametrize("together", [False, True])
def test_without_it_one_worker_is_torchs_nesterov_bit_for_bit(together: bool) -> None:
    """And nothing is kept of lengths."""
    params = parameters()
    reference = copies(params)
    sgd, plain = torch.optim.SGD(params, **GROUPS), torch.optim.SGD(reference, **GROUPS, nesterov=True)
    momentum = GradientMomentum(sgd, True)
    for step in (1, 3, 4, 8, 19):
        for one, other, grad in zip(params, reference, gradients(params, step), strict=True):
            one.grad, other.grad = grad, grad.clone()
        out = [*momentum.pushes(params).values()] if together else pushed_each(momentum, params)
        plain.step()
        with torch.no_grad():
            for one, other, pushed in zip(params, reference, out, strict=True):
                one.sub_(pushed, alpha=0.1)
                assert torch.equal(one, other)
    assert not any(USUAL in own for own in sgd.state.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("together", [False, True])
def test_what_is_usual_is_in_the_state_and_goes_on_from_it(dtype: torch.dtype, together: bool) -> None:
    params = parameters(dtype)
    first = torch.optim.SGD(params, **GROUPS)
    others = copies(params)
    second = torch.optim.SGD(others, **GROUPS)
    ours, theirs = GradientMomentum(first, True, 1.5), GradientMomentum(second, True, 1.5)

    def step(momentum: GradientMomentum, of: Sequence[torch.nn.Parameter], number: int) -> list[torch.Tensor]:
        for param, grad in zip(of, gradients(of, number), strict=True):
            param.grad = grad
        return [*momentum.pushes(of).values()] if together else pushed_each(momentum, of)

    for number in (1, 2, 3):
        step(ours, params, number)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for number in (4, 8, 11):
        pairs = zip(step(ours, params, number), step(theirs, others, number), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert usual(first, params) == usual(second, others)
    plain = torch.optim.SGD(others, **GROUPS)
    plain.load_state_dict(first.state_dict())
    plain.step()  # torch's own has no use for it


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("together", [False, True])
def test_a_first_gradient_that_says_nothing_is_not_what_is_usual(bad: float, together: bool) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    sgd = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    momentum = GradientMomentum(sgd, True, 1.5)
    for value, wanted in ((bad, 0.0), (3.0, 3.0), (100.0, 3.075)):
        param.grad = torch.tensor([value, 0.0])
        if together:
            momentum.pushes([param])
        else:
            pushed_each(momentum, [param])
        assert usual(sgd, [param]) == pytest.approx([wanted])


# In virtual time.


def test_virtual_time_refuses_what_a_live_job_refuses() -> None:
    model = torch.nn.Linear(1, 1)
    adam = lambda p: torch.optim.Adam(p)  # noqa: E731
    with pytest.raises(UsageError, match=r"^asp,spike=2: spike= shortens .*, and that of Adam is of changes; leave it out$"):
        settled_spec("asp,spike=2", model, adam, 2)
    assert settled_spec("asp,spike=2", model, adam, 1).text == "asp,spike=2"


def test_at_a_high_rate_the_steep_beginning_does_not_throw_workers_out() -> None:
    """Digits with SGD, momentum 0.9 and 4 workers, at a rate at which `bsp` still learns, and at equal samples."""

    def accuracy(sync: str, steps: int) -> float:
        task = digits()
        return train_virtually(
            task.model, task.data, task.loss, sync=sync, cluster=Cluster(workers=4, batch=32),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.8, momentum=0.9), steps=steps, evaluate_every=1e9,
        ).accuracy  # fmt: skip

    assert accuracy("bsp", 200) > 0.85
    assert accuracy("asp", 800) > 0.95
    assert accuracy("asp,momentum=lookahead", 800) < 0.6

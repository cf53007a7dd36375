"""What a worker pushes that keeps its own momentum, against torch: one worker whose pushes are answered at once.

For SGD that is `nesterov=True`, bit for bit. For any other rule it is d + b (d - d_before), worked out here a second time
from what torch's optimizer changes. Parameters on a device are handled together (`pushes`); here tensors of the CPU stand
for them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.optim import worker_momentum
from polytempo.optim.worker_momentum import DIRECTION, ChangeMomentum, GradientMomentum
from polytempo.sync.momentum import RULES

STEPS = 6
#: Tensors are worked on in pieces of so many elements here: what is beyond one need not be large.
PIECE = 1 << 16
#: Two ways to the same numbers: parameter by parameter, or all of a group together.
TOGETHER = pytest.mark.parametrize("together", [False, True], ids=["each", "together"])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_momentum, "PIECE", PIECE)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def parameters(dtype: torch.dtype = torch.float64, large: bool = False) -> list[torch.nn.Parameter]:
    """Of every form: of one number, plain, transposed, every second column of a matrix, channels last, empty, and one that
    is worked on in pieces."""
    shapes = [
        numbers(0, 1, dtype=dtype)[0],
        numbers(1, 4, 3, dtype=dtype),
        numbers(2, 3, 5, dtype=dtype).t(),
        numbers(3, 4, 6, dtype=dtype)[:, ::2],
        numbers(4, 2, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last),
        torch.zeros(0, dtype=dtype),
    ]
    if large:
        shapes += [
            numbers(5, PIECE + 1, dtype=dtype),
            numbers(6, 3, PIECE, dtype=dtype),
            numbers(7, 2, PIECE, dtype=dtype).t(),
        ]
    return [torch.nn.Parameter(one) for one in shapes]


def set_gradients(params: Sequence[torch.Tensor], step: int, none_in: Sequence[int] = ()) -> None:
    """The same for the same step; in the parameter's form, or plain; the third parameter has none in some steps."""
    for place, param in enumerate(params):
        gradient = numbers(100 * step + place, *param.shape, dtype=param.dtype)
        like = torch.empty_like(param) if step % 2 else torch.empty(param.shape, dtype=param.dtype)
        param.grad = None if place == 2 and step in none_in else like.copy_(gradient)


def copies(params: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().clone()) for param in params]


def groups_of(params: Sequence[torch.Tensor], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameters dealt out to the groups."""
    return [{"params": list(params[place :: len(groups)]), **group} for place, group in enumerate(groups)]


def made(cls: type[torch.optim.Optimizer], params: Sequence[torch.Tensor], groups: Sequence[dict[str, Any]]) -> Any:
    return cls(groups_of(params, groups))


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def schedule(groups: Sequence[dict[str, Any]]) -> Iterator[list[float]]:
    """The rates of each step: as they are, halved, ten times as large, and none for a step."""
    for factor in (1.0, 1.0, 0.5, 0.0, 10.0, 1.0)[:STEPS]:
        yield [group["lr"] * factor for group in groups]


# SGD.


class GradientWorker:
    """A worker that pushes gradients of its own momentum to servers that run SGD without any."""

    def __init__(
        self, params: Sequence[torch.Tensor], groups: Sequence[dict[str, Any]], ahead: bool, together: bool
    ) -> None:
        self.params, self.on_servers = params, copies(params)
        self.optimizer = made(torch.optim.SGD, params, groups)
        self.servers = made(torch.optim.SGD, self.on_servers, [{"lr": group["lr"]} for group in groups])
        self.momentum, self.together = GradientMomentum(self.optimizer, ahead), together

    def step(self, rates: Sequence[float]) -> None:
        set_rates(self.optimizer, rates)
        set_rates(self.servers, rates)
        kept = [None if param.grad is None else param.grad.clone() for param in self.params]
        for on_server, pushed in zip(self.on_servers, self._pushed(), strict=True):
            on_server.grad = pushed
        self.servers.step()
        for param, on_server, before in zip(self.params, self.on_servers, kept, strict=True):
            assert (param.grad is None) == (before is None)
            assert before is None or torch.equal(param.grad, before), "the gradient stays the gradient"
            param.data.copy_(on_server)

    def _pushed(self) -> list[torch.Tensor | None]:
        if self.together:
            found = self.momentum.pushes(self.params)
            return [found.get(id(param)) for param in self.params]
        pushed: list[torch.Tensor | None] = []
        for param in self.params:
            out = torch.full_like(param, math.nan)
            if param.grad is not None:
                total = self.momentum.push(param, param.grad, out)
                assert total == pytest.approx(out.double().sum().item(), rel=1e-2, abs=1e-2 * max(1, param.numel()))
            pushed.append(None if param.grad is None else out)
        return pushed


def compare_sgd(
    groups: Sequence[dict[str, Any]],
    ahead: bool,
    together: bool,
    dtype: torch.dtype = torch.float64,
    large: bool = False,
    close: float = 0.0,
) -> None:
    params = parameters(dtype, large)
    reference = copies(params)
    plain = made(torch.optim.SGD, reference, [{**group, "nesterov": ahead and group["momentum"] > 0} for group in groups])
    worker = GradientWorker(params, groups, ahead, together)
    for step, rates in enumerate(schedule(groups)):
        set_gradients(params, step, none_in=(0, 3))
        set_gradients(reference, step, none_in=(0, 3))
        worker.step(rates)
        set_rates(plain, rates)
        plain.step()
        for ours, theirs in zip(worker.on_servers, reference, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=close, atol=close)


SETTINGS = [
    [{"lr": 0.1, "momentum": 0.9, "weight_decay": decay, "maximize": maximize}]
    for decay in (0.0, 0.01)
    for maximize in (0, 1)
] + [
    [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.1}, {"lr": 0.3, "momentum": 0.0}],
    [{"lr": 0.1, "momentum": 0.0, "weight_decay": 0.01}, {"lr": 0.5, "momentum": 0.99, "maximize": True}],
]


@TOGETHER
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("groups", SETTINGS)
def test_sgd_alone_is_torchs_bit_for_bit(groups: list[dict[str, Any]], ahead: bool, together: bool) -> None:
    """With the look-ahead that of `nesterov=True`; without, that of plain momentum."""
    compare_sgd(groups, ahead, together)


@TOGETHER
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 0.0), (torch.float32, 0.0), (torch.bfloat16, 0.1), (torch.float16, 0.01)]
)
def test_large_tensors_of_every_dtype_go_by_torch_too(dtype: torch.dtype, close: float, together: bool) -> None:
    """Numbers of 16 bits to their last ones: how torch rounds them depends on how they lie in memory."""
    compare_sgd(SETTINGS[4], True, together, dtype, large=True, close=close)


group_settings = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 1),
        "momentum": st.sampled_from((0.0, 0.3, 0.9, 0.99)) | st.floats(0, 1),
        "weight_decay": st.just(0.0) | st.floats(0, 0.5),
        "maximize": st.booleans(),
    }
)


@settings(max_examples=30)
@given(st.lists(group_settings, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_sgd_alone_is_torchs_at_any_settings(groups: list[dict[str, Any]], ahead: bool, together: bool) -> None:
    compare_sgd(groups, ahead, together)


@pytest.mark.proof
@settings(max_examples=2000)
@given(st.lists(group_settings, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_sgd_alone_is_torchs_at_any_settings_many(groups: list[dict[str, Any]], ahead: bool, together: bool) -> None:
    compare_sgd(groups, ahead, together)


@pytest.mark.parametrize("ahead", [True, False])
def test_an_optimizer_with_nesterov_looks_ahead_in_any_case(ahead: bool) -> None:
    params = parameters()
    reference = copies(params)
    groups = [{"lr": 0.1, "momentum": 0.9, "nesterov": True}]
    plain, worker = made(torch.optim.SGD, reference, groups), GradientWorker(params, groups, ahead, False)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(reference, step)
        worker.step([0.1])
        plain.step()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(worker.on_servers, reference, strict=True))


def test_a_look_that_is_not_the_step_leaves_the_velocity() -> None:
    """Buckets that are sent ahead of a step are made before it is known that the step is made."""
    for size in (5, 2 * PIECE):
        param = torch.nn.Parameter(numbers(0, size))
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
        momentum, gradient, ahead, step = GradientMomentum(optimizer, True), numbers(1, size), *torch.empty(2, size).double()
        momentum.push(param, gradient, step)
        velocity = optimizer.state[param]["momentum_buffer"].clone()
        momentum.push(param, gradient, ahead, keeps=False)
        assert torch.equal(optimizer.state[param]["momentum_buffer"], velocity)
        momentum.push(param, gradient, step)
        assert torch.equal(ahead, step)
        assert not torch.equal(optimizer.state[param]["momentum_buffer"], velocity)


def test_a_gradient_may_become_what_is_pushed() -> None:
    param = torch.nn.Parameter(numbers(0, 7))
    apart, in_place = numbers(1, 7), numbers(1, 7)
    for gradient, out in ((numbers(1, 7), apart), (in_place, in_place)):
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, weight_decay=0.1)
        GradientMomentum(optimizer, True).push(param, gradient, out)
    assert torch.equal(apart, in_place)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [3, PIECE + 3])
def test_the_sum_tells_of_an_element_that_is_not_finite(bad: float, size: int) -> None:
    param = torch.nn.Parameter(torch.zeros(size))
    sgd = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    gradient = torch.zeros(size)
    assert GradientMomentum(sgd, True).push(param, gradient, torch.empty(size)) == 0
    gradient[-1] = bad
    assert not math.isfinite(GradientMomentum(sgd, True).push(param, gradient, torch.empty(size)))
    before = param.detach().clone()
    with torch.no_grad():
        param[-1] = bad
    assert not math.isfinite(ChangeMomentum(torch.optim.Adam([param]), True).push(param, before))


# Any other rule.


class ChangeWorker:
    """A worker that pushes what its optimizer changes, extrapolated, to servers that add it."""

    def __init__(self, cls: Any, params: Sequence[torch.Tensor], groups: Sequence[dict[str, Any]], **how: bool) -> None:
        self.params, self.together = params, how["together"]
        self.optimizer = made(cls, params, groups)
        self.momentum = ChangeMomentum(self.optimizer, how["ahead"])

    def step(self, rates: Sequence[float]) -> list[torch.Tensor]:
        """What is pushed; the parameters have been put back, and have it added."""
        set_rates(self.optimizer, rates)
        before = [param.detach().clone() for param in self.params]
        out = [values.clone() for values in before]
        self.optimizer.step()
        if self.together:
            found = self.momentum.pushes(self.params, out)
            assert all(found[id(param)] is values for param, values in zip(self.params, out, strict=True))
        else:
            for param, values in zip(self.params, out, strict=True):
                self.momentum.push(param, values)
        for param, values, pushed in zip(self.params, before, out, strict=True):
            assert torch.equal(param, values), "servers make the change"
            param.data.add_(pushed)
        return out


class ByHand:
    """The formula: d + b (d - d_before), with d_before at the rate of this step, and decoupled decay apart. Before the first
    there was none of SGD; of other rules it is taken to be the first."""

    def __init__(
        self, cls: Any, params: Sequence[torch.Tensor], groups: Sequence[dict[str, Any]], extrapolation: str
    ) -> None:
        self.params, self.extrapolation = params, extrapolation
        self.optimizer = made(cls, params, groups)
        self.direction: dict[int, torch.Tensor] = {}

    def step(self, rates: Sequence[float]) -> list[torch.Tensor]:
        set_rates(self.optimizer, rates)
        before = {id(param): param.detach().clone() for param in self.params}
        self.optimizer.step()
        pushed = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                pushed[id(param)] = self._pushed(param, before[id(param)], group)
        for param in self.params:
            param.data.copy_(before[id(param)] + pushed[id(param)])
        return [pushed[id(param)] for param in self.params]

    def _pushed(self, param: torch.Tensor, before: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        change, rate = param.detach() - before, group["lr"]
        if param.grad is None or rate == 0 or not self.extrapolation:
            return change
        momentum = group[self.extrapolation]
        momentum = momentum[0] if isinstance(momentum, tuple) else momentum
        decoupled = group.get("decoupled_weight_decay") or isinstance(self.optimizer, torch.optim.AdamW)
        own = change + rate * group["weight_decay"] * before if decoupled else change
        first = torch.zeros_like(own) if type(self.optimizer) is torch.optim.SGD else own / rate
        earlier = rate * self.direction.get(id(param), first)
        self.direction[id(param)] = own / rate
        return change + momentum * (own - earlier)


#: Class, the settings of its groups, and which of these is its momentum.
CASES: list[tuple[Any, list[dict[str, Any]], str]] = [
    (torch.optim.Adam, [{"lr": 0.01}], "betas"),
    (torch.optim.Adam, [{"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "betas": (0.5, 0.9)}], "betas"),
    (torch.optim.Adam, [{"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}], "betas"),
    (torch.optim.Adam, [{"lr": 0.01, "maximize": True}, {"lr": 0.1, "betas": (0.0, 0.9)}, {"lr": 0.3}], "betas"),
    (torch.optim.Adam, [{"lr": 0.01, "foreach": True}], "betas"),
    (torch.optim.AdamW, [{"lr": 0.01}], "betas"),
    (torch.optim.AdamW, [{"lr": 0.01, "weight_decay": 0.5}, {"lr": 0.02, "weight_decay": 0.0, "maximize": True}], "betas"),
    (torch.optim.Adamax, [{"lr": 0.01, "weight_decay": 0.1}], "betas"),
    (torch.optim.RAdam, [{"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.5)}], "betas"),
    (torch.optim.RAdam, [{"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}], "betas"),
    (torch.optim.NAdam, [{"lr": 0.01}], ""),
    (torch.optim.NAdam, [{"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}], ""),
    (torch.optim.RMSprop, [{"lr": 0.01}], "momentum"),
    (torch.optim.RMSprop, [{"lr": 0.01, "centered": True, "momentum": 0.9, "weight_decay": 0.1}], "momentum"),
    (torch.optim.Adagrad, [{"lr": 0.01, "lr_decay": 0.1}], ""),
    (torch.optim.Adadelta, [{"lr": 0.5, "weight_decay": 0.1}], ""),
    (torch.optim.Adafactor, [{"lr": 0.01, "weight_decay": 0.1}], ""),
    (torch.optim.ASGD, [{"lr": 0.01}], ""),
    (torch.optim.SGD, [{"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}], "momentum"),
]


@TOGETHER
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    ("cls", "groups", "extrapolation"), CASES, ids=[f"{cls.__name__}-{n}" for n, (cls, _, _) in enumerate(CASES)]
)
def test_other_rules_alone_go_by_the_formula(
    cls: Any, groups: list[dict[str, Any]], extrapolation: str, ahead: bool, together: bool
) -> None:
    params = [param for param in parameters() if param.numel()]
    reference = copies(params)
    worker = ChangeWorker(cls, params, groups, ahead=ahead, together=together)
    by_hand = ByHand(cls, reference, groups, extrapolation if ahead else "")
    for step, rates in enumerate(schedule(groups)):
        set_gradients(params, step, none_in=(0, 3))
        set_gradients(reference, step, none_in=(0, 3))
        pushed, wanted = worker.step(rates), by_hand.step(rates)
        for ours, theirs in zip(pushed, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(params, reference, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_every_class_that_is_known_is_tested() -> None:
    assert {cls.__name__ for cls, _, _ in CASES} == set(RULES)


@TOGETHER
@pytest.mark.parametrize(("cls", "rate"), [(torch.optim.Adam, 0.01), (torch.optim.AdamW, 0.01), (torch.optim.RMSprop, 1e-4)])
def test_large_tensors_go_by_the_formula_too(cls: Any, rate: float, together: bool) -> None:
    groups = [{"lr": rate, **({"momentum": 0.9} if cls is torch.optim.RMSprop else {})}]
    params = [param for param in parameters(large=True) if param.numel()]
    reference = copies(params)
    worker = ChangeWorker(cls, params, groups, ahead=True, together=together)
    by_hand = ByHand(cls, reference, groups, "momentum" if cls is torch.optim.RMSprop else "betas")
    for step in range(3):
        set_gradients(params, step)
        set_gradients(reference, step)
        for ours, theirs in zip(worker.step([rate]), by_hand.step([rate]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@TOGETHER
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_other_dtypes_come_near(dtype: torch.dtype, close: float, together: bool) -> None:
    """As near as the changes themselves, which are read off the values, are known."""
    groups = [{"lr": 0.5}]
    params = [param for param in parameters(dtype) if param.numel()]
    reference = [torch.nn.Parameter(param.detach().double()) for param in params]
    worker = ChangeWorker(torch.optim.AdamW, params, groups, ahead=True, together=together)
    by_hand = ByHand(torch.optim.AdamW, reference, groups, "betas")
    for step in range(2):
        set_gradients(params, step)
        for param, double in zip(params, reference, strict=True):
            double.grad = param.grad.double()
            double.data.copy_(param.detach())
        for ours, theirs in zip(worker.step([0.5]), by_hand.step([0.5]), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=close, atol=close)


@TOGETHER
def test_both_forms_of_sgd_are_one(together: bool) -> None:
    """-lr (g + m v) = d + m (d - d_before)."""
    groups = [{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}]
    params = parameters()
    reference = copies(params)
    worker = ChangeWorker(torch.optim.SGD, params, groups, ahead=True, together=together)
    plain = made(torch.optim.SGD, reference, [{**groups[0], "nesterov": True}])
    for step in range(STEPS):
        set_gradients(params, step)
        set_gradients(reference, step)
        worker.step([0.1])
        plain.step()
        for ours, theirs in zip(params, reference, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


# State.


def direction_steps(optimizer: torch.optim.Optimizer, momentum: ChangeMomentum, params: Any, steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        before = [param.detach().clone() for param in params]
        optimizer.step()
        for param, values in zip(params, before, strict=True):
            momentum.push(param, values)
            param.data.add_(values)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam, torch.optim.Adamax])
def test_momentum_is_in_the_optimizers_state_and_goes_on_from_it(cls: Any) -> None:
    params = [param for param in parameters() if param.numel()]
    optimizer = cls(params, lr=0.01)
    direction_steps(optimizer, ChangeMomentum(optimizer, True), params, range(3))
    others = copies(params)
    resumed = cls(others, lr=0.5)
    momentum = ChangeMomentum(resumed, True)  # made before the state is loaded
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.is_tensor(state[DIRECTION]) for state in resumed.state_dict()["state"].values())
    direction_steps(optimizer, ChangeMomentum(optimizer, True), params, range(3, 6))
    direction_steps(resumed, momentum, others, range(3, 6))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(params, others, strict=True))


def test_sgds_momentum_goes_on_from_torchs_own_state() -> None:
    """A state of plain PyTorch, with `nesterov=True` or without, is one of a worker, and the other way round."""
    params = parameters()
    worker = GradientWorker(params, [{"lr": 0.1, "momentum": 0.9}], True, False)
    for step in range(3):
        set_gradients(params, step)
        worker.step([0.1])
    reference = copies(params)
    plain = torch.optim.SGD(reference, lr=0.1, momentum=0.9, nesterov=True)
    plain.load_state_dict({**plain.state_dict(), "state": copy.deepcopy(worker.optimizer.state_dict()["state"])})
    for step in range(3, 6):
        set_gradients(params, step)
        set_gradients(reference, step)
        worker.step([0.1])
        plain.step()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(worker.on_servers, reference, strict=True))


@TOGETHER
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_nothing_is_kept_of_what_has_no_gradient(make: Callable[..., Any], together: bool) -> None:
    """Not even in the state: torch would take a parameter that has any for one that it has stepped."""
    params = parameters()[:2]
    optimizer = make(params, lr=0.1)
    momentum, before = ChangeMomentum(optimizer, True), [param.detach().clone() for param in params]
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    out = [values.clone() for values in before]
    if together:
        momentum.pushes(params, out)
    else:
        for param, values in zip(params, out, strict=True):
            momentum.push(param, values)
    assert not out[1].any()
    assert DIRECTION not in optimizer.state[params[1]]
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()


# What the table of rules says of torch's classes.

OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}


def changed(name: str, factor: float, **how: Any) -> torch.Tensor:
    """What a tenth step makes of a matrix, with a gradient that is multiplied by a factor; each step begins at the same
    values. (The first five of RAdam divide by nothing.)"""
    param, before = torch.nn.Parameter(numbers(0, 4, 5)), numbers(0, 4, 5)
    param.grad = numbers(1, 4, 5) * factor
    optimizer = OPTIMIZERS[name]([param], **{"lr": 0.01, **how})
    for _ in range(10):
        param.data.copy_(before)
        optimizer.step()
    return param.detach() - before


def test_torchs_other_classes_are_left_to_the_servers() -> None:
    assert set(RULES) <= set(OPTIMIZERS)
    assert set(OPTIMIZERS) - set(RULES) <= {"LBFGS", "Muon", "Rprop", "SparseAdam"}, (
        "decide on a new one: in the table or not?"
    )


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_linear_in_the_gradient_or_divides_by_its_size(name: str) -> None:
    once, often = changed(name, 1.0), changed(name, 100.0)
    ratio = float(often.norm() / once.norm())
    assert 90 < ratio < 110 if RULES[name].linear else ratio < 1.1


@pytest.mark.parametrize("name", RULES)
def test_torchs_groups_have_the_momentum_under_the_name_in_the_table(name: str) -> None:
    (group,) = OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))]).param_groups
    words = {"momentum", "betas"} & set(group)
    assert words == ({RULES[name].momentum} - {""})
    assert RULES[name].momentum_in(group) == (0.9 if "betas" in group else 0.0)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, {}) for name in ("Adam", "AdamW", "Adamax", "RAdam", "NAdam", "RMSprop")),
        *((name, {"decoupled_weight_decay": True}) for name in ("Adam", "RAdam", "NAdam")),
    ],
)
def test_decoupled_decay_is_a_change_of_its_own(name: str, how: dict[str, Any]) -> None:
    """It does not go through the momentum: the change is that without it, and rate times decay times the value."""
    (group,) = OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))], weight_decay=0.1, **how).param_groups
    apart = changed(name, 1.0, weight_decay=0.0) - 0.01 * 0.1 * numbers(0, 4, 5)
    is_apart = torch.allclose(changed(name, 1.0, weight_decay=0.1, **how), apart, rtol=1e-9, atol=1e-12)
    assert RULES[name].decay_in(group) == (0.1 if is_apart else 0.0)
    assert is_apart == (name == "AdamW" or bool(how))

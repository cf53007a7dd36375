"""Momentum at each worker and steps that are not plain: other rates, gradients that are missing, steps that do not count.

What is not applied leaves a worker's momentum as it was.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import MakeOptimizer, assert_close, assert_equal
from own_momentum import START, ByHand, Tensors, Turn, by_hand, differentiate, gradient, loss, plain_turn, played

pytestmark = [pytest.mark.timeout(20), pytest.mark.both_wires]

RULES: dict[str, tuple[MakeOptimizer, float, float]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1), 0.5, 0.0),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3), 0.5**0.75, 0.3),
}


# What is done in a turn, live and by hand: of the worker, what it has read, its rank and the number of its step.


def plain_change(one: ByHand, values: Tensors, worker: int, number: int) -> Tensors:
    return one.change(values, gradient(values, worker, number))


def nothing(values: Tensors) -> Tensors:
    return [torch.zeros_like(value) for value in values]


def rate(number: int) -> float:
    """0 at first, as in a warm-up, and once later; it rises and falls."""
    return (0.0, 0.02, 0.1, 0.0, 0.01)[number]


def other_rate(turn: Turn) -> None:
    turn.optimizer.param_groups[0]["lr"] = rate(turn.number)
    plain_turn(turn)


def other_rate_by_hand(one: ByHand, values: Tensors, worker: int, number: int) -> Tensors:
    one.optimizer.param_groups[0]["lr"] = rate(number)
    return plain_change(one, values, worker, number)


def some_missing(turn: Turn) -> None:
    """The first has no gradient in every other step, the second has none at first, the last never."""
    differentiate(turn)
    for index in (0,) * (turn.number % 2) + (1,) * (turn.number == 0) + (2,):
        turn.params[index].grad = None
    turn.optimizer.step()


def some_missing_by_hand(one: ByHand, values: Tensors, worker: int, number: int) -> Tensors:
    first, second, _ = gradient(values, worker, number)
    return one.change(values, [None if number % 2 else first, None if number == 0 else second, None])


def skipped(turn: Turn) -> None:
    """A GradScaler has found gradients that are not finite in every other step."""
    turn.optimizer.zero_grad()
    (loss(turn.params, turn.worker, turn.number) * 64.0).backward()
    if turn.number % 2:
        turn.params[0].grad[0] = float("inf")
    turn.optimizer.grad_scale, turn.optimizer.found_inf = torch.tensor(64.0), torch.tensor(float(turn.number % 2))
    turn.optimizer.step()
    del turn.optimizer.grad_scale, turn.optimizer.found_inf


def no_samples(turn: Turn) -> None:
    differentiate(turn)
    turn.optimizer.step(samples=0 if turn.number % 2 else 7)


def every_other_by_hand(one: ByHand, values: Tensors, worker: int, number: int) -> Tensors:
    return nothing(values) if number % 2 else plain_change(one, values, worker, number)


def accumulated(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    with turn.optimizer.no_sync():
        (loss(turn.params, turn.worker, 20 + turn.number) / 2).backward()
    (loss(turn.params, turn.worker, turn.number) / 2).backward()
    turn.optimizer.step()


def accumulated_unawares(turn: Turn) -> None:
    """Buckets leave in both backwards, and those of the second replace the first's."""
    turn.optimizer.zero_grad()
    (loss(turn.params, turn.worker, 20 + turn.number) / 2).backward()
    (loss(turn.params, turn.worker, turn.number) / 2).backward()
    turn.optimizer.step()


def accumulated_by_hand(one: ByHand, values: Tensors, worker: int, number: int) -> Tensors:
    pairs = zip(gradient(values, worker, number), gradient(values, worker, 20 + number), strict=True)
    return one.change(values, [(first + second) / 2 for first, second in pairs])


def thrown_away(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    loss(turn.params, turn.worker, 30 + turn.number).backward()
    plain_turn(turn)


def clipped(turn: Turn) -> None:
    differentiate(turn)
    torch.nn.utils.clip_grad_norm_(turn.params, 0.3)
    turn.optimizer.step()


def clipped_by_hand(one: ByHand, values: Tensors, worker: int, number: int) -> Tensors:
    grads = gradient(values, worker, number)
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    return one.change(values, [grad * min(1.0, float(0.3 / (norm + 1e-6))) for grad in grads])


Live, Hand = Callable[[Turn], None], Callable[[ByHand, Tensors, int, int], Tensors]
STEPS: dict[str, tuple[Live, Hand]] = {
    "other rates": (other_rate, other_rate_by_hand),
    "gradients missing": (some_missing, some_missing_by_hand),
    "a GradScaler skips": (skipped, every_other_by_hand),
    "no samples": (no_samples, every_other_by_hand),
    "no_sync": (accumulated, accumulated_by_hand),
    "two backwards": (accumulated_unawares, accumulated_by_hand),
    "zero_grad without step": (thrown_away, plain_change),
    "clipped by the script": (clipped, clipped_by_hand),
}


@pytest.mark.parametrize("what", STEPS)
@pytest.mark.parametrize("name", RULES)
def test_what_is_not_applied_leaves_the_momentum_as_it_was(name: str, what: str) -> None:
    (make, scale, decoupled), (live, hand) = RULES[name], STEPS[what]
    end, _, _ = played("asp", make, live)
    assert_close(end, by_hand(make, scale, decoupled=decoupled, of=hand), rtol=1e-11)


@pytest.mark.parametrize("name", RULES)
def test_clipping_is_of_each_workers_own_gradient(name: str) -> None:
    """Not of what is pushed: a look-ahead is longer than the gradient, by right."""

    def turn_of(turn: Turn) -> None:
        differentiate(turn)
        turn.optimizer.step()

    make, scale, decoupled = RULES[name]
    end, _, _ = played("asp", make, turn_of, clip_norm=0.3)
    assert_close(end, by_hand(make, scale, decoupled=decoupled, of=clipped_by_hand), rtol=1e-11)


def test_a_parameter_that_never_has_a_gradient_has_no_state() -> None:
    for name, (make, _, _) in RULES.items():
        _, _, states = played("asp", make, some_missing)
        assert [sorted(state["state"]) for state in states] == [[0, 1], [0, 1]], name


def test_a_backward_without_a_step_leaves_no_state() -> None:
    make, _, _ = RULES["SGD"]

    def differentiated(turn: Turn) -> None:
        differentiate(turn)
        assert not turn.optimizer.state_dict()["state"]

    end, _, states = played("asp", make, differentiated)
    assert not any(state["state"] for state in states)
    assert_equal(end, [start.detach() for start in START])

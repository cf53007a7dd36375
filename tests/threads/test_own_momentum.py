"""Momentum at each worker, live: what reaches the servers is what a loop by hand makes, and `.grad` stays the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import MakeOptimizer, assert_close, assert_equal, copied
from own_momentum import ORDER, START, by_hand, gradient, loss, played
from torch import nn

pytestmark = [pytest.mark.timeout(20), pytest.mark.both_wires]

Params = list[nn.Parameter]


def in_groups(params: Params) -> torch.optim.Optimizer:
    groups = [{"params": params[:1], "momentum": 0.5}, {"params": params[1:], "lr": 0.02, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def adam_in_groups(params: Params) -> torch.optim.Optimizer:
    groups = [{"params": params[2:], "betas": (0.5, 0.9)}, {"params": params[:2], "lr": 0.02}]
    return torch.optim.Adam(groups, lr=0.05, amsgrad=True)


#: Each with the decoupled weight decay that it has.
RULES: dict[str, tuple[MakeOptimizer, float]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), 0.0),
    "SGD, nesterov": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True), 0.0),
    "SGD, weight decay": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1), 0.0),
    "SGD, maximize": (lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9, maximize=True, weight_decay=0.1), 0.0),
    "SGD, dampening": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.4), 0.0),
    "SGD in groups": (in_groups, 0.0),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1), 0.0),
    "Adam in groups": (adam_in_groups, 0.0),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3), 0.3),
    "Adamax": (lambda p: torch.optim.Adamax(p, lr=0.05), 0.0),
    "RAdam": (lambda p: torch.optim.RAdam(p, lr=0.05, weight_decay=0.2, decoupled_weight_decay=True), 0.2),
    "NAdam": (lambda p: torch.optim.NAdam(p, lr=0.05), 0.0),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.8), 0.0),
}


def scale_of(name: str, workers: int = 2) -> float:
    return 1 / workers if name.startswith("SGD") else workers**-0.75


def expected(name: str, **how: object) -> list[torch.Tensor]:
    make, decoupled = RULES[name]
    return by_hand(make, scale_of(name), decoupled=decoupled, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("fresh", [True, False], ids=["nothing stale", "stale"])
@pytest.mark.parametrize("name", RULES)
def test_workers_in_turn_make_what_a_loop_by_hand_makes(name: str, fresh: bool) -> None:
    make, _ = RULES[name]
    end, job, states = played("asp", make, fresh=fresh)
    assert_close(end, expected(name, fresh=fresh), rtol=1e-11)
    assert job.summary["staleness_max"] == (0 if fresh else 3)
    assert all(set(state["state"]) == {0, 1, 2} for state in states), "each worker has its own"


@pytest.mark.parametrize("name", ["SGD, weight decay", "SGD, nesterov", "AdamW", "RMSprop"])
def test_without_the_look_ahead_what_a_worker_steps_along_is_pushed(name: str) -> None:
    make, decoupled = RULES[name]
    end, _, _ = played("ssp:9,momentum=worker", make)
    assert_close(end, by_hand(make, scale_of(name), ahead=False, decoupled=decoupled, spike=0), rtol=1e-11)


def test_where_there_is_no_momentum_servers_run_the_rule_at_the_rate_that_goes_with_it() -> None:
    """Adagrad of all pushes, in their order: its sums are the servers'."""
    params = copied(START)
    optimizer = torch.optim.Adagrad(params, lr=0.05 / math.sqrt(2))
    counts = [0, 0]
    for worker in ORDER:
        for param, grad in zip(params, gradient([p.detach() for p in params], worker, counts[worker]), strict=True):
            param.grad = grad
        optimizer.step()
        counts[worker] += 1
    end, job, states = played("asp", lambda p: torch.optim.Adagrad(p, lr=0.05), fresh=True)
    assert_close(end, [param.detach() for param in params], rtol=1e-12)
    assert float(states[0]["state"][0]["step"]) == len(ORDER)
    assert (
        "asp,scale=sqrt: Adagrad divides by the size of gradients; a push of one of n workers counts 1/sqrt(n)"
        in job.notices
    )


@pytest.mark.parametrize(("options", "scale"), [("", 0.5), (",scale=1", 1.0), (",scale=sqrt", math.sqrt(0.5))])
@pytest.mark.parametrize("sync", ["asp", "ssp:9", "dssp:9..12", "dssp-paper:9..12", "every:20"])
def test_all_modes_that_apply_single_pushes_do_the_same(sync: str, options: str, scale: float) -> None:
    make, _ = RULES["SGD"]
    end, job, _ = played(sync + options, make, servers=1)
    assert_close(end, by_hand(make, scale), rtol=1e-11)
    assert [line for line in job.notices if "momentum" in line] == [
        f"{sync}{options},momentum=lookahead,spike=1.5: each worker keeps the momentum of its own SGD and pushes its "
        "look-ahead; gradients above 1.5 times their usual length are shortened (spike=1.5); momentum=server keeps one for "
        "all on the servers"
    ]


@pytest.mark.parametrize(("options", "spike"), [("momentum=lookahead", 0), ("spike=1.1", 1.1), ("spike=9", 9)])
@pytest.mark.parametrize("name", ["SGD", "SGD, weight decay", "SGD in groups"])
def test_gradients_are_shortened_at_the_length_that_is_given(name: str, options: str, spike: float) -> None:
    """By name the look-ahead is Nesterov's, of gradients as they are."""
    make, _ = RULES[name]
    end, _, _ = played(f"asp,{options}", make)
    assert_close(end, expected(name, spike=spike), rtol=1e-11)
    others = [expected(name, spike=other) for other in (0, 1.1, 1.5) if other != spike and {other, spike} != {0, 9}]
    assert not any(torch.equal(one, mine) for other in others for one, mine in zip(other[:1], end[:1], strict=True))


# One worker.

STEPS = [0] * 12


def alone(make: MakeOptimizer, **group: object) -> list[torch.Tensor]:
    """Plain PyTorch on the steps of one worker."""
    params = copied(START)
    optimizer = make(params)
    for one in optimizer.param_groups:
        one.update(group)
    for number in range(len(STEPS)):
        optimizer.zero_grad()
        loss(params, 0, number).backward()
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("name", RULES)
def test_a_worker_alone_takes_the_way_that_equals_plain_pytorch(name: str) -> None:
    make, _ = RULES[name]
    end, job, states = played("asp", make, order=STEPS)
    assert_equal(end, alone(make))
    assert not [line for line in job.notices if "momentum" in line]
    assert "direction" not in states[0]["state"][0]


@pytest.mark.parametrize("name", [name for name in RULES if name.startswith("SGD") and "dampening" not in name])
def test_under_the_option_sgd_alone_is_torchs_nesterov_bit_for_bit(name: str) -> None:
    make, _ = RULES[name]
    end, _, states = played("asp,momentum=lookahead", make, order=STEPS)
    assert_equal(end, alone(make, nesterov=True))
    params = copied(START)
    plain = make(params)
    plain.load_state_dict(states[0])  # as torch names it


@pytest.mark.parametrize("name", [name for name in RULES if not name.startswith("SGD") or "dampening" in name])
def test_under_the_option_any_other_rule_alone_looks_ahead(name: str) -> None:
    make, decoupled = RULES[name]
    end, _, _ = played("asp,momentum=lookahead", make, order=STEPS)
    assert_close(end, by_hand(make, 1.0, order=STEPS, decoupled=decoupled), rtol=1e-12)
    assert any(not torch.equal(one, other) for one, other in zip(end, alone(make), strict=True)) == (name != "NAdam")


def test_without_momentum_the_option_changes_nothing() -> None:
    ends = [played(sync, lambda p: torch.optim.SGD(p, lr=0.05))[0] for sync in ("asp,momentum=lookahead", "asp")]
    assert_equal(ends[0], ends[1])

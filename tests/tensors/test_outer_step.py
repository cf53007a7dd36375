"""The outer step against its formulas: averaging, block momentum, DiLoCo; on workers and as servers make it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.optim.outer_step import PLAIN, OuterRule, OuterStep

NUMBERS = st.floats(-100, 100)
settled = settings(max_examples=50, deadline=None, derandomize=True, database=None)


def flat(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settled
@given(anchor=NUMBERS, means=st.lists(NUMBERS, min_size=1, max_size=6), rate=st.floats(0.1, 1.5), mu=st.floats(0.05, 0.99))
def test_diloco_is_nesterov_on_the_difference(anchor: float, means: list[float], rate: float, mu: float) -> None:
    step = OuterStep([flat(anchor)], [0], [OuterRule(rate, mu, nesterov=True)])
    theta, m = anchor, 0.0
    for mean in means:
        step.step([flat(mean)], [0.1])
        delta = theta - mean
        m = mu * m + delta
        theta -= rate * (delta + mu * m)
        torch.testing.assert_close(step.anchor[0], flat(theta), rtol=1e-9, atol=1e-6)


@settled
@given(
    anchor=NUMBERS,
    blocks=st.lists(st.tuples(NUMBERS, st.floats(1e-4, 1.0)), min_size=1, max_size=6),
    beta=st.floats(0.05, 0.99),
)
def test_block_momentum_is_in_units_of_the_rate(anchor: float, blocks: list[tuple[float, float]], beta: float) -> None:
    step = OuterStep([flat(anchor)], [0], [OuterRule(1.0, beta, in_lr=True)])
    x, u = anchor, 0.0
    for mean, lr in blocks:
        step.step([flat(mean)], [lr])
        u = beta * u - (mean - x) / lr
        x -= lr * u
        torch.testing.assert_close(step.anchor[0], flat(x), rtol=1e-7, atol=1e-4)
        x = float(step.anchor[0])


def test_groups_have_rules_of_their_own_and_a_rate_of_0_is_an_average() -> None:
    step = OuterStep([flat(1.0), flat(1.0), flat(1.0)], [0, 1, 2], [OuterRule(1.0, 0.5, in_lr=True)] * 2 + [PLAIN])
    step.step([flat(0.0)] * 3, [0.1, 0.2, 1.0])
    torch.testing.assert_close(torch.cat(step.anchor), flat(0.0, 0.0, 0.0))
    before = [None if m is None else m.clone() for m in step.momentum()]
    step.step([flat(2.0)] * 3, [0.0, 0.2, 1.0])  # no unit for the first: its momentum stays as it is
    torch.testing.assert_close(torch.cat(step.anchor), flat(2.0, 1.5, 2.0))  # u = 0.5 * 5 - 2 / 0.2
    assert before[0] is not None
    assert torch.equal(step.momentum()[0], before[0])  # type: ignore[arg-type]
    assert step.momentum()[2] is None


def test_it_goes_on_from_an_anchor_and_a_momentum() -> None:
    rules = [OuterRule(0.7, 0.9, nesterov=True)]
    whole, broken = OuterStep([flat(3.0, -1.0)], [0], rules), OuterStep([flat(3.0, -1.0)], [0], rules)
    for mean in (flat(1.0, 2.0), flat(0.5, 1.0)):
        whole.step([mean], [0.1])
    broken.step([flat(1.0, 2.0)], [0.1])
    again = OuterStep([torch.zeros(2, dtype=torch.float64)], [0], rules)
    again.load(broken.anchor, broken.momentum())
    again.step([flat(0.5, 1.0)], [0.1])
    assert torch.equal(again.anchor[0], whole.anchor[0])

"""Delay compensation against the formula, element by element; nothing where nothing is late."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.optim.delay_compensation import compensated

moderately = settings(max_examples=80, deadline=None, derandomize=True, database=None)
numbers = st.floats(-100, 100, allow_nan=False)
triples = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8)


def column(rows: list[tuple[float, float, float]], index: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.tensor([row[index] for row in rows], dtype=dtype)]


def bits(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int64)


@moderately
@given(triples, st.floats(0, 5))
def test_the_constant_form_is_the_formula(rows: list[tuple[float, float, float]], strength: float) -> None:
    (found,) = compensated(column(rows, 0), column(rows, 1), column(rows, 2), strength, False, 0.95, None)
    assert found is not None
    for value, (g, now, read) in zip(found.tolist(), rows, strict=True):
        assert math.isclose(value, g + strength * g * g * (now - read), rel_tol=1e-10, abs_tol=1e-10)


@moderately
@given(st.lists(triples, min_size=1, max_size=4), st.floats(0, 5), st.floats(0, 0.99))
def test_the_adaptive_form_is_the_formula(
    steps: list[list[tuple[float, float, float]]], strength: float, memory: float
) -> None:
    width = min(len(rows) for rows in steps)
    squares, by_hand = [torch.zeros(width, dtype=torch.float64)], [0.0] * width
    for rows in (rows[:width] for rows in steps):
        (found,) = compensated(column(rows, 0), column(rows, 1), column(rows, 2), strength, True, memory, squares)
        assert found is not None
        for index, (g, now, read) in enumerate(rows):
            by_hand[index] = memory * by_hand[index] + (1 - memory) * g * g
            strong = strength / math.sqrt(by_hand[index] + 1e-7)
            wanted = g + strong * g * g * (now - read)
            assert math.isclose(found[index].item(), wanted, rel_tol=1e-9, abs_tol=1e-9)
            assert math.isclose(squares[0][index].item(), by_hand[index], rel_tol=1e-12, abs_tol=1e-300)


@moderately
@given(triples, st.floats(0, 5), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_what_is_not_late_stays_to_the_bit(
    rows: list[tuple[float, float, float]], strength: float, adaptive: bool, dtype: torch.dtype
) -> None:
    rows = [*rows, (-0.0, 1.0, 0.0), (0.0, -0.0, 0.0)]
    gradient, now = column(rows, 0, dtype), column(rows, 1, dtype)
    squares = [torch.zeros_like(now[0])]
    (found,) = compensated(gradient, now, [now[0].clone()], strength, adaptive, 0.95, squares)
    assert torch.equal(bits(found), bits(gradient[0]))


@moderately
@given(triples, st.booleans())
def test_without_strength_nothing_changes(rows: list[tuple[float, float, float]], adaptive: bool) -> None:
    gradient = column([*rows, (-0.0, 1.0, 0.0)], 0)
    now, read = column([*rows, (-0.0, 1.0, 0.0)], 1), column([*rows, (-0.0, 1.0, 0.0)], 2)
    (found,) = compensated(gradient, now, read, 0.0, adaptive, 0.95, [torch.zeros_like(now[0])])
    assert torch.equal(bits(found), bits(gradient[0]))


@pytest.mark.parametrize("adaptive", [False, True])
def test_inputs_are_not_written_to_and_a_missing_gradient_stays_missing(adaptive: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient, now, read = (torch.randn(20, generator=generator) for _ in range(3))
    before = [tensor.clone() for tensor in (gradient, now, read)]
    squares = [torch.zeros(20), torch.zeros(20)]
    found = compensated([None, gradient], [now, now], [read, read], 0.5, adaptive, 0.9, squares)
    assert found[0] is None
    assert found[1] is not None
    assert not torch.equal(found[1], gradient)
    assert all(torch.equal(a, b) for a, b in zip((gradient, now, read), before, strict=True))
    assert not squares[0].any()
    assert bool(squares[1].any()) is adaptive


def test_parameters_may_be_given_and_no_graph_is_made() -> None:
    now = torch.nn.Parameter(torch.ones(3))
    (found,) = compensated([torch.ones(3)], [now], [torch.zeros(3)], 0.5, False, 0.9, None)
    assert found is not None
    assert not found.requires_grad
    assert found.tolist() == [1.5] * 3


def test_the_adaptive_form_needs_its_memory() -> None:
    with pytest.raises(UsageError, match="needs mean_square"):
        compensated([torch.ones(1)], [torch.ones(1)], [torch.ones(1)], 1.0, True, 0.9, None)

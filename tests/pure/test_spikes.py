"""Gradients that are far longer than usual (`spike=`): by how much they are shortened, what is usual, where it is chosen."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import SpecError, UsageError
from polytempo.sync.momentum import FOLLOWS, calmed
from polytempo.sync.spec import Spec, parse_spec

SGD = [{"lr": 0.1, "momentum": 0.9}]
PLAIN = [{"lr": 0.1, "momentum": 0}]
DAMPED = [{"lr": 0.1, "momentum": 0.9, "dampening": 0.1}]
ADAM = [{"lr": 0.001, "betas": (0.9, 0.999)}]


def usual_after(lengths: list[float], spike: float = 1.5, usual: float = 0.0) -> float:
    for length in lengths:
        _, usual = calmed(length, usual, spike)
    return usual


def test_the_first_gradient_is_what_is_usual() -> None:
    assert calmed(7.0, 0.0, 1.5) == (1.0, 7.0)


@pytest.mark.parametrize(
    ("length", "factor", "usual"), [(1.0, 1.0, 1.95), (2.0, 1.0, 2.0), (3.0, 1.0, 2.05), (12.0, 0.25, 2.05)]
)
def test_a_longer_one_counts_as_the_longest_that_is_let_through(length: float, factor: float, usual: float) -> None:
    assert calmed(length, 2.0, 1.5) == pytest.approx((factor, usual), rel=1e-15)


@pytest.mark.parametrize("length", [0.0, math.inf, math.nan])
def test_of_no_gradient_and_of_one_that_is_not_finite_nothing_is_learned(length: float) -> None:
    """And such a one stays what it is: what looks for numbers that are not finite finds them."""
    assert calmed(length, 0.0, 1.5) == (1.0, 0.0)
    assert calmed(length, 3.0, 1.5) == (1.0, 3.0)


def test_gradients_that_were_zero_for_long_do_not_hold_up_the_first_that_is_not() -> None:
    assert calmed(5.0, usual_after([0.0] * 10_000), 1.5) == (1.0, 5.0)
    assert calmed(5.0, usual_after([5.0, *[0.0] * 10_000]), 1.5) == (1.0, 5.0)


@pytest.mark.parametrize("spike", [1.1, 1.5, 4.0, 100.0])
@pytest.mark.parametrize("rise", [2.0, 100.0, 1e6])
def test_what_is_usual_follows_a_rise_that_lasts(spike: float, rise: float) -> None:
    """In each step by 1 + FOLLOWS (spike - 1), until gradients pass as they are."""
    bound = math.ceil(math.log(max(rise / spike, 1)) / math.log1p(FOLLOWS * (spike - 1)))
    usual = 1.0
    for _ in range(bound):
        _, usual = calmed(rise, usual, spike)
    assert calmed(rise, usual * (1 + 1e-9), spike)[0] == 1
    if rise > 1.2 * spike:
        assert calmed(rise, usual_after([rise] * (bound // 2), spike, 1.0), spike)[0] < 1, "not at once"


def test_one_spike_hardly_moves_what_is_usual() -> None:
    usual = usual_after([1.0] * 50)
    assert usual_after([1e9], usual=usual) == pytest.approx(1.025)
    assert usual_after([1e9, *[1.0] * 100], usual=usual) == pytest.approx(1.0, abs=2e-4)


lengths = st.floats(0, 1e30) | st.sampled_from((0.0, math.inf, math.nan))


@settings(max_examples=60)
@given(st.lists(lengths, max_size=30), st.floats(1.001, 1e6))
def test_nothing_is_lengthened_and_nothing_passes_that_is_too_long(found: list[float], spike: float) -> None:
    usual = 0.0
    for length in found:
        factor, after = calmed(length, usual, spike)
        assert 0 < factor <= 1
        assert math.isfinite(after)
        if usual and math.isfinite(length):
            assert length * factor <= spike * usual * (1 + 1e-12)
            assert min(usual, length or usual) * (1 - 1e-12) <= after <= usual * (1 + FOLLOWS * (spike - 1)) * (1 + 1e-12)
        if factor == 1 and usual and 0 < length < math.inf:
            assert after == pytest.approx(usual + FOLLOWS * (length - usual))
        usual = after


# In the text of a mode.


def settled(text: str, optimizer: str = "SGD", groups: list[dict[str, Any]] = SGD, workers: int = 4, **why: str) -> Spec:
    return parse_spec(text).settled(optimizer, groups, workers=workers, **why)


def test_a_text_without_it_shortens_nothing() -> None:
    for text in ("asp", "asp,momentum=lookahead", "asp,momentum=worker", "bsp", "downpour"):
        assert parse_spec(text).spike == 0
    assert parse_spec("asp,spike=2").spike == 2


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("asp", "asp,momentum=lookahead,spike=1.5"),
        ("asp,spike=3", "asp,spike=3,momentum=lookahead"),
        ("asp,momentum=lookahead", "asp,momentum=lookahead"),
        ("asp,momentum=worker", "asp,momentum=worker"),
        ("asp,momentum=worker,spike=2", "asp,momentum=worker,spike=2"),
        ("delay:2,spike=1.2,scale=1", "delay:2,spike=1.2,scale=1,momentum=lookahead"),
    ],
)
def test_it_is_chosen_with_the_momentum_and_not_beside_one_that_is_named(text: str, whole: str) -> None:
    assert settled(text).text == whole


@pytest.mark.parametrize("value", ["0.5", "1", "0", "-2", "abc", "nan", "inf", ""])
def test_what_would_shorten_usual_gradients_is_refused(value: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec(f"asp,spike={value}")
    assert "\n" not in str(refused.value)
    assert "spike" in str(refused.value)
    assert not value or "a number above 1" in str(refused.value)


@pytest.mark.parametrize("mode", ["bsp", "downpour", "asup", "local:2", "gossip:ring"])
def test_modes_without_momentum_at_workers_do_not_have_it(mode: str) -> None:
    with pytest.raises(SpecError, match="has no option 'spike'"):
        parse_spec(f"{mode},spike=2")


WITHOUT_EFFECT = [
    ("momentum=server", "SGD", SGD, "", "momentum=server keeps it on the servers"),
    ("momentum=async", "SGD", SGD, "", "momentum=async keeps it on the servers"),
    ("dc=0.04", "SGD", SGD, "", "dc and dca correct gradients there"),
    ("decay=0.9", "SGD", SGD, "because", "because"),
    ("decay=0.9", "SGD", PLAIN, "", "SGD has none"),
    ("decay=0.9", "SGD", DAMPED, "", "that of SGD is of changes"),
    ("momentum=lookahead", "Adam", ADAM, "", "that of Adam is of changes"),
    ("decay=0.9", "Adam", ADAM, "", "that of Adam is of changes"),
    ("decay=0.9", "Own", SGD, "", "its look-ahead is not known"),
    ("decay=0.9", "", SGD, "the look-ahead of Own is not known", "the look-ahead of Own is not known"),
]


@pytest.mark.parametrize(("option", "optimizer", "groups", "why", "says"), WITHOUT_EFFECT)
def test_where_it_could_have_no_effect_it_is_refused(
    option: str, optimizer: str, groups: list[dict[str, Any]], why: str, says: str
) -> None:
    text = f"asp,spike=2,{option}"
    with pytest.raises(UsageError) as refused:
        settled(text, optimizer, groups, needs_server=why)
    assert str(refused.value) == (
        f"{text}: spike= shortens gradients that go into momentum at each worker, and {says}; leave it out"
    )


@pytest.mark.parametrize(("option", "optimizer", "groups", "why", "says"), WITHOUT_EFFECT)
def test_one_worker_alone_is_refused_nothing(
    option: str, optimizer: str, groups: list[dict[str, Any]], why: str, says: str
) -> None:
    """So a script is tried without a job."""
    text = f"asp,spike=2,{option}"
    assert settled(text, optimizer, groups, workers=1, needs_server=why).text == text


def test_without_momentum_it_works_where_momentum_at_workers_is_named() -> None:
    assert settled("asp,spike=2,momentum=lookahead", "SGD", PLAIN).spike == 2


def test_it_is_told_in_the_line_about_momentum() -> None:
    told = settled("asp,spike=2").told("SGD", "")
    assert told.startswith("asp,spike=2,momentum=lookahead: each worker keeps the momentum of its own SGD")
    assert "; gradients above 2 times their usual length are shortened (spike=2); " in told
    assert "shorten" not in settled("asp,momentum=lookahead").told("SGD", "")
    assert "shorten" not in settled("asp", "Adam", ADAM).told("Adam", "")
    assert "\n" not in told

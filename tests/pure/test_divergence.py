"""The rule by which a training has diverged: told within 20 updates of the blow-up, in any units; never of a healthy one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.protocol.training_troubles import Circumstances, diverged, ends, goes_on, not_finite
from polytempo.report.summary import divergence_in_words
from polytempo.sync.divergence import DivergenceRule, Seen

#: What a push has told: loss, gradient, change, size.
Signs = tuple[float | None, float, float, float]
SOON = 20


def first_alarm(signs: Iterable[Signs], workers: int = 4) -> int | None:
    rule = DivergenceRule(workers)
    return next((number for number, push in enumerate(signs) if rule.add([Seen(*push)]) is not None), None)


def healthy(seed: int, pushes: int, loss: bool = True) -> Iterator[Signs]:
    """It learns, with noise, spikes of 10 to 30 times the gradient, and a rate that falls, is started again, and falls."""
    dice = Random(seed)
    for push in range(pushes):
        level = 2.3 * math.exp(-push / 150) + 0.05
        spike = dice.uniform(10, 30) if dice.random() < 0.05 else 1.0
        rate = 0.1 * (0.02 + abs(math.cos(push / 70)))
        noise = math.exp(dice.gauss(0, 0.4))
        change = min(rate * spike, 0.5) if push >= 4 else 0.0
        yield (
            level * noise * (2 if spike > 1 else 1) if loss else None,
            (0.3 + level) * noise * spike,
            change,
            5 + push / 50,
        )


def blown_up(onset: int, growth: float, pushes: int, loss: bool = True) -> Iterator[Signs]:
    """It is healthy until this push; from there on loss, gradient and values grow by this factor in each."""
    for push, (level, gradient, change, size) in enumerate(healthy(3, pushes)):
        grown = growth ** max(0, push - onset)
        after = push > onset
        yield (
            level * grown**2 if loss and level is not None else None,
            gradient * grown,
            0.45 if after else change,
            size * grown,
        )


@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("workers", [1, 4, 16])
def test_no_alarm_while_a_training_is_healthy(workers: int, loss: bool) -> None:
    assert [seed for seed in range(60) if first_alarm(healthy(seed, 600, loss), workers) is not None] == []


@pytest.mark.parametrize(
    "signs",
    [
        # Noise around a loss of zero, orders of magnitude up from where it was.
        [
            (10.0 ** -min(k / 20, 8) if k < 300 else 1e-4 * (1 + k % 7), 10.0 ** -min(k / 20, 8), 1e-6, 1.0)
            for k in range(900)
        ],
        # From zero, in long steps at first, at a warm-up.
        [(2.3 - 0.002 * k, 1.0, 0.0 if not k else min(1.0, 3 / k), 0.01 * k**2) for k in range(300)],
        # Out of a saddle: gradients and values grow a hundredfold, and the loss falls.
        [
            (1.0 / (1 + math.exp(k / 5 - 12)), 0.01 * math.exp(min(k / 8, 5)), 0.12, 0.1 * math.exp(min(k / 12, 5)))
            for k in range(300)
        ],
        # What is rewarded grows, and so does a loss that says little.
        [(0.01 + 0.01 * k, 0.1 + 0.01 * k, 0.002, 10.0) for k in range(900)],
        # What cannot be learned, at a rate that is high; of the first batches most were easy.
        [((0.4, 1.2)[k % 8 > 4] if k < 8 else 1.0 + 0.05 * (k % 5), 1.4, 0.12, 1.0) for k in range(300)],
        # A regression that starts high, on data without noise.
        [(1e6 * 0.9**k, 1e4 * 0.95**k, 0.0 if not k else 0.5 / k, 100 * (1 - 0.9**k)) for k in range(300)],
        # A network that is normalised: values grow, gradients shrink, the loss falls.
        [(2.3 / (1 + k / 50), 1 / (1 + k / 30), 0.05, 1 + k / 30) for k in range(300)],
    ],
)
def test_what_is_no_divergence(signs: list[Signs]) -> None:
    assert first_alarm(signs) is None


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("onset", [12, 40, 250])
@pytest.mark.parametrize("growth", [1.1, 1.5, 3.0])
def test_growth_is_told_within_twenty_updates(growth: float, onset: int, workers: int) -> None:
    for loss in (True, False):
        signs = list(blown_up(onset, growth, onset + 120, loss))
        alarm = first_alarm(signs, workers)
        there = onset + math.ceil(math.log(8) / math.log(growth))  # gradients are 8 times as large, the loss 64 times
        assert alarm is not None
        assert onset < alarm <= there + SOON


def test_with_many_workers_it_is_told_within_five_steps_of_each() -> None:
    alarm = first_alarm(blown_up(200, 1.02, 600), workers=16)
    assert alarm is not None
    assert 200 < alarm < 200 + math.log(8) / math.log(1.02) + 5 * 16


def test_a_training_that_is_lost_is_told_though_it_is_quiet() -> None:
    """ReLUs have died: the loss is what it was, gradients are small, values large."""
    signs: list[Signs] = [*[(2.3, 1.0, 0.05, 5.0)] * 40, *[(2.3, 0.5, 0.001, 40.0)] * 60]
    alarm = first_alarm(signs)
    assert alarm is not None
    assert alarm < 40 + 48


def test_values_that_have_grown_while_nothing_was_learned_are_told() -> None:
    assert first_alarm([*[(2.3, 1.0, 0.05, 5.0)] * 20, *[(2.35, 1.0, 0.01, 60.0)] * 60]) is not None
    assert first_alarm([(2.3, 1.0, 0.0, 0.0), *[(2.3 + 0.01 * (k % 3), 1.0, 1 / k, 0.1 * k) for k in range(1, 90)]]) is None


def test_of_blocks_of_local_steps_every_step_counts() -> None:
    """A rate that is far too high has spoiled the first block: what it began with is the start."""
    block = [Seen(2.3, 1.0, 0.0, 5.0), *[Seen(80.0, 9.0, 0.6, 60.0)] * 3]
    rule = DivergenceRule(4)
    told = [rule.add(block) for _ in range(4)]
    told += [rule.add([Seen(20.0, 2.0, 0.01, 90.0)] * 4) for _ in range(8)]
    (found,) = [one for one in told if one is not None]
    assert found.start == 2.3


@settings(max_examples=30)
@given(st.integers(-12, 12), st.integers(-12, 12), st.integers(-12, 12), st.integers(0, 1000))
def test_units_do_not_matter(loss: int, gradient: int, size: int, seed: int) -> None:
    dice = Random(seed)
    made = list(blown_up(30, 1 + dice.random(), 100))
    scaled = [(a * 2.0**loss if a is not None else None, b * 2.0**gradient, c, d * 2.0**size) for a, b, c, d in made]
    assert first_alarm(made) == first_alarm(scaled) is not None


def test_a_number_that_is_not_finite_is_told_at_once() -> None:
    for push in (0, 5, 100):
        rule = DivergenceRule(4)
        assert all(rule.add([Seen(*signs)]) is None for signs in list(healthy(0, push)))
        found = rule.add_nonfinite()
        assert found is not None
        assert not found.finite
        assert rule.add_nonfinite() is None, "once"
    assert first_alarm([*healthy(0, 50), (1.0, 1.0, 0.0, math.nan)]) == 50
    assert first_alarm([*healthy(0, 50), (math.nan, math.inf, 0.0, 1.0), *healthy(0, 50)]) is None, (
        "the push counts, not its loss"
    )


def test_a_training_can_come_back() -> None:
    rule = DivergenceRule(4)
    told = [rule.add([Seen(*signs)]) for signs in [*healthy(0, 30), *[(9.0, 20.0, 0.4, 9.0)] * 20]]
    assert len([found for found in told if found is not None]) == 1
    assert rule.found is not None
    assert not rule.found.recovered
    told = [rule.add([Seen(0.4, 0.5, 0.01, 9.0)]) for _ in range(20)]
    assert rule.found.recovered
    assert not any(told)
    again = [rule.add([Seen(9.0, 20.0, 0.4, 9.0)]) for _ in range(20)]
    assert len([found for found in again if found is not None]) == 1, "and diverge again"
    rule.add_nonfinite()
    for _ in range(16):
        assert not rule.found.recovered
        rule.add([Seen(0.4, 0.5, 0.01, 9.0)])
    assert rule.found.recovered


def on_a_quadratic(rate: float, looks_ahead: bool, seed: int, workers: int = 4) -> Iterator[Signs]:
    """SGD with momentum 0.9 by workers in turn, one push of each in flight; momentum is the servers', or looks ahead."""
    dice, curvature, momentum = Random(seed), (1.0, 0.4, 0.1, 0.02), 0.9
    values = [dice.gauss(0, 1) for _ in curvature]
    reads = [list(values) for _ in range(workers)]
    velocities = [[0.0] * 4 for _ in range(workers if looks_ahead else 1)]
    last: dict[int, list[float]] = {}
    for push in range(400):
        worker = push % workers
        at = reads[worker]
        gradient = [h * x + 0.01 * dice.gauss(0, 1) for h, x in zip(curvature, at, strict=True)]
        loss, size = sum(h * x * x / 2 for h, x in zip(curvature, at, strict=True)) + 0.01, math.hypot(*at)
        if size > 1e100:
            return
        yield loss, math.hypot(*gradient), math.dist(at, last.get(worker, at)) / size, size
        last[worker] = at
        velocity = velocities[worker % len(velocities)]
        velocity[:] = [momentum * v + g for v, g in zip(velocity, gradient, strict=True)]
        along = [g + momentum * v for g, v in zip(gradient, velocity, strict=True)] if looks_ahead else velocity
        values = [x - rate / workers * step for x, step in zip(values, along, strict=True)]
        reads[worker] = list(values)


@pytest.mark.parametrize("looks_ahead", [True, False])
def test_it_tells_rates_above_the_limit_from_rates_below(looks_ahead: bool) -> None:
    """The largest stable rate of 4 workers with momentum 0.9: 0.138 with momentum on the servers, 0.88 with a look-ahead."""
    limit = 0.88 if looks_ahead else 0.138
    for seed in range(10):
        for share in (0.2, 0.5, 0.8):
            assert first_alarm(on_a_quadratic(share * limit, looks_ahead, seed)) is None
        for share in (2, 4, 20):
            signs = list(on_a_quadratic(share * limit, looks_ahead, seed))
            there = next(
                number for number, (loss, *_) in enumerate(signs) if loss is not None and loss > 4 * (signs[0][0] or 0)
            )
            alarm = first_alarm(signs)
            assert alarm is not None
            assert alarm <= there + SOON


# The words.


def test_the_cause_that_is_named() -> None:
    on_servers = Circumstances("asp,momentum=server", 0.4, 0.9, staleness=2.98).advice
    assert "momentum 0.9 on the servers" in on_servers
    assert "3.0 updates stale" in on_servers
    assert "(in asp,momentum=server, at the rate 0.4)" in on_servers
    assert "momentum=lookahead" in on_servers
    own_rule = Circumstances("asup", 0.4, 0.9, movable=False, staleness=1.8).advice
    assert own_rule.endswith("(in asup, at the rate 0.4); lower it, bound the staleness (ssp:3), or lower the rate")
    stale = Circumstances("ssp:3", 0.4, staleness=2.0).advice
    assert stale == (
        "likely cause: the rate 0.4 is too high for gradients that are 2.0 updates stale on average (in ssp:3); lower it, "
        "bound the staleness (ssp:3), or clip (clip_norm=)"
    )
    fresh = Circumstances("bsp", 8.0, 0.9).advice
    assert fresh == "likely cause: the rate 8 is too high (in bsp); lower it, warm it up, or clip (clip_norm=)"
    local = Circumstances("local:8", None, local=True).advice
    assert local.startswith("likely cause: the rate is too high for local steps (in local:8); lower it, average more often")
    assert "nonfinite='refuse'" in Circumstances("bsp").advice_on_nonfinite


def test_the_lines() -> None:
    trouble = diverged(44, 4.2391, 2.31, 0.4151, 7.2)
    assert trouble == "diverged at update 44: the loss is 4.24, at the start it was 2.31; a step changes the values by 42 %"
    assert "gradients are 7.2 times what they were" in diverged(44, None, 2.31, 0.4151, 7.2)
    assert diverged(44, 4.2391, 2.31, 0.4151, size=12.4).endswith("by 42 %, which have grown to 12 times their size")
    assert goes_on(trouble, "lower it") == f"warning: {trouble}, and the job goes on with it; lower it"
    assert ends(not_finite(1, 3, "gradient"), "lower it") == (
        "worker 1, step 3: its gradient is not finite (NaN or infinite), and the job ends (--on-divergence stop); lower it"
    )
    assert divergence_in_words({}) == ""
    assert divergence_in_words({"update": 44, "recovered": False}) == "diverged at update 44"
    assert divergence_in_words({"update": 44, "recovered": True}) == "came back after it had diverged at update 44"

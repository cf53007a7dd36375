"""What is done about stale gradients: by hand-computed figures, and by what must hold for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.sync.corrections import NOTHING, Compensation, Corrections, MeanStaleness, Verdict
from polytempo.sync.spec import parse_spec

moderately = settings(max_examples=100, deadline=None, derandomize=True, database=None)

COMPENSATIONS = st.none() | st.builds(Compensation, st.floats(1e-3, 10), st.booleans(), st.floats(0, 0.99))
ANY = st.builds(Corrections, st.booleans(), st.floats(1e-3, 1), st.none() | st.integers(0, 20), st.booleans(), COMPENSATIONS)


@pytest.mark.parametrize(
    ("options", "staleness", "verdict"),
    [
        ("", 7, Verdict(1.0)),
        ("lr=staleness", 0, Verdict(1.0)),
        ("lr=staleness", 1, Verdict(1.0)),
        ("lr=staleness", 4, Verdict(0.25)),
        ("decay=0.5", 3, Verdict(0.125)),
        ("decay=1", 3, Verdict(1.0)),
        ("lr=staleness,decay=0.5", 2, Verdict(0.125)),
        ("drop=8", 8, Verdict(1.0)),
        ("drop=8", 9, Verdict(0.0, "staleness 9 is above 8")),
        ("drop=0", 0, Verdict(1.0)),
        ("drop=0,lr=staleness", 1, Verdict(0.0, "staleness 1 is above 0")),
        ("drop=8,decay=0.5", 1, Verdict(0.5)),
    ],
)
def test_rates_and_drops(options: str, staleness: int, verdict: Verdict) -> None:
    assert parse_spec(f"asp,{options}" if options else "asp").corrections.verdict(staleness) == verdict


@pytest.mark.parametrize(
    ("momentum", "mean", "expected"),
    [
        (0.9, 0, 0.9),
        (0.9, 7, 0.2),  # the published example: 8 workers
        (0.9, 1, 0.8),
        (0.9, 2.5, 0.65),
        (0.9, 9, 0.0),
        (0.9, 100, 0.0),
        (0.0, 3, 0.0),
        (0.5, 0.5, 0.25),
    ],
)
def test_momentum(momentum: float, mean: float, expected: float) -> None:
    assert parse_spec("asp,momentum=async").corrections.momentum_for(momentum, mean) == pytest.approx(expected, abs=1e-12)
    assert parse_spec("asp").corrections.momentum_for(momentum, mean) == momentum


@pytest.mark.parametrize(
    ("options", "compensation"),
    [
        ("dc=0.04", Compensation(0.04, False, 0.95)),
        ("dca=2", Compensation(2.0, True, 0.95)),
        ("dcm=0.5,dca=2", Compensation(2.0, True, 0.5)),
        ("dc=0", None),
        ("dca=0,dcm=0.5", None),
        ("scale=1", None),
    ],
)
def test_compensation(options: str, compensation: Compensation | None) -> None:
    corrections = parse_spec(f"ssp:3,{options}").corrections
    assert corrections.compensation == compensation
    assert corrections.any == (compensation is not None)


def test_any() -> None:
    assert not NOTHING.any
    assert not parse_spec("bsp").corrections.any
    assert not parse_spec("asup,momentum=0.5").corrections.any
    for option in ("lr=staleness", "decay=0.9", "drop=0", "momentum=async", "dc=1", "dca=1"):
        assert parse_spec(f"asp,{option}").corrections.any
        assert parse_spec(f"asup,{option}").corrections.any


@given(corrections=ANY, momentum=st.floats(0, 0.999))
@moderately
def test_nothing_is_done_to_what_is_fresh(corrections: Corrections, momentum: float) -> None:
    assert corrections.verdict(0) == Verdict(1.0)
    assert corrections.momentum_for(momentum, 0.0) == momentum


@given(corrections=ANY, staleness=st.integers(0, 50))
@moderately
def test_more_staleness_never_means_more_weight(corrections: Corrections, staleness: int) -> None:
    fresher, staler = corrections.verdict(staleness), corrections.verdict(staleness + 1)
    assert 0 <= staler.rate <= fresher.rate <= 1
    assert not fresher.drop or staler.drop
    assert bool(fresher.drop) == (corrections.most is not None and staleness > corrections.most)


@given(corrections=ANY, momentum=st.floats(0, 0.999), mean=st.floats(0, 100), more=st.floats(0, 10))
@moderately
def test_momentum_stays_between_nothing_and_what_was_asked_for(
    corrections: Corrections, momentum: float, mean: float, more: float
) -> None:
    used = corrections.momentum_for(momentum, mean)
    assert 0 <= corrections.momentum_for(momentum, mean + more) <= used <= momentum


@given(corrections=ANY, staleness=st.integers(0, 50))
@moderately
def test_a_reason_is_known_again(corrections: Corrections, staleness: int) -> None:
    reason = corrections.verdict(staleness).drop
    assert corrections.gives(reason) == bool(reason)
    assert not NOTHING.gives(f"staleness {staleness} is above 3")
    most = corrections.most
    if most is not None:
        assert corrections.gives(f"staleness {staleness} is above {most}") == (staleness > most)
    for other in ("", "staleness", "staleness ", "staleness x is above 3", "worker 3 is not a member; it must join first"):
        assert not corrections.gives(other)


@given(values=st.lists(st.integers(0, 1000), min_size=1, max_size=50))
@moderately
def test_the_mean_is_that_of_all_so_far(values: list[int]) -> None:
    mean = MeanStaleness()
    for count, value in enumerate(values, 1):
        assert mean.add(value) == pytest.approx(sum(values[:count]) / count)

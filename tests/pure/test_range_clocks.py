"""Clocks of ranges say what a clock for each key would say, and never hold more segments than they need."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.tables.table_shard import NEVER, RangeClocks

often = settings(max_examples=100, deadline=None, derandomize=True, database=None)

KEYS = 30
WORKERS = 3
RANGES = st.tuples(st.integers(0, KEYS), st.integers(0, KEYS)).map(lambda ends: (min(ends), max(ends)))
STAMPS = st.lists(st.tuples(st.integers(0, WORKERS - 1), RANGES, st.integers(0, 4)), max_size=25)
Stamps = list[tuple[int, tuple[int, int], int]]


def stamped(stamps: Stamps) -> tuple[RangeClocks, dict[int, list[int]]]:
    """The clocks after these stamps, and a plain step for each worker and key."""
    clocks, plain = RangeClocks(KEYS), {worker: [NEVER] * KEYS for worker in range(WORKERS)}
    for worker, (start, stop), step in stamps:
        clocks.set(worker, start, stop, step)
        plain[worker][start:stop] = [step] * (stop - start)
    return clocks, plain


@given(stamps=STAMPS)
@often
def test_every_key_has_the_step_that_a_clock_of_its_own_would_have(stamps: Stamps) -> None:
    clocks, plain = stamped(stamps)
    assert {worker: [clocks.lowest(key, key + 1).get(worker, -1) for key in range(KEYS)] for worker in plain} == plain


@given(stamps=STAMPS)
@often
def test_segments_are_in_order_touch_each_other_cover_all_keys_and_differ_from_their_neighbours(stamps: Stamps) -> None:
    clocks, _ = stamped(stamps)
    for worker in range(WORKERS):
        segments = clocks.segments(worker)
        assert segments[0][0] == 0
        assert segments[-1][1] == KEYS
        assert all(start < stop for start, stop, _ in segments)
        assert all(one[1] == other[0] and one[2] != other[2] for one, other in pairwise(segments))


@given(stamps=STAMPS, within=RANGES)
@often
def test_the_lowest_and_the_highest_of_a_range_are_those_of_its_keys(stamps: Stamps, within: tuple[int, int]) -> None:
    clocks, plain = stamped(stamps)
    start, stop = within
    seen = {worker for worker, (first, last), _ in stamps if first < last} if start < stop else set()
    assert clocks.lowest(start, stop) == {worker: min(plain[worker][start:stop]) for worker in seen}
    assert clocks.highest(start, stop) == {worker: max(plain[worker][start:stop]) for worker in seen}


@given(stamps=STAMPS)
@often
def test_a_stamp_adds_two_segments_at_most(stamps: Stamps) -> None:
    clocks = RangeClocks(KEYS)
    for worker, (start, stop), step in stamps:
        before = len(clocks.segments(worker))
        clocks.set(worker, start, stop, step)
        assert len(clocks.segments(worker)) <= before + 2


@given(stamps=STAMPS)
@often
def test_what_was_saved_says_the_same(stamps: Stamps) -> None:
    clocks, plain = stamped(stamps)
    other = RangeClocks(KEYS)
    other.set(0, 3, 9, 77)
    other.load(clocks.saved())
    assert {worker: [other.lowest(key, key + 1).get(worker, -1) for key in range(KEYS)] for worker in plain} == plain
    assert other.saved() == clocks.saved()


def test_a_stamp_in_the_middle_cuts_a_segment_into_three() -> None:
    clocks = RangeClocks(100)
    clocks.set(0, 0, 100, 7)
    clocks.set(0, 10, 25, 9)
    assert clocks.segments(0) == [(0, 10, 7), (10, 25, 9), (25, 100, 7)]
    clocks.set(0, 5, 30, 7)
    assert clocks.segments(0) == [(0, 100, 7)]


@pytest.mark.parametrize("ends", [(-1, 3), (3, 31), (5, 4)])
def test_a_range_that_is_none_is_refused_and_changes_nothing(ends: tuple[int, int]) -> None:
    clocks = RangeClocks(KEYS)
    clocks.set(1, 2, 5, 8)
    for call in (lambda: clocks.set(1, *ends, 9), lambda: clocks.lowest(*ends), lambda: clocks.highest(*ends)):
        with pytest.raises(UsageError, match=f"a range inside 0 to {KEYS}, got {ends[0]} to {ends[1]}"):
            call()
    assert clocks.saved() == [[1, 2, 5, 8]]


def test_a_clock_needs_keys() -> None:
    with pytest.raises(UsageError, match="at least 1 key, got 0"):
        RangeClocks(0)

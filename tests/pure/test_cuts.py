"""Parts cover everything once, in order, and are alike."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.collectives.steps import GRAIN, cuts


@given(length=st.integers(0, 5000), count=st.integers(1, 20), grain=st.sampled_from([1, 7, GRAIN]))
@settings(deadline=None, derandomize=True, database=None)
def test_parts_cover_everything_once(length: int, count: int, grain: int) -> None:
    parts = cuts(length, count, grain)
    assert len(parts) == count
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(length))
    assert all(part.start % grain == 0 or part.start == length for part in parts)
    whole = [part.stop - part.start for part in parts]
    assert max(whole) - min(whole) <= 2 * grain - 1

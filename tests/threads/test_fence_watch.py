"""The thread that watches fences: what is reached is given once, what is discarded never, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from helpers import until
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.server.device_share import QUICK, SLOW, FenceWatch, pause


@contextmanager
def watching() -> Iterator[tuple[FenceWatch[int], list[int], list[int]]]:
    """A watch, how often it rang, and what is reached."""
    rung: list[int] = []
    watch: FenceWatch[int] = FenceWatch(lambda: rung.append(1))
    try:
        yield watch, rung, []
    finally:
        watch.close()


@given(st.lists(st.tuples(st.sampled_from(["add", "reach", "discard", "take"]), st.integers(0, 5)), max_size=40))
@settings(max_examples=40, deadline=None)
def test_what_is_reached_is_given_once_and_what_is_discarded_never(calls: list[tuple[str, int]]) -> None:
    """Against a model: keys are used once; those that are reached and not discarded are given, each once."""
    with watching() as (watch, _, _):
        reached: set[int] = set()
        live: dict[int, int] = {}  # number: key
        expected: set[int] = set()
        given: list[int] = []
        number = 0
        for what, which in calls:
            if what == "add" and which not in live:
                number, live[which] = number + 1, number
                watch.add(live[which], lambda key=live[which]: key in reached)  # type: ignore[misc]
            elif what == "reach" and which in live:
                reached.add(live[which])
                expected.add(live.pop(which))
            elif what == "discard" and which in live:
                watch.discard(live.pop(which))
            elif what == "take":
                given += watch.take()
        until(lambda: bool(given.extend(watch.take())) or expected <= set(given), "all that was reached is given")
        assert sorted(given) == sorted(expected)


def test_it_rings_once_something_is_reached_and_sleeps_without_a_pending_push() -> None:
    with watching() as (watch, rung, _):
        watch.add(1, lambda: bool(gone))
        gone: list[int] = []
        assert watch.take() == []
        gone.append(1)
        until(lambda: len(rung) == 1, "it rings")
        assert watch.take() == [1]
        assert not watch._pending
        thread = watch._thread
        assert thread is not None
    assert not thread.is_alive()
    assert all(other.name != "fence watch" for other in threading.enumerate() if other is thread)


def test_without_a_push_there_is_no_thread() -> None:
    with watching() as (watch, _, _):
        assert watch._thread is None


@given(st.floats(0, 1e6))
def test_a_look_is_seldom_late(pending: float) -> None:
    assert QUICK <= pause(pending) <= SLOW
    assert pause(pending) <= max(QUICK, 0.01 * pending)

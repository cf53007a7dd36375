"""The queue of an epoch: every place is done exactly once, whatever is abandoned, discarded or lost on the way."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.sync.sample_queue import Range, SampleQueue, merged, without

often = settings(max_examples=120, deadline=None, derandomize=True, database=None)
RANGES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=6
)


def places(ranges: list[Range]) -> set[int]:
    return {place for start, stop in ranges for place in range(start, stop)}


@often
@given(first=RANGES, second=RANGES)
def test_ranges_are_sets_of_places(first: list[Range], second: list[Range]) -> None:
    both = merged([*first, *second])
    assert places(both) == places(first) | places(second)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(both)), "as few as can be"
    rest = without(first, second)
    assert places(rest) == places(first) - places(second)
    assert all(start < stop for start, stop in rest)


@often
@given(
    length=st.integers(1, 60),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 9)), max_size=60),
)
def test_every_place_is_done_once_and_none_is_lost(length: int, moves: list[tuple[int, int, int]]) -> None:
    """Workers take, finish, give back and leave, and once the job goes on from a checkpoint with what is done."""
    queue, held, done = SampleQueue(length), {worker: [] for worker in range(3)}, set()
    for kind, worker, count in moves:
        mine = held[worker]
        if kind == 0:
            taken = queue.take(worker, count)
            assert len(places(taken)) == min(count, length - len(done) - sum(len(places(r)) for r in held.values()))
            assert not places(taken) & (done | {place for ranges in held.values() for place in places(ranges)})
            mine += taken
        elif kind == 1 and mine:
            one = mine.pop(0)
            queue.finish(worker, [one])
            assert not places([one]) & done
            done |= places([one])
        elif kind == 2 and mine:
            queue.give_back(worker, [mine.pop()])
        elif kind == 3:
            queue.give_back(worker)
            mine.clear()
        assert places(queue.done) == done
        assert queue.left == length - len(done) - sum(len(places(ranges)) for ranges in held.values())
    resumed = SampleQueue(length, queue.done)
    rest = places(resumed.take(0, length))
    assert rest == set(range(length)) - done, "after a resume exactly what was not done"
    assert resumed.is_empty
    resumed.finish(0, [(place, place + 1) for place in rest])
    assert resumed.is_done


def test_what_returns_is_leased_first_and_lowest_first() -> None:
    queue = SampleQueue(10)
    assert queue.take(0, 4) == [(0, 4)]
    assert queue.take(1, 4) == [(4, 8)]
    queue.give_back(0, [(1, 3)])
    assert queue.take(1, 4) == [(1, 3), (8, 10)]
    assert queue.is_empty
    queue.give_back(1)
    assert queue.take(2, 99) == [(1, 3), (4, 10)]

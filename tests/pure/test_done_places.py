"""What of an epoch is done: the places of applied pushes, after what earlier jobs have done of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from polytempo.server.done_places import DonePlaces
from polytempo.train.epoch_order import remaining

from polytempo.protocol.values import Position
from polytempo.sync.joint_batches import ranges_of


def place(*ranges: tuple[int, int], epoch: int = 0, length: int = 20) -> Position:
    return Position(epoch, sum(stop - start for start, stop in ranges), "train", done=ranges, length=length)


def test_places_of_several_workers_are_one_part_of_the_epoch() -> None:
    done = DonePlaces()
    done.apply([place((0, 3)), place((3, 4), (9, 12))])
    done.apply([place((4, 6))])
    names, parts = done.parts([])
    assert names == {"train"}
    assert parts == [{"sampler": "train", "epoch": 0, "length": 20, "done": [[0, 6], [9, 12]]}]
    assert list(remaining(range(20), parts)) == [6, 7, 8, *range(12, 20)]


def test_what_earlier_jobs_have_done_of_the_epoch_comes_first() -> None:
    earlier = [
        {"sampler": "train", "epoch": 3, "size": 2, "taken": [2, 1]},
        {"sampler": "other", "epoch": 3, "size": 2, "taken": [2, 1]},
    ]
    done = DonePlaces()
    done.apply([place((0, 2), epoch=3, length=17)])
    _, parts = done.parts(earlier)
    assert parts[:1] == earlier[:1]
    assert list(remaining(range(20), parts)) == list(range(5, 20)), "0, 1 and 2 before, then 3 and 4"


def test_another_time_through_the_epoch_starts_over() -> None:
    earlier = [{"sampler": "train", "epoch": 0, "size": 1, "taken": [10]}]
    done = DonePlaces()
    done.apply([place((0, 10), length=10)])
    done.apply([place((0, 4), length=20)])
    assert done.parts(earlier)[1] == [{"sampler": "train", "epoch": 0, "length": 20, "done": [[0, 4]]}]
    done.apply([place((4, 20), length=20)])
    done.apply([place((2, 3), length=20)])
    assert done.parts(earlier)[1] == [{"sampler": "train", "epoch": 0, "length": 20, "done": [[2, 3]]}]


def test_the_last_epoch_is_kept_and_where_places_are_leased_those_that_are_not_whole() -> None:
    for leased, kept in ((False, [6]), (True, [2, 3, 5, 6])):
        done = DonePlaces()
        for epoch in range(7):
            done.apply([place((0, 20 if epoch == 4 else 2), epoch=epoch)], leased)
        assert [part["epoch"] for part in done.parts([])[1]] == kept


def test_pushes_of_other_modes_say_nothing_of_places() -> None:
    done = DonePlaces()
    done.apply([Position(0, 5, "train")])
    assert done.parts([]) == (set(), [])


@given(st.lists(st.sets(st.integers(0, 29)), max_size=4))
def test_a_chain_of_jobs_leaves_out_exactly_what_each_has_done(jobs: list[set[int]]) -> None:
    rest, parts = list(range(30)), []
    for places in jobs:
        own = {one for one in places if one < len(rest)}
        parts.append({"length": len(rest), "done": [list(one) for one in ranges_of(own)]})
        rest = [sample for index, sample in enumerate(rest) if index not in own]
    assert list(remaining(range(30), parts)) == rest

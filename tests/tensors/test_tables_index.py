"""Where rows are kept: both indices against a dict, also when they grow and when ids collide."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.tables.index import LOAD, HashIndex, RangeIndex

moderately = settings(max_examples=80, deadline=None, derandomize=True, database=None)

IDS = st.one_of(st.integers(0, 30), st.integers(2**63 - 30, 2**63 - 1), st.integers(0, 2**63 - 1))
CALLS = st.lists(st.tuples(st.booleans(), st.lists(IDS, max_size=40)), max_size=12)


def tensor(ids: list[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


class Plain:
    """A dict of slots in the order of first touch."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def touch(self, ids: list[int]) -> tuple[list[int], list[bool]]:
        fresh = [one not in self.slots for one in ids]
        return [self.slots.setdefault(one, len(self.slots)) for one in ids], fresh


def check(index: HashIndex, plain: Plain) -> None:
    ids, slots = index.touched()
    assert dict(zip(ids.tolist(), slots.tolist(), strict=True)) == plain.slots
    assert ids.tolist() == sorted(plain.slots)
    assert torch.equal(index.ids_of(slots), ids)
    assert index.count == len(plain.slots) <= index.capacity


@given(calls=CALLS)
@moderately
def test_the_hash_index_is_a_dict_that_numbers_ids_as_they_come(calls: list[tuple[bool, list[int]]]) -> None:
    index, plain = HashIndex(0, 1), Plain()
    for touches, ids in calls:
        if touches:
            slots, fresh = index.touch(tensor(ids))
            assert (slots.tolist(), fresh.tolist()) == plain.touch(ids)
        else:
            assert index.find(tensor(ids)).tolist() == [plain.slots.get(one, -1) for one in ids]
    check(index, plain)


def test_it_grows_and_stays_below_its_load() -> None:
    index, plain = HashIndex(0, 1), Plain()
    dice = torch.Generator().manual_seed(1)
    for _ in range(40):
        ids = torch.randint(0, 2**63 - 1, (500,), generator=dice)
        slots, fresh = index.touch(ids)
        assert bool(fresh.all())
        assert slots.tolist() == plain.touch(ids.tolist())[0]
        assert index.count <= LOAD * len(index._keys)
        assert int((index._keys >= 0).sum()) == index.count
    check(index, plain)
    missing = torch.randint(0, 2**63 - 1, (5000,), generator=dice)
    assert bool((index.find(missing) == -1).all())


def unmixed(word: int) -> int:
    """The word that the index's hash makes this one of."""
    word ^= word >> 31 ^ word >> 62
    word = word * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    word ^= word >> 27 ^ word >> 54
    word = word * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return word ^ word >> 30 ^ word >> 60


@pytest.mark.parametrize("stride", [0, 1 << 32], ids=["same path", "same place, other strides"])
def test_ids_made_to_collide_are_kept_apart(stride: int) -> None:
    """All begin their search at place 5, until the map has more than 2**20 places."""
    ids = [one for k in range(600) if (one := unmixed((k << 20) * (1 if not stride else stride >> 20) + 5)) < 2**63]
    assert len(ids) > 200
    index, plain = HashIndex(0, 1), Plain()
    assert len({int(place) for place in index._paths(numpy.array(ids))[0]}) == 1, "they do not collide: nothing is tested"
    for start in range(0, len(ids), 70):
        slots, _ = index.touch(tensor(ids[start : start + 70]))
        assert slots.tolist() == plain.touch(ids[start : start + 70])[0]
    assert index.find(tensor(ids)).tolist() == [plain.slots[one] for one in ids]
    check(index, plain)


@given(rows=st.integers(1, 60), shards=st.integers(1, 5), data=st.data())
@moderately
def test_the_range_index_has_a_slot_for_each_row_of_its_shard(rows: int, shards: int, data: st.DataObject) -> None:
    total = 0
    for shard in range(shards):
        index = RangeIndex(rows, shard, shards)
        own = list(range(shard, rows, shards))
        assert index.capacity == len(own)
        total += index.capacity
        touched: set[int] = set()
        for _ in range(3):
            ids = data.draw(st.lists(st.sampled_from(own), max_size=9)) if own else []
            slots, fresh = index.touch(tensor(ids))
            assert slots.tolist() == [own.index(one) for one in ids]
            assert fresh.tolist() == [one not in touched for one in ids]
            touched |= set(ids)
            assert index.find(tensor(own)).tolist() == [own.index(i) if i in touched else -1 for i in own]
        ids_, slots = index.touched()
        assert ids_.tolist() == sorted(touched)
        assert torch.equal(index.ids_of(slots), ids_)
        assert index.count == len(touched)
    assert total == rows


def test_a_run_of_slots_is_touched_at_once() -> None:
    index = RangeIndex(10, 0, 1)
    index.touch(tensor([4, 4]))
    assert index.touch_slots(slice(3, 6)).tolist() == [True, False, True]
    assert index.count == 3
    assert index.touched()[0].tolist() == [3, 4, 5]

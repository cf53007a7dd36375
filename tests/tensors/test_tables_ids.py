"""What may be an id, rows named twice, the way to shards and back, and first values."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import PeerError, UsageError
from polytempo.protocol.values import TableInfo
from polytempo.tables.initializers import check_start, start_values
from polytempo.tables.routing import cut_range, join_range, range_ids, range_slots, route
from polytempo.tables.row_batches import checked_ids, coalesce

moderately = settings(max_examples=80, deadline=None, derandomize=True, database=None)

BOUNDED = TableInfo("users", 10, 4)
ENDLESS = TableInfo("words", 0, 4)
LISTS = st.lists(st.integers(0, 40), max_size=30)


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Ids.


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 3, 9],
        (1, 2, 3, 9),
        torch.tensor([[1, 2], [3, 9]]),
        torch.tensor([1, 2, 3, 9], dtype=torch.uint8),
        torch.tensor([1, 0, 2, 0, 3, 0, 9], dtype=torch.int32)[::2],
        numpy.array([[1, 2, 3, 9]], dtype=numpy.int16),
        numpy.array([1, 2, 3, 9], dtype=">i4"),
        numpy.array([9, 3, 2, 1], dtype=numpy.uint64)[::-1],
        [numpy.int64(1), 2, numpy.int8(3), 9],
    ],
    ids=str,
)
def test_integers_of_any_kind_and_shape_become_flat_int64(ids: object) -> None:
    flat = checked_ids(ids, BOUNDED)
    assert flat.dtype == torch.int64
    assert flat.tolist() == [1, 2, 3, 9]


@pytest.mark.parametrize("ids", [[], (), range(0), torch.tensor([]), numpy.zeros((0, 3))], ids=str)
def test_nothing_is_a_list_of_ids(ids: object) -> None:
    flat = checked_ids(ids, BOUNDED)
    assert flat.dtype == torch.int64
    assert flat.shape == (0,)


@pytest.mark.parametrize(
    ("ids", "found", "position"),
    [
        ([3, 10], "10", 1),
        ([3, -1, 11], "-1", 1),
        (torch.tensor([[1, 2], [10, -4]]), "10", 2),
        (numpy.array([0, 1, 99]), "99", 2),
        (torch.tensor([1.0, 2.0]), "1.0", 0),
        (numpy.array([0.5]), "0.5", 0),
        (torch.tensor([True]), "True", 0),
        ([1, True], "True", 1),
        ([1, 2.0], "2.0", 1),
        ([1, "2"], "'2'", 1),
        ([1, 2**63], str(2**63), 1),
        (numpy.array([2**63 + 5], dtype=numpy.uint64), str(2**63 + 5), 0),
    ],
    ids=str,
)
def test_what_is_no_id_is_named_with_its_table_and_its_position(ids: object, found: str, position: int) -> None:
    with pytest.raises(UsageError) as refusal:
        checked_ids(ids, BOUNDED)
    text = str(refusal.value)
    assert text.startswith(f"table 'users': expected ids from 0 to 9, got {found} at position {position} of ")
    assert "\n" not in text


@pytest.mark.parametrize("ids", ["12", 7, None, {1}, numpy.array(["a"])], ids=str)
def test_what_is_no_list_is_refused_by_its_type(ids: object) -> None:
    with pytest.raises(UsageError, match=r"table 'users': expected .* integer"):
        checked_ids(ids, BOUNDED)


def test_a_table_without_a_bound_takes_any_id_but_negative_ones() -> None:
    assert checked_ids([0, 2**63 - 1], ENDLESS).tolist() == [0, 2**63 - 1]
    with pytest.raises(
        UsageError, match="'words': expected ids from 0 to 2\\*\\*63 - 1, got -1 at position 0 of 1; leave pad"
    ):
        checked_ids([-1], ENDLESS)


# Rows that are named twice.


@given(ids=LISTS, seed=st.integers(0, 99))
@moderately
def test_each_id_stands_once_ascending_with_the_sum_of_its_rows_in_their_order(ids: list[int], seed: int) -> None:
    values = some(len(ids), 3, seed=seed)
    unique, sums = coalesce(torch.tensor(ids, dtype=torch.int64), values)
    assert unique.tolist() == sorted(set(ids))
    for place, one in enumerate(unique.tolist()):
        own = [values[position] for position, other in enumerate(ids) if other == one]
        wanted = own[0].clone()
        for row in own[1:]:
            wanted = wanted + row
        assert torch.equal(sums[place], wanted)


@pytest.mark.parametrize(("how", "pick"), [("min", min), ("max", max), ("last", lambda rows: rows[-1])])
@given(ids=LISTS)
@moderately
def test_other_ways_to_make_one_row_of_several(ids: list[int], how: str, pick: object) -> None:
    values = some(len(ids), 1)
    unique, rows = coalesce(torch.tensor(ids, dtype=torch.int64), values, how)
    for one, row in zip(unique.tolist(), rows[:, 0].tolist(), strict=True):
        own = [float(values[position, 0]) for position, other in enumerate(ids) if other == one]
        assert row == pick(own)  # type: ignore[operator]


def test_a_sum_of_one_row_is_that_row_to_the_sign_of_its_zeros() -> None:
    _, rows = coalesce(torch.tensor([5, 2, 5]), torch.tensor([[1.0], [-0.0], [2.0]]))
    assert rows.tolist() == [[-0.0], [3.0]]
    assert torch.signbit(rows[0, 0])


# To the shards and back.


@given(ids=LISTS, shards=st.integers(1, 5))
@moderately
def test_ids_go_to_the_shard_of_their_remainder_in_order_and_rows_come_back(ids: list[int], shards: int) -> None:
    flat = torch.tensor(ids, dtype=torch.int64)
    routing = route(flat, shards)
    assert [part.tolist() for part in routing.parts] == [[i for i in ids if i % shards == s] for s in range(shards)]
    values = torch.stack([flat * 10, flat * 10 + 1], 1)
    cuts = routing.cut(values)
    assert all(torch.equal(cut[:, 0], part * 10) for cut, part in zip(cuts, routing.parts, strict=True))
    assert torch.equal(routing.join(cuts), values)


@given(start=st.integers(0, 40), length=st.integers(0, 40), shards=st.integers(1, 5))
@moderately
def test_a_range_is_cut_like_the_list_of_its_ids(start: int, length: int, shards: int) -> None:
    stop = start + length
    routing = route(torch.arange(start, stop), shards)
    values = some(length, 2)
    for shard in range(shards):
        ids = range_ids(start, stop, shard, shards)
        assert torch.equal(ids, routing.parts[shard])
        slots = range_slots(start, stop, shard, shards)
        assert list(range(slots.start, slots.stop)) == (ids // shards).tolist()
    cuts = cut_range(values, start, shards)
    assert all(torch.equal(one, other) for one, other in zip(cuts, routing.cut(values), strict=True))
    assert torch.equal(join_range(cuts, start, stop, shards), values)


def test_rows_that_do_not_fit_what_was_asked_for_are_refused() -> None:
    routing = route(torch.arange(5), 2)
    for join in (routing.join, lambda parts: join_range(parts, 0, 5, 2)):
        with pytest.raises(PeerError, match="expected 2 rows from shard 1, got 3"):
            join([some(3, 1), some(3, 1)])
        with pytest.raises(PeerError, match="expected rows from 2 shards, got them from 1"):
            join([some(5, 1)])


# First values.

STARTS = ["uniform", "uniform:0.1", "normal:0.01"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", STARTS)
def test_a_rows_first_values_do_not_depend_on_what_else_is_asked_for(start: str, dtype: torch.dtype) -> None:
    ids = torch.cat([torch.arange(5000), torch.tensor([2**63 - 1, 2**62])])
    whole = start_values(start, 3, ids, 7, dtype)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    assert torch.equal(start_values(start, 3, ids[order], 7, dtype), whole[order])
    for place in (0, 1, 17, 4095, 4096, len(ids) - 1):
        assert torch.equal(start_values(start, 3, ids[place : place + 1], 7, dtype), whole[place : place + 1])


def test_a_number_depends_on_its_column_not_on_how_many_there_are() -> None:
    ids = torch.arange(100)
    for start in ("uniform:0.1", "normal:0.01"):
        assert torch.equal(
            start_values(start, 0, ids, 5, torch.float64), start_values(start, 0, ids, 8, torch.float64)[:, :5]
        )


@pytest.mark.parametrize("start", STARTS)
def test_seeds_ids_and_columns_all_make_other_numbers(start: str) -> None:
    one, other = (start_values(start, seed, torch.arange(200), 6, torch.float64) for seed in (1, 2))
    assert torch.cat([one, other]).unique().numel() == 2 * 200 * 6


def test_the_numbers_are_spread_as_the_start_says() -> None:
    ids = torch.arange(100_000)
    uniform = start_values("uniform", 1, ids, 4, torch.float64)
    assert float(uniform.abs().max()) <= 0.5
    assert float(uniform.mean()) == pytest.approx(0, abs=0.003)
    assert float(uniform.std()) == pytest.approx(0.5 / 3**0.5, rel=0.01)
    assert float(start_values("uniform:0.1", 1, ids, 4, torch.float64).abs().max()) == pytest.approx(0.1, rel=0.001)
    normal = start_values("normal:0.01", 1, ids, 4, torch.float64) / 0.01
    assert float(normal.mean()) == pytest.approx(0, abs=0.01)
    assert float(normal.std()) == pytest.approx(1, rel=0.01)
    assert float((normal.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.003)
    assert float((normal**4).mean()) == pytest.approx(3, rel=0.03)
    columns = torch.corrcoef(normal.T) - torch.eye(4, dtype=torch.float64)
    assert float(columns.abs().max()) < 0.015
    assert bool((start_values("zeros", 1, ids, 4, torch.float64) == 0).all())


def hashed(word: int) -> int:
    """The finaliser of splitmix64, in plain integers."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


@pytest.mark.parametrize("seed", [0, 7, -1, 2**64 - 1, 2**70])
def test_first_values_are_the_hash_of_seed_id_and_column(seed: int) -> None:
    """And must stay so from release to release: a checkpoint holds only rows that were pushed to."""
    ids, golden = [0, 1, 2**40, 2**63 - 1], 0x9E3779B97F4A7C15
    got = start_values("uniform:1", seed, torch.tensor(ids), 3, torch.float64)
    keys = [hashed((one + hashed((seed + golden) % 2**64)) % 2**64) for one in ids]
    wanted = [[(hashed((key + column * golden) % 2**64) >> 11) * 2.0**-52 - 1 for column in (1, 2, 3)] for key in keys]
    assert got.tolist() == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zeroes", "unknown start 'zeroes'; nearest: zeros; known: zeros, uniform:0.1, normal:0.01"),
        ("zeros:1", "zeros takes no argument, got 'zeros:1'; write zeros"),
        ("uniform:", "uniform needs a number above 0; write for example uniform:0.1"),
        ("uniform:-1", "expected a number above 0 in 'uniform:-1', got '-1'"),
        ("normal", "normal needs a number above 0; write for example normal:0.01"),
        ("normal:nan", "in 'normal:nan', got 'nan'"),
        ("normal:inf", "in 'normal:inf', got 'inf'"),
        ("", "unknown start ''; known"),
    ],
)
def test_a_start_that_cannot_be_read_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        check_start(text)
    assert words in str(refusal.value)

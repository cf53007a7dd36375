"""Tables: untouched rows, shards, rounds, ranges, mirrors, checkpoints, refusals and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_tables import Sharded, same, some

from polytempo.errors import PeerError, PolytempoError, UsageError
from polytempo.protocol.values import TableInfo
from polytempo.tables import table_shard
from polytempo.tables.row_batches import RowPush
from polytempo.tables.row_optimizers import RULES
from polytempo.tables.table_shard import TableShard
from polytempo.tables.validation import check_table

moderately = settings(max_examples=40, deadline=None, derandomize=True, database=None)

ROWS = 23
EVERY = list(range(ROWS))
kinds = pytest.mark.parametrize("rows", [ROWS, 0], ids=["bounded", "unbounded"])
rules = pytest.mark.parametrize("rule", RULES)


def described(rule: str = "sgd", rows: int = ROWS, dtype: str = "float64", **more: Any) -> TableInfo:
    start = "zeros" if rule == "ftrl" else "uniform"
    return TableInfo("t", rows, 3, dtype, **{"start": start, "seed": 5, "rule": rule, **more})


def ids_of(seed: int, size: int, unique: bool = True) -> list[int]:
    dice = torch.Generator().manual_seed(seed)
    picked = torch.randperm(ROWS, generator=dice)[:size] if unique else torch.randint(0, ROWS, (size,), generator=dice)
    return picked.tolist()


def trained(info: TableInfo, shards: int = 1, steps: int = 6) -> Sharded:
    """After some updates of one and of two pushes."""
    table, dtype = Sharded(info, shards), getattr(torch, info.dtype)
    for step in range(steps):
        one, other = ids_of(step, 6), ids_of(100 + step, 4)
        pushes = [(one, some(6, 3, seed=step, dtype=dtype), 1.0), (other, some(4, 3, seed=step + 50, dtype=dtype), 3.0)]
        table.push(*pushes[: 1 + step % 2])
    return table


# Untouched rows, order, shards.


@kinds
@rules
def test_rows_that_nobody_pushed_keep_their_bits(rule: str, rows: int) -> None:
    table = trained(described(rule, rows))
    for step in range(5):
        before, ids = table.pull(EVERY), ids_of(step + 7, 5)
        table.push((ids, some(5, 3, seed=step)))
        others = [one for one in EVERY if one not in ids]
        assert same(table.pull(others), before[others])
    assert not same(table.pull(ids), before[ids])


@kinds
@rules
def test_neither_the_number_of_shards_nor_the_order_of_ids_changes_a_bit(rule: str, rows: int) -> None:
    wanted = trained(described(rule, rows, "float32")).pull(EVERY)
    for shards in (2, 3, 5):
        assert same(trained(described(rule, rows, "float32"), shards).pull(EVERY), wanted)
    mixed = Sharded(described(rule, rows, "float32"), 2)
    for step in range(6):
        pushes = []
        for seed, size, weight in ((step, 6, 1.0), (100 + step, 4, 3.0))[: 1 + step % 2]:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(step))
            values = some(size, 3, seed=step + 50 * (size == 4), dtype=torch.float32)
            pushes.append(([ids_of(seed, size)[place] for place in order.tolist()], values[order], weight))
        mixed.push(*pushes)
    assert same(mixed.pull(EVERY), wanted)


@kinds
@pytest.mark.parametrize("start", ["zeros", "uniform", "normal:0.1"])
def test_reading_a_row_does_not_make_it(start: str, rows: int) -> None:
    table = Sharded(described("sgd", rows, start=start), 2)
    first = table.pull([4, 9, 4])
    assert same(first[0], first[2])
    assert sum(one.count for one in table.tables) == 0
    table.push(([9], torch.zeros(1, 3, dtype=torch.float64)))
    assert same(table.pull([4, 9, 4]), first)
    assert [one.count for one in table.tables] == [0, 1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_two_bytes_are_rounded_once_an_update(dtype: str) -> None:
    kind = getattr(torch, dtype)
    ours, wide = Sharded(described("adagrad", dtype=dtype)), Sharded(described("adagrad", dtype="float32"))
    wide.tables[0].fill(torch.arange(ROWS), ours.pull(EVERY).float())
    values = some(6, 3, dtype=kind)
    for table, pushed in ((ours, values), (wide, values.float())):
        table.push((ids_of(0, 6), pushed))
    assert same(ours.pull(EVERY), wide.pull(EVERY).to(kind))
    assert ours.tables[0].saved()["state.sum"].dtype == torch.float32


# Rounds.


def dense(pushes: list[tuple[list[int], torch.Tensor, float]]) -> torch.Tensor:
    """The weighted mean of the pushes as gradients of the whole table."""
    total = torch.zeros(ROWS, 3, dtype=torch.float64)
    for ids, values, weight in pushes:
        for one, row in zip(ids, values, strict=True):
            total[one] += weight * row
    return total / sum(weight for _, _, weight in pushes)


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), seed=st.integers(0, 99), even=st.booleans())
@moderately
def test_the_pushes_of_a_round_become_the_mean_of_dense_gradients(sizes: list[int], seed: int, even: bool) -> None:
    table = Sharded(described("sgd", start="zeros"), 2)
    pushes = [
        (ids_of(seed + 10 * i, size, unique=False), some(size, 3, seed=seed + i), 1.0 if even else i + 0.5)
        for i, size in enumerate(sizes)
    ]
    table.push(*pushes, hyper={"lr": 1.0})
    assert torch.allclose(table.pull(EVERY), -dense(pushes), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("weight", [1.0, 0.3, 7.0])
def test_a_round_of_one_push_is_that_push_to_the_bit(weight: float) -> None:
    values = some(6, 3)
    values[2] = -0.0
    one, other = Sharded(described("add", start="zeros")), Sharded(described("sgd", start="zeros"))
    one.tables[0].fill(torch.arange(ROWS), torch.full((ROWS, 3), -0.0, dtype=torch.float64))  # loses its sign to 0 + -0
    one.push((ids_of(0, 6), values, weight))
    other.push((ids_of(0, 6), values, weight), hyper={"lr": 1.0})
    assert same(one.pull(ids_of(0, 6)), values)
    assert torch.equal(other.pull(ids_of(0, 6)), -values)


def test_a_worker_without_rows_counts_in_the_mean() -> None:
    table, nothing = Sharded(described("sgd", start="zeros")), torch.empty(0, 3, dtype=torch.float64)
    table.push(([4], torch.ones(1, 3, dtype=torch.float64), 1.0), ([], nothing, 3.0), hyper={"lr": 1.0})
    assert table.pull([4]).tolist() == [[-0.25] * 3]


@pytest.mark.parametrize(("rule", "wanted"), [("add", 12.0), ("assign", 3.0), ("min", -1.0), ("max", 9.0)])
def test_other_rules_combine_as_they_are(rule: str, wanted: float) -> None:
    rows = [torch.full((1, 3), value, dtype=torch.float64) for value in (9.0, -1.0, 1.0, 3.0)]
    table = Sharded(described(rule, start="zeros"))
    table.push(([4, 4], torch.cat(rows[:2])), ([4, 2, 4], torch.cat([rows[2], rows[0], rows[3]]), 5.0))
    assert table.pull([4]).tolist() == [[wanted] * 3]


# Ranges.


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@rules
def test_a_range_is_the_list_of_its_ids(rule: str, dtype: str, shards: int) -> None:
    ours, lists = (Sharded(described(rule, dtype=dtype), shards) for _ in range(2))
    for step, (start, stop) in enumerate([(3, 17), (0, ROWS), (20, 23), (5, 5), (6, 7)]):
        values = some(stop - start, 3, seed=step, dtype=getattr(torch, dtype))
        ours.push_range(start, values)
        lists.push((list(range(start, stop)), values))
        assert same(ours.pull(EVERY), lists.pull(EVERY))
        assert same(ours.pull_range(start, stop), lists.pull(range(start, stop)))
    assert [one.count for one in ours.tables] == [one.count for one in lists.tables]


def test_ranges_and_lists_meet_in_a_round() -> None:
    table, values = TableShard(described("sgd", start="zeros"), 0, 1), some(4, 3)
    pushes = [
        RowPush(None, values, span=(2, 6)),
        RowPush(None, values, span=(4, 8)),
        RowPush(torch.tensor([9, 5]), values[:2]),
    ]
    table.update(pushes, {"lr": 3.0}, 1.0, 1)
    wanted = torch.zeros(ROWS, 3, dtype=torch.float64)
    wanted[2:6] -= values
    wanted[4:8] -= values
    wanted[[9, 5]] -= values[:2]
    assert torch.allclose(table.pull_range(0, ROWS), wanted, rtol=1e-13)


# Clocks, and what has changed.


def test_a_range_stamps_its_ids_and_a_list_all_of_them() -> None:
    table, values = TableShard(described(), 0, 1), some(5, 3)
    assert (table.clock(0, ROWS), table.version_of(0, ROWS)) == ({}, -1)
    table.update([RowPush(torch.tensor([2]), values[:1], 1.0, 0, 4)], {}, 1.0, 11)
    table.update([RowPush(None, values, 1.0, 0, 6, (5, 10)), RowPush(None, values, 1.0, 3, 2, (8, 13))], {}, 1.0, 12)
    assert table.clock(0, ROWS) == {0: 4, 3: -1}
    assert table.clock(5, 10) == {0: 6, 3: -1}
    assert table.clock(8, 13) == {0: 4, 3: 2}
    assert [table.version_of(*span) for span in ((0, 5), (4, 6), (13, 20))] == [11, 12, 11]
    table.update([RowPush(torch.tensor([2]), values[:1])], {}, 1.0, 13)  # nobody's
    assert table.clock(0, ROWS) == {0: 4, 3: -1}


@pytest.mark.parametrize("few", [1 << 16, 12, 0])
@kinds
def test_a_mirror_that_takes_what_changed_is_the_table(rows: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ago it last asked, and however little of the past is kept as lists."""
    monkeypatch.setattr(table_shard, "FEW", few)
    table = TableShard(described("adagrad", rows, mirrored=True), 0, 1)
    first = table.pull(torch.arange(ROWS))
    mirrors = {lag: (first.clone(), 0) for lag in (1, 2, 5)}
    for version in range(1, 12):
        if rows and version % 4 == 0:
            table.update([RowPush(None, some(9, 3, seed=version), span=(version, version + 9))], {}, 1.0, version)
        else:
            table.update([RowPush(torch.tensor(ids_of(version, 5)), some(5, 3, seed=version))], {}, 1.0, version)
        for lag, (mirror, seen) in mirrors.items():
            if version % lag == 0:
                before = mirror.clone()
                ids, values = table.changed_since(seen)
                assert ids.tolist() == sorted(set(ids.tolist()))
                mirror[ids] = values
                assert same(mirror, table.pull(torch.arange(ROWS)))
                changed = (mirror != before).any(1).nonzero().squeeze(1)
                assert torch.equal(changed, ids), "rows came that had not changed"
                mirrors[lag] = mirror, version
    assert torch.equal(table.changed_since(-1)[0], table.saved()["ids"])
    assert table.changed_since(11)[0].numel() == 0


def test_a_table_that_is_not_mirrored_does_not_know_what_changed() -> None:
    with pytest.raises(UsageError, match="table 't' is not mirrored"):
        TableShard(described(), 0, 1).changed_since(0)


# Checkpoints.


@kinds
@pytest.mark.parametrize("mirrored", [False, True])
@rules
def test_three_shards_save_and_two_go_on(rule: str, mirrored: bool, rows: int) -> None:
    info = described(rule, rows, mirrored=mirrored)
    three, two = trained(info, 3, steps=3), Sharded(info, 2)
    saved = set(torch.cat([table.saved()["ids"] for table in three.tables]).tolist())
    for table in two.tables:
        strange = next(one for one in EVERY if one not in saved and one % 2 == table.shard)
        table.fill(torch.tensor([strange]), some(1, 3))  # must be gone afterwards
        table.load([one.saved() for one in three.tables], three.tables[0].saved_clocks())
    assert same(two.pull(EVERY), three.pull(EVERY))
    assert sum(one.count for one in two.tables) == sum(one.count for one in three.tables)
    assert two.tables[0].saved_clocks() == three.tables[2].saved_clocks()
    for version in range(-1, 7) if mirrored else ():
        changed = [torch.cat([t.changed_since(version)[0] for t in all_.tables]).sort()[0] for all_ in (two, three)]
        assert torch.equal(*changed)
    for step in range(3):
        two.push((ids_of(step, 6), some(6, 3, seed=step)))
        three.push((ids_of(step, 6), some(6, 3, seed=step)))
    assert same(two.pull(EVERY), three.pull(EVERY))


def test_only_rows_that_exist_are_saved() -> None:
    table = Sharded(described("rowwise-adagrad"))
    table.pull(EVERY)
    table.push(([7, 2], some(2, 3)))
    saved = table.tables[0].saved()
    assert saved["ids"].tolist() == [2, 7]
    assert {name: list(rows.shape) for name, rows in saved.items() if name not in ("ids", "steps")} == {
        "values": [2, 3],
        "state.sum": [2, 1],
    }


def test_what_was_saved_of_another_table_is_refused() -> None:
    table, saved = trained(described()).tables[0], trained(described()).tables[0].saved()
    before = table.saved()
    for broken in (
        {**saved, "values": saved["values"][:, :2]},
        {**saved, "ids": saved["ids"] + ROWS},
        {"ids": saved["ids"]},
    ):
        with pytest.raises(PeerError, match="table 't'"):
            table.load([saved, broken])
    assert all(same(rows, before[name]) for name, rows in table.saved().items())


# Refusals.

GOOD = RowPush(torch.tensor([1, 3]), some(2, 3))
BAD: dict[str, tuple[RowPush, str]] = {
    "width": (RowPush(torch.tensor([1]), some(1, 4)), "1 rows of 3 numbers of float64, got float64 of shape [1, 4]"),
    "count": (RowPush(torch.tensor([1, 3]), some(1, 3)), "2 rows of 3 numbers of float64, got float64 of shape [1, 3]"),
    "dtype": (RowPush(torch.tensor([1]), some(1, 3).float()), "got float32 of shape [1, 3]"),
    "kind of ids": (RowPush(torch.tensor([1.0]), some(1, 3)), "expected flat int64 ids, got torch.float32 of shape [1]"),
    "shape of ids": (RowPush(torch.tensor([[1]]), some(1, 3)), "expected flat int64 ids"),
    "negative": (RowPush(torch.tensor([1, -1]), some(2, 3)), "expected ids from 0 to 22, got -1"),
    "too large": (RowPush(torch.tensor([23]), some(1, 3)), "expected ids from 0 to 22, got 23"),
    "not ours": (RowPush(torch.tensor([1, 4]), some(2, 3)), "only ids that live here, got 4, which lives on shard 0"),
    "neither": (RowPush(None, some(1, 3)), "either ids or a span"),
    "both": (RowPush(torch.tensor([1]), some(1, 3), span=(0, 2)), "either ids or a span"),
    "range": (RowPush(None, some(1, 3), span=(22, 24)), "a range inside 0 to 23, got 22 to 24"),
    "backwards": (RowPush(None, some(0, 3), span=(5, 4)), "a range inside 0 to 23, got 5 to 4"),
    "range's rows": (RowPush(None, some(3, 3), span=(0, 4)), "2 rows of 3 numbers of float64, got float64 of shape [3, 3]"),
    "weight": (RowPush(torch.tensor([1]), some(1, 3), float("nan")), "a weight from 0 on, got nan"),
    "worker": (RowPush(torch.tensor([1]), some(1, 3), 1.0, -2), "got worker -2, step 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_push_that_cannot_be_is_refused_and_nothing_is_changed(case: str) -> None:
    table = trained(described("adagrad", mirrored=True), 2).tables[1]
    before, clocks = table.saved(), table.saved_clocks()
    bad, words = BAD[case]
    with pytest.raises(PeerError) as refusal:
        table.update([GOOD, bad], {}, 1.0, 99)
    assert words in str(refusal.value)
    assert str(refusal.value).startswith("table 't' on shard 1: expected ")
    with pytest.raises(PeerError, match="rule 'adagrad' has the options"):
        table.update([GOOD], {"rate": 1.0}, 1.0, 99)
    after = table.saved()
    assert after.keys() == before.keys()
    assert all(same(rows, before[name]) for name, rows in after.items())
    assert (table.saved_clocks(), table.changed_since(98)[0].numel()) == (clocks, 0)


def test_a_round_that_weighs_nothing_is_refused() -> None:
    with pytest.raises(PeerError, match="one has a weight above 0"):
        TableShard(described(), 1, 2).update([RowPush(torch.tensor([1]), some(1, 3), 0.0)], {}, 1.0, 1)


def test_pulls_and_fills_are_looked_at_too() -> None:
    table = TableShard(described(), 1, 2)
    refused = [
        lambda: table.pull(torch.tensor([2])),
        lambda: table.pull_range(0, 24),
        lambda: table.fill(torch.tensor([1]), some(1, 2)),
        lambda: TableShard(described(rows=0), 0, 1).pull_range(0, 4),
    ]
    for call in refused:
        with pytest.raises(PeerError, match="table 't' on shard"):
            call()
    assert table.count == 0


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (described(rows=-1), "got rows=-1, dim=3"),
        (TableInfo("t", 3, 0), "got rows=3, dim=0"),
        (described(dtype="float33"), "got 'float33'; nearest: float32"),
        (described(start="ones"), "unknown start 'ones'; known"),
        (described(rule="sdg"), "expected a rule of"),
        (described(rule="ftrl", start="uniform"), "rule 'ftrl' works its rows out anew"),
    ],
)
def test_a_table_that_cannot_be_is_refused(info: TableInfo, words: str) -> None:
    for call in (lambda: check_table(info), lambda: TableShard(info, 0, 1)):
        with pytest.raises(PolytempoError) as refusal:
            call()
        assert isinstance(refusal.value, UsageError)
        assert str(refusal.value).startswith("table 't': ")
        assert words in str(refusal.value)


# Memory.


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("start", ["zeros", "uniform"])
def test_a_large_table_costs_what_was_pushed_to(start: str) -> None:
    """20 million rows of 16 numbers are 1.3 GB, with their state 2.6 GB."""
    before = resident()
    table = TableShard(TableInfo("t", 20_000_000, 16, start=start, rule="adagrad"), 0, 1)
    ids = torch.arange(500) * 40_000
    table.pull(ids)
    table.update([RowPush(ids, torch.ones(500, 16))], {}, 1.0, 1)
    assert table.count == 500
    assert table.pull(ids).shape == (500, 16)
    assert resident() - before < 100e6


def test_an_unbounded_table_grows_and_stays_what_a_bounded_one_is() -> None:
    growing, wide = (TableShard(described("adagrad", rows, mirrored=True), 0, 1) for rows in (0, 1_100_000))
    for step in range(20):
        ids = torch.arange(step * 50, step * 50 + 60).flip(0) * 1003
        for table in (growing, wide):
            table.update([RowPush(ids, some(60, 3, seed=step))], {}, 1.0, step)
    assert growing.count == wide.count == 1010
    before, after = wide.saved(), growing.saved()
    assert after.keys() == before.keys()
    assert all(same(rows, before[name]) for name, rows in after.items())

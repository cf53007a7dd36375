"""Shard and join are exact inverses, also from one number of ranks to another and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.tensor_parallel.sharding import Sharding

RANKS = st.sampled_from([1, 2, 3, 4, 6])


@given(RANKS, RANKS, st.integers(0, 2), st.sampled_from([1, 3]), st.integers(1, 2))
def test_shards_of_one_number_of_ranks_become_those_of_another_and_back(
    size: int, other: int, dim: int, blocks: int, each: int
) -> None:
    shape = [2, 3, 2]
    shape[dim] = 12 * blocks * each
    whole = torch.randn(shape)
    sharding = Sharding(tuple(shape), dim, blocks)
    shards = [sharding.shard(whole, rank, size) for rank in range(size)]
    assert {tuple(shard.shape) for shard in shards} == {sharding.shard_shape(size)}
    between = [sharding.shard(sharding.join(shards), rank, other) for rank in range(other)]
    again = [sharding.shard(sharding.join(between), rank, size) for rank in range(size)]
    assert torch.equal(sharding.join(again), whole)
    assert all(torch.equal(a, b) for a, b in zip(again, shards, strict=True))


@given(RANKS, RANKS, st.integers(1, 20))
def test_a_padded_vocabulary_joins_to_the_unsplit_table(size: int, other: int, rows: int) -> None:
    table = torch.randn(rows, 3)
    sharding = Sharding((rows, 3), padded=True)
    shards = [sharding.shard(table, rank, size) for rank in range(size)]
    assert {tuple(shard.shape) for shard in shards} == {(-(-rows // size), 3)}
    between = [sharding.shard(sharding.join(shards), rank, other) for rank in range(other)]
    assert torch.equal(sharding.join(between), table)
    assert torch.equal(torch.cat(shards)[:rows], table)
    assert not torch.cat(shards)[rows:].any()


def test_blocks_are_cut_one_by_one() -> None:
    qkv = torch.arange(12.0)
    sharding = Sharding((12,), 0, 3)
    assert [sharding.shard(qkv, rank, 2).tolist() for rank in range(2)] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


def test_a_shard_has_memory_of_its_own() -> None:
    whole = torch.zeros(4, 2)
    for sharding in (Sharding((4, 2)), Sharding((4, 2), padded=True)):
        sharding.shard(whole, 0, 2).fill_(1)
        sharding.join([whole]).fill_(1)
    assert not whole.any()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 4 along dimension 0, got shape"):
        Sharding((6, 2)).shard(torch.zeros(6, 2), 0, 4)
    with pytest.raises(UsageError, match="expected the whole tensor of shape"):
        Sharding((6, 2)).shard(torch.zeros(3, 2), 0, 2)
    with pytest.raises(UsageError, match=r"expected 2 shards of shape \(3, 2\), got \(2, 2\)"):
        Sharding((6, 2)).join([torch.zeros(3, 2), torch.zeros(2, 2)])

"""Key lists arrive as they were, whoever forgets them, and memory is bounded; and what L1 problems need not send."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.compression import key_cache
from polytempo.compression.key_cache import OVERHEAD, KeyLists, KeyReceiver, KeySender, digest_of
from polytempo.compression.sparsification import kkt_keep
from polytempo.errors import PeerError, UsageError

settled = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def ids_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def send(sender: KeySender, receiver: KeyReceiver, ids: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The whole conversation about one list: what arrives, and whether it went as a digest, in full, or after a miss."""
    digest, known = sender.offer(ids)
    if not known:
        return receiver.take(digest, ids.clone()), "full"
    found = receiver.find(digest)
    if found is not None:
        return found, "digest"
    sender.forget(digest)
    digest, known = sender.offer(ids)
    assert not known
    return receiver.take(digest, ids.clone()), "miss"


LISTS = [ids_of(*range(start, start + length)) for start in (0, 5) for length in (0, 1, 2, 3, 8, 30)] + [ids_of(2, 1, 0)]


@settled
@given(
    limits=st.tuples(st.integers(0, 2000), st.integers(0, 2000)),
    chosen=st.lists(st.integers(0, len(LISTS) - 1), max_size=60),
    losses=st.lists(st.sampled_from(["", "", "sender", "receiver", "both"]), min_size=60, max_size=60),
    hashes=st.sampled_from([1 << 64, 3]),
)
def test_every_list_arrives_as_it_was(limits: tuple[int, int], chosen: list[int], losses: list[str], hashes: int) -> None:
    """Whatever either side forgets, and also where many lists have the same digest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_cache, "digest_of", lambda ids: digest_of(ids) % hashes)
        sender, receiver = KeySender(limits[0]), KeyReceiver(limits[1])
        for index, loss in zip(chosen, losses, strict=False):
            ids = LISTS[index].clone()
            arrived, way = send(sender, receiver, ids)
            assert torch.equal(arrived, LISTS[index])
            if way != "digest":
                arrived.fill_(-1)  # what is kept is a copy
            for side, name in ((sender, "sender"), (receiver, "receiver")):
                assert side.lists.nbytes <= side.lists.limit_bytes
                if loss in (name, "both"):
                    side.lists.drop(key_cache.digest_of(LISTS[index]))


@settled
@given(limit=st.integers(0, 2000), chosen=st.lists(st.integers(0, len(LISTS) - 1), max_size=60))
def test_with_equal_limits_there_are_no_misses(limit: int, chosen: list[int]) -> None:
    sender, receiver = KeySender(limit), KeyReceiver(limit)
    ways = [send(sender, receiver, LISTS[index])[1] for index in chosen]
    assert "miss" not in ways
    if limit >= len(LISTS) * OVERHEAD + 8 * sum(ids.numel() for ids in LISTS):
        assert ways.count("full") == len(set(chosen))


def test_the_second_time_a_list_goes_as_a_digest() -> None:
    sender, receiver, ids = KeySender(10_000), KeyReceiver(10_000), ids_of(3, 1, 4)
    assert [send(sender, receiver, ids)[1] for _ in range(3)] == ["full", "digest", "digest"]
    assert send(sender, KeyReceiver(10_000), ids)[1] == "miss"


def test_the_sender_keeps_a_copy() -> None:
    sender, receiver, ids = KeySender(10_000), KeyReceiver(10_000), ids_of(3, 1, 4)
    assert send(sender, receiver, ids)[1] == "full"
    ids.fill_(-1)
    assert send(sender, receiver, ids_of(3, 1, 4))[1] == "digest"


def test_the_least_recently_used_list_goes_first() -> None:
    cost = 8 * 2 + OVERHEAD
    lists = KeyLists(3 * cost)
    for digest in (1, 2, 3):
        lists.put(digest, ids_of(digest, 0))
    assert lists.get(1) is not None
    lists.put(4, ids_of(4, 0))
    assert [lists.get(digest) is not None for digest in (1, 2, 3, 4)] == [True, False, True, True]
    lists.put(5, torch.zeros(1000, dtype=torch.int64))  # above the limit: neither kept, nor in anybody's way
    assert (len(lists), lists.nbytes, lists.get(5)) == (3, 3 * cost, None)
    lists.put(4, ids_of())
    assert (len(lists), lists.nbytes) == (3, 2 * cost + OVERHEAD)
    lists.drop(99)


def test_many_empty_lists_are_bounded_too() -> None:
    lists = KeyLists(10 * OVERHEAD)
    for digest in range(1000):
        lists.put(digest, ids_of())
    assert len(lists) == 10


def test_a_digest_is_64_bits_of_the_ids_and_their_order() -> None:
    digests = {digest_of(ids) for ids in LISTS}
    assert len(digests) == len({tuple(ids.tolist()) for ids in LISTS})
    assert all(0 <= digest < 1 << 64 for digest in digests)
    assert digest_of(ids_of(0, 9, 1, 9)[::2]) == digest_of(ids_of(0, 1))


def test_what_is_no_list_is_refused() -> None:
    ids = ids_of(1, 2)
    for wrong in (ids.int(), ids.view(1, 2), torch.zeros(2)):
        with pytest.raises(UsageError, match="expected a flat int64 tensor of ids"):
            KeySender(1000).offer(wrong)
        with pytest.raises(PeerError, match="expected a flat int64 tensor of ids"):
            KeyReceiver(1000).take(0, wrong)
    receiver = KeyReceiver(1000)
    with pytest.raises(PeerError, match=r"expected the digest [0-9a-f]{16} with a list of 2 ids, got 0000000000000005"):
        receiver.take(5, ids)
    assert receiver.find(5) is receiver.find(digest_of(ids)) is None
    with pytest.raises(UsageError, match="at least 0 bytes"):
        KeySender(-1)


# L1 problems.


@settled
@given(
    entries=st.lists(
        st.tuples(
            st.sampled_from([0.0, -0.0, 1.0, -1e-30]),
            st.sampled_from([0.0, 0.1, -0.1, 0.2, -3.0, float("nan"), float("inf")]),
        )
    ),
    delta=st.sampled_from([0.0, 0.1, 0.15, 5.0]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_what_stays_zero_is_skipped(entries: list[tuple[float, float]], delta: float, dtype: torch.dtype) -> None:
    weights, gradient = (torch.tensor([entry[i] for entry in entries], dtype=dtype) for i in (0, 1))
    wanted = [not (w == 0 and abs(g) <= delta) for w, g in zip(weights.tolist(), gradient.tolist(), strict=True)]
    assert kkt_keep(weights, gradient, delta).tolist() == wanted


def test_an_l1_problem_is_solved_as_without_the_filter() -> None:
    """Proximal steps: where every worker's gradient is that of all, what is skipped would have changed nothing."""
    target, penalty = torch.tensor([2.0, 0.3, -1.5, 0.0], dtype=torch.float64), 0.5
    ends = []
    for delta in (None, penalty):
        x, skipped = torch.zeros(4, dtype=torch.float64), 0
        for _ in range(200):
            gradient = x - target
            if delta is not None:
                keep = kkt_keep(x, gradient, delta)
                skipped += int((~keep).sum())
                gradient = torch.where(keep, gradient, 0.0)
            moved = x - 0.1 * gradient
            x = moved.sign() * (moved.abs() - 0.1 * penalty).clamp(min=0)
        ends.append(x)
    assert torch.equal(*ends)
    assert skipped == 400


def test_what_cannot_be_filtered_is_refused() -> None:
    with pytest.raises(UsageError, match=r"of the same shape, got \[3\] and \[2\]"):
        kkt_keep(torch.zeros(3), torch.zeros(2), 0.1)
    for delta in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="expected a delta of at least 0"):
            kkt_keep(torch.zeros(3), torch.zeros(3), delta)

"""Buckets: every gradient is in one, pieces add up to a shard, and they leave in order while backward runs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.protocol.layout import ITEM_SIZES, Layout, lay_out
from polytempo.protocol.values import BufferRange, TensorInfo
from polytempo.reducer.buckets import BucketScheduler, group_by_size, plan_buckets, rest_of

moderately = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, list[int]]:
    """A model, cut into shards, and an order of some of its parameters."""
    tensors = [
        TensorInfo(f"t{i}", (draw(st.integers(0, 40)),), draw(st.sampled_from(["float32", "float64"])), 0)
        for i in range(draw(st.integers(1, 8)))
    ]
    layout = lay_out(tensors, draw(st.integers(1, 4)))
    order = draw(st.permutations(range(len(tensors))))
    return layout, order[: draw(st.integers(0, len(order)))]


def covered(pieces: list[BufferRange]) -> list[tuple[int, int]]:
    return sorted((piece.buffer, at) for piece in pieces for at in range(piece.start, piece.stop))


@given(model=layouts(), limit=st.integers(1, 400))
@moderately
def test_every_parameter_is_in_one_bucket_and_the_order_is_kept(model: tuple[Layout, list[int]], limit: int) -> None:
    layout, order = model
    buckets = plan_buckets(layout, order, limit)
    assert [index for bucket in buckets for index in bucket.params] == order
    sizes = {place.index: (place.stop - place.start) * ITEM_SIZES[place.info.dtype] for place in layout.places}
    for bucket in buckets[:-1]:
        assert sum(sizes[index] for index in bucket.params) >= limit
        assert sum(sizes[index] for index in bucket.params[:-1]) < limit


@given(model=layouts(), limit=st.integers(1, 400))
@moderately
def test_buckets_and_the_rest_cover_every_byte_of_every_shard_once(model: tuple[Layout, list[int]], limit: int) -> None:
    layout, order = model
    buckets = plan_buckets(layout, order, limit)
    for shard, stretches in enumerate(layout.shards):
        pieces = [piece for bucket in buckets for piece in bucket.pieces[shard]]
        whole = [(buffer, at) for buffer, stretch in enumerate(stretches) for at in range(stretch.nbytes)]
        assert covered([*pieces, *rest_of(layout, shard, pieces)]) == whole


def test_the_usual_model_has_one_piece_a_bucket() -> None:
    layout = lay_out([TensorInfo(f"t{i}", (100,), "float32", 0) for i in range(6)], 1)
    buckets = plan_buckets(layout, range(5, -1, -1), 800)
    assert [bucket.params for bucket in buckets] == [(5, 4), (3, 2), (1, 0)]
    assert [bucket.pieces[0] for bucket in buckets] == [
        (BufferRange(0, 1600, 2400),),
        (BufferRange(0, 800, 1600),),
        (BufferRange(0, 0, 800),),
    ]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab")), max_size=12),
    limit=st.integers(1, 60),
)
@moderately
def test_groups_have_one_kind_and_are_complete_at_the_limit(sizes: list[tuple[int, str]], limit: int) -> None:
    groups = group_by_size([(index, size, kind) for index, (size, kind) in enumerate(sizes)], limit)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    for group in groups:
        assert len({sizes[index][1] for index in group}) == 1
        assert group == sorted(group)
        assert sum(sizes[index][0] for index in group[:-1]) < limit
    small = [sizes[group[0]][1] for group in groups if sum(sizes[index][0] for index in group) < limit]
    assert len(small) == len(set(small))


class Gradients:
    """Gradients that have a version each, and what was launched of their buckets."""

    def __init__(self, buckets: list[list[int]], **options: bool) -> None:
        self.versions = [0] * sum(len(bucket) for bucket in buckets)
        self.launched: list[int] = []
        self.scheduler = BucketScheduler(buckets, self.launched.append, lambda index: self.versions[index], **options)

    def complete(self, *indices: int) -> list[int]:
        for index in indices:
            self.versions[index] += 1
            self.scheduler.complete(index)
        return self.launched


def test_buckets_of_collectives_leave_in_order_whatever_order_backward_takes() -> None:
    gradients = Gradients([[5, 4], [3, 2], [1, 0]], in_order=True)
    assert gradients.complete(3, 2, 5) == []
    assert gradients.complete(4) == [0, 1]
    assert gradients.complete(1, 0) == [0, 1, 2]
    assert gradients.scheduler.changed() == []
    gradients.versions[2] += 1
    assert gradients.scheduler.changed() == [1]


def test_the_last_bucket_may_be_held_until_the_end_and_the_rest_is_launched_then() -> None:
    gradients = Gradients([[2], [1], [0]], in_order=True, hold_last=True)
    assert gradients.complete(2, 0) == [0]
    gradients.scheduler.launch_rest()
    assert gradients.launched == gradients.scheduler.launched == [0, 1, 2]
    gradients.scheduler.start_over()
    assert gradients.scheduler.launched == gradients.scheduler.changed() == []
    assert gradients.complete(2, 1, 0) == [0, 1, 2, 0, 1]


def test_without_an_order_a_bucket_leaves_when_it_is_complete_and_again_when_all_of_it_is_again() -> None:
    gradients = Gradients([[3, 2], [1, 0]], in_order=False)
    assert gradients.complete(0, 1) == [1]
    assert gradients.complete(0) == [1]
    assert gradients.scheduler.changed() == [1]
    assert gradients.complete(1) == [1, 1]
    assert gradients.scheduler.changed() == []
    assert gradients.complete(3, 2) == [1, 1, 0]


def test_an_exact_comparison_replaces_stamps() -> None:
    differing = set[int]()
    scheduler = BucketScheduler([[0], [1]], lambda number: None, in_order=True, differs=differing.__contains__)
    scheduler.launch_rest()
    assert scheduler.changed() == []
    differing.add(1)
    assert scheduler.changed() == [1]

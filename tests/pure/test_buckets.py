"""Buckets: every gradient is in one, in the order of the first backward, and pieces add up to a shard."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.protocol.layout import ITEM_SIZES, Layout, lay_out
from polytempo.protocol.values import BufferRange, TensorInfo
from polytempo.reducer.buckets import plan_buckets, rest_of

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

"""How a model is cut into shards: nothing is lost, nothing is held twice, and every shard has the same to do."""

from __future__ import annotations

from itertools import groupby, pairwise
from math import prod

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.protocol.layout import ITEM_SIZES, Layout, Stretch, TensorPlace, first_difference, lay_out
from polytempo.protocol.values import TensorInfo

moderately = settings(max_examples=80, deadline=None, derandomize=True, database=None)

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.tuples(st.integers(0, 5000))
TENSORS = st.builds(TensorInfo, st.sampled_from("abcdefgh"), SHAPES, st.sampled_from(sorted(ITEM_SIZES)), st.integers(0, 2))
MODELS = st.lists(TENSORS, min_size=1, max_size=12)
COUNTS = st.integers(1, 7)

HUGE = TensorInfo("huge", (50_000, 1_000), "float32", 0)
SMALL = TensorInfo("small", (10,), "float32", 0)


def size_of(info: TensorInfo) -> int:
    return prod(info.shape)


def bytes_of(model: list[TensorInfo]) -> int:
    return sum(size_of(info) * ITEM_SIZES[info.dtype] for info in model)


def of_dtype(layout: Layout, dtype: str) -> list[TensorPlace]:
    return [place for place in layout.places if place.info.dtype == dtype]


def stretches_of(layout: Layout, dtype: str) -> list[Stretch]:
    return [stretch for shard in layout.shards for stretch in shard if stretch.dtype == dtype]


def loads(layout: Layout) -> list[int]:
    return [sum(stretch.nbytes for stretch in stretches) for stretches in layout.shards]


# What holds for every layout.


@pytest.mark.parametrize("whole", [False, True])
@given(model=MODELS, shards=COUNTS)
@moderately
def test_every_tensor_has_one_place_and_places_fill_the_flat_buffer(
    model: list[TensorInfo], shards: int, whole: bool
) -> None:
    layout = lay_out(model, shards, whole)
    assert sorted(place.index for place in layout.places) == list(range(len(model)))
    for place in layout.places:
        assert place.info == model[place.index]
        assert place.stop - place.start == size_of(place.info)
    for dtype in {info.dtype for info in model}:
        places = of_dtype(layout, dtype)
        assert places[0].start == 0
        assert all(one.stop == other.start for one, other in pairwise(places))
        assert places[-1].stop == layout.sizes[dtype] == sum(size_of(i) for i in model if i.dtype == dtype)


@pytest.mark.parametrize("whole", [False, True])
@given(model=MODELS, shards=COUNTS)
@moderately
def test_shards_share_out_every_element_once(model: list[TensorInfo], shards: int, whole: bool) -> None:
    layout = lay_out(model, shards, whole)
    assert len(layout.shards) == shards
    for dtype, length in layout.sizes.items():
        stretches = stretches_of(layout, dtype)
        assert len(stretches) == shards, "one stretch a shard: a push has one buffer for each dtype"
        filled = sorted((s.start, s.stop) for s in stretches if s.size)
        assert [start for start, _ in filled] == [0, *(stop for _, stop in filled)][: len(filled)]
        assert sum(stretch.size for stretch in stretches) == length
    assert sum(loads(layout)) == bytes_of(model)


@pytest.mark.parametrize("whole", [False, True])
@given(model=MODELS, shards=COUNTS)
@moderately
def test_all_shards_name_the_same_dtypes_in_the_same_order(model: list[TensorInfo], shards: int, whole: bool) -> None:
    layout = lay_out(model, shards, whole)
    orders = {tuple(stretch.dtype for stretch in shard) for shard in layout.shards}
    assert orders == {tuple(sorted({info.dtype for info in model}))}


@given(model=MODELS, shards=COUNTS)
@moderately
def test_the_same_model_is_always_cut_alike(model: list[TensorInfo], shards: int) -> None:
    assert lay_out(model, shards) == lay_out(tuple(model), shards)


# Cut anywhere.


@given(model=MODELS, shards=COUNTS)
@example(model=[HUGE, SMALL, SMALL], shards=7)
@moderately
def test_no_two_shards_differ_by_two_elements(model: list[TensorInfo], shards: int) -> None:
    """Of the widest dtype there is. So they differ by less than 5 % once each has 40 elements of it."""
    widest = max(ITEM_SIZES[info.dtype] for info in model)
    sizes = loads(lay_out(model, shards))
    assert max(sizes) - min(sizes) < 2 * widest
    if bytes_of(model) >= 40 * widest * shards:
        assert max(sizes) - min(sizes) < 0.05 * bytes_of(model) / shards


def test_one_huge_tensor_is_cut_like_any_other() -> None:
    layout = lay_out([SMALL, HUGE], 4)
    assert loads(layout) == [(size_of(HUGE) + 10) * 4 // 4 + extra for extra in (2, -2, 2, -2)]
    cuts = [shard[0].stop for shard in layout.shards[:-1]]
    (huge,) = (place for place in layout.places if place.info is HUGE)
    assert all(huge.start < cut < huge.stop for cut in cuts)


@given(model=MODELS, shards=COUNTS)
@moderately
def test_the_tensors_of_a_group_stand_together_in_the_order_of_the_model(model: list[TensorInfo], shards: int) -> None:
    layout = lay_out(model, shards)
    for dtype in layout.sizes:
        places = of_dtype(layout, dtype)
        groups = [group for group, _ in groupby(places, key=lambda place: place.info.group)]
        assert groups == sorted(set(groups))
        for _, members in groupby(places, key=lambda place: place.info.group):
            indices = [place.index for place in members]
            assert indices == sorted(indices)


@given(model=MODELS, shards=st.integers(2, 7))
@moderately
def test_places_do_not_depend_on_the_number_of_shards(model: list[TensorInfo], shards: int) -> None:
    """A checkpoint of two servers can be read by five."""
    assert lay_out(model, shards).places == lay_out(model, 1).places


def test_more_shards_than_elements_leave_some_empty() -> None:
    layout = lay_out([TensorInfo("w", (2,), "float32", 0)], 5)
    assert sorted(loads(layout)) == [0, 0, 0, 4, 4]


# Whole tensors.


@given(model=MODELS, shards=COUNTS)
@example(model=[HUGE, SMALL, SMALL], shards=2)
@moderately
def test_whole_never_cuts_a_tensor(model: list[TensorInfo], shards: int) -> None:
    layout = lay_out(model, shards, whole=True)
    for place in layout.places:
        if place.start < place.stop:
            holders = [s for s in stretches_of(layout, place.info.dtype) if s.start < place.stop and s.stop > place.start]
            (holder,) = holders
            assert holder.start <= place.start
            assert place.stop <= holder.stop


@given(model=MODELS, shards=COUNTS)
@moderately
def test_whole_shards_differ_by_one_tensor_at_most(model: list[TensorInfo], shards: int) -> None:
    largest = max(size_of(info) * ITEM_SIZES[info.dtype] for info in model)
    sizes = loads(lay_out(model, shards, whole=True))
    assert max(sizes) - min(sizes) <= largest


def test_whole_evens_out_what_can_be_evened_out() -> None:
    model = [TensorInfo(str(size), (size,), "float32", 0) for size in (1, 2, 3, 4, 5, 6, 7, 8)]
    assert loads(lay_out(model, 2, whole=True)) == [18 * 4, 18 * 4]


# What is refused, and what differs.


@pytest.mark.parametrize("dtype", ["int64", "complex64", "bool", "float8_e4m3fn", "", "os"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_dtype_no_server_holds_is_refused_by_name(dtype: str, whole: bool) -> None:
    with pytest.raises(UsageError, match=f"odd is {dtype}; a parameter server holds float64, float32, float16, bfloat16"):
        lay_out([SMALL, TensorInfo("odd", (1,), dtype, 0)], 1, whole)


@pytest.mark.parametrize("shards", [0, -1])
def test_a_job_without_servers_is_refused(shards: int) -> None:
    with pytest.raises(UsageError, match=f"at least 1 server, got {shards}"):
        lay_out([SMALL], shards)


@given(model=MODELS)
@moderately
def test_equal_models_do_not_differ(model: list[TensorInfo]) -> None:
    assert first_difference(model, tuple(model)) == ""


@given(model=MODELS, data=st.data())
@moderately
def test_the_first_difference_is_named_whatever_comes_after_it(model: list[TensorInfo], data: st.DataObject) -> None:
    where = data.draw(st.integers(0, len(model) - 1))
    mine = TensorInfo("mine", (3, 4), "float32", 1)
    other = [*model[:where], mine, *data.draw(MODELS)]
    theirs = model[where]
    words = first_difference(other, model)
    assert words == (
        f"parameter {where} is mine [3, 4] float32 in group 1 here and "
        f"{theirs.name} {list(theirs.shape)} {theirs.dtype} in group {theirs.group} there"
    )


@pytest.mark.parametrize(
    "changed",
    [
        TensorInfo("other", (10,), "float32", 0),
        TensorInfo("small", (11,), "float32", 0),
        TensorInfo("small", (10,), "float16", 0),
        TensorInfo("small", (10,), "float32", 1),
    ],
)
def test_name_shape_dtype_and_group_all_make_a_difference(changed: TensorInfo) -> None:
    assert first_difference([SMALL, SMALL], [SMALL, changed]).startswith("parameter 1 is small [10] float32 in group 0 here")


def test_a_model_with_more_parameters_differs_too() -> None:
    assert first_difference([SMALL], [SMALL, HUGE]) == "1 parameters here and 2 there"
    assert first_difference([SMALL, HUGE], [SMALL]) == "2 parameters here and 1 there"

"""Sums and means, block by block, are those of plain torch, and the same however the work is cut up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from polytempo.collectives import reduce_ops
from polytempo.collectives.reduce_ops import reduce_into, total_on_device, weighted_mean
from polytempo.device.host_device import HostDevice

BLOCK = 1 << 8  # in these tests

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3]
#: How far a result may be from the exact one, relative to the largest term.
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-2, torch.float16: 4e-3}
WEIGHTS = {"equal": [2.0] * 5, "unequal": [1.0, 5.0, 0.25, 3.0, 7.0], "one of nothing": [3.0, 0.0, 1.0, 0.0, 2.0]}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reduce_ops, "BLOCK", BLOCK)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def some(count: int, size: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=dice, dtype=torch.float64).to(dtype) for _ in range(count)]


def assert_near(got: torch.Tensor, wanted: torch.Tensor, terms: list[torch.Tensor]) -> None:
    """Within the rounding of the dtype, wherever there is something to compare."""
    largest = max((float(term.abs().max()) for term in terms if term.numel()), default=1.0)
    assert got.shape == wanted.shape
    assert float((got.double() - wanted).abs().sum()) <= ROUNDING[got.dtype] * largest * len(terms) * max(1, got.numel())
    if got.numel():
        assert float((got.double() - wanted).abs().max()) <= 2 * ROUNDING[got.dtype] * largest * len(terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", SIZES)
def test_a_sum_is_plain_torchs_sum_in_the_order_given_bit_for_bit(size: int, count: int, dtype: torch.dtype) -> None:
    terms = some(count, size, dtype)
    wanted = terms[0].clone()
    for term in terms[1:]:
        wanted = wanted + term
    out = torch.full((size,), 9.0, dtype=dtype)
    reduce_into(terms, out)
    assert torch.equal(out, wanted)
    reduce_into(terms, out, factor=0.25)
    assert torch.equal(out, wanted * 0.25)
    assert_near(out, sum(term.double() for term in terms) * 0.25, terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighing", WEIGHTS)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", SIZES)
def test_a_weighted_mean_is_the_exact_one_rounded(size: int, count: int, weighing: str, dtype: torch.dtype) -> None:
    terms, weights = some(count, size, dtype), WEIGHTS[weighing][:count]
    out = torch.full((size,), 9.0, dtype=dtype)
    weighted_mean(terms, weights, out)
    exact = sum(term.double() * weight for term, weight in zip(terms, weights, strict=True)) / sum(weights)
    assert isinstance(exact, torch.Tensor)
    assert_near(out, exact, terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighing", WEIGHTS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_result_may_go_where_the_first_term_is_and_the_others_stay(
    count: int, weighing: str, dtype: torch.dtype
) -> None:
    terms, weights = some(count, 2 * BLOCK + 3, dtype), WEIGHTS[weighing][:count]
    elsewhere, others = torch.empty_like(terms[0]), [term.clone() for term in terms[1:]]
    weighted_mean(terms, weights, elsewhere)
    weighted_mean(terms, weights, terms[0])
    assert torch.equal(terms[0], elsewhere)
    assert all(torch.equal(term, before) for term, before in zip(terms[1:], others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_term_of_weight_0_may_hold_anything(dtype: torch.dtype) -> None:
    terms = [torch.full((7,), float("nan"), dtype=dtype), *some(2, 7, dtype), torch.full((7,), float("inf"), dtype=dtype)]
    out, without = torch.empty(7, dtype=dtype), torch.empty(7, dtype=dtype)
    for weights in ([0.0, 2.0, 2.0, 0.0], [0.0, 1.0, 3.0, 0.0]):
        weighted_mean(terms, weights, out)
        weighted_mean(terms[1:3], weights[1:3], without)
        assert torch.equal(out, without)


@pytest.mark.parametrize("weighing", ["equal", "unequal"])
def test_a_mean_of_large_float16_is_a_number(weighing: str) -> None:
    terms, out = [torch.full((5,), 60000.0, dtype=torch.float16)] * 5, torch.empty(5, dtype=torch.float16)
    weighted_mean(terms, WEIGHTS[weighing], out)
    assert torch.equal(out, terms[0])


@pytest.mark.parametrize("count", [2, 3])
def test_a_sum_may_go_where_the_first_term_is(count: int) -> None:
    terms = some(count, BLOCK + 5, torch.float32)
    elsewhere = torch.empty_like(terms[0])
    reduce_into(terms, elsewhere, 0.5)
    reduce_into(terms, terms[0], 0.5)
    assert torch.equal(terms[0], elsewhere)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighing", WEIGHTS)
@pytest.mark.parametrize("cuts", [[1], [BLOCK], [BLOCK - 1, BLOCK + 1], [32, 96, BLOCK + 32, 2 * BLOCK]], ids=str)
def test_the_result_does_not_depend_on_how_a_tensor_is_cut(cuts: list[int], weighing: str, dtype: torch.dtype) -> None:
    size = 2 * BLOCK + 11
    terms, weights = some(5, size, dtype), WEIGHTS[weighing]
    whole, parts = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
    weighted_mean(terms, weights, whole)
    for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
        weighted_mean([term[start:stop] for term in terms], weights, parts[start:stop])
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("weighing", WEIGHTS)
def test_a_tensor_of_many_real_blocks_is_added_up_like_any(weighing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert reduce_ops.BLOCK > BLOCK
    terms = some(2, 2 * reduce_ops.BLOCK + 3, torch.float32)
    out = torch.empty_like(terms[0])
    weighted_mean(terms, WEIGHTS[weighing][:2], out)
    weights = WEIGHTS[weighing]
    exact = (terms[0].double() * weights[0] + terms[1].double() * weights[1]) / (weights[0] + weights[1])
    assert_near(out, exact, terms)


@pytest.mark.parametrize("weighing", WEIGHTS)
def test_the_result_does_not_depend_on_the_size_of_blocks(weighing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terms, results = some(5, 1000, torch.float32), []
    for block in (3, 64, 999, 1000, 5000):
        monkeypatch.setattr(reduce_ops, "BLOCK", block)
        out = torch.empty(1000)
        weighted_mean(terms, WEIGHTS[weighing], out)
        results.append(out)
    assert all(torch.equal(result, results[0]) for result in results)


def test_equal_terms_of_powers_of_two_have_themselves_as_mean() -> None:
    (term,) = some(1, BLOCK + 1, torch.float32)
    for count in (1, 2, 4):
        out = torch.empty_like(term)
        weighted_mean([term] * count, [0.5] * count, out)
        assert torch.equal(out, term)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_a_mean_of_integers_on_a_device_is_rounded_towards_zero(dtype: torch.dtype) -> None:
    """Floats take one pass there, integers one for each term."""
    terms = [torch.tensor(term).to(dtype) for term in ([-7, 5, 4, 0], [2, 1, 4, 0], [1, 1, 4, 1])]
    out = torch.empty(4, dtype=dtype)
    total_on_device(HostDevice(), "mean", terms, out)
    assert out.tolist() == [84 if dtype == torch.uint8 else -1, 2, 4, 0]
    total_on_device(HostDevice(), "sum", terms, out)
    assert out.tolist() == [252 if dtype == torch.uint8 else -4, 7, 12, 1]

"""What holds for every chain and any values: nothing is lost, little is held back, and a bad message is refused."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.compression.chain import parse_chain
from polytempo.compression.encoding import ByteArray
from polytempo.errors import PeerError

settled = settings(max_examples=50, deadline=None, derandomize=True, database=None)

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LOSSY = ("bf16", "fp16", "topk:0.1", "topk:0.1+bf16", "sign", "int8", "significant:0.5", "significant:0.5+fp16")
#: How exactly a dtype adds up.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
lossy = pytest.mark.parametrize("text", LOSSY)


def some(dice: torch.Generator, size: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(size, generator=dice, dtype=torch.float64) * scale).to(dtype)


# Nothing is lost.


@dtypes
@lossy
@settled
@given(
    size=st.integers(1, 200),
    scales=st.lists(st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 1e3, 1e5]), min_size=1, max_size=30),
    seed=st.integers(0, 1 << 30),
)
def test_sent_and_held_add_up_to_produced(text: str, dtype: torch.dtype, size: int, scales: list[float], seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    spec = parse_chain(text)
    chain = spec.new(size, dtype)
    produced, sent, weight = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
    for scale in scales:
        values = some(dice, size, dtype, min(scale, 1e3) if dtype == torch.float16 else scale)
        message = spec.decode(chain.encode(values), size, dtype)
        sent += message.double()
        produced += values.double()
        weight += values.double().abs() + message.double().abs()
    assert bool(((sent + chain.residual.double() - produced).abs() <= ROUNDING[dtype] * weight).all())


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("topk:0.1", 0.0),
        ("topk:0.1+bf16", 1e-10),
        ("significant:0.01", 0.01),
        ("bf16", 0.0),
        ("fp16", 2.0**-25),
        ("int8", 1e-12),
    ],
)
def test_everything_is_sent_in_the_end(text: str, left: float) -> None:
    """After the last values, zeros bring out what is left, down to a threshold or half the smallest number of float16."""
    dice = torch.Generator().manual_seed(3)
    spec = parse_chain(text)
    chain, values = spec.new(100, torch.float64), some(dice, 100)
    sent = torch.zeros(100, dtype=torch.float64)
    for step in range(50):
        sent += spec.decode(chain.encode(values if step == 0 else torch.zeros_like(values)), 100, torch.float64)
    assert float((sent - values).abs().max()) <= left


# Little is held back.


def longest(text: str, feed: list[torch.Tensor]) -> tuple[float, float]:
    """Over all rounds: the largest norm of what is held back, and the smallest part of a sum that a message takes away."""
    spec, size = parse_chain(text), feed[0].numel()
    chain, most, least = spec.new(size, torch.float64), 0.0, 1.0
    for values in feed:
        before = float((chain.residual + values).norm())
        chain.encode(values)
        after = float(chain.residual.norm())
        most, least = max(most, after), min(least, 1 - (after / before) ** 2)
    return most, least


def feeds() -> dict[str, list[torch.Tensor]]:
    dice = torch.Generator().manual_seed(5)
    steady = some(dice, 50).clamp(-1, 1)
    return {
        "random": [some(dice, 50).clamp(-1, 1) for _ in range(1000)],
        "steady": [steady] * 1000,
        "one large": [torch.eye(50, dtype=torch.float64)[0] + 1e-3] * 1000,
    }


@pytest.mark.parametrize("how", ["random", "steady", "one large"])
@pytest.mark.parametrize("text", ["topk:0.1", "topk:0.1+bf16", "sign"])
def test_what_is_held_back_stays_bounded(text: str, how: str) -> None:
    """If a message takes away a part d of a sum (squared), sums of norm G leave at most s / (1 - s) * G, s = sqrt(1 - d)."""
    feed = feeds()[how]
    most, least = longest(text, feed)
    part = least if text == "sign" else 0.1 * (1 - 2.0**-14)  # a cast takes a little less than the tenth
    shrink = (1 - part) ** 0.5
    assert least >= part > 0
    assert most <= shrink / (1 - shrink) * max(float(values.norm()) for values in feed)


@pytest.mark.parametrize("how", ["random", "steady", "one large"])
@pytest.mark.parametrize(
    ("text", "bound"),
    [("significant:0.5", 0.5), ("significant:0.5+fp16", 0.5), ("bf16", 2.0**-8), ("fp16", 2.0**-11), ("int8", 1.01 / 254)],
)
def test_what_a_threshold_or_a_cast_holds_back_is_small_for_each_value(text: str, bound: float, how: str) -> None:
    spec = parse_chain(text)
    chain = spec.new(50, torch.float64)
    for values in feeds()[how]:
        chain.encode(values)
        assert float(chain.residual.abs().max()) <= bound


# What is no number.


BAD = (float("inf"), float("-inf"), float("nan"))


@dtypes
@lossy
@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_number_is_seen_and_gone_with_the_next_message(text: str, bad: float, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(7)
    spec = parse_chain(text)
    chain = spec.new(40, dtype)
    produced, sent = (torch.zeros(40, dtype=torch.float64) for _ in range(2))
    for step in range(6):
        values = some(dice, 40, dtype)
        produced += values.double()
        if step == 2:
            values[11] = bad
        decoded = spec.decode(chain.encode(values), 40, dtype).double()
        seen = ~decoded.isfinite()
        assert seen.nonzero().flatten().tolist() == ([] if step != 2 else list(range(40)) if text == "sign" else [11])
        if step == 2 and text not in ("sign", "int8"):  # these say that there is one, not which
            assert torch.equal(decoded[11], torch.tensor(bad, dtype=torch.float64)) or bad != bad
        assert bool(chain.residual.isfinite().all())
        assert step != 2 or chain.residual[11] == 0
        sent += torch.where(seen, 0.0, decoded)
    others = torch.arange(40) != 11
    assert torch.allclose((sent + chain.residual.double())[others], produced[others], rtol=1e-5, atol=1e-5)


@dtypes
@lossy
def test_where_nothing_is_a_number_the_next_message_is_as_good_as_the_first(text: str, dtype: torch.dtype) -> None:
    """Also where a message has room for a few only."""
    spec = parse_chain(text)
    used, fresh = spec.new(40, dtype), spec.new(40, dtype)
    bad = torch.tensor([BAD[i % 3] for i in range(40)], dtype=dtype)
    decoded = spec.decode(used.encode(bad), 40, dtype)
    assert (~decoded.isfinite()).sum() == (4 if text.startswith("topk") else 40)
    assert used.residual.count_nonzero() == 0
    values = some(torch.Generator().manual_seed(1), 40, dtype)
    assert all(numpy.array_equal(*pair) for pair in zip(used.encode(values), fresh.encode(values), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("text", "largest"), [("fp16", 65504.0), ("topk:1+fp16", 65504.0), ("bf16", 3.3895313892515355e38)])
def test_what_is_too_large_for_a_cast_is_sent_in_parts(text: str, largest: float, dtype: torch.dtype) -> None:
    spec = parse_chain(text)
    chain = spec.new(2, dtype)
    values = torch.tensor([largest * 1.003, -largest * 1.003], dtype=dtype)
    decoded = spec.decode(chain.encode(values), 2, dtype)
    assert decoded.tolist() == [largest, -largest]
    assert torch.equal(chain.residual, values - decoded)
    left = chain.residual.clone()
    assert torch.allclose(spec.decode(chain.encode(torch.zeros(2, dtype=dtype)), 2, dtype), left, rtol=2.0**-8)


@dtypes
@lossy
def test_the_largest_numbers_of_a_dtype_leave_nothing_but_numbers(text: str, dtype: torch.dtype) -> None:
    spec, most = parse_chain(text), torch.finfo(dtype).max
    chain = spec.new(9, dtype)
    values = torch.tensor([most, -most, most, 0, 1, -1, most, most, most], dtype=dtype)
    decoded = spec.decode(chain.encode(values), 9, dtype)
    assert bool(decoded.isfinite().all())
    assert bool(chain.residual.isfinite().all())


# What another process may send.


def decoded_or_refused(text: str, message: list[ByteArray], size: int, dtype: torch.dtype) -> torch.Tensor | None:
    try:
        result = parse_chain(text).decode(message, size, dtype)
    except PeerError as error:
        said = str(error)
    else:
        assert result.shape == (size,)
        assert result.dtype == dtype
        return result
    assert said.startswith(f"cannot decode a message of {size} ")
    assert "\n" not in said
    return None


@pytest.mark.parametrize("text", ["none", *LOSSY])
@settled
@given(
    size=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    parts=st.lists(st.binary(max_size=170), max_size=3),
    data=st.data(),
)
def test_random_bytes_are_refused_or_a_tensor(
    text: str, size: int, dtype: torch.dtype, parts: list[bytes], data: st.DataObject
) -> None:
    decoded_or_refused(text, [numpy.frombuffer(bytearray(part), dtype=numpy.uint8) for part in parts], size, dtype)
    right = parse_chain(text).new(size, dtype).encode(some(torch.Generator().manual_seed(size), size, dtype))
    random = [
        numpy.frombuffer(bytearray(data.draw(st.binary(min_size=b.nbytes, max_size=b.nbytes))), numpy.uint8) for b in right
    ]
    decoded_or_refused(text, random, size, dtype)


def message_of(text: str, size: int = 20) -> list[ByteArray]:
    return parse_chain(text).new(size, torch.float32).encode(torch.arange(1.0, size + 1))


@pytest.mark.parametrize("text", ["none", *LOSSY])
def test_a_message_that_is_too_short_or_too_long_is_refused(text: str) -> None:
    message = message_of(text)
    assert decoded_or_refused(text, message, 20, torch.float32) is not None
    assert decoded_or_refused(text, message[:-1], 20, torch.float32) is None
    assert decoded_or_refused(text, [*message, message[0]], 20, torch.float32) is None
    for index, buffer in enumerate(message):
        for wrong in (buffer[:-1], numpy.append(buffer, numpy.uint8(0)), buffer[:0], numpy.tile(buffer, 2)):
            assert decoded_or_refused(text, [*message[:index], wrong, *message[index + 1 :]], 20, torch.float32) is None


@pytest.mark.parametrize("text", ["topk:0.15", "significant:17"])
@pytest.mark.parametrize(
    "places",
    [[0, 1, 20], [-1, 1, 2], [2, 1, 3], [1, 1, 2], [0, 2, 2], [0, -5, 7], [0, 1, 2**31 - 1], [-(2**31), 0, 1], [0, 99, 2]],
    ids=str,
)
def test_places_that_cannot_be_are_refused(text: str, places: list[int]) -> None:
    message = message_of(text)
    assert message[0].view(numpy.int32).tolist() == [17, 18, 19]
    wrong = numpy.array(places, dtype=numpy.int32).view(numpy.uint8)
    with pytest.raises(PeerError, match="expected strictly increasing places from 0 to 19, got 3 from"):
        parse_chain(text).decode([wrong, message[1]], 20, torch.float32)


def test_a_topk_message_of_another_count_is_refused() -> None:
    with pytest.raises(PeerError, match="places: expected 12 bytes for 3 of int32, got 16"):
        parse_chain("topk:0.15").decode(message_of("topk:0.2"), 20, torch.float32)


def test_a_scale_below_nothing_is_refused_and_one_that_is_no_number_is_not() -> None:
    _, bits = message_of("sign")
    for scale in (-1.0, -1e-40, float("-inf")):
        wrong = numpy.array([scale], dtype=numpy.float32).view(numpy.uint8)
        with pytest.raises(PeerError, match="expected a scale of at least 0, got -"):
            parse_chain("sign").decode([wrong, bits], 20, torch.float32)
    nan = numpy.array([float("nan")], dtype=numpy.float32).view(numpy.uint8)
    assert bool(parse_chain("sign").decode([nan, bits], 20, torch.float32).isnan().all())


@pytest.mark.parametrize("text", ["none", *LOSSY])
def test_a_buffer_may_be_read_only_and_stand_anywhere(text: str) -> None:
    message = message_of(text)
    odd = [numpy.frombuffer(b"x" + buffer.tobytes(), dtype=numpy.uint8)[1:] for buffer in message]
    assert torch.equal(*(parse_chain(text).decode(m, 20, torch.float32) for m in (message, odd)))

"""Chains: what can be written, what they promise in bytes, where they change nothing, and going on after a stop."""

from __future__ import annotations

import pickle

import numpy
import pytest
import torch
from tests.tensors.stated import stated_bytes

from polytempo.compression.chain import parse_chain, parse_compression
from polytempo.errors import PeerError, UsageError

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LOSSY = ("bf16", "fp16", "topk:0.1", "topk:0.1+bf16", "sign", "int8", "significant:0.5", "significant:0.5+fp16")
SIZES = (0, 1, 7, 8, 9, 1000)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
lossy = pytest.mark.parametrize("text", LOSSY)


def some(seed: int, size: int = 1000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=dice, dtype=torch.float64).to(dtype)


# What can be written.


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", "none"),
        ("none", "none"),
        (" bf16 ", "bf16"),
        ("topk:1e-2", "topk:0.01"),
        ("topk:.5 + fp16", "topk:0.5+fp16"),
        ("topk:1.0", "topk:1"),
        ("topk:1E-5", "topk:1e-05"),
        ("significant:1e-3+bf16", "significant:0.001+bf16"),
        ("significant:1e+20+fp16", "significant:1e20+fp16"),
        ("significant:0", "significant:0"),
        ("sign", "sign"),
    ],
)
def test_a_chain_has_one_name_which_means_the_same(text: str, canonical: str) -> None:
    spec = parse_chain(text)
    assert spec.text == str(spec) == canonical
    assert parse_chain(canonical) == spec
    assert hash(parse_chain(canonical)) == hash(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_chains_differ_where_their_texts_do() -> None:
    texts = ("none", *LOSSY, "topk:0.2", "significant:0.1")
    assert len({parse_chain(text) for text in texts}) == len(texts)
    assert [text for text in texts if parse_chain(text).is_lossless] == ["none"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpok:0.1", "nearest: topk"),
        ("BF16", "nearest: bf16"),
        ("zip", "unknown compression 'zip'"),
        ("topk", "topk needs a share above 0 and up to 1"),
        ("topk:", "write for example topk:0.01"),
        ("topk:0", "above 0"),
        ("topk:1e-999", "above 0"),
        ("topk:1.5", "up to 1"),
        ("topk:nan", "above 0"),
        ("topk:1_0", "above 0"),
        ("topk:0.1:2", "above 0"),
        ("significant:-1", "a threshold of at least 0"),
        ("significant:inf", "a threshold of at least 0"),
        ("significant:1e999", "a threshold of at least 0"),
        ("sign:1", "sign takes no argument"),
        ("bf16:8", "bf16 takes no argument"),
        ("none:1", "none takes no argument"),
        ("sign+bf16", "cannot be cast"),
        ("int8+bf16", "int8 sends single bytes, which cannot be cast"),
        ("bf16+topk:0.1", "in this order"),
        ("bf16+fp16", "in this order"),
        ("topk:0.1+sign", "in this order"),
        ("topk:0.1+topk:0.1", "in this order"),
        ("topk:0.1+none", "in this order"),
        ("none+bf16", "in this order"),
        ("topk:0.1+bf16+fp16", "in this order"),
        ("+bf16", "unknown compression ''"),
        ("topk:0.1+", "unknown compression ''"),
    ],
)
def test_what_is_no_chain_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_chain(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_that_no_chain_can_take_are_refused() -> None:
    chain = parse_chain("topk:0.1").new(10, torch.float32)
    for values in (torch.zeros(9), torch.zeros(10, 1), torch.zeros(10, dtype=torch.float64), torch.zeros(10, device="meta")):
        with pytest.raises(UsageError, match=r"expected a flat tensor of 10 float32 on the CPU, got \["):
            chain.encode(values)
    with pytest.raises(UsageError, match=r"expected values of float64, .*got int32"):
        parse_chain("none").new(10, torch.int32)
    with pytest.raises(UsageError, match="size of at least 0"):
        parse_chain("sign").new(-1, torch.float32)
    for text in ("topk:0.1", "significant:1"):
        with pytest.raises(UsageError, match="at most 2147483648 values"):
            parse_chain(text).decode([], 2**31 + 1, torch.float32)
    with pytest.raises(PeerError, match="expected 2 buffers, got 0"):  # so many are no reason to refuse
        parse_chain("sign").decode([], 2**40, torch.float32)


# Directions.


@pytest.mark.parametrize(
    ("given", "push", "pull"),
    [
        (None, "none", "none"),
        ("none", "none", "none"),
        ("bf16", "bf16", "bf16"),
        ("sign", "sign", "none"),
        ("topk:0.01+bf16", "topk:0.01+bf16", "none"),
        ({"push": "fp16"}, "fp16", "none"),
        ({"push": "sign", "pull": "significant:1e-3"}, "sign", "significant:0.001"),
        ({}, "none", "none"),
    ],
)
def test_a_cast_is_for_both_directions_and_a_selection_for_pushes(
    given: dict[str, str] | str | None, push: str, pull: str
) -> None:
    compression = parse_compression(given)
    assert (compression.push.text, compression.pull.text) == (push, pull)
    assert compression.is_lossless == (push == pull == "none")


def test_what_is_no_compression_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown direction 'pusch' of compression; nearest: push; known: push, pull"):
        parse_compression({"pusch": "bf16"})
    with pytest.raises(UsageError, match="got int"):
        parse_compression(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="as compression of pull, got NoneType"):
        parse_compression({"pull": None})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="nearest: bf16"):
        parse_compression({"pull": "bf61"})
    assert str(parse_compression("bf16")) == "bf16"
    assert str(parse_compression("sign")) == "push sign, pull none"


# Bytes.


@dtypes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("text", ["none", *LOSSY])
def test_the_bytes_of_a_message_are_those_stated(text: str, size: int, dtype: torch.dtype) -> None:
    spec = parse_chain(text)
    message = spec.new(size, dtype).encode(some(1, size, dtype))
    assert len(message) == spec.buffers
    assert all(buffer.dtype == numpy.uint8 and buffer.ndim == 1 for buffer in message)
    stated = stated_bytes(text, size, dtype)
    assert (stated is None) == text.startswith("significant")
    if stated is not None:
        assert sum(buffer.nbytes for buffer in message) == stated


def test_stated_bytes_in_numbers() -> None:
    stated = {text: stated_bytes(text, 1001, torch.float32) for text in ("none", *LOSSY, "topk:0.07")}
    assert stated == {
        "none": 4004,
        "bf16": 2002,
        "fp16": 2002,
        "topk:0.1": 101 * 8,
        "topk:0.1+bf16": 101 * 6,
        "sign": 4 + 126,
        "int8": 4 * 4 + 1001,
        "significant:0.5": None,
        "significant:0.5+fp16": None,
        "topk:0.07": 71 * 8,
    }
    assert stated_bytes("topk:0.07", 100, torch.float32) == 7 * 8  # 0.07 * 100 is above 7 in floats


# Where a chain changes nothing.


@dtypes
@pytest.mark.parametrize("text", ["none", "topk:1", "significant:0"])
def test_chains_that_send_everything_are_the_identity(text: str, dtype: torch.dtype) -> None:
    spec = parse_chain(text)
    chain = spec.new(100, dtype)
    for step in range(3):
        values = some(step, 100, dtype)
        values[::7] = 0
        assert torch.equal(spec.decode(chain.encode(values), 100, dtype), values)
        assert chain.residual.count_nonzero() == 0


@dtypes
@pytest.mark.parametrize(("text", "narrow"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_cast_of_what_is_narrow_already_is_exact(text: str, narrow: torch.dtype, dtype: torch.dtype) -> None:
    values = (some(1, 100) * 8).round().to(narrow).to(dtype)
    spec = parse_chain(text)
    chain = spec.new(100, dtype)
    assert torch.equal(spec.decode(chain.encode(values), 100, dtype), values)
    assert chain.residual.count_nonzero() == 0


@dtypes
@lossy
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_nothing_is_sent_as_nothing(text: str, zero: float, dtype: torch.dtype) -> None:
    spec = parse_chain(text)
    chain = spec.new(33, dtype)
    decoded = spec.decode(chain.encode(torch.full((33,), zero, dtype=dtype)), 33, dtype)
    assert decoded.count_nonzero() == chain.residual.count_nonzero() == 0


@dtypes
@pytest.mark.parametrize("text", ["none", *LOSSY])
def test_values_stay_as_they_were_and_what_is_read_has_memory_of_its_own(text: str, dtype: torch.dtype) -> None:
    spec, values = parse_chain(text), some(1, 99, dtype)
    chain, before = spec.new(99, dtype), values.clone()
    message = chain.encode(values.requires_grad_())
    first = spec.decode(message, 99, dtype)
    kept, held = first.clone(), chain.residual.clone()
    assert torch.equal(values.detach(), before)
    first.add_(1)
    chain.residual.add_(1)
    assert torch.equal(spec.decode(message, 99, dtype), kept)
    assert torch.equal(chain.residual, held)
    chain.encode(some(2, 99, dtype))
    assert torch.equal(spec.decode(message, 99, dtype), kept)  # a message is not written over by the next


@pytest.mark.parametrize("text", ["none", *LOSSY])
def test_values_need_not_stand_side_by_side(text: str) -> None:
    spec, apart = parse_chain(text), some(1, 100)[::2]
    messages = [spec.new(50, torch.float32).encode(values) for values in (apart, apart.clone())]
    assert all(numpy.array_equal(one, other) for one, other in zip(*messages, strict=True))


# Going on.


@dtypes
@lossy
def test_a_chain_goes_on_from_its_state_bit_for_bit(text: str, dtype: torch.dtype) -> None:
    spec = parse_chain(text)
    whole, first, second = (spec.new(100, dtype) for _ in range(3))
    for step in range(10):
        part = first if step < 5 else second
        if step == 5:
            state = first.state()
            first.encode(some(99, 100, dtype))  # the state is a copy
            second.load(state)
            second.load(second.state())
        messages = [chain.encode(some(step, 100, dtype)) for chain in (whole, part)]
        assert all(numpy.array_equal(one, other) for one, other in zip(*messages, strict=True))
        assert torch.equal(whole.residual, part.residual)
    assert whole.residual.count_nonzero() > 0 or (text in ("bf16", "fp16") and dtype.itemsize == 2)


def test_a_state_that_does_not_fit_is_refused() -> None:
    chain = parse_chain("sign").new(4, torch.bfloat16)
    for state in (
        {},
        {"residual": torch.zeros(5)},
        {"residual": torch.zeros(4, dtype=torch.bfloat16)},
        {"other": torch.zeros(4)},
    ):
        with pytest.raises(UsageError, match=r"the state of compression sign is residual \[4\] float32, got"):
            chain.load(state)
    plain = parse_chain("none").new(4, torch.float32)
    plain.load(plain.state())
    with pytest.raises(UsageError, match=r"the state of compression none is nothing, got residual"):
        plain.load({"residual": torch.zeros(4)})

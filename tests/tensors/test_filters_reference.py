"""Every filter against plain loops over floats, bit for bit: what is on the wire, what is read, what is held back."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.compression.chain import parse_chain
from polytempo.compression.encoding import ByteArray

settled = settings(max_examples=40, deadline=None, derandomize=True, database=None)

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Digits of the significand, exponent of the last digit of the smallest number, largest number.
KINDS = {
    torch.float64: (53, -1074, 1.7976931348623157e308),
    torch.float32: (24, -149, (2 - 2.0**-23) * 2.0**127),
    torch.float16: (11, -24, 65504.0),
    torch.bfloat16: (8, -133, (2 - 2.0**-7) * 2.0**127),
}
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def rounded(number: float, dtype: torch.dtype) -> float:
    """To the nearest number of a dtype, ties to even; numbers far too large stay what they are."""
    digits, lowest, _ = KINDS[dtype]
    last = max(math.frexp(number)[1] - digits, lowest)
    return math.ldexp(round(math.ldexp(number, -last)), last)


def largest_on_both(wire: torch.dtype, dtype: torch.dtype) -> float:
    if (wire, dtype) == (torch.bfloat16, torch.float16):
        return 65280.0  # 65504 has too many digits for bfloat16, and 65536 is none of float16
    return min(KINDS[wire][2], KINDS[dtype][2])


class Reference:
    """One chain on lists of floats."""

    def __init__(self, text: str, size: int, dtype: torch.dtype) -> None:
        self.selection, _, cast = text.rpartition("+") if "+" in text else (text, "", text)
        self.dtype, self.wire = dtype, CASTS.get(cast, dtype)
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.held = [0.0] * size

    def chosen(self, values: list[float]) -> list[int]:
        name, _, number = self.selection.partition(":")
        if name == "topk":
            count = min(len(values), max(1, -(-int(number.removeprefix("0.")) * len(values) // 10 ** (len(number) - 2))))
            return sorted(sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[:count])
        if name == "significant":
            return [i for i, value in enumerate(values) if abs(value) > float(number)]
        return list(range(len(values)))

    def step(self, new: list[float]) -> tuple[list[int], list[float], list[float]]:
        """Places, numbers on the wire, and what is read at the other end."""
        values = [rounded(a + b, self.wide) for a, b in zip(new, self.held, strict=True)]
        places, limit = self.chosen(values), largest_on_both(self.wire, self.dtype)
        sent = [rounded(min(max(values[i], -limit), limit), self.wire) for i in places]
        read = [0.0] * len(values)
        for place, number in zip(places, sent, strict=True):
            read[place] = rounded(number, self.dtype)
        self.held = [rounded(a - b, self.wide) for a, b in zip(values, read, strict=True)]
        return places, sent, read


def numbers(buffer: ByteArray, dtype: torch.dtype) -> list[float]:
    """What lies in a buffer, without torch."""
    data = buffer.tobytes()
    if dtype == torch.bfloat16:  # the upper half of a float32
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    letter, size = {torch.float64: ("d", 8), torch.float16: ("e", 2)}.get(dtype, ("f", 4))
    return list(struct.unpack(f"<{len(data) // size}{letter}", data))


def rounds_of(dtype: torch.dtype) -> st.SearchStrategy[list[list[float]]]:
    """Some rounds of equally many numbers that the dtype can hold: ties, zeros, tiny and large ones."""
    limit = 60000.0 if dtype == torch.float16 else 1e30
    number = st.one_of(
        st.integers(-3, 3).map(float),
        st.floats(-4, 4),
        st.floats(-limit, limit),
        st.floats(-1e-37, 1e-37),
        st.sampled_from([0.1, -0.1, 0.001, 65519.0, 65520.0, 1 + 2.0**-9, 1 + 2.0**-9 + 2.0**-40, 1 + 2.0**-12, -0.0]),
    ).map(lambda x: rounded(max(min(x, limit), -limit), dtype))
    sizes = st.integers(0, 20)
    return sizes.flatmap(lambda n: st.lists(st.lists(number, min_size=n, max_size=n), min_size=1, max_size=4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "text",
    ["bf16", "fp16", "topk:0.07", "topk:0.3", "topk:0.3+bf16", "topk:0.3+fp16", "significant:0.1", "significant:0.1+fp16"],
)
@settled
@given(data=st.data())
def test_selections_and_casts_are_those_of_plain_loops(text: str, dtype: torch.dtype, data: st.DataObject) -> None:
    rounds = data.draw(rounds_of(dtype))
    size = len(rounds[0])
    spec, reference = parse_chain(text), Reference(text, size, dtype)
    chain = spec.new(size, dtype)
    for new in rounds:
        message = chain.encode(torch.tensor(new, dtype=dtype))
        places, sent, read = reference.step(new)
        assert numbers(message[-1], reference.wire) == sent
        if len(message) == 2:
            assert list(struct.unpack(f"<{len(places)}i", message[0].tobytes())) == places
        assert spec.decode(message, size, dtype).tolist() == read
        assert chain.residual.tolist() == reference.held
        assert chain.residual.dtype == reference.wide


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settled
@given(data=st.data())
def test_signs_are_those_of_plain_loops(dtype: torch.dtype, data: st.DataObject) -> None:
    rounds = data.draw(rounds_of(dtype))
    size = len(rounds[0])
    spec, wide = parse_chain("sign"), torch.float64 if dtype == torch.float64 else torch.float32
    chain, held = spec.new(size, dtype), [0.0] * size
    for new in rounds:
        scale_bytes, bits = chain.encode(torch.tensor(new, dtype=dtype))
        values = [rounded(a + b, wide) for a, b in zip(new, held, strict=True)]
        (scale,) = numbers(scale_bytes, wide)
        mean = min(math.fsum(map(abs, values)) / size, KINDS[dtype][2]) if size else 0.0
        assert scale == pytest.approx(
            mean, rel=2.0**-48 if wide == torch.float64 else 2.0**-23, abs=0 if mean > 1e-30 else 2e-45
        )
        signs = "".join("1" if value < 0 else "0" for value in values)
        assert "".join(f"{byte:08b}" for byte in bits.tobytes()) == signs.ljust(-(-size // 8) * 8, "0")
        read = [math.copysign(rounded(scale, dtype), -1 if value < 0 else 1) for value in values]
        held = [rounded(a - b, wide) for a, b in zip(values, read, strict=True)]
        assert spec.decode([scale_bytes, bits], size, dtype).tolist() == read
        assert chain.residual.tolist() == held


def test_the_scale_is_the_mean_to_the_last_bit_where_sums_are_exact() -> None:
    scale, bits = parse_chain("sign").new(4, torch.float32).encode(torch.tensor([1.0, -2.5, 0.0, -0.0]))
    assert numbers(scale, torch.float32) == [0.875]
    assert bits.tolist() == [0b01000000]


@pytest.mark.parametrize(("name", "dtype"), CASTS.items())
@settled
@given(data=st.data())
def test_a_cast_rounds_once_also_from_float64(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Numbers a little beside the middle between two narrow ones, which float32 cannot tell from the middle."""
    digits = KINDS[dtype][0]
    middle = data.draw(st.integers(2 ** (digits - 1), 2**digits - 1)) * 2 + 1
    power = data.draw(st.integers(-20, 3) if name == "fp16" else st.integers(-150, 100))
    number = math.ldexp(middle, power) * (1 + data.draw(st.sampled_from([-1, 0, 1])) * 2.0**-40)
    spec = parse_chain(name)
    (message,) = spec.new(1, torch.float64).encode(torch.tensor([number], dtype=torch.float64))
    assert numbers(message, dtype) == [min(rounded(number, dtype), KINDS[dtype][2])]


@pytest.mark.parametrize("size", [65536, 100_000, 262_147])
@pytest.mark.parametrize("how", ["normal", "ties", "spikes at the sampled places", "sorted", "equal", "nothing"])
def test_the_largest_of_many_are_found_whatever_the_sample_says(size: int, how: str) -> None:
    dice = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=dice)
    if how == "ties":
        values = (values * 2).round()
    if how == "spikes at the sampled places":
        values[:: size // (1 << 14)] *= 100
    if how == "sorted":
        values = values.sort().values
    if how in ("equal", "nothing"):
        values = torch.full((size,), float(how == "equal"))
    spec = parse_chain("topk:0.01")
    message = spec.new(size, torch.float32).encode(values)
    order = sorted(range(size), key=(-values.abs()).tolist().__getitem__)  # stable: among equals the first stand first
    places = sorted(order[: math.ceil(size / 100)])
    assert message[0].view("int32").tolist() == places
    assert torch.equal(spec.decode(message, size, torch.float32)[places], values[places])

"""The way in which chains encode and decode on a GPU, with tensors on the CPU: no look at values, and the CPU's own bits.

`tests/gpu/test_hosts.py` has the same on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.compression.chain import CPU, CompressionChain, parse_chain
from polytempo.compression.encoding import as_bytes
from polytempo.errors import UsageError

settled = settings(max_examples=25, deadline=None, derandomize=True, database=None)

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CHAINS = ("bf16", "fp16", "int8", "sign", "topk:0.1", "topk:0.01+bf16", "significant:0.5", "significant:0.5+fp16")
BAD = (float("inf"), float("-inf"), float("nan"))


def on_device(text: str, size: int, dtype: torch.dtype) -> CompressionChain:
    """A chain that goes the way of a GPU."""
    spec = parse_chain(text)
    return CompressionChain(spec, replace(spec.new(size, dtype).form, on_host=False))


def feed(seed: int, size: int, dtype: torch.dtype, bad: float | None) -> torch.Tensor:
    """Values of very different sizes, of which many are equal in size."""
    dice = torch.Generator().manual_seed(seed)
    values = torch.randint(-6, 7, (size,), generator=dice).double() / 4
    values *= 10.0 ** torch.randint(-3, 4, (size,), generator=dice)
    if bad is not None:
        values[int(torch.randint(size, (1,), generator=dice))] = bad
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", CHAINS)
@settled
@given(size=st.integers(1, 700), seed=st.integers(0, 1 << 30), bad=st.sampled_from([None, *BAD]))
def test_both_ways_give_the_same_bits(text: str, dtype: torch.dtype, size: int, seed: int, bad: float | None) -> None:
    spec = parse_chain(text)
    host, device = spec.new(size, dtype), on_device(text, size, dtype)
    for step in range(3):
        values = feed(seed + step, size, dtype, bad if step == 1 else None)
        expected, got = host.encode(values), [as_bytes(part) for part in device.encode_tensors(values)]
        if text == "sign" and dtype == torch.float64:  # the mean is added up in another order
            scales = [message[0].view(numpy.float64) for message in (expected, got)]
            numpy.testing.assert_allclose(*scales, rtol=1e-14)
            device.load({"residual": host.residual})
            got[0] = expected[0]
        assert [part.tobytes() for part in got] == [part.tobytes() for part in expected]
        decoded = spec.code.decode(got, device.form, CPU)
        assert as_bytes(decoded).tobytes() == as_bytes(spec.decode(expected, size, dtype)).tobytes()
        assert as_bytes(device.residual).tobytes() == as_bytes(host.residual).tobytes()


@pytest.mark.parametrize("text", ["topk:0.1", "topk:0.5", "topk:1"])
def test_among_equals_the_first_are_sent(text: str) -> None:
    values = torch.tensor([1.0, -1.0] * 50)
    places, _ = on_device(text, 100, torch.float32).encode_tensors(values)
    assert places.tolist() == list(range(places.numel()))


def test_sign_of_numbers_too_large_to_be_added_up() -> None:
    values = torch.full((9,), 1e308, dtype=torch.float64)
    scale, _ = on_device("sign", 9, torch.float64).encode_tensors(values)
    assert scale.item() == pytest.approx(1e308)


def test_a_chain_takes_values_of_its_own_device_alone() -> None:
    chain = parse_chain("bf16").new(4, torch.float32)
    with pytest.raises(UsageError, match=r"4 float32 on the CPU, got .* on meta"):
        chain.encode(torch.zeros(4, device="meta"))

"""Flat buffers on a device, here its stand-in: what is gathered and landed is what the host's buffers have, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo.device.host_device import HostDevice
from polytempo.protocol.layout import lay_out
from polytempo.reducer.copier import Copier
from polytempo.reducer.device_moves import largest, shaped_like
from polytempo.reducer.flat_buffer import FlatBuffer, describe
from polytempo.transport.buffer_pool import Pool

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def parameters(seed: int) -> list[torch.Tensor]:
    """Of several dtypes and memory formats, some without a gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,), (), (2, 3, 3, 3), (8, 4, 1, 1), (0, 2), (1, 7)]
    params = []
    for number, shape in enumerate(shapes * 2):
        dtype = DTYPES[(number + seed) % len(DTYPES)]
        values = torch.randn(shape, generator=generator).to(dtype)
        if len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        param = torch.nn.Parameter(values)
        if (number * 7 + seed) % 5:
            param.grad = torch.randn(shape, generator=generator).to(dtype)
        params.append(param)
    return params


@given(st.integers(0, 50), st.integers(1, 3))
def test_gathers_and_lands_as_the_host_does(seed: int, shards: int) -> None:
    ours, theirs = parameters(seed), parameters(seed)
    layout = lay_out(describe(ours, [str(i) for i in range(len(ours))], [0] * len(ours)), shards)
    device = Copier(ours, layout, HostDevice())
    host = Copier(theirs, layout, Pool())
    on_device, on_host = device.next_buffer(), host.next_buffer()
    for buffer in (on_device, on_host):
        for flat in buffer.tensors.values():
            flat.fill_(3.0)
    assert device.gather(on_device, lambda p: p.grad) == host.gather(on_host, lambda p: p.grad)
    for dtype, flat in on_host.tensors.items():
        assert torch.equal(on_device.tensors[dtype], flat)
        device.landing.tensors[dtype].copy_(flat * 2)
        flat.mul_(2)
    device.land()
    host.scatter(dict(enumerate(on_host.parts)))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True))
    assert device.watch.is_clean()
    host.scatter(dict(enumerate(on_host.parts)))
    device.scatter(dict(enumerate(on_host.parts)))  # bytes that came through the host
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_at_most_two_flat_copies_and_their_bytes_are_stated() -> None:
    device, params = HostDevice(), [torch.nn.Parameter(torch.zeros(1000)), torch.nn.Parameter(torch.zeros(24))]
    copier = Copier(params, lay_out(describe(params, ["a", "b"], [0, 0]), 2), device)
    assert copier.device_bytes == device.allocated == 2 * 1024 * 4


def test_views_take_the_strides_of_their_parameter_where_order_stays() -> None:
    narrow = torch.empty(8, 4, 1, 1).to(memory_format=torch.channels_last)
    wide = torch.empty(8, 4, 3, 3).to(memory_format=torch.channels_last)
    assert shaped_like(torch.empty(8, 4, 1, 1), narrow).stride() == narrow.stride()
    assert shaped_like(torch.empty(8, 4, 3, 3), wide).is_contiguous()


def test_largest_is_not_finite_where_an_element_is_not() -> None:
    flat = torch.full((1000,), 3e38)
    assert torch.isfinite(largest(flat))  # a sum would not be
    for wrong in (float("nan"), float("inf"), -float("inf")):
        flat[500] = wrong
        assert not torch.isfinite(largest(flat))
    params = [torch.nn.Parameter(torch.zeros(4))]
    buffer = FlatBuffer(lay_out(describe(params, ["a"], [0]), 1), HostDevice())
    assert buffer.is_finite(everything=True)
    buffer.views[0][2] = float("nan")
    assert not buffer.is_finite(everything=False)

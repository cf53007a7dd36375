"""`sign`: one bit for each value, and one scale for all, the mean of |p| (as in Karimireddy et al. 2019).

D(q) is the scale with the sign of each value; 0 has the sign +. With a NaN or Inf the mean is not finite: then
the whole message is NaN, which the receiver sees, and every finite value stays in the residual.

The mean is summed in float64: on the CPU in NumPy's order, by one thread; on a GPU by halves that are added. As float32 both
are the same, unless the mean lies within 1e-14 of the middle between two numbers; as float64 the last digits may differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from polytempo.compression.encoding import ByteArray, Code, NumberFormat, as_values, clear
from polytempo.errors import PeerError


@dataclass(frozen=True)
class Sign(Code):
    """Signs and one scale."""

    buffers = 2
    text = "sign"

    def encode(self, held: torch.Tensor, form: NumberFormat) -> list[torch.Tensor]:
        negative = (held < 0).view(torch.uint8)
        if not form.on_host:
            scale = _scale_on_device(held, form)
            left = held - _signed(scale, negative, form)
            clear(held, on_host=False)
            held.copy_(torch.where(torch.isfinite(scale), left, held))
            return [scale, _packed_on_device(negative)]
        scale = _scale(held, form)
        message = [scale, torch.from_numpy(numpy.packbits(negative.numpy()))]
        if math.isfinite(scale.item()):
            held.sub_(_signed(scale, negative, form))
        else:
            clear(held)
        return message

    def decode(self, buffers: Sequence[ByteArray], form: NumberFormat, device: torch.device) -> torch.Tensor:
        scale = as_values(buffers[0], 1, form.wide, "scale")
        if scale.item() < 0:
            raise PeerError(f"expected a scale of at least 0, got {scale.item()}")
        bits = as_values(buffers[1], -(-form.size // 8), torch.uint8, "signs")
        if form.on_host:
            return _signed(scale, torch.from_numpy(numpy.unpackbits(bits.numpy(), count=form.size)), form)
        return _signed(scale.to(device), _unpacked_on_device(bits.to(device), form.size), form)


def _scale(held: torch.Tensor, form: NumberFormat) -> torch.Tensor:
    """The mean of |held|, summed in float64 by one thread: the same however many there are."""
    if not form.size:
        return torch.zeros(1, dtype=form.wide)
    absolute = numpy.abs(held.numpy())
    with numpy.errstate(over="ignore"):
        mean = float(absolute.sum(dtype=numpy.float64)) / form.size
    if math.isinf(mean):  # of numbers that are too large to be added up, perhaps
        mean = float((absolute / form.size).sum(dtype=numpy.float64))
    return torch.tensor([min(mean, torch.finfo(form.dtype).max) if math.isfinite(mean) else mean], dtype=form.wide)


def _scale_on_device(held: torch.Tensor, form: NumberFormat) -> torch.Tensor:
    """The same, without a look at it."""
    if not form.size:
        return held.new_zeros(1)
    absolute = held.abs().double()
    size = absolute.new_full((), form.size)
    mean = _sum(absolute) / size
    if form.wide == torch.float64:
        mean = torch.where(torch.isinf(mean), _sum(absolute / size), mean)
    limited = mean.clamp(max=torch.finfo(form.dtype).max)
    return torch.where(torch.isfinite(mean), limited, mean).to(form.wide)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """The sum, as one element: halves are added to each other, in an order that no device and no thread changes."""
    while values.numel() > 1:
        half = values.numel() // 2
        odd = values[2 * half :]
        values = values[:half] + values[half : 2 * half]
        values = torch.cat([values, odd]) if odd.numel() else values
    return values


def _packed_on_device(bits: torch.Tensor) -> torch.Tensor:
    """Eight to a byte, the first in the highest place: as `numpy.packbits`."""
    rows = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (rows << _places(bits.device)).sum(1, dtype=torch.uint8)


def _unpacked_on_device(packed: torch.Tensor, count: int) -> torch.Tensor:
    return ((packed[:, None] >> _places(packed.device)) & 1).view(-1)[:count]


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def _signed(scale: torch.Tensor, negative: torch.Tensor, form: NumberFormat) -> torch.Tensor:
    return negative.to(form.dtype).mul_(-2).add_(1).mul_(scale.to(form.dtype))

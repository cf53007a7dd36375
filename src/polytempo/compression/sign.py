"""`sign`: one bit for each value, and one scale for all, the mean of |p| (as in Karimireddy et al. 2019).

D(q) is the scale with the sign of each value; 0 has the sign +. With a NaN or Inf the mean is not finite: then
the whole message is NaN, which the receiver sees, and every finite value stays in the residual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from polytempo.compression.encoding import ByteArray, Code, NumberFormat, Whole, as_bytes, as_values, clear, item_size
from polytempo.errors import PeerError


@dataclass(frozen=True)
class Sign(Code):
    """Signs and one scale."""

    buffers = 2
    text = "sign"

    def encode(self, held: torch.Tensor, form: NumberFormat) -> list[ByteArray]:
        scale = _scale(held, form)
        negative = held.numpy() < 0
        message = [as_bytes(scale), numpy.packbits(negative)]
        if math.isfinite(scale.item()):
            held.sub_(_signed(scale, negative.view(numpy.uint8), form))
        else:
            clear(held)
        return message

    def decode(self, buffers: Sequence[ByteArray], form: NumberFormat) -> torch.Tensor:
        scale = as_values(buffers[0], 1, form.wide, "scale")
        if scale.item() < 0:
            raise PeerError(f"expected a scale of at least 0, got {scale.item()}")
        bits = buffers[1]
        if bits.nbytes != -(-form.size // 8):
            raise PeerError(f"signs: expected {-(-form.size // 8)} bytes for {form.size} values, got {bits.nbytes}")
        return _signed(scale, numpy.unpackbits(bits, count=form.size), form)

    def stated_bytes(self, form: NumberFormat) -> int:
        return item_size(form.wide) + -(-form.size // 8)


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


def _signed(scale: torch.Tensor, negative: Whole, form: NumberFormat) -> torch.Tensor:
    signs = torch.from_numpy(negative).to(form.dtype)
    return signs.mul_(-2).add_(1).mul_(scale.to(form.dtype))

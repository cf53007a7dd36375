"""`int8`: every value in one byte, with a scale for each block of 256 values: the largest |p| of the block / 127.

D(q) is the whole number from -127 to 127 times the scale, rounded to the nearest, ties to even; so what is held back of a
value is at most half a scale. A NaN or Inf is sent as -128 and comes out as NaN, which the receiver sees; the other values
of its block are not disturbed by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polytempo.compression.encoding import ByteArray, Code, NumberFormat, as_values, clear, is_finite
from polytempo.errors import PeerError

#: Values that share a scale.
BLOCK = 256
#: The largest whole number of a value, and the one of what is no number.
LARGEST, NO_NUMBER = 127, -128


@dataclass(frozen=True)
class Int8(Code):
    """Whole numbers of one byte, and scales."""

    buffers = 2
    text = "int8"

    def encode(self, held: torch.Tensor, form: NumberFormat) -> list[torch.Tensor]:
        finite = form.on_host and is_finite(held)
        values = held if finite else held.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        rows = torch.nn.functional.pad(values.clamp(-form.limit, form.limit), (0, -form.size % BLOCK)).view(-1, BLOCK)
        # By a tensor: a GPU multiplies by the reciprocal of a number, which is not always the same.
        scales = rows.abs().amax(1) / rows.new_full((), LARGEST) if form.size else rows.new_zeros(0)
        wholes = torch.where(scales[:, None] > 0, rows / scales[:, None], rows.new_zeros(()))
        numbers = wholes.round_().clamp_(-LARGEST, LARGEST).to(torch.int8).view(-1)[: form.size].clone()
        if not finite:
            numbers.masked_fill_(~torch.isfinite(held), NO_NUMBER)
        held.sub_(_values(scales, numbers, form).to(form.wide))
        clear(held, form.on_host)
        return [scales, numbers]

    def decode(self, buffers: Sequence[ByteArray], form: NumberFormat, device: torch.device) -> torch.Tensor:
        scales = as_values(buffers[0], -(-form.size // BLOCK), form.wide, "scales")
        if not bool((scales >= 0).all()) or not is_finite(scales):
            raise PeerError("expected finite scales of at least 0, got others")
        numbers = as_values(buffers[1], form.size, torch.int8, "values")
        return _values(scales.to(device), numbers.to(device), form)


def _values(scales: torch.Tensor, numbers: torch.Tensor, form: NumberFormat) -> torch.Tensor:
    """Whole numbers times the scale of their block; -128 is NaN."""
    wide = numbers.to(form.wide) * scales.repeat_interleave(BLOCK)[: form.size]
    values = wide.clamp_(-form.limit, form.limit).to(form.dtype)
    no_numbers = numbers == NO_NUMBER
    if not form.on_host or bool(no_numbers.any()):
        values.masked_fill_(no_numbers, torch.nan)
    return values

"""How numbers lie in buffers, and how they become narrower ones.

Values of two bytes are added up in four: what a chain holds back is float32 for them, and of their own dtype for others.
A cast rounds to the nearest, ties to even, once; torch takes float64 to two bytes by way of float32, which rounds twice.
A number beyond what the narrow dtype can hold becomes the largest that it can; infinities and NaN stay what they are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch

from polytempo.errors import PeerError, UsageError

ByteArray = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]
Whole = numpy.ndarray[Any, numpy.dtype[Any]]

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class NumberFormat:
    """So many values of a dtype, and the dtype they have on their way."""

    size: int
    dtype: torch.dtype
    wire: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            names = ", ".join(dtype_name(dtype) for dtype in DTYPES)
            raise UsageError(f"expected values of {names}, got {dtype_name(self.dtype)}; cast them first")
        if self.size < 0:
            raise UsageError(f"expected a size of at least 0, got {self.size}")

    @property
    def wide(self) -> torch.dtype:
        """In which sums are made, and residuals kept."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @cached_property
    def limit(self) -> float:
        """The largest number that is finite on its way and at its end."""
        return round_down(min(torch.finfo(self.wire).max, torch.finfo(self.dtype).max), self.wire)

    def __str__(self) -> str:
        return f"{self.size} {dtype_name(self.dtype)}"


def item_size(dtype: torch.dtype) -> int:
    """Bytes of one value."""
    return int(dtype.itemsize)


def dtype_name(dtype: torch.dtype) -> str:
    """As it stands in texts: "float32"."""
    return str(dtype).removeprefix("torch.")


def round_down(number: float, dtype: torch.dtype) -> float:
    """The largest number of this dtype that is not above `number`, which is not negative: so comparisons are exact."""
    rounded = torch.tensor(min(number, torch.finfo(dtype).max), dtype=torch.float64).to(dtype)
    if rounded.item() > number:
        rounded = torch.nextafter(rounded, torch.zeros_like(rounded))
    return float(rounded.item())


def is_finite(values: torch.Tensor) -> bool:
    """Are all of them numbers? What is no number survives a sum."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def clear(values: torch.Tensor) -> None:
    """What is no number becomes 0."""
    if not is_finite(values):
        values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def narrow(values: torch.Tensor, form: NumberFormat) -> torch.Tensor:
    """Wide values as they travel."""
    if form.wire == form.wide:
        return values
    limited = values.clamp(-form.limit, form.limit)
    if not is_finite(values):
        limited = torch.where(torch.isfinite(values), limited, values)
    return (_to_odd(limited) if limited.dtype == torch.float64 else limited).to(form.wire)


def _to_odd(values: torch.Tensor) -> torch.Tensor:
    """As float32, towards zero, with the last bit set where something was cut off: rounding that again is rounding once."""
    single = values.float()
    bits, back = single.view(torch.int32), single.double()
    bits.sub_((back.abs() > values.abs()).int())
    bits.bitwise_or_((back != values).int())
    return single


def magnitudes(values: torch.Tensor) -> Whole:
    """Whole numbers in the order of |values|: their bits without the sign. NaN is above infinity."""
    whole = numpy.int64 if values.dtype == torch.float64 else numpy.int32
    bits: Whole = values.numpy().view(whole)
    return bits & numpy.iinfo(whole).max


def as_bytes(values: torch.Tensor) -> ByteArray:
    """The memory of a flat tensor."""
    return values.contiguous().view(torch.uint8).numpy() if values.numel() else numpy.empty(0, dtype=numpy.uint8)


def as_values(buffer: ByteArray, count: int, dtype: torch.dtype, what: str) -> torch.Tensor:
    """A tensor of its own with what lies in a buffer that another process sent."""
    nbytes = count * item_size(dtype)
    if buffer.nbytes != nbytes:
        raise PeerError(f"{what}: expected {nbytes} bytes for {count} of {dtype_name(dtype)}, got {buffer.nbytes}")
    values = torch.empty(count, dtype=dtype)
    if count:
        values.view(torch.uint8).numpy()[:] = buffer
    return values


# What a code is, and the plain one: every value, as it is or cast.
#
# A code takes the sum p of new values and what was held back, writes a message q, and leaves p - D(q) where p was: so
# what is sent and what is held back always add up to what was produced.
#
# What is no number (infinities and NaN) is sent as it is and leaves 0 behind: the other side sees it, and what is held back
# stays finite. Where more of them come than a message has room for, those that are sent speak for the others.


class Code(ABC):
    """One way to write values into buffers and to read them back."""

    buffers: int  #: of every message

    @property
    @abstractmethod
    def text(self) -> str:
        """As it is written in the name of a chain."""

    def check(self, form: NumberFormat) -> None:
        """Refuse, as a `UsageError`, values that cannot be written."""

    @abstractmethod
    def encode(self, held: torch.Tensor, form: NumberFormat) -> list[ByteArray]:
        """A message about what is held, which becomes what the message does not say."""

    @abstractmethod
    def decode(self, buffers: Sequence[ByteArray], form: NumberFormat) -> torch.Tensor:
        """The values that a message says; `PeerError` when it cannot be right."""

    @abstractmethod
    def stated_bytes(self, form: NumberFormat) -> int | None:
        """Bytes of every message; None where the values decide."""


@dataclass(frozen=True)
class Dense(Code):
    """Every value, in the dtype of its way. What is not cast is sent from where it is, and nothing is held."""

    buffers = 1
    text = ""

    def encode(self, held: torch.Tensor, form: NumberFormat) -> list[ByteArray]:
        sent = narrow(held, form)
        held.sub_(sent.to(form.dtype))
        clear(held)
        return [as_bytes(sent)]

    def decode(self, buffers: Sequence[ByteArray], form: NumberFormat) -> torch.Tensor:
        return as_values(buffers[0], form.size, form.wire, "values").to(form.dtype)

    def stated_bytes(self, form: NumberFormat) -> int:
        return form.size * item_size(form.wire)

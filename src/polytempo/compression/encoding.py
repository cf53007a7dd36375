"""Formats of numbers in buffers, casts between them, and the interface of a code.

Values of two bytes are summed in four: their residuals are float32, those of other values have their own dtype. A cast
rounds to the nearest, ties to even, once; torch casts float64 to two bytes by way of float32, which rounds twice. A number
beyond the range of the narrow dtype becomes the largest of that range; infinities and NaN stay what they are.

A code takes the sum p of new values and residual, writes a message q, and leaves p - D(q) in place of p. Infinities and NaN
are sent as they are and leave a residual of 0: the receiver sees them, and residuals stay finite. Where a message has no
room for all of them, it sends some.

Values on a GPU are encoded there, and decoded on the device the caller names: only encoded bytes are copied. On the CPU a
look at the values (are all finite?) saves a pass; on a GPU it would stop the host until the stream has come this far, so the
pass is made always (`NumberFormat.on_host`). Both ways give the same bits, but for those of a NaN.
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
    """The number of values, their dtype, the dtype in which they are sent, and whether they lie in the CPU's memory."""

    size: int
    dtype: torch.dtype
    wire: torch.dtype
    on_host: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            names = ", ".join(dtype_name(dtype) for dtype in DTYPES)
            raise UsageError(f"expected values of {names}, got {dtype_name(self.dtype)}; cast them first")
        if self.size < 0:
            raise UsageError(f"expected a size of at least 0, got {self.size}")

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and residuals."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @cached_property
    def limit(self) -> float:
        """The largest number that is finite in both dtypes."""
        return round_down(min(torch.finfo(self.wire).max, torch.finfo(self.dtype).max), self.wire)

    def __str__(self) -> str:
        return f"{self.size} {dtype_name(self.dtype)}"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: "float32"."""
    return str(dtype).removeprefix("torch.")


def round_down(number: float, dtype: torch.dtype) -> float:
    """The largest number of this dtype that is not above `number`, which is not negative: so comparisons are exact."""
    rounded = torch.tensor(min(number, torch.finfo(dtype).max), dtype=torch.float64).to(dtype)
    if rounded.item() > number:
        rounded = torch.nextafter(rounded, torch.zeros_like(rounded))
    return float(rounded.item())


def is_finite(values: torch.Tensor) -> bool:
    """Are all values finite? (NaN and Inf propagate through sum().)"""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def clear(values: torch.Tensor, on_host: bool = True) -> None:
    """Replace NaN and Inf by 0."""
    if not on_host or not is_finite(values):
        values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def narrow(values: torch.Tensor, form: NumberFormat) -> torch.Tensor:
    """Wide values in the dtype in which they are sent."""
    if form.wire == form.wide:
        return values
    limited = values.clamp(-form.limit, form.limit)
    if not form.on_host or not is_finite(values):
        limited = torch.where(torch.isfinite(values), limited, values)
    return (_to_odd(limited) if limited.dtype == torch.float64 else limited).to(form.wire)


def _to_odd(values: torch.Tensor) -> torch.Tensor:
    """As float32, towards zero, with the last bit set where something was cut off: rounding that again is rounding once."""
    single = values.float()
    bits, back = single.view(torch.int32), single.double()
    bits.sub_((back.abs() > values.abs()).int())
    bits.bitwise_or_((back != values).int())
    return single


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers in the order of |values|: their bits without the sign. NaN is above infinity."""
    whole = torch.int64 if values.dtype == torch.float64 else torch.int32
    return values.view(whole) & torch.iinfo(whole).max


def as_bytes(values: torch.Tensor) -> ByteArray:
    """The memory of a flat tensor."""
    return values.contiguous().view(torch.uint8).numpy() if values.numel() else numpy.empty(0, dtype=numpy.uint8)


def as_values(buffer: ByteArray, count: int, dtype: torch.dtype, what: str) -> torch.Tensor:
    """A tensor of its own, on the CPU, with what lies in a buffer that another process sent."""
    nbytes = count * dtype.itemsize
    if buffer.nbytes != nbytes:
        raise PeerError(f"{what}: expected {nbytes} bytes for {count} of {dtype_name(dtype)}, got {buffer.nbytes}")
    values = torch.empty(count, dtype=dtype)
    if count:
        values.view(torch.uint8).numpy()[:] = buffer
    return values


class Code(ABC):
    """One way to write values into buffers and to read them back."""

    buffers: int  #: of every message

    @property
    @abstractmethod
    def text(self) -> str:
        """The text of this code in the name of a chain."""

    def check(self, form: NumberFormat) -> None:
        """Refuse, as a `UsageError`, values that cannot be written."""

    @abstractmethod
    def encode(self, held: torch.Tensor, form: NumberFormat) -> list[torch.Tensor]:
        """A message of the values in `held`, on its device; `held` then has the residual."""

    @abstractmethod
    def decode(self, buffers: Sequence[ByteArray], form: NumberFormat, device: torch.device) -> torch.Tensor:
        """The values of a message, on a device; `PeerError` when it is invalid, which is found out on the host."""


@dataclass(frozen=True)
class Dense(Code):
    """Every value, in the dtype in which it is sent. Without a cast the memory of the values is sent, with no residual."""

    buffers = 1
    text = ""

    def encode(self, held: torch.Tensor, form: NumberFormat) -> list[torch.Tensor]:
        sent = narrow(held, form)
        held.sub_(sent.to(form.dtype))
        clear(held, form.on_host)
        return [sent]

    def decode(self, buffers: Sequence[ByteArray], form: NumberFormat, device: torch.device) -> torch.Tensor:
        return as_values(buffers[0], form.size, form.wire, "values").to(device).to(form.dtype)

"""What passes between two stages: values with a microbatch's number, the version of its weights, and a figure; as bytes
and back. Tensors that arrive lie in the memory the message came in; it is used again when nobody holds them any more."""

from __future__ import annotations

import json
import struct
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.transport.channel import Bytes
from polytempo.transport.pool import Pool

#: Number of the microbatch, version of the weights, figure.
HEAD = struct.Struct("<qqd")
ALIGNED = 64


@dataclass
class Parcel:
    """What one message brings. `single`: the one value was not in a tuple."""

    values: list[Any]
    single: bool = False
    number: int = 0
    version: int = 0
    figure: float = 0.0


@dataclass
class Form:
    """What all messages are like that follow an announcement: for each value its place, dtype and shape, or itself."""

    text: str
    entries: list[Any] = field(default_factory=list)
    single: bool = False
    size: int = ALIGNED
    places: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.single, self.entries = json.loads(self.text)
        for entry in self.entries:
            self.places.append(self.size)
            if "shape" in entry:
                length = torch.Size(entry["shape"]).numel() * dtype_of(entry).itemsize
                self.size += -(-length // ALIGNED) * ALIGNED


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    """The dtype of an announced tensor."""
    found = getattr(torch, entry["dtype"])
    assert isinstance(found, torch.dtype)
    return found


def described(parcel: Parcel) -> str:
    """The form of a parcel, as text."""
    return json.dumps([parcel.single, [_entry(value) for value in parcel.values]], separators=(",", ":"))


def _entry(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise UsageError(f"expected dense tensors between stages, got one with layout {value.layout}; use .to_dense()")
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "dtype": dtype, "grad": value.requires_grad}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise UsageError(f"expected tensors between stages (or numbers, or None), got {type(value).__name__}; cut elsewhere")


def packed(parcel: Parcel, form: Form, pool: Pool) -> Bytes:
    """A copy as bytes."""
    data = pool.take(form.size)
    HEAD.pack_into(data.data, 0, parcel.number, parcel.version, parcel.figure)
    whole = torch.from_numpy(data)
    for value, place in zip(parcel.values, form.places, strict=True):
        if isinstance(value, torch.Tensor) and value.numel():
            length = value.numel() * value.element_size()
            whole[place : place + length].view(value.dtype).view(value.shape).copy_(value.detach())
    return data


def unpacked(data: Bytes, form: Form, pool: Pool, device: torch.device) -> Parcel:
    """Tensors in the same memory, which goes back to the pool when they are gone."""
    number, version, figure = HEAD.unpack_from(data.data, 0)
    view = data[:]
    whole = torch.from_numpy(view)  # holds the view, not what the view is of
    weakref.finalize(view, pool.give, data).atexit = False
    values = [_value(whole, entry, place, device) for entry, place in zip(form.entries, form.places, strict=True)]
    return Parcel(values, form.single, number, version, figure)


def _value(whole: torch.Tensor, entry: dict[str, Any], place: int, device: torch.device) -> Any:
    if "shape" not in entry:
        return torch.Size(entry["size"]) if "size" in entry else entry["value"]
    dtype, shape = dtype_of(entry), torch.Size(entry["shape"])
    if not shape.numel():
        tensor = torch.empty(shape, dtype=dtype, device=device)
    else:
        tensor = whole[place : place + shape.numel() * dtype.itemsize].view(dtype).view(shape).to(device)
    return tensor.requires_grad_() if entry["grad"] else tensor

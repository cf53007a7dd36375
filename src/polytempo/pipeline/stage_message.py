"""What passes between two stages: values with a microbatch's number, the version of its weights, and a figure; as bytes
and back. Tensors that arrive lie in the memory the message came in."""

from __future__ import annotations

import ctypes
import json
import struct
from dataclasses import dataclass, field
from typing import Any

import torch

from polytempo.errors import UsageError, WrongType
from polytempo.transport.channel import Bytes
from polytempo.transport.shared_memory import address_of

#: Number of the microbatch, version of the weights, figure.
HEAD = struct.Struct("<qqd")
ALIGNED = 64


@dataclass
class StageMessage:
    """What one message brings. `single`: the one value was not in a tuple."""

    values: list[Any]
    single: bool = False
    number: int = 0
    version: int = 0
    figure: float = 0.0


@dataclass(slots=True)
class _Tensor:
    """Where a tensor lies, and what it is like."""

    place: int
    dtype: torch.dtype
    shape: torch.Size
    count: int
    grad: bool


@dataclass(slots=True)
class _Value:
    """What is the same in every message."""

    value: Any


@dataclass
class MessageForm:
    """What all messages are like that follow an announcement: for each value its place, dtype and shape, or itself."""

    text: str
    single: bool = False
    size: int = ALIGNED
    entries: list[_Tensor | _Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.single, entries = json.loads(self.text)
        for entry in entries:
            if "shape" not in entry:
                self.entries.append(_Value(torch.Size(entry["size"]) if "size" in entry else entry["value"]))
                continue
            dtype, shape = getattr(torch, entry["dtype"]), torch.Size(entry["shape"])
            assert isinstance(dtype, torch.dtype)
            self.entries.append(_Tensor(self.size, dtype, shape, shape.numel(), entry["grad"]))
            self.size += -(-shape.numel() * dtype.itemsize // ALIGNED) * ALIGNED


def outline(parcel: StageMessage) -> tuple[Any, ...]:
    """Parcels with equal outlines have equal forms: this is cheaper to compare."""
    tensor = torch.Tensor
    return parcel.single, *(
        (value.shape, value.dtype, value.requires_grad, value.layout) if isinstance(value, tensor) else (type(value), value)
        for value in parcel.values
    )


def described(parcel: StageMessage) -> str:
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
    raise WrongType(f"expected tensors between stages (or numbers, or None), got {type(value).__name__}; cut elsewhere")


def pack(parcel: StageMessage, form: MessageForm, data: Bytes) -> None:
    """Copy it into memory that has room for it."""
    HEAD.pack_into(data.data, 0, parcel.number, parcel.version, parcel.figure)
    for value, entry in zip(parcel.values, form.entries, strict=True):
        if isinstance(entry, _Tensor) and entry.count:
            _copy(value.detach(), entry, data)


def _copy(value: torch.Tensor, entry: _Tensor, data: Bytes) -> None:
    if value.device.type == "cpu" and value.is_contiguous() and not (value.is_conj() or value.is_neg()):
        ctypes.memmove(address_of(data) + entry.place, value.data_ptr(), value.nbytes)  # torch's takes 0.1 ms when cold
    else:
        _view(data, entry).copy_(value)


def _view(data: Bytes, entry: _Tensor) -> torch.Tensor:
    return torch.frombuffer(data, dtype=entry.dtype, count=entry.count, offset=entry.place).view(entry.shape)


def unpacked(data: Bytes, form: MessageForm, device: torch.device) -> StageMessage:
    """Tensors in the same memory, which they hold."""
    number, version, figure = HEAD.unpack_from(data.data, 0)
    values = [_value(data, entry, device) for entry in form.entries]
    return StageMessage(values, form.single, number, version, figure)


def _value(data: Bytes, entry: _Tensor | _Value, device: torch.device) -> Any:
    if isinstance(entry, _Value):
        return entry.value
    if entry.count:
        tensor = _view(data, entry).to(device)
    else:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    return tensor.requires_grad_() if entry.grad else tensor

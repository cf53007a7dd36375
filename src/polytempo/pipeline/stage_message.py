"""Messages between stages, and the microbatches that become the first of them.

A message has values (tensors, numbers, None), the number of its microbatch, the version of its weights, and a figure (a
loss, or the number of examples). Its form (shapes, dtypes, which tensors require a gradient) is described once; then only
bytes travel. Received tensors lie in the memory in which the message came. A batch is split along the first dimension of its
tensors, in tuples, lists and dicts.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from polytempo.errors import UsageError, WrongType
from polytempo.transport.channel import Bytes
from polytempo.transport.shared_memory import Borrowed, address_of

#: Number of the microbatch, version of the weights, figure.
HEAD = struct.Struct("<qqd")
ALIGNED = 64
#: Views of memory: of a dtype, from an offset in bytes, of a number of elements.
Views: TypeAlias = Callable[[torch.dtype, int, int], torch.Tensor]


@dataclass
class StageMessage:
    """The contents of one message. `single`: the one value was not in a tuple. `figure`: a loss, or the number of examples
    in a microbatch."""

    values: list[Any]
    single: bool = False
    number: int = 0
    version: int = 0
    figure: float = 0.0


@dataclass(slots=True)
class _Tensor:
    """The offset, dtype and shape of a tensor in a message."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    count: int
    grad: bool


@dataclass(slots=True)
class _Value:
    """A value that is the same in every message of a form."""

    value: Any


@dataclass
class MessageForm:
    """The form of the messages after an announcement: for each value its offset, dtype and shape, or the value itself."""

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


def outline(message: StageMessage) -> tuple[Any, ...]:
    """Messages with equal outlines have equal forms; outlines are cheaper to compare."""
    tensor = torch.Tensor
    return message.single, *(
        (value.shape, value.dtype, value.requires_grad, value.layout) if isinstance(value, tensor) else (type(value), value)
        for value in message.values
    )


def described(message: StageMessage) -> str:
    """The form of a message, as text."""
    return json.dumps([message.single, [_entry(value) for value in message.values]], separators=(",", ":"))


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


def pack(message: StageMessage, form: MessageForm, data: Bytes) -> None:
    """Copy a message into memory of its form's size."""
    HEAD.pack_into(data.data, 0, message.number, message.version, message.figure)
    for value, entry in zip(message.values, form.entries, strict=True):
        if isinstance(entry, _Tensor) and entry.count:
            tensor = value.detach()
            if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
                # torch's copy takes 0.1 ms when cold
                ctypes.memmove(address_of(data) + entry.offset, tensor.data_ptr(), tensor.nbytes)
            else:
                _view(data, entry).copy_(tensor)


def on_gpu(message: StageMessage) -> bool:
    """Is a tensor of this message on a GPU?"""
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in message.values)


def pinned(size: int) -> Bytes:
    """Pinned host memory; torch keeps it for the next time when it is not used any more."""
    memory: Bytes = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().view(Borrowed)
    )  # of no pool of this library
    return memory


def _view(data: Bytes, entry: _Tensor) -> torch.Tensor:
    return torch.frombuffer(data, dtype=entry.dtype, count=entry.count, offset=entry.offset).view(entry.shape)


def unpacked(data: Bytes, form: MessageForm, device: torch.device) -> StageMessage:
    """The message in this memory; its tensors share the memory and keep it alive."""
    number, version, figure = HEAD.unpack_from(data.data, 0)
    values = [_value(data, entry, device) for entry in form.entries]
    return StageMessage(values, form.single, number, version, figure)


def _value(data: Bytes, entry: _Tensor | _Value, device: torch.device) -> Any:
    if isinstance(entry, _Value):
        return entry.value
    if entry.count:
        tensor = _view(data, entry)
        tensor = tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
    else:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    return tensor.requires_grad_() if entry.grad else tensor


def copied_in(message: StageMessage, form: MessageForm, room: Views) -> None:
    """Copy the tensors of a message into memory of its form's size, on the current stream."""
    for value, entry in zip(message.values, form.entries, strict=True):
        if isinstance(entry, _Tensor) and entry.count:
            room(entry.dtype, entry.offset, entry.count).view(entry.shape).copy_(value.detach(), non_blocking=True)


def copied_out(form: MessageForm, room: Views, device: torch.device) -> list[Any]:
    """The values of a message whose tensors lie in this memory: copies on a device, made on the current stream."""
    values: list[Any] = []
    for entry in form.entries:
        if isinstance(entry, _Value):
            values.append(entry.value)
            continue
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        if entry.count:
            tensor.copy_(room(entry.dtype, entry.offset, entry.count).view(entry.shape), non_blocking=True)
        values.append(tensor.requires_grad_() if entry.grad else tensor)
    return values


def split(batch: Any, parts: int, device: torch.device, even: bool = True) -> list[Any]:
    """Equal parts of a batch on a device; if not `even`, about equal ones, some of them empty. Values that are no tensors
    are repeated in each part."""
    if isinstance(batch, torch.Tensor):
        if not even and batch.dim():
            return list(batch.to(device).tensor_split(parts))
        if batch.dim() == 0 or batch.shape[0] == 0:
            raise UsageError(f"expected a batch of examples, got a tensor of shape {tuple(batch.shape)}")
        if (size := batch.shape[0]) % parts:
            divisors = [number for number in range(1, size + 1) if size % number == 0]
            near = min(divisors, key=lambda number: (abs(number - parts), number))
            raise UsageError(
                f"a batch of {size} examples cannot be cut into {parts} equal microbatches; nearest: microbatches={near}"
            )
        return list(batch.to(device).chunk(parts))
    if isinstance(batch, dict):
        cut = {name: split(value, parts, device, even) for name, value in batch.items()}
        return [{name: pieces[part] for name, pieces in cut.items()} for part in range(parts)]
    if isinstance(batch, tuple | list):
        pieces = [split(value, parts, device, even) for value in batch]
        return [tuple(piece[part] for piece in pieces) for part in range(parts)]
    return [batch] * parts


def rows(batch: Any) -> int:
    """The number of examples in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    return max(map(rows, values), default=0)


def stage_inputs(batch: Any, parts: int, device: torch.device, even: bool = True) -> list[StageMessage]:
    """The microbatches of a batch as inputs of the first stage."""
    if batch is None:
        raise UsageError("the first stage needs the inputs of the batch, got None; call step(x, y) on every rank")
    pieces = split(batch, parts, device, even)
    return [
        StageMessage(list(piece) if (many := isinstance(piece, tuple)) else [piece], not many, figure=rows(piece))
        for piece in pieces
    ]

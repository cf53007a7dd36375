"""An optimizer's state, cut along runs: how it is described, sent, saved, cut anew and put together.

A *run* is a stretch of the flat order of all parameters whose elements have the same history. Its state is what torch keeps
for one parameter: tensors with an element for each of the run's, and single numbers such as the count of steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy
import torch

from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes

StateTensors = dict[str, Any]
#: The "dtype" of a run that is no stretch: it holds what rules keep beside the rows of tables.
OF_TABLES = "tables"


@dataclass
class SegmentState:
    """Elements `start` to `stop` of a dtype's flat order, and their state."""

    dtype: str
    start: int
    stop: int
    state: StateTensors = field(default_factory=dict)

    def part(self, start: int, stop: int) -> StateTensors:
        """The state of a stretch inside this run."""
        if (start, stop) == (self.start, self.stop):
            return {name: _copied(value) for name, value in self.state.items()}
        size = self.stop - self.start
        return {
            name: value.reshape(-1)[start - self.start : stop - self.start].clone()
            if _spread(value, size)
            else _copied(value)
            for name, value in self.state.items()
        }


def _spread(value: Any, size: int) -> bool:
    """Does this value have an element for each of the run's?"""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == size


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def find(segments: Iterable[SegmentState], dtype: str, start: int, stop: int) -> list[SegmentState]:
    """The runs that touch a stretch, in order."""
    touching = (segment for segment in segments if segment.dtype == dtype and segment.start < stop and segment.stop > start)
    return sorted(touching, key=lambda segment: segment.start)


def of_tensor(segments: Sequence[SegmentState], dtype: str, start: int, stop: int, shape: Sequence[int]) -> StateTensors:
    """The state of one parameter, as torch keeps it, from the runs that hold it."""
    touching = find(segments, dtype, start, stop)
    if not touching or not all(segment.state for segment in touching):
        return {}
    if len(touching) == 1 and (touching[0].start, touching[0].stop) == (start, stop):
        return {name: _shaped(value, stop - start, shape) for name, value in touching[0].part(start, stop).items()}
    result: StateTensors = {}
    for name, value in touching[0].state.items():
        if _spread(value, touching[0].stop - touching[0].start):
            pieces = [segment.part(max(segment.start, start), min(segment.stop, stop))[name] for segment in touching]
            result[name] = torch.cat([piece.reshape(-1) for piece in pieces]).view(tuple(shape))
        else:
            result[name] = _copied(value)
    return result


def _shaped(value: Any, size: int, shape: Sequence[int]) -> Any:
    return value.reshape(tuple(shape)) if _spread(value, size) else value


# On the wire: a description in msgpack, and the tensors as buffers.


def pack(segments: Sequence[SegmentState]) -> tuple[bytes, list[Bytes]]:
    """Runs as a description and buffers."""
    buffers: list[Bytes] = []
    described = []
    for segment in segments:
        state: dict[str, Any] = {}
        for name, value in segment.state.items():
            if isinstance(value, torch.Tensor):
                state[name] = {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "buffer": len(buffers)}
                buffers.append(as_bytes(value))
            else:
                state[name] = value
        described.append([segment.dtype, segment.start, segment.stop, state])
    return msgspec.msgpack.encode(described), buffers


def unpack(description: bytes, buffers: Sequence[Bytes]) -> list[SegmentState]:
    """The runs in a description and buffers; `PeerError` when they do not fit."""
    try:
        segments = []
        for dtype, start, stop, described in msgspec.msgpack.decode(
            description, type=list[tuple[str, int, int, dict[str, Any]]]
        ):
            state = {name: _value(value, buffers) for name, value in described.items()}
            segments.append(SegmentState(dtype, start, stop, state))
        return segments
    except PeerError:
        raise
    except (msgspec.DecodeError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise PeerError(f"an optimizer's state cannot be read: {error}") from None


def _value(value: Any, buffers: Sequence[Bytes]) -> Any:
    if not isinstance(value, dict):
        return value
    return as_tensor(buffers[value["buffer"]], value["dtype"]).clone().view(value["shape"])


def dtype_name(dtype: torch.dtype) -> str:
    """As it stands in messages: "float32"."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """A tensor as bytes in the CPU's memory: its own where it is there and contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = flat.as_strided((flat.numel(),), (1,))  # one element counts as contiguous whatever its stride
    return flat.view(torch.uint8).numpy() if flat.numel() else numpy.empty(0, dtype=numpy.uint8)


def as_tensor(buffer: Bytes, dtype: str) -> torch.Tensor:
    """A flat tensor on this memory."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise PeerError(f"{dtype!r} is not a dtype")
    if not buffer.nbytes:
        return torch.empty(0, dtype=kind)
    return torch.from_numpy(buffer).view(kind)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Are all elements equal? NaN counts as equal to NaN."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def digest_of_bytes(buffers: Iterable[Bytes], head: bytes = b"") -> bytes:
    """Eight bytes that differ where these do."""
    digest = hashlib.blake2b(head, digest_size=8)
    for buffer in buffers:
        digest.update(buffer.data)
    return digest.digest()

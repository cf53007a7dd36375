"""What a rank is about to call, as one small record that it sends to all others before the call.

    cost: one all-gather of 128 bytes for each call, or group of calls, or step of an optimizer

Record and numbers are parts of one call of the group (`negotiating.py`): what was announced is compared first, so ranks that
call different things all say so, none waits for ever, and later calls go on. A rank that has called `join()` reads what the
others call and takes part with values that change nothing.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.horovod.ops import OPS

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
#: Nine numbers, and the beginning of the name.
RECORD = struct.Struct("<9q56s")


class CallKind(IntEnum):
    """What is called."""

    JOIN = 0
    ALLREDUCE = 1
    STEP = 2
    ALLGATHER = 3
    BROADCAST = 4
    ALLTOALL = 5
    REDUCESCATTER = 6
    OBJECT = 7
    BARRIER = 8
    WAIT = 9  #: nothing: this rank waits for what it has called before


#: What a rank that has joined can take part in.
GOES_ON = (CallKind.ALLREDUCE, CallKind.STEP, CallKind.BARRIER)


@dataclass(frozen=True)
class Call:
    """A record: the same on all ranks, but for `own`."""

    kind: CallKind
    op: int = 0
    dtype: int = 0
    count: int = 0
    shape: int = 0  #: a digest
    root: int = 0  #: a rank, or the number of an optimizer
    scale: int = 0  #: a digest of the factors
    own: int = 0  #: what only this rank knows: its tensor's length, whether gradients changed
    key: int = 0  #: a digest of the whole name; 0 without one
    name: str = ""

    def __str__(self) -> str:
        named = f", name={self.name!r}" if self.key else ""
        if self.kind in (CallKind.STEP, CallKind.JOIN):
            return f"{self.kind.name.lower()}()"
        if self.kind in (CallKind.BARRIER, CallKind.OBJECT):
            return "barrier" if self.kind == CallKind.BARRIER else f"broadcast_object({named[2:]})"
        numbers = f"{self.count} {str(DTYPES[self.dtype]).removeprefix('torch.')}"
        if self.kind in (CallKind.ALLREDUCE, CallKind.REDUCESCATTER):
            return f"{self.kind.name.lower()}({numbers}, {OPS[self.op]}{named})"
        if self.kind == CallKind.BROADCAST:
            return f"broadcast({numbers}, root_rank={self.root}{named})"
        return f"{self.kind.name.lower()}({numbers.split()[1]}{named})"


def call_of(kind: CallKind, name: str | None = None, **about: Any) -> Call:
    """A call, by its name if it has one. Names of different kinds of calls are different names, as in Horovod."""
    return Call(kind, **about, key=digest(kind.name, name) if name else 0, name=name or "")


def row_of(call: Call) -> torch.Tensor:
    """The record, to be sent."""
    numbers = (call.kind, call.op, call.dtype, call.count, call.shape, call.root, call.scale, call.own, call.key)
    return torch.frombuffer(bytearray(RECORD.pack(*numbers, call.name.encode()[:56])), dtype=torch.int64)


def read_row(row: torch.Tensor) -> Call:
    """The record that was sent."""
    *numbers, name = RECORD.unpack(row.numpy().tobytes())
    kind, op, dtype, count, shape, root, scale, own, key = numbers
    return Call(CallKind(kind), op, dtype, count, shape, root, scale, own, key, name.rstrip(b"\0").decode(errors="ignore"))


def digest(*about: object) -> int:
    """A number that stands for something longer."""
    return int.from_bytes(hashlib.sha256(repr(about).encode()).digest()[:7], "big") if any(about) else 0


def dtype_code(dtype: torch.dtype) -> int:
    """The number of a dtype in a record."""
    if dtype not in DTYPES:
        raise UsageError(f"tensors of {dtype} cannot be sent; convert to one of {', '.join(map(str, DTYPES))}")
    return DTYPES.index(dtype)

"""The join protocol's wire: before each call every rank tells all others, in one small record, what it is about to call.

A rank that has called `join()` has nothing more to call. It reads what the others call and takes part in it with values that
change nothing (`joining.py`), until everybody has joined. Nobody can know beforehand that somebody has joined, so the record
is always sent:

    cost: one all-gather of 64 bytes for each call, or group of calls, or step of an optimizer

A reduction does not wait for it: record and numbers are under way together, and who waits for the numbers looks at the
record first. Other calls wait for it, since it also carries what they must know: how long everybody's tensor is.

Records also tell when ranks call different things, by name too: all ranks then say so, and nobody waits for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from enum import IntEnum

import torch

from polytempo.errors import UsageError
from polytempo.horovod.ops import OPS
from polytempo.horovod.sets import ProcessSet
from polytempo.train import communicate

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


class Kind(IntEnum):
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


#: What a rank that has joined can take part in.
GOES_ON = (Kind.JOIN, Kind.ALLREDUCE, Kind.STEP, Kind.BARRIER)


@dataclass(frozen=True)
class Call:
    """A record: the same on all ranks, but for `own`."""

    kind: Kind
    op: int = 0
    dtype: int = 0
    count: int = 0
    shape: int = 0  #: a digest
    root: int = 0  #: a rank, or the number of an optimizer
    name: int = 0  #: a digest
    own: int = 0  #: what only this rank knows: its tensor's length, whether gradients changed, since when it has joined

    def __str__(self) -> str:
        word = {Kind.STEP: "step()", Kind.JOIN: "join()", Kind.OBJECT: "broadcast_object"}.get(self.kind)
        if self.kind in (Kind.STEP, Kind.JOIN, Kind.BARRIER, Kind.OBJECT):
            return word or "barrier"
        numbers = f"{self.count} {str(DTYPES[self.dtype]).removeprefix('torch.')}"
        if self.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
            return f"{self.kind.name.lower()}({numbers}, {OPS[self.op]})"
        if self.kind == Kind.BROADCAST:
            return f"broadcast({numbers}, root_rank={self.root})"
        return f"{self.kind.name.lower()}({numbers.split()[1]})"


def digest(*about: object) -> int:
    """A number that stands for something longer."""
    return int.from_bytes(hashlib.sha256(repr(about).encode()).digest()[:7], "big") if any(about) else 0


def dtype_code(dtype: torch.dtype) -> int:
    """The number of a dtype in a record."""
    if dtype not in DTYPES:
        raise UsageError(f"tensors of {dtype} cannot be sent; convert to one of {', '.join(map(str, DTYPES))}")
    return DTYPES.index(dtype)


class Announced:
    """A record on its way."""

    def __init__(self, call: Call, members: ProcessSet, wait: bool = False) -> None:
        self._ranks = members.ranks
        mine = torch.tensor(astuple(call), dtype=torch.int64)
        self._rows = [torch.empty_like(mine) for _ in self._ranks]
        self._handle = communicate.all_gather(self._rows, mine, group=members.group, async_op=not wait)

    def is_completed(self) -> bool:
        """Has everybody's record come?"""
        return self._handle is None or self._handle.is_completed()

    def calls(self) -> list[Call]:
        """What everybody calls, once it is known and fits together."""
        if self._handle is not None:
            self._handle.wait()
        rows = [row.tolist() for row in self._rows]
        calls = [Call(Kind(kind), *rest) for kind, *rest in rows]
        check_calls(calls, self._ranks)
        return calls


def exchange(call: Call, members: ProcessSet) -> list[Call]:
    """Everybody's record, waited for."""
    return Announced(call, members, wait=True).calls()


def check_calls(calls: Sequence[Call], ranks: Sequence[int]) -> None:
    """All that have not joined call the same, and what can go on without those that have."""
    active = [(rank, call) for rank, call in zip(ranks, calls, strict=True) if call.kind != Kind.JOIN]
    if not active:
        return
    first, mine = active[0]
    for rank, call in active[1:]:
        if replace(call, own=0) != replace(mine, own=0):
            raise UsageError(
                f"rank {first} calls {mine} where rank {rank} calls {call}{_difference(mine, call)}; "
                "all ranks must make the same calls in the same order"
            )
    if len(active) < len(calls) and mine.kind not in GOES_ON:
        joined = next(rank for rank, call in zip(ranks, calls, strict=True) if call.kind == Kind.JOIN)
        raise UsageError(
            f"rank {first} calls {mine}, but rank {joined} has called join(): only allreduce, optimizer steps and "
            "barrier go on until all ranks have joined"
        )


def _difference(one: Call, other: Call) -> str:
    """Where two calls look alike in words."""
    if str(one) != str(other):
        return ""
    different = [field for field in ("count", "shape", "root", "name") if getattr(one, field) != getattr(other, field)]
    words = {"count": "size", "root": "optimizer" if one.kind == Kind.STEP else "root rank"}
    return f" with another {words.get(different[0], different[0])}" if different else ""

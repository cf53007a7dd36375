"""Reduction operations, by Horovod's names."""

from __future__ import annotations

from dataclasses import dataclass

from polytempo.errors import UsageError
from polytempo.horovod.errors import NotOffered


@dataclass(frozen=True)
class Op:
    """A reduction operation. `word` is its name in `polytempo.collectives`, `neutral` its neutral element."""

    name: str
    code: int
    word: str
    neutral: float = 0.0

    def __repr__(self) -> str:
        return self.name


Average = Op("Average", 0, "mean")
"""The mean over all ranks."""
Sum = Op("Sum", 1, "sum")
"""The sum over all ranks."""
Adasum = Op("Adasum", 2, "")
"""Not offered; refused in one line."""
Min = Op("Min", 3, "min", float("inf"))
"""The element-wise minimum."""
Max = Op("Max", 4, "max", float("-inf"))
"""The element-wise maximum."""
Product = Op("Product", 5, "prod", 1.0)
"""The element-wise product."""

OPS = (Average, Sum, Adasum, Min, Max, Product)


def choose_op(op: Op | int | None, average: bool | None = None) -> Op:
    """The operation of a call, by either of Horovod's two arguments for it."""
    if op is not None and average is not None:
        raise UsageError(f"op={op} and average={average} both name the operation; give op alone")
    if average is not None:
        return Average if average else Sum
    return check_op(Average if op is None else op)


def check_op(given: Op | int) -> Op:
    """The operation of a name or of Horovod's number; refuses others."""
    op: object = given
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(OPS):
        op = OPS[given]
    if op is Adasum:
        raise NotOffered("op=Adasum is not offered; use op=Average, or op=Sum with a learning rate for the sum")
    if not isinstance(op, Op):
        names = ", ".join(known.name for known in OPS if known is not Adasum)
        raise UsageError(f"expected op to be one of {names} of polytempo.horovod, or its number, got {given!r}")
    return op

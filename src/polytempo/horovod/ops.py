"""How tensors of several ranks become one: Horovod's names for it."""

from __future__ import annotations

from dataclasses import dataclass

from polytempo.errors import UsageError


@dataclass(frozen=True)
class Op:
    """A way to combine tensors. `word` is polytempo's name of it, `neutral` what changes nothing."""

    name: str
    code: int
    word: str
    neutral: float = 0.0

    def __repr__(self) -> str:
        return self.name


Average = Op("Average", 0, "mean")
Sum = Op("Sum", 1, "sum")
Adasum = Op("Adasum", 2, "")
Min = Op("Min", 3, "min", float("inf"))
Max = Op("Max", 4, "max", float("-inf"))
Product = Op("Product", 5, "prod", 1.0)

OPS = (Average, Sum, Adasum, Min, Max, Product)


def choose_op(op: Op | None, average: bool | None = None) -> Op:
    """The operation that a call asks for, by either of Horovod's arguments for it."""
    if op is not None and average is not None:
        raise UsageError(f"op={op} and average={average} say the same thing twice; give op alone")
    if average is not None:
        return Average if average else Sum
    return check_op(Average if op is None else op)


def check_op(op: Op) -> Op:
    """Refuse what is none of ours."""
    if op is Adasum:
        raise UsageError("op=Adasum is not offered; use op=Average, or op=Sum with a learning rate for the sum")
    if op not in OPS:
        names = ", ".join(known.name for known in OPS if known is not Adasum)
        raise UsageError(f"expected op to be one of {names} of polytempo.horovod, got {op!r}")
    return op

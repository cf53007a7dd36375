"""How two tensors are combined into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed

from polytempo.collectives.arithmetic import BLOCK
from polytempo.errors import UsageError, nearest

Combine = Callable[..., object]  # of two tensors, into `out`

COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "mean": torch.add,  # divided once, at the end
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
NAMES = {"avg": "mean", "product": "prod", "average": "mean"}


def operation(op: object) -> str:
    """The name of an operation given by name or as torch's `ReduceOp`."""
    word = op if isinstance(op, str) else _word(op)
    name = NAMES.get(word.lower(), word.lower())
    if name not in COMBINE:
        raise UsageError(f"expected op to be one of {', '.join(COMBINE)}, got {op!r}{nearest(name, COMBINE)}")
    return name


def _word(op: object) -> str:
    """Of torch's enumeration, or of an object made from it, which has no name of its own."""
    kinds = getattr(torch.distributed.ReduceOp, "RedOpType", None)
    found = next((name for name, kind in getattr(kinds, "__members__", {}).items() if op == kind), "")
    return found or str(op).rpartition(".")[2]


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """Refuse an operation that means nothing for these numbers."""
    number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if name == "mean" and not number:
        raise UsageError(f"expected floating point numbers for a mean, got {tensor.dtype}; use op='sum'")
    if name in ("band", "bor", "bxor") and number:
        raise UsageError(f"expected integers for op={name!r}, got {tensor.dtype}")
    if name in ("min", "max") and tensor.dtype.is_complex:
        raise UsageError(f"complex numbers have no order: op={name!r} means nothing for {tensor.dtype}")
    if name == "prod" and tensor.dtype.is_complex:
        raise UsageError(f"expected real numbers for op='prod', got {tensor.dtype}: the two parts of a number travel apart")


def before_mean(name: str, tensor: torch.Tensor, size: int) -> None:
    """Where the sum of so many terms may be too large for their dtype (float16): make this term smaller, by a power of two,
    which costs no digits. `divide` knows of it."""
    if name == "mean" and tensor.dtype == torch.float16:
        tensor.div_(_shrunk(tensor, size))


def divide(name: str, tensor: torch.Tensor, size: int) -> None:
    """Make a sum of so many terms their mean, if that is the operation."""
    if name == "mean":
        tensor.div_(size / _shrunk(tensor, size))


def _shrunk(tensor: torch.Tensor, size: int) -> int:
    return 1 << (size - 1).bit_length() if tensor.dtype == torch.float16 else 1


def total(name: str, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """All terms combined in their order, into `out`, which may be one of them: block by block, so that it stays in cache."""
    combine, last = COMBINE[name], len(terms) - 2
    if last == 0:
        combine(*terms, out=out)  # nothing lies in between: at once
        return
    between = torch.empty(min(BLOCK, out.numel()) if last > 0 else 0, dtype=out.dtype)
    for start in range(0, out.numel(), BLOCK):
        target, sofar = out[start : start + BLOCK], terms[0][start : start + BLOCK]
        if last < 0:
            target.copy_(sofar)
        for index, term in enumerate(terms[1:]):
            into = target if index == last else between[: target.numel()]
            combine(sofar, term[start : start + BLOCK], out=into)
            sofar = into

"""How two tensors are combined into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed

from polytempo.device.device import Device
from polytempo.errors import UsageError, nearest
from polytempo.summation import in_order

CombineFn = Callable[..., object]  # of two tensors, into `out`

COMBINE: dict[str, CombineFn] = {
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
    if name == "mean" and tensor.dtype == torch.bool:
        raise UsageError("expected numbers for a mean, got torch.bool; use op='max' for any, op='min' for all")
    if name in ("band", "bor", "bxor") and number:
        raise UsageError(f"expected integers for op={name!r}, got {tensor.dtype}")
    if name in ("min", "max") and tensor.dtype.is_complex:
        raise UsageError(f"complex numbers have no order: op={name!r} means nothing for {tensor.dtype}")
    if name == "prod" and tensor.dtype.is_complex:
        raise UsageError(f"expected real numbers for op='prod', got {tensor.dtype}: the two parts of a number travel apart")


def before_mean(name: str, tensor: torch.Tensor, size: int) -> None:
    """Where the sum of `count` terms may be too large for their dtype (float16): make this term smaller, by a power of two,
    which costs no digits. `divide` knows of it."""
    if name == "mean" and tensor.dtype == torch.float16:
        tensor.div_(_shrunk(tensor, size))


def divide(name: str, tensor: torch.Tensor, size: int) -> None:
    """Make a sum of `count` terms their mean, if that is the operation. That of integers is rounded towards zero, as by
    NCCL and Horovod."""
    if name == "mean" and _is_whole(tensor):
        tensor.div_(size, rounding_mode="trunc")
    elif name == "mean":
        tensor.div_(size / _shrunk(tensor, size))


def check_mean(op: object, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse a mean of integers, as `torch.mean` does: it would not be their mean, but a whole number beside it."""
    for tensor in tensors:
        if operation(op) == "mean" and _is_whole(tensor):
            raise UsageError(f"expected floating point numbers for a mean, got {tensor.dtype}; use op='sum'")


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


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


def total_on_device(device: Device, name: str, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """All terms combined in their order, on the current stream; of "mean" it is the mean. Floats are summed in one pass."""
    if name in ("sum", "mean") and out.dtype.is_floating_point:
        device.weighted_sum(terms, [1.0] * len(terms), out, len(terms) if name == "mean" else 1.0)
        return
    combine, sofar = COMBINE[name], terms[0]
    for term in terms[1:-1]:
        between = torch.empty_like(out)
        combine(sofar, term, out=between)
        sofar = between
    combine(sofar, terms[-1], out=out)
    divide(name, out, len(terms))


# Sums and weighted means of flat tensors, block by block: the second pass over a block finds it in the cache.
#
# The order of the terms is the order given, in every block, so the result does not depend on how the work is cut up.

#: Elements of a block: three of them fit into a core's own cache.
BLOCK = 1 << 16


def weighted_mean(
    terms: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor, device: Device | None = None
) -> None:
    """The mean of the terms, each as heavy as its weight, into `out`, which may be the first of them.

    A term of weight 0 is not looked at: it may hold anything. Equal weights of float16 go the long way: their sum may be
    larger than float16 can be, where their mean is not. On a device it is one pass over all terms.
    """
    if 0 in weights:
        pairs = [(term, weight) for term, weight in zip(terms, weights, strict=True) if weight != 0]
        terms, weights = [term for term, _ in pairs], [weight for _, weight in pairs]
    alike, total = all(weight == weights[0] for weight in weights), in_order(weights)
    shares = [weight / total for weight in weights]
    if device is not None:
        count = len(terms)
        device.weighted_sum(terms, [1.0] * count if alike else shares, out, float(count) if alike else 1.0)
        return
    if alike and out.dtype != torch.float16:
        reduce_into(terms, out, 1 / len(terms))
        return
    for start in range(0, out.numel(), BLOCK):
        block = slice(start, start + BLOCK)
        mean = _wide(terms[0][block]) * shares[0]
        for term, share in zip(terms[1:], shares[1:], strict=True):
            mean.add_(_wide(term[block]), alpha=share)
        out[block] = mean


def _wide(term: torch.Tensor) -> torch.Tensor:
    """Numbers of two bytes are added up in four: rounded once, and alike whether torch takes them singly or by the dozen."""
    return term.float() if term.element_size() == 2 else term


def reduce_into(terms: Sequence[torch.Tensor], out: torch.Tensor, factor: float = 1.0) -> None:
    """The sum of the terms times a factor, into `out`, which may be the first of them."""
    first, *others = terms
    for start in range(0, out.numel(), BLOCK):
        target = out[start : start + BLOCK]
        if not others:
            target.copy_(first[start : start + BLOCK])
        for index, other in enumerate(others):
            torch.add(target if index else first[start : start + BLOCK], other[start : start + BLOCK], out=target)
        if factor != 1.0:
            target.mul_(factor)

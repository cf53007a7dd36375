"""How tensors are reduced: packed by dtype, announced, sent as one, and brought back to where they were.

What is not in place can be differentiated: the gradient is reduced as the tensor was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.horovod.compression import Compressor
from polytempo.horovod.ops import Average, Op, Sum
from polytempo.horovod.pending import Pending
from polytempo.horovod.records import Announced, Call, Kind, digest, dtype_code
from polytempo.horovod.sets import ProcessSet, check_member
from polytempo.train import communicate

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Reduction:
    """How tensors are reduced."""

    op: Op
    members: ProcessSet
    name: str | None = None
    before: float = 1.0
    after: float = 1.0


def check_tensors(tensors: Tensors, call: str) -> None:
    """Dense tensors, at least one."""
    if not tensors:
        raise UsageError(f"{call} needs at least one tensor, got none")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{call} needs tensors, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise UsageError(f"{call} needs dense tensors, got one with layout {tensor.layout}; use .to_dense()")


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; whole numbers are cut off, as Horovod does."""
    if factor != 1.0:
        exact = tensor.is_floating_point() or tensor.is_complex()
        _ = tensor.mul_(factor) if exact else tensor.copy_(tensor.double() * factor)


def pack(tensors: Tensors) -> list[list[torch.Tensor]]:
    """What can travel as one: tensors of one dtype and device."""
    packs: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        packs.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(packs.values())


class _Pack:
    """Some tensors of one dtype, which travel as one and come back to where they were."""

    def __init__(self, tensors: Tensors, how: Reduction) -> None:
        self._tensors, self._how = tensors, how
        self._in_place = len(tensors) == 1 and tensors[0].is_contiguous()
        self.flat = tensors[0].view(-1) if self._in_place else torch.cat([tensor.reshape(-1) for tensor in tensors])
        scale_(self.flat, how.before)
        self.handles: list[Any] = []
        if how.members.size() > 1:
            self._launch()

    def _launch(self) -> None:
        how, flat, shapes = self._how, self.flat, [tuple(tensor.shape) for tensor in self._tensors]
        call = Call(Kind.ALLREDUCE, how.op.code, dtype_code(flat.dtype), flat.numel(), digest(*shapes), 0, digest(how.name))
        self.announced = Announced(call, how.members)
        handle = communicate.all_reduce(flat, word_for(how.op, flat.dtype), group=how.members.group, async_op=True)
        self.handles = [self.announced, handle]

    def finish(self) -> None:
        if self.handles:
            self.announced.calls()
            self.handles[1].wait()
            divide_whole_(self.flat, self._how.op, self._how.members.size())
        scale_(self.flat, self._how.after)
        if not self._in_place:
            pieces = self.flat.split([tensor.numel() for tensor in self._tensors])
            for tensor, piece in zip(self._tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))


def word_for(op: Op, dtype: torch.dtype) -> str:
    """Polytempo's operation. The mean of whole numbers is their sum, divided afterwards."""
    return "sum" if op is Average and not (dtype.is_floating_point or dtype.is_complex) else op.word


def divide_whole_(tensor: torch.Tensor, op: Op, size: int) -> None:
    """What `word_for` left to do."""
    if op is Average and word_for(op, tensor.dtype) == "sum":
        tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))


def start(tensors: Tensors, how: Reduction, in_place: bool) -> Pending[list[torch.Tensor]]:
    """Reduce tensors: themselves, or copies of them."""
    check_tensors(tensors, "allreduce")
    check_member(how.members, "allreduce")
    with torch.no_grad():
        kept = [t.detach() if in_place else t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
        packs = [_Pack(some, how) for some in pack(kept)]

    def finish() -> list[torch.Tensor]:
        with torch.no_grad():
            for some in packs:
                some.finish()
        return list(tensors) if in_place else kept

    return Pending(finish, [handle for some in packs for handle in some.handles])


class _Reduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, how: Reduction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        return tuple(start(tensors, how, in_place=False).wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if ctx.how.op not in (Average, Sum):
            raise UsageError(f"allreduce with op={ctx.how.op} has no gradient here; use Average or Sum, or detach()")
        reduced = iter(start([grad for grad in grads if grad is not None], ctx.how, in_place=False).wait())
        return None, *(None if grad is None else next(reduced) for grad in grads)


def reduce_differentiably(tensors: Tensors, how: Reduction, compression: type[Compressor]) -> list[torch.Tensor]:
    """New tensors, through which gradients flow."""
    check_tensors(tensors, "allreduce")
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _Reduce.apply(how, *(small for small, _ in pairs))
    return [compression.decompress(small, ctx) for small, (_, ctx) in zip(reduced, pairs, strict=True)]

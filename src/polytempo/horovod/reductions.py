"""`allreduce` in Horovod's eight forms: tensors are packed by dtype, negotiated, reduced as one, and unpacked.

Forms that are not in place and not asynchronous can be differentiated: the gradient is reduced as the tensor was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from polytempo.errors import UsageError, WrongType
from polytempo.horovod.compression import Compression, Compressor
from polytempo.horovod.handles import Handle, first, numbered
from polytempo.horovod.negotiation import Call, CallKind, CallSteps, PendingCall, call_of, digest, dtype_code, negotiator_of
from polytempo.horovod.ops import Average, Op, Sum, choose_op
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set

ReducedTensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Reduction:
    """The options of a reduction."""

    op: Op
    members: ProcessSet
    name: str | None = None
    before: float = 1.0
    after: float = 1.0
    background: bool = True  #: the progress thread moves it on while the script does something else


def digest_of_factors(how: Reduction) -> int:
    """A digest of the factors, which must be the same on all ranks."""
    return 0 if how.before == how.after == 1.0 else digest(float(how.before), float(how.after))


def check_tensors(tensors: ReducedTensors, call: str) -> None:
    """Refuse anything but dense tensors, at least one."""
    if not tensors:
        raise UsageError(f"{call} needs at least one tensor, got none")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise WrongType(f"{call} needs tensors, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise WrongType(f"{call} needs dense tensors, got one with layout {tensor.layout}; use .to_dense()")


def scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place; integers are truncated, as in Horovod."""
    if factor != 1.0:
        exact = tensor.is_floating_point() or tensor.is_complex()
        _ = tensor.mul_(factor) if exact else tensor.copy_(tensor.double() * factor)
    return tensor


def pack(tensors: ReducedTensors) -> list[list[torch.Tensor]]:
    """Lists of tensors of one dtype and device, each of which can be sent as one message."""
    packs: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        packs.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(packs.values())


class _Pack:
    """Tensors of one dtype that are reduced as one flat buffer and copied back."""

    def __init__(self, tensors: ReducedTensors, how: Reduction) -> None:
        self._tensors, self._how = tensors, how
        self._in_place = len(tensors) == 1 and tensors[0].is_contiguous()
        self.flat = tensors[0].view(-1) if self._in_place else torch.cat([tensor.reshape(-1) for tensor in tensors])
        scale_(self.flat, how.before)
        self.pending: PendingCall | None = self._launch() if how.members.size() > 1 else None

    def _launch(self) -> PendingCall:
        how, flat, shapes = self._how, self.flat, [tuple(tensor.shape) for tensor in self._tensors]
        call = call_of(
            CallKind.ALLREDUCE,
            how.name,
            op=how.op.code,
            dtype=dtype_code(flat.dtype),
            count=flat.numel(),
            shape=digest(*shapes),
            scale=digest_of_factors(how),
        )

        def body(calls: dict[int, Call], group: Any) -> CallSteps:
            yield from group.all_reduce([flat], how.op.word)

        return negotiator_of(how.members).start(call, body, how.background, [flat])

    def finish(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        scale_(self.flat, self._how.after)
        if not self._in_place:
            pieces = self.flat.split([tensor.numel() for tensor in self._tensors])
            for tensor, piece in zip(self._tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))


def start(tensors: ReducedTensors, how: Reduction, in_place: bool) -> Handle[list[torch.Tensor]]:
    """Start a reduction of tensors, in place or of copies."""
    check_tensors(tensors, "allreduce")
    check_member(how.members, "allreduce")
    with torch.no_grad():
        kept = [t.detach() if in_place else t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
        alike = pack(kept)
        names = [how.name if len(alike) == 1 else numbered(how.name, index) for index in range(len(alike))]
        packs = [_Pack(some, replace(how, name=name)) for some, name in zip(alike, names, strict=True)]

    def finish() -> list[torch.Tensor]:
        with torch.no_grad():
            for some in packs:
                some.finish()
        return list(tensors) if in_place else kept

    return Handle(finish, [some.pending for some in packs if some.pending is not None])


class _Reduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, how: Reduction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        return tuple(start(tensors, replace(how, background=False), in_place=False).wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if ctx.how.op not in (Average, Sum):
            raise UsageError(f"allreduce with op={ctx.how.op} has no gradient here; use Average or Sum, or detach()")
        how = replace(ctx.how, name=None)
        reduced = iter(start([grad for grad in grads if grad is not None], how, in_place=False).wait())
        return None, *(None if grad is None else next(reduced) for grad in grads)


def reduce_differentiably(tensors: ReducedTensors, how: Reduction, compression: type[Compressor]) -> list[torch.Tensor]:
    """Reduce into new tensors, through which gradients flow."""
    check_tensors(tensors, "allreduce")
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _Reduce.apply(how, *(small for small, _ in pairs))
    return [compression.decompress(small, ctx) for small, (_, ctx) in zip(reduced, pairs, strict=True)]


# Horovod's eight forms: one tensor or several, a new one or in place, synchronous or not.


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; the result is a new tensor, through which gradients flow.

    Args:
        tensor: The tensor of this rank.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        compression: What is sent instead: `Compression.none`, `fp16` or `bf16`.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The result.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    how = Reduction(choose_op(op, average), process_set, name, prescale_factor, postscale_factor)
    return reduce_differentiably([tensor], how, compression)[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start an `allreduce` into a new tensor, without gradients.

    Args:
        tensor: The tensor of this rank.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    how = Reduction(choose_op(op, average), process_set, name, prescale_factor, postscale_factor)
    return first(start([tensor], how, in_place=False))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start an `allreduce` in place.

    Args:
        tensor: Changed in place.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    how = Reduction(choose_op(op, average), process_set, name, prescale_factor, postscale_factor)
    return first(start([tensor], how, in_place=True))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks in place.

    Args:
        tensor: Changed in place.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The tensor.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


def grouped_allreduce(
    tensors: ReducedTensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors as one message per dtype; the results are new tensors, through which gradients flow.

    Args:
        tensors: The tensors of this rank, the same number on all ranks.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        compression: What is sent instead: `Compression.none`, `fp16` or `bf16`.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The results.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    how = Reduction(choose_op(op, average), process_set, name, prescale_factor, postscale_factor)
    return reduce_differentiably(tensors, how, compression)


def grouped_allreduce_async(
    tensors: ReducedTensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start a `grouped_allreduce` into new tensors, without gradients.

    Args:
        tensors: The tensors of this rank, the same number on all ranks.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    how = Reduction(choose_op(op, average), process_set, name, prescale_factor, postscale_factor)
    return start(tensors, how, in_place=False)


def grouped_allreduce_async_(
    tensors: ReducedTensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start a `grouped_allreduce` in place.

    Args:
        tensors: Changed in place; the same number on all ranks.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    how = Reduction(choose_op(op, average), process_set, name, prescale_factor, postscale_factor)
    return start(tensors, how, in_place=True)


def grouped_allreduce_(
    tensors: ReducedTensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in place, as one message per dtype.

    Args:
        tensors: Changed in place; the same number on all ranks.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        name: Matches this call with those of the other ranks; without a name calls are matched in their order.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The tensors.

    Raises:
        UsageError: An argument cannot be used, or this rank is not in the process set.
        MismatchError: Ranks made different calls; later calls go on.
        PeerError: A rank is lost.
    """
    return grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set).wait()

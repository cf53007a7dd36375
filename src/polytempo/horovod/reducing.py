"""`allreduce` in Horovod's eight forms: one tensor or several, a new one or in place, waited for or not."""

from __future__ import annotations

import torch

from polytempo.horovod.compression import Compression, Compressor
from polytempo.horovod.ops import Op, choose_op
from polytempo.horovod.pending import Pending
from polytempo.horovod.reduction import Reduction, Tensors, reduce_differentiably, start
from polytempo.horovod.sets import ProcessSet, global_process_set


def _first(handle: Pending[list[torch.Tensor]]) -> Pending[torch.Tensor]:
    return Pending(lambda: handle.wait()[0], handle._parts)


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
    """The mean over all ranks (or another `op`), as a new tensor."""
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
) -> Pending[torch.Tensor]:
    """The same, not waited for."""
    how = Reduction(choose_op(op, average), process_set, name, prescale_factor, postscale_factor)
    return _first(start([tensor], how, in_place=False))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending[torch.Tensor]:
    """In place, not waited for."""
    how = Reduction(choose_op(op, average), process_set, name, prescale_factor, postscale_factor)
    return _first(start([tensor], how, in_place=True))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """In place."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Several tensors as one."""
    how = Reduction(choose_op(op, average), process_set, name, prescale_factor, postscale_factor)
    return reduce_differentiably(tensors, how, compression)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending[list[torch.Tensor]]:
    """Several tensors as one, not waited for."""
    how = Reduction(choose_op(op, average), process_set, name, prescale_factor, postscale_factor)
    return start(tensors, how, in_place=False)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending[list[torch.Tensor]]:
    """Several tensors as one, in place, not waited for."""
    how = Reduction(choose_op(op, average), process_set, name, prescale_factor, postscale_factor)
    return start(tensors, how, in_place=True)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Several tensors as one, in place."""
    return grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set).wait()

"""`DistributedOptimizer`: what it is given is checked here; what it does is in `distributed.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.horovod.compression import Compression, Compressor
from polytempo.horovod.distributed_optimizer import Distributed, check_passes
from polytempo.horovod.gradient_buckets import Travel
from polytempo.horovod.ops import Average, Op, Sum, check_op
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set

Named = Iterable[tuple[str, torch.Tensor]]


def _names(named_parameters: Named | None, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Of all parameters, each its own."""
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UsageError("expected named_parameters to be pairs of a name and a parameter: model.named_parameters()")
    twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
    if twice:
        raise UsageError(f"expected different names in named_parameters, got {twice[0]} more than once")
    names = {param: name for name, param in pairs}
    unnamed = [i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"]) if p not in names]
    if unnamed:
        raise UsageError(f"parameter {unnamed[0]} of the optimizer is not among named_parameters; name all, or none")
    return names


def _travel(given: Op | int, compression: type[Compressor], factor: float, sparse_as_dense: bool, size: int) -> Travel:
    op = check_op(given)
    if op not in (Average, Sum):
        raise UsageError(f"expected op=Average or op=Sum for an optimizer, got {op}")
    if factor == 1.0:
        return Travel(op, compression, sparse_as_dense=sparse_as_dense)
    if op is not Average:
        raise UsageError(f"gradient_predivide_factor needs op=Average, got {op}")
    return Travel(Sum, compression, 1.0 / factor, factor / size, sparse_as_dense)


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Named | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, with gradients averaged over all ranks. `num_groups` and `groups` change nothing: buckets are ours."""
    if isinstance(optimizer, Distributed):
        raise UsageError("the optimizer is wrapped already; wrap the plain one, once")
    if type(optimizer) is torch.optim.LBFGS:
        raise UsageError("LBFGS evaluates the loss as often as each rank likes, so reductions cannot fit; use another")
    if process_set.included():
        check_member(process_set, "DistributedOptimizer")
    check_passes(backward_passes_per_step)
    travel = _travel(op, compression, gradient_predivide_factor, sparse_as_dense, process_set.size())
    names = _names(named_parameters, optimizer)
    kind = type(type(optimizer).__name__, (Distributed, type(optimizer)), {})
    wrapped: Distributed = object.__new__(kind)
    wrapped.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "step")})
    wrapped.inner = optimizer
    wrapped.begin(travel, backward_passes_per_step, process_set, names)
    return wrapped

"""Horovod's `DistributedOptimizer`: gradients are averaged while backward makes them, and `step()` waits for the mean.

How gradients travel is in `gradient_buckets.py`. The result is an object of a class derived from the wrapped optimizer's, as
Horovod's is; groups and state are the wrapped optimizer's own, so that schedulers made before see what happens to them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.horovod.compression import Compression, Compressor
from polytempo.horovod.gradient_buckets import GradientReducer, ReductionOptions
from polytempo.horovod.ops import Average, Op, Sum, check_op
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set

Named = Iterable[tuple[str, torch.Tensor]]


class Distributed(torch.optim.Optimizer):  # type: ignore[misc]
    """Comes before the wrapped optimizer's class in the class of what `DistributedOptimizer` returns."""

    inner: torch.optim.Optimizer

    def begin(self, options: ReductionOptions, passes: int, members: ProcessSet, names: dict[torch.Tensor, str]) -> None:
        """Take part in the job; a rank outside the process set, or alone in it, does not."""
        self._reducer: GradientReducer | None = None
        self._synchronizes, self._synchronized = True, False
        if members.size() > 1 and members.included():
            params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
            self._reducer = GradientReducer(params, options, members, names)
            self._reducer.passes_per_step = passes

    # It shares everything with the optimizer it wraps.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups themselves."""
        return self.inner.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state itself."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.inner.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only before it is wrapped."""
        raise UsageError("add parameter groups before wrapping the optimizer: its gradients are in buckets already")

    # Steps.

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up the gradients of this number of backward passes before they are reduced."""
        check_passes(passes)
        if self._reducer is not None:
            self._reducer.check_idle("set_backward_passes_per_step()")
            self._reducer.passes_per_step = passes
            self._reducer.start_over()

    def synchronize(self) -> None:
        """Make `.grad` the mean over all ranks, now: to be clipped, say, before `step()` in `skip_synchronize()`."""
        if self._reducer is not None:
            self._reducer.reduce()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step()` takes the gradients as they are: `synchronize()` was called before."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the reduced gradients, and step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._synchronizes:
            if self._synchronized:
                words = "optimizer.step() called without optimizer.skip_synchronize() after synchronize()"
                warnings.warn(f"{words}: gradients are reduced twice", stacklevel=2)
            self.synchronize()
        self._synchronized = False
        self.inner._opt_called = True  # a scheduler made before wrapping looks for it there
        self.inner.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; refused while they are being reduced."""
        if self._reducer is not None:
            self._reducer.check_idle("zero_grad()")
            self._reducer.start_over()
        self.inner.zero_grad(set_to_none)


def _names(named_parameters: Named | None, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
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


def _options(
    given: Op | int, compression: type[Compressor], factor: float, sparse_as_dense: bool, size: int
) -> ReductionOptions:
    op = check_op(given)
    if op not in (Average, Sum):
        raise UsageError(f"expected op=Average or op=Sum for an optimizer, got {op}")
    if factor == 1.0:
        return ReductionOptions(op, compression, sparse_as_dense=sparse_as_dense)
    if op is not Average:
        raise UsageError(f"gradient_predivide_factor needs op=Average, got {op}")
    return ReductionOptions(Sum, compression, 1.0 / factor, factor / size, sparse_as_dense)


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
    """Wrap an optimizer so that `step()` uses gradients averaged over all ranks; buckets are sent while backward runs.

    Args:
        optimizer: A torch optimizer, not wrapped.
        named_parameters: `model.named_parameters()`, for error messages.
        compression: What is sent instead of a gradient: `Compression.none`, `fp16` or `bf16`.
        backward_passes_per_step: The number of backward passes whose gradients are accumulated before they are sent.
        op: `Average` or `Sum`.
        gradient_predivide_factor: Splits the division of an average: by it before the sum, by the rest after it.
        num_groups: Accepted and ignored.
        groups: Accepted and ignored.
        sparse_as_dense: Send sparse gradients as dense ones.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        An optimizer of the same class, with `synchronize()`, `skip_synchronize()` and `set_backward_passes_per_step()`.

    Raises:
        UsageError: The optimizer is wrapped already or is LBFGS, or an argument cannot be used.
    """
    if isinstance(optimizer, Distributed):
        raise UsageError("the optimizer is wrapped already; wrap the plain one, once")
    if type(optimizer) is torch.optim.LBFGS:
        raise UsageError(
            "LBFGS evaluates the loss a different number of times on each rank, so reductions cannot match; use another"
        )
    if process_set.included():
        check_member(process_set, "DistributedOptimizer")
    check_passes(backward_passes_per_step)
    options = _options(op, compression, gradient_predivide_factor, sparse_as_dense, process_set.size())
    names = _names(named_parameters, optimizer)
    kind = type(type(optimizer).__name__, (Distributed, type(optimizer)), {})
    wrapped: Distributed = object.__new__(kind)
    wrapped.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "step")})
    wrapped.inner = optimizer
    wrapped.begin(options, backward_passes_per_step, process_set, names)
    return wrapped


def check_passes(passes: int) -> None:
    """Refuse a number of passes below 1."""
    if passes < 1:
        raise UsageError(f"expected backward_passes_per_step to be 1 or more, got {passes}")

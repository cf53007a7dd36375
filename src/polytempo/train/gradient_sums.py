"""Sums of the gradients of several batches, of two kinds.

GradientSum    in a flat buffer, in which they are sent
MicroBatchSum  where the parameters are, wider than narrow gradients, and without a job; their mean becomes `.grad`, so
               that the step is made of it like any other
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.errors import UsageError
from polytempo.reducer.copier import Copier
from polytempo.reducer.flat_buffer import FlatBuffer

#: Sums of narrow gradients are kept wider: a sum over samples is larger than a mean.
NARROW = (torch.float16, torch.bfloat16)


class GradientSum:
    """Gradients of several batches, added up in a flat buffer."""

    def __init__(self, copier: Copier, buffer: FlatBuffer) -> None:
        self._copier, self.buffer = copier, buffer
        self.empty = True  #: nothing was added: the buffer has what it had before
        self.absent = frozenset[int]()  #: parameters for which no batch had a gradient

    def add(self, weight: float = 1.0) -> None:
        """Add the gradients as they are now, times their weight."""
        views = self.buffer.views
        if self.empty:
            self.absent = frozenset(self._copier.gather(self.buffer, lambda param: param.grad))
            if weight != 1.0:
                torch._foreach_mul_(list(views.values()), weight)
            self.empty = False
            return
        have = self._copier.here(lambda param: param.grad)
        dense = [grad if grad.layout == torch.strided else grad.to_dense() for grad in have.values()]
        if dense:
            torch._foreach_add_([views[index] for index in have], dense, alpha=weight)
        self.absent -= frozenset(have)

    def had(self) -> dict[int, torch.Tensor]:
        """The sum of each parameter for which a batch had a gradient."""
        return {index: view for index, view in self.buffer.views.items() if index not in self.absent}


class MicroBatchSum:
    """The gradients of several micro-batches, weighted by samples."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._sums: list[torch.Tensor | None] = [None] * len(params)
        self.samples = 0.0

    def add(self, samples: float) -> None:
        """Add the gradients as they are now."""
        self.samples += samples
        for index, param in enumerate(self._params):
            grad = param.grad
            if grad is None or not samples:
                continue
            if grad.layout != torch.strided:
                raise UsageError(
                    f"micro-batches cannot be summed for gradients of layout {grad.layout}; use sparse=False, or "
                    "sync='bsp+balance' with pt.DistributedBatchSampler"
                )
            total = self._sums[index]
            if total is None:
                wide = torch.float32 if grad.dtype in NARROW else grad.dtype
                self._sums[index] = grad.to(wide, copy=True).mul_(samples)
            else:
                total.add_(grad, alpha=samples)

    def assign_mean(self) -> None:
        """Make `.grad` the mean, and start over."""
        for index, (param, total) in enumerate(zip(self._params, self._sums, strict=True)):
            if total is None:
                param.grad = None
                continue
            total.div_(self.samples)
            if param.grad is None:
                param.grad = total.to(param.dtype)
            else:
                param.grad.copy_(total)
            self._sums[index] = None
        self.samples = 0.0

    def drop(self) -> None:
        """Start over."""
        self._sums, self.samples = [None] * len(self._params), 0.0

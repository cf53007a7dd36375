"""What a worker has made since its last push, where a push holds the gradients of several batches.

    samples    what the gradients in the sum weigh together
    count      how many batches have gradients in it
    version    of the oldest values that one of these gradients was computed on
    measures   what is said of all batches, also of those that were left out of the sum: a GradScaler found them not finite

FlatSum   in a flat buffer, in which it is sent: rounds with deadlines, and local steps of `downpour`
WideSum   where the parameters are, wider than narrow gradients, and without a job: micro-batches of a share. The mean
          becomes `.grad`, so that the step is made of it like any other
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from polytempo.errors import UsageError
from polytempo.protocol.push import Measures, no_steps
from polytempo.reducer.copier import Copier
from polytempo.reducer.flat_buffer import FlatBuffer

#: Sums of narrow gradients are kept wider: a sum over samples is larger than a mean.
NARROW = (torch.float16, torch.bfloat16)


class GradientSum(ABC):
    """Gradients of several batches, added up, and what is said of them."""

    def __init__(self) -> None:
        self.samples, self.count = 0.0, 0
        self.version: int | None = None
        self.measures = no_steps()

    def add(self, weight: float = 1.0, version: int = 0) -> None:
        """Add the gradients as they are now, times their weight; `version`: of the values that they were computed on."""
        self._add(weight)
        self.samples, self.count = self.samples + weight, self.count + 1
        self.version = version if self.version is None else min(self.version, version)

    @abstractmethod
    def _add(self, weight: float) -> None: ...

    def say(self, measures: Measures) -> None:
        """Of a batch that was made on the same values as those before: of vital signs the last count."""
        self.measures.add(measures)
        self.measures.vital_signs = measures.vital_signs


class FlatSum(GradientSum):
    """A sum in a flat buffer."""

    def __init__(self, copier: Copier, buffer: FlatBuffer) -> None:
        super().__init__()
        self._copier, self.buffer = copier, buffer
        self.absent = frozenset[int]()  #: parameters for which no batch had a gradient

    def _add(self, weight: float) -> None:
        views = self.buffer.views
        if not self.count:  # the buffer has what it had before
            self.absent = frozenset(self._copier.gather(self.buffer, lambda param: param.grad))
            if weight != 1.0:
                torch._foreach_mul_(list(views.values()), weight)
            return
        have = self._copier.here(lambda param: param.grad)
        dense = [grad if grad.layout == torch.strided else grad.to_dense() for grad in have.values()]
        if dense:
            torch._foreach_add_([views[index] for index in have], dense, alpha=weight)
        self.absent -= frozenset(have)

    def had(self) -> dict[int, torch.Tensor]:
        """The sum of each parameter for which a batch had a gradient."""
        views = self.buffer.views if self.count else {}
        return {index: view for index, view in views.items() if index not in self.absent}


class WideSum(GradientSum):
    """A sum beside the parameters, in their form."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._params = params
        self._sums: list[torch.Tensor | None] = [None] * len(params)

    def _add(self, weight: float) -> None:
        for index, param in enumerate(self._params):
            grad = param.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise UsageError(
                    f"micro-batches cannot be summed for gradients of layout {grad.layout}; use sparse=False, or "
                    "sync='bsp+balance' with pt.DistributedBatchSampler"
                )
            total = self._sums[index]
            if total is None:
                wide = torch.float32 if grad.dtype in NARROW else grad.dtype
                self._sums[index] = grad.to(wide, copy=True).mul_(weight)
            else:
                total.add_(grad, alpha=weight)

    def assign_mean(self) -> None:
        """Make `.grad` the mean. A parameter for which no batch had a gradient has none."""
        for param, total in zip(self._params, self._sums, strict=True):
            if total is None:
                param.grad = None
                continue
            total.div_(self.samples)
            if param.grad is None:
                param.grad = total.to(param.dtype)
            else:
                param.grad.copy_(total)

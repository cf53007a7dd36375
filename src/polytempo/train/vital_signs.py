"""What a worker sees of its steps, for the guard against divergence: the loss, and samples of gradients and values.

Of at most `TENSORS` parameters every n-th element is read, `ELEMENTS` of each: 0.1 ms a step, however large the model. The
loss is what `step(loss=...)` was given or a closure has returned, else what `backward()` was called on (`loss_watch.py`).
Where a process has several optimizers, no loss is the loss of one of them, and none is told: those of a GAN rise and fall.

On a device the host does not wait: the stream writes the numbers into host memory, and they are told with the next step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from polytempo.protocol.training_troubles import diverged
from polytempo.protocol.values import VitalSigns
from polytempo.reducer.device_moves import is_permuted
from polytempo.reducer.gradient_checks import OwnReport
from polytempo.session.session import Session
from polytempo.sync.divergence import DivergenceRule, Seen
from polytempo.train.loss_watch import LossWatch, wide
from polytempo.train.update import StepRequest

#: How much of a model is looked at.
TENSORS, ELEMENTS = 8, 128


@dataclass(frozen=True)
class Sample:
    """Some of the elements of a tensor, in the order in which they lie in memory."""

    param: torch.Tensor
    count: int
    stride: int

    @classmethod
    def of(cls, param: torch.Tensor) -> Sample:
        """Of a parameter, and of its gradients. The stride has no divisor in common with the size, so that in a matrix all
        rows and columns are met."""
        size = param.numel()
        stride = -(-size // ELEMENTS)
        while math.gcd(stride, size) > 1:
            stride += 1
        return cls(param, -(-size // stride), stride)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of this tensor of the same size."""
        if not tensor.is_contiguous() and not is_permuted(tensor):
            tensor = tensor.contiguous()
        return tensor.as_strided((self.count,), (self.stride,))


def samples(params: Sequence[torch.Tensor]) -> list[Sample]:
    """Of the parameters on the first one's device: the largest of each stretch of them."""
    dense = [param for param in params if param.numel() and param.is_floating_point() and param.device == params[0].device]
    cuts = [len(dense) * cut // TENSORS for cut in range(TENSORS + 1)]
    parts = [dense[start:stop] for start, stop in pairwise(cuts) if start < stop]
    return [Sample.of(max(part, key=torch.numel)) for part in parts]


class StepSigns:
    """Looks at the steps of one optimizer.

    Args:
        session: The job.
        params: Its parameters.
    """

    def __init__(self, session: Session, params: Sequence[torch.Tensor]) -> None:
        self._session, self._losses = session, LossWatch(session)
        weakref.finalize(self, self._losses.close)
        self._samples = samples(params)
        self._last: torch.Tensor | None = None  # values of the step before
        self._change = 0.0
        self._device: DeviceNumbers | None = None
        session.guards.add(self)

    def look(self, request: StepRequest) -> VitalSigns | None:
        """A step is about to be made; None where there is nothing to tell. Gradients that are skipped, or weigh nothing, say
        nothing of the training."""
        seen = self._losses.take()
        having = [sample for sample in self._samples if _is_dense(sample.param.grad)]
        if request.skip or not request.samples or not having:
            return None
        loss = self._loss(request, seen) if len(self._session.guards) == 1 else None
        values = torch.cat([sample.take(sample.param) for sample in self._samples])
        gradients = torch.cat([sample.take(sample.param.grad) for sample in having])
        last, self._last = self._last, values
        change = values - last if last is not None and last.device == values.device else torch.zeros_like(values)
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in (gradients, change, values)]
        if not values.is_cuda:
            return self._told(None if loss is None else float(loss), [norm.item() for norm in norms])
        self._device = self._device or DeviceNumbers()
        told = self._device.exchange([_absent(norms[0]) if loss is None else torch.as_tensor(loss), *norms])
        return None if told is None else self._told(None if math.isnan(told[0]) else told[0], told[1:])

    def _loss(self, request: StepRequest, seen: torch.Tensor | None) -> torch.Tensor | float | None:
        """The loss of this step; None where it is not known."""
        given = request.loss
        if isinstance(given, torch.Tensor) and given.numel() == 1:
            return wide(given)
        if given is not None:
            return given if isinstance(given, int | float) else None
        if seen is None or request.unscaled or request.closure is not None:  # LBFGS calls backward as often as it likes
            return None
        return seen if request.scale is None else seen / request.scale

    def _told(self, loss: float | None, norms: Sequence[float]) -> VitalSigns:
        """Where values have not changed, as after a step that only accumulates, the last change counts."""
        gradient, change, size = norms
        if change and size:
            self._change = change / size
        return VitalSigns(loss, gradient, self._change, size)


class DeviceNumbers:
    """Numbers of one step, on their way from a GPU to the host, which does not wait for them."""

    def __init__(self) -> None:
        self._here = torch.zeros(4, dtype=torch.float64, pin_memory=True)
        self._there = torch.cuda.Event()
        self._sent = False

    def exchange(self, numbers: Sequence[torch.Tensor]) -> list[float] | None:
        """Those of an earlier step, if they are here, and these on their way; None while others are."""
        if self._sent and not self._there.query():
            return None
        told: list[float] | None = self._here.tolist() if self._sent else None
        place = numbers[-1].device
        wide_ones = [number.to(place, torch.float64, non_blocking=True) for number in numbers]
        self._here.copy_(torch.stack(wide_ones), non_blocking=True)
        self._there.record(torch.cuda.current_stream(place))
        self._sent = True
        return told


def _absent(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, math.nan)


def _is_dense(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout == torch.strided


class OwnGuard:
    """Where there is no coordinator, the first rank of an optimizer says that its own steps show a divergence."""

    def __init__(self, report: OwnReport) -> None:
        self._rule, self._report = DivergenceRule(1), report

    def look(self, signs: VitalSigns | None, step: int) -> None:
        """A step is about to be made. Of numbers that are not finite `FiniteWatch` knows more."""
        found = self._rule.add([Seen(signs.loss, signs.gradient, signs.change, signs.size)]) if signs is not None else None
        if found is not None and found.finite:
            trouble = diverged(step, found.loss, found.start, found.change, found.gradient, found.size)
            self._report.say(trouble, self._report.circumstances().advice)

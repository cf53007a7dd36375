"""What a worker sees of its steps, for the guard against divergence: the loss, and samples of gradients and values.

Of at most `TENSORS` parameters `ELEMENTS` elements are read: 0.1 ms a step, however large the model. The loss is what
`step(loss=...)` was given or a closure has returned, else what `backward()` was called on (`loss_watch.py`).
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
from polytempo.train.driver import StepRequest
from polytempo.train.loss_watch import LossWatch, wide

#: How much of a model is looked at: of so few tensors these many elements, in runs that lie side by side.
TENSORS, ELEMENTS, RUN = 4, 256, 16


@dataclass(frozen=True)
class Sample:
    """Some of the elements of a parameter and its gradients, in the order in which they lie in memory."""

    param: torch.Tensor
    shape: tuple[int, int]  #: the number of runs, and their length
    apart: int  #: from the start of one run to that of the next

    @classmethod
    def of(cls, param: torch.Tensor, run: int) -> Sample:
        """Runs of this length. They are apart by what has no divisor in common with the size, so that in a matrix they begin
        in other columns."""
        size = param.numel()
        runs = min(ELEMENTS, size) // run
        apart = max((size - run) // max(runs - 1, 1), 1)
        while math.gcd(apart, size) > 1:
            apart -= 1
        return cls(param, (runs, run), apart)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of this tensor of the same size."""
        if not tensor.is_contiguous() and not is_permuted(tensor):
            tensor = tensor.contiguous()
        return tensor.as_strided(self.shape, (self.apart, 1))

    def take_gradient(self) -> torch.Tensor:
        """Of the gradient; zeros where there is none, or it is sparse."""
        gradient = self.param.grad
        if gradient is None or gradient.layout != torch.strided:
            return self.param.new_zeros(self.shape)
        return self.take(gradient)


def samples(params: Sequence[torch.Tensor]) -> list[Sample]:
    """Of the parameters on the first one's device: the largest of each stretch of them."""
    dense = [param for param in params if param.numel() and param.is_floating_point() and param.device == params[0].device]
    cuts = [len(dense) * cut // TENSORS for cut in range(TENSORS + 1)]
    chosen = [max(dense[start:stop], key=torch.numel) for start, stop in pairwise(cuts) if start < stop]
    run = RUN if all(param.numel() >= ELEMENTS for param in chosen) else 1
    return [Sample.of(param, run) for param in chosen]


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
        if request.skip or not request.measures.samples or not any(_is_dense(sample.param.grad) for sample in self._samples):
            return None
        loss = self._loss(request, seen) if len(self._session.guards) == 1 else None
        values = _joined([sample.take(sample.param) for sample in self._samples])
        gradients = _joined([sample.take_gradient() for sample in self._samples])
        last, self._last = self._last, values
        change = values - last if last is not None and last.device == values.device else torch.zeros_like(values)
        squares = [torch.dot(part, part) for part in (gradients, change, values)]
        if not values.is_cuda:
            return self._told(None if loss is None else float(loss), [square.item() for square in squares])
        self._device = self._device or DeviceNumbers()
        told = self._device.exchange(
            [torch.full_like(squares[0], math.nan) if loss is None else torch.as_tensor(loss), *squares]
        )
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

    def _told(self, loss: float | None, squares: Sequence[float]) -> VitalSigns:
        """Where values have not changed, as after a step that only accumulates, the last change counts."""
        gradient, change, size = map(math.sqrt, squares)
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
        together = torch.stack([number.reshape(()).to(place, torch.float64, non_blocking=True) for number in numbers])
        self._here.copy_(together, non_blocking=True)
        self._there.record(torch.cuda.current_stream(place))
        self._sent = True
        return told


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor; squares of its elements would not fit two bytes."""
    flat = torch.cat(list(parts)).view(-1)
    return flat if flat.element_size() >= 4 else flat.float()


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

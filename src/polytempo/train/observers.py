"""What a worker sees of its steps, beside gradients and values: what a push says of them (`Measures`).

**Vital signs**, for the guard against divergence: the loss, and samples of gradients and values. Of at most `TENSORS`
parameters `ELEMENTS` elements are read: 0.1 ms a step, however large the model. The loss is what `step(loss=...)` was given
or a closure has returned, else what `backward()` was called on. Where a process has several optimizers, no loss is the loss
of one of them, and none is told: those of a GAN rise and fall. On a device the host does not wait: the stream writes the
numbers into host memory, and they are told with the next step.

**The loss**, without a change of the script. While a session has an optimizer that takes steps with others,
`torch.autograd.backward` is wrapped: modes like `adacomm` need the loss, too. The value of a root that is one number, and
that backward starts from without a given gradient, is noted for the optimizers of the calling session. Between two steps
these values are summed: losses of several micro-batches are, as their gradients are. The last such session takes the wrapper
away when it ends. `step(loss=...)` and the value of a closure come before what was noted.

**Input**: how long the worker waits for data, seen by a hook of the model. From the end of a step to the next forward pass a
training loop gets its next batch: these seconds are `Measures.input`. What the model is given then is counted as well: the
elements of its first argument are the work of the step where no sampler says what samples cost, so that long sequences are
not taken for a slow host. The hook is on the root module from the end of a step to the first forward pass, which removes it:
a few microseconds a step. It is not there when the job's budget is used up, or the worker leaves: a trained model is as it
was (TorchScript refuses hooks that it cannot compile; copies and saved models have an inert one).

Not seen, and counted as computing: input while gradients are accumulated, after the first forward pass; models that are
called without their hooks (`model.forward(x)`, captured CUDA graphs, inside `torch.compile`), and scripted ones.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.protocol.push import Measures
from polytempo.protocol.training_troubles import diverged
from polytempo.protocol.values import VitalSigns
from polytempo.reducer.device_moves import is_permuted
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session, current, is_initialized
from polytempo.sync.divergence import DivergenceRule, Seen
from polytempo.train.driver import StepRequest, StepUpdate
from polytempo.train.update import DIGESTED_STEPS, OwnReport, gradient_digest

#: How much of a model is looked at: of so few tensors these many elements, in runs that lie side by side.
TENSORS, ELEMENTS, RUN = 4, 256, 16


class StepObservers:
    """All that looks at the steps of one optimizer.

    Args:
        session: The job.
        params: The parameters.
        by_speed: Does the mode deal out work by speed? Then the sampler says what the work of a step is.
        deals: Do its steps say where this worker is in its data?
        exchanges: Does it take its steps with others?
        model: Whose input is watched; None: it is not.
        report: Where there is no coordinator, and this worker says for all that its steps show a divergence.
    """

    def __init__(
        self,
        session: Session,
        params: Sequence[torch.Tensor],
        *,
        by_speed: bool,
        deals: bool,
        exchanges: bool,
        model: torch.nn.Module | None,
        report: OwnReport | None,
    ) -> None:
        self._session, self._params, self._by_speed, self._deals = session, params, by_speed, deals
        self._to_digest = DIGESTED_STEPS + 1
        self._signs = StepSigns(session, params) if exchanges else None
        self._rule, self._report = DivergenceRule(1), report
        self._input = InputWatch(model) if model is not None else None
        if self._input is not None:
            session.on_leave(LeavingStep.FLUSH, self._input.stop)

    def look_at_signs(self, request: StepRequest, update: StepUpdate) -> None:
        """What this step shows of the training, for the guard against divergence."""
        if self._signs is None:
            return
        signs = self._signs.look(request)
        request.measures.vital_signs = () if signs is None else (signs,)
        if self._report is None or signs is None:
            return
        found = self._rule.add([Seen(signs.loss, signs.gradient, signs.change, signs.size)])
        if found is not None and found.finite:  # of numbers that are not finite `FiniteWatch` knows more
            trouble = diverged(update.steps, found.loss, found.start, found.change, found.gradient, found.size)
            self._report.say(trouble, self._report.circumstances().advice)

    def look_at_data(self, measures: Measures, samples: float | None, agreed: bool) -> None:
        """How long this worker has waited for data, where it is in it and, in the first steps, a digest of its gradient."""
        if self._input is not None:
            measures.input, work = self._input.take(self._session.computed, measures.computed)
            if not self._by_speed:
                measures.work = work
        if not self._deals:
            return
        self._to_digest -= self._to_digest > 0
        if self._to_digest and not agreed:  # the mean is alike
            measures.gradient_digest = gradient_digest(self._params)
        ledger = self._session.ledger
        measures.positions = ledger.trained(samples)
        if not self._by_speed:
            measures.size = samples if samples is not None else ledger.counted

    def end_step(self) -> None:
        """Look out for the next batch, unless none is to come."""
        if self._input is not None and not (self._session.client and self._session.client.stop):
            self._input.watch()


# Vital signs.


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
    """Looks at the steps of one optimizer."""

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


# The loss.


class LossWatch:
    """What backward was called on since the last step of one optimizer."""

    def __init__(self, session: Session) -> None:
        global _original, _ours
        self._session = session
        self._seen: torch.Tensor | None = None
        with _lock:
            _watches.add(self)
            if _original is None:
                _original = torch.autograd.backward
                _ours = _noting(_original)
                torch.autograd.backward = _ours
        session.on_leave(LeavingStep.UNDO, self.close)

    def close(self) -> None:
        """The session ends: nothing is noted any more. The last one takes the wrapper away, unless another library has
        wrapped it in turn."""
        global _original, _ours
        with _lock:
            _watches.discard(self)
            if _original is not None and not _watches and torch.autograd.backward is _ours:
                torch.autograd.backward = _original
                _original = _ours = None

    def note(self, session: Session, loss: torch.Tensor) -> None:
        """Backward was called on this, by a thread of that session."""
        if session is self._session:
            value = wide(loss)
            self._seen = value if self._seen is None else self._seen + value

    def take(self) -> torch.Tensor | None:
        """The sum since the last call; None where there was none."""
        seen, self._seen = self._seen, None
        return seen


class BlockLoss:
    """The mean loss of a block of local steps, weighted by their samples; read from the device once a block."""

    def __init__(self, watch: LossWatch) -> None:
        self._watch = watch
        self._sum: torch.Tensor | None = None
        self._samples = 0.0
        self._ever = False

    def add(self, given: Any, samples: float, scale: Any, unscaled: bool) -> None:
        """A local step was made.

        Args:
            given: The loss, where the script gave it or a closure returned it.
            samples: The step's weight.
            scale: What a GradScaler has multiplied the loss by.
            unscaled: A GradScaler has multiplied it, and the script has divided the gradients already: by what is not known.
        """
        seen = self._watch.take()
        if given is not None:
            seen = wide(torch.as_tensor(given))
        elif seen is not None and unscaled:
            raise UsageError("the loss was scaled by a GradScaler, and unscale_() hides by how much; call step(loss=loss)")
        elif seen is not None and scale is not None:
            seen = seen / scale
        if seen is not None:
            weighted = seen * samples
            self._sum = weighted if self._sum is None else self._sum.to(weighted.device) + weighted
            self._samples += samples

    def skip(self) -> None:
        """A step was skipped: its loss does not count."""
        self._watch.take()

    def take(self, sync: str) -> float | None:
        """The mean of the block that ends; None where no step had a loss."""
        total, samples, self._sum, self._samples = self._sum, self._samples, None, 0.0
        if total is None or not samples:
            if not self._ever:
                raise UsageError(f"{sync} sets its period by the loss, and has seen none; call optimizer.step(loss=loss)")
            return None
        self._ever = True
        return float(total) / samples


_watches: set[LossWatch] = set()
_lock = threading.RLock()
_original: Callable[..., None] | None = None
_ours: Callable[..., None] | None = None


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        original(tensors, grad_tensors, *args, **kwargs)
        if grad_tensors is not None or kwargs.get("grad_variables") is not None or not is_initialized():
            return
        session = current()
        for root in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if root.numel() == 1 and root.is_floating_point():
                for watch in list(_watches):
                    watch.note(session, root)

    return backward


def wide(loss: torch.Tensor) -> torch.Tensor:
    """A loss as one number, detached; of two bytes it is summed in four."""
    value = loss.detach().reshape(())
    return value.float() if value.element_size() < 4 else value


# Input.


class InputWatch:
    """Sees the first forward pass of a model after each step."""

    __slots__ = ("__weakref__", "_elements", "_first", "_handle", "_model")

    def __init__(self, model: torch.nn.Module) -> None:
        self._first = 0.0  # when the first forward pass since the last step began; 0: there was none
        self._elements = 0  # of what the model was given then
        self._model = weakref.ref(model)
        self._handle: torch.utils.hooks.RemovableHandle | None = None  # of the hook, while it is there
        self.watch()

    def watch(self) -> None:
        """A step has ended: wait for the next forward pass."""
        model = self._model()
        if self._handle is None and model is not None and not isinstance(model, torch.jit.ScriptModule):
            self._handle = model.register_forward_pre_hook(self)

    def stop(self) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():  # a graph cannot hold a clock
            return
        self._first = self._first or time.perf_counter()
        if not torch.is_grad_enabled():  # the script evaluates: what it gives the model then is no work of the step
            return
        if arguments and isinstance(arguments[0], torch.Tensor):
            self._elements = arguments[0].numel()
        self.stop()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and saved models have a function in its place that returns what it is given: they need no Polytempo."""
        return getattr, ({}, "get")

    def take(self, computed: Callable[[float], float], most: float) -> tuple[float, float | None]:
        """A step is made: its seconds of input, and its work where that was seen.

        Args:
            computed: Seconds of computing up to a moment.
            most: The same up to now.
        """
        first, elements, self._first, self._elements = self._first, self._elements, 0.0, 0
        return (min(max(computed(first), 0.0), most) if first else 0.0), (float(elements) if elements else None)

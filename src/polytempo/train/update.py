"""Where the update of a step is made: four ways to split a step between worker and servers.

    PushGradient    the gradient is pushed; the servers run the optimizer, and the new values come back
    PushChange      the wrapped optimizer runs here; what it changed is pushed (barrier modes: on the agreed mean)
    StepOnMean      workers reduce gradients among themselves; each runs the wrapped optimizer on the mean
    StepAlone       a job of one without servers: the wrapped optimizer runs
    DownpourUpdate  local steps, accumulated pushes (`downpour.py`)
    LocalStepUpdate blocks of local steps, averages of values (`local_steps.py`)
    GossipUpdate    a local step, and mixing with neighbours; PairUpdate: averages of pairs (`neighbours.py`)

`DistributedOptimizer` picks one (`assembly.py`) and calls it in every step. What it needs of the script's optimizer comes
first: hyper-parameters as plain data, the weight of a gradient, checks of gradients.

Values that are not finite are found before they are pushed (`FiniteWatch`). On a device the host does not wait for that: the
stream writes the largest magnitude of a push into host memory, before it says that the push is there. So it can be read when
that push was answered, and counts with the push after it. Only `nonfinite="refuse"` waits, since it must know before it
pushes.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import operator
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from polytempo.errors import UsageError
from polytempo.optim.asup import AsuP
from polytempo.optim.worker_momentum import ChangeMomentum
from polytempo.protocol.training_troubles import Circumstances, goes_on, not_finite
from polytempo.reducer.device_moves import largest
from polytempo.reducer.exchange import Exchange, GroupValues
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.peers import PeerExchange
from polytempo.reducer.servers import ServerExchange
from polytempo.sync import machine as machines
from polytempo.sync.machine import PushStep, WorkerMachine
from polytempo.sync.momentum import BARE
from polytempo.sync.spec import Spec
from polytempo.train.driver import LivePerforms, MachineUpdate, StepRequest, StepUpdate
from polytempo.train.model_tables import ModelTables

#: Types of hyper-parameters that a message can have, beside tuples of these and tensors of one element.
PLAIN = (bool, int, float, str, type(None))


class HyperParameters:
    """The hyper-parameters of all groups, as plain data. They seldom change, so values that are the same objects are not
    converted again."""

    def __init__(self, spec: Spec, optimizer: torch.optim.Optimizer, bare: bool = False) -> None:
        """`bare`: for servers that run SGD without momentum, since each worker keeps its own."""
        self._spec, self._optimizer, self._is_own = spec, optimizer, isinstance(optimizer, AsuP)
        self._bare = bare
        self._seen: list[Any] = []
        self._plain: tuple[dict[str, Any], ...] = ()

    def now(self) -> tuple[dict[str, Any], ...]:
        """The hyper-parameters as they are now."""
        groups = self._optimizer.param_groups
        seen = [value for group in groups for name, value in group.items() if name != "params"]
        same = len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))
        if not same or any(isinstance(value, torch.Tensor | list) for value in seen):  # these may change inside
            self._plain = tuple(self._of_group(group) for group in groups)
            self._seen = seen
        return self._plain

    def _of_group(self, group: dict[str, Any]) -> dict[str, Any]:
        plain = {name: _plain(name, value) for name, value in group.items() if name not in ("params", "param_names")}
        if self._bare:
            plain |= BARE
        if not self._spec.mode.rule:
            return plain
        names = self._spec.rule_options
        own = {name: plain[name] for name in names if self._is_own and name not in self._spec.options}
        return {"lr": plain["lr"], "weight_decay": plain.get("weight_decay", 0.0), **names, **own}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(_plain(name, item) for item in value)
    raise UsageError(f'hyper-parameter {name!r} is {type(value).__name__}; a server takes numbers; use apply="delta"')


def weight_of(samples: Any, zero: bool = True) -> float:
    """The weight of a step as a float, from a number of any kind: Python's, NumPy's, or a tensor of one element.

    Args:
        samples: What the script gave.
        zero: May it be 0?
    """
    is_flag = isinstance(samples, bool) or str(getattr(samples, "dtype", "")).endswith("bool")
    number = math.nan
    if not is_flag and not isinstance(samples, str | bytes):
        with suppress(TypeError, ValueError, RuntimeError):  # not a number, or several
            number = float(samples)
    if not 0 <= number < math.inf or (number == 0 and not zero):
        wanted = "a number, 0 or more" if zero else "a number above 0"
        raise UsageError(f"expected samples to be {wanted}, got {samples!r}; give how many samples it is of, or nothing")
    return number


#: Steps of which gradients are digested.
DIGESTED_STEPS = 2
#: Elements of each parameter that are digested.
ELEMENTS = 1024


def gradient_digest(params: Iterable[torch.Tensor]) -> int:
    """A digest by which workers that read the same batches are found; 0 where gradients are missing, zero or sparse."""
    grads = [p.grad.detach() for p in params if p.grad is not None and p.grad.layout == torch.strided]
    parts = [grad.reshape(-1)[:ELEMENTS] for grad in grads]
    if parts and parts[0].is_cuda:  # by one transfer
        together = torch.cat([part.contiguous().view(torch.uint8) for part in parts]).cpu()
        pieces = together.split([part.numel() * part.element_size() for part in parts])
        parts = [piece.clone().view(part.dtype) for piece, part in zip(pieces, parts, strict=True)]
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    nonzero = any(bool(part.any()) for part in parts)
    return int.from_bytes(digest.digest(), "little") >> 1 if nonzero else 0


class DelayedCheck:
    """Of the pushes of one flat buffer on a device: one that was made is looked at once it was answered."""

    def __init__(self, buffer: FlatBuffer) -> None:
        self._flats = list(buffer.tensors.values())
        pinned = any(flat.is_cuda for flat in self._flats)
        self._largest = [torch.zeros((), dtype=flat.dtype, pin_memory=pinned) for flat in self._flats]
        self._done = torch.cuda.Event() if pinned else None
        self._waiting = False

    def start(self) -> None:
        """Look at the flat buffer as it is now, on the current stream."""
        for to, flat in zip(self._largest, self._flats, strict=True):
            to.copy_(largest(flat), non_blocking=True)
        if self._done is not None:
            self._done.record()
        self._waiting = True

    def take(self) -> bool:
        """Was the push not finite that was looked at last? It must be answered. Asked again, it says False."""
        waiting, self._waiting = self._waiting, False
        if waiting and self._done is not None:
            self._done.synchronize()  # it is there, if the push was answered
        return waiting and not all(math.isfinite(found.item()) for found in self._largest)


class OwnReport:
    """Where there is no coordinator, a worker says itself, once, that its training goes wrong.

    Args:
        rank: Its rank.
        params: What it trains.
        circumstances: How it trains now.
    """

    def __init__(self, rank: int, params: Sequence[torch.Tensor], circumstances: Callable[[], Circumstances]) -> None:
        self.rank, self.circumstances = rank, circumstances
        self._params = list(params)
        self._said = False

    def not_finite(self, step: int, what: str) -> None:
        """Say it, unless a gradient is so because the parameters are: then it began with another worker, or before."""
        if what == "model" or all(bool(param.isfinite().all()) for param in self._params):
            self.say(not_finite(self.rank, step, what), self.circumstances().advice_on_nonfinite)
        self._said = True

    def say(self, trouble: str, advice: str) -> None:
        """Say what is wrong, if nothing was said before."""
        if not self._said:
            sys.stderr.write(f"polytempo: {goes_on(trouble, advice)}\n")
            sys.stderr.flush()
        self._said = True


class FiniteWatch:
    """Counts pushes of one optimizer that are not finite, or refuses them with the name of the parameter."""

    def __init__(self, names: Sequence[str], rank: int, nonfinite: str, report: OwnReport | None = None) -> None:
        """`report`: where there is no coordinator, which would name the first worker of the job."""
        self._names, self._rank, self._nonfinite = names, rank, nonfinite
        self._report = report
        self.seen = 0
        self._delayed: dict[int, DelayedCheck] = {}  # by flat buffer on a device

    def take(self) -> bool:
        """Were pushes not finite that a device has looked at, and were answered since?"""
        found = sum([check.take() for check in self._delayed.values()])
        self.seen += found
        return found > 0

    def check(self, buffer: FlatBuffer, step: int, rows_finite: bool = True, names: Sequence[str] = ()) -> bool:
        """Is a number in it, or among the rows of tables, not finite? With `names` it holds values of these parameters. On a
        device: was one in the push before, which must be answered?"""
        if buffer.on_device and self._nonfinite != "refuse":
            found = self.take()
            if id(buffer) not in self._delayed:
                self._delayed[id(buffer)] = DelayedCheck(buffer)
            self._delayed[id(buffer)].start()
            if found and self._report is not None:
                self._report.not_finite(step - 1, "model" if names else "gradient")
            return found
        if buffer.is_finite(everything=self._nonfinite == "refuse") and rows_finite:
            return False
        self.seen += 1
        if self._nonfinite == "refuse":
            wrong = ((names or self._names)[index] for index, view in buffer.views.items() if not view.isfinite().all())
            name = next(wrong, "a table")
            raise UsageError(
                f"worker {self._rank}, step {step}: {name} has a {'value' if names else 'gradient'} that is not finite; "
                "lower the learning rate, clip, or count such gradients with nonfinite='count'"
            )
        if self._report is not None:
            self._report.not_finite(step, "model" if names else "gradient")
        return True


@dataclass(frozen=True)
class Wrapped:
    """What is wrapped: the script's optimizer and how its gradients are treated."""

    optimizer: torch.optim.Optimizer
    params: Sequence[torch.nn.Parameter]
    hyper: Callable[[], GroupValues]  #: the hyper-parameters of all groups, as they are now
    finite: FiniteWatch
    tables: ModelTables
    clip_norm: float | None

    def clip(self) -> None:
        """Clip the gradients, if `clip_norm` was given."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, self.clip_norm)

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Let the optimizer step, on the gradients or by a closure that makes them; what that returned."""
        if closure is not None:  # of LBFGS, which calls it several times, and has gradients recorded inside
            return self.optimizer.step(closure)
        step_unwrapped(self.optimizer)
        return None


@contextmanager
def left_as_shown(params: Sequence[torch.Tensor], shows: bool) -> Iterator[None]:
    """Inside, a worker that leaves takes up its own model; what `consolidate()` has shown is in the parameters again then.

    A script that evaluates, leaves the job and saves its model saves what it has evaluated."""
    shown = [param.detach().clone() for param in params] if shows else []
    yield
    with torch.no_grad():
        for param, value in zip(params, shown, strict=False):
            param.copy_(value)


class PushEachStep(MachineUpdate):
    """What is common to the ways in which each step is a push. Its answer, or room for another one, is waited for with it:
    a server that this worker has to itself comes over to its core meanwhile."""

    def __init__(self, wrapped: Wrapped, reducer: Exchange, machine: WorkerMachine, barrier: bool = True) -> None:
        super().__init__(machine, reducer)
        self._wrapped, self._barrier = wrapped, barrier
        self.start()

    def performs(self) -> LivePerforms:
        return {PushStep: self._push_step}

    def _push_step(self, order: PushStep) -> None:
        self._request.measures.fields = order.measured
        self._push(self._request)

    def step(self, request: StepRequest) -> Any:
        self._request, self._result = request, None
        self._tell(machines.COMPUTED)
        self._hear()
        return self._result

    @abstractmethod
    def _push(self, request: StepRequest) -> None:
        """What the step has made goes out, and its answer comes in."""


class PushGradient(PushEachStep):
    """The servers run the optimizer on the gradients; `barrier`: on their mean, which they clip."""

    _reducer: ServerExchange

    def _push(self, request: StepRequest) -> None:
        wrapped, reducer = self._wrapped, self._reducer
        reducer.take_answer()  # that of the push before, where it was deferred: checks of this one count with it
        buffer: FlatBuffer | None = None
        measures, absent = request.measures, tuple[int, ...]()
        if not request.skip and (self._barrier or measures.samples):  # in a round others wait for a push of weight zero
            if not self._barrier:
                wrapped.clip()
            buffer, absent = reducer.gradients()
            measures.nonfinite = wrapped.finite.check(buffer, reducer.step, wrapped.tables.is_finite())
        reducer.push(buffer, wrapped.hyper(), measures, absent)


class PushChange(PushEachStep):
    """The wrapped optimizer runs here, and the servers add the changes; `barrier`: they take the new values, which are the
    same on all workers, since all run on the agreed mean. `momentum` makes of a change what is pushed."""

    _reducer: ServerExchange

    def __init__(
        self,
        wrapped: Wrapped,
        servers: ServerExchange,
        machine: WorkerMachine,
        barrier: bool,
        momentum: ChangeMomentum | None,
    ) -> None:
        super().__init__(wrapped, servers, machine, barrier)
        self._momentum = momentum

    def _push(self, request: StepRequest) -> None:
        wrapped, reducer, measures = self._wrapped, self._reducer, request.measures
        reducer.take_answer()
        skip = request.skip or (self._momentum is not None and not measures.samples)
        if self._barrier and not request.agreed:
            skip = reducer.agree(wrapped.hyper(), measures.samples, skip)
        buffer: FlatBuffer | None = None
        if not skip:
            wrapped.clip()
            if self._barrier:
                wrapped.optimizer.step()
                reducer.copier.watch.record()
                buffer, _ = reducer.buffer_of(lambda param: param.detach())
            else:
                buffer, self._result = self._change(request.closure)
            measures.nonfinite = wrapped.finite.check(buffer, reducer.step)
        reducer.push(buffer, wrapped.hyper(), measures)

    def _change(self, closure: Callable[[], Any] | None) -> tuple[FlatBuffer, Any]:
        """What the optimizer changes, and what the closure returned."""
        reducer, copier, momentum = self._reducer, self._reducer.copier, self._momentum
        if momentum is not None and copier.on_gpu:
            before = [param.detach().clone() for param in copier.params]
            loss = self._step(closure)
            pushed = momentum.pushes(copier.params, before)
            buffer, _ = reducer.buffer_of(lambda param: pushed[id(param)])
        else:
            buffer, _ = reducer.buffer_of(lambda param: param.detach())
            loss = self._step(closure)
            if momentum is None:
                copier.subtract_from_values(buffer)
            else:
                for index, param in enumerate(copier.params):
                    buffer.found_finite(index, momentum.push(param, buffer.view(index)))
        copier.watch.record()
        return buffer, loss

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                return self._wrapped.optimizer.step(closure)
        with nullcontext() if self._momentum is None else dense_gradients(self._reducer.copier.params):
            step_unwrapped(self._wrapped.optimizer)
        return None


class StepOnMean(PushEachStep):
    """Every worker runs the wrapped optimizer on the mean gradient."""

    def __init__(self, wrapped: Wrapped, peers: PeerExchange, machine: WorkerMachine) -> None:
        self._peers, self._mean = peers, peers.mean
        super().__init__(wrapped, peers, machine)

    def step(self, request: StepRequest) -> None:
        super().step(request)
        self._apply(request.agreed)

    def _push(self, request: StepRequest) -> None:
        wrapped, reducer = self._wrapped, self._reducer
        buffer, absent = (None, ()) if request.skip else reducer.gradients()
        if buffer is not None:
            request.measures.nonfinite = wrapped.finite.check(buffer, reducer.step)
        reducer.push(buffer, wrapped.hyper(), request.measures, absent)

    def join(self) -> None:
        with torch.no_grad():
            while not self._peers.join():
                self._apply(agreed=False)
        self.start()  # at the step that all have come to

    def _apply(self, agreed: bool) -> None:
        if self._mean.skipped:
            return
        wrapped = self._wrapped
        in_place = wrapped.clip_norm is None and self._mean.may_read_in_place(wrapped.optimizer)
        with nullcontext() if agreed else self._mean.as_gradients(in_place):
            wrapped.clip()
            step_unwrapped(wrapped.optimizer)
        self._reducer.copier.watch.record()


class RuleAlone:
    """A mode's own rule in a job of one without servers."""

    def __init__(self, hyper: HyperParameters, optimizer: torch.optim.Optimizer) -> None:
        self._hyper, self._optimizer = hyper, optimizer
        pairs = zip(hyper.now(), optimizer.param_groups, strict=True)
        groups = [{**own, "params": group["params"]} for own, group in pairs]
        self._rule = AsuP(groups)

    def step(self) -> None:
        """With the hyper-parameters of now."""
        for group, now in zip(self._rule.param_groups, self._hyper.now(), strict=True):
            group.update(now)
        self._rule.state = self._optimizer.state  # so that state_dict() has it, and load_state_dict() gives it
        self._rule.step()


class StepAlone(StepUpdate):
    """The wrapped optimizer, or the mode's own rule, runs in this process."""

    def __init__(self, wrapped: Wrapped, rule: RuleAlone | None) -> None:
        self._wrapped, self._rule, self._steps = wrapped, rule, 0

    @property
    def steps(self) -> int:
        return self._steps

    def step(self, request: StepRequest) -> Any:
        self._steps += 1
        if request.skip or request.measures.samples == 0:
            return None
        self._wrapped.clip()
        self._wrapped.tables.step_alone()
        if self._rule is not None:
            self._rule.step()
            return None
        return self._wrapped.optimizer.step(request.closure)


# Torch wraps every optimizer's `step` for its profiler and hooks. The wrappers cost 40 us a step, and the first call imports
# torch's compiler: 1.4 s, for which all other workers would wait. They are left out where there is no profiler and no hook.


def is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Is there a hook or a profiler that must see its steps?"""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    everywhere = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(hooks or everywhere or torch.autograd._profiler_enabled())


def step_unwrapped(optimizer: torch.optim.Optimizer) -> None:
    """A step of this optimizer, under `no_grad`, without torch's wrappers where they have no effect."""
    of_torch = type(optimizer).__module__.startswith("torch.optim.")
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    if of_torch and not differentiable and not is_observed(optimizer):
        inspect.unwrap(type(optimizer).step)(optimizer)
    else:
        optimizer.step()


@contextmanager
def dense_gradients(params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Sparse gradients are dense inside, as servers take them: most optimizers refuse sparse ones."""
    sparse = [(param, param.grad) for param in params if param.grad is not None and param.grad.layout != torch.strided]
    for param, grad in sparse:
        param.grad = grad.to_dense()
    yield
    for param, grad in sparse:
        param.grad = grad


def unscale(gradients: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply gradients in place, sparse ones too. `factor`: a number, or a tensor of one on the same device."""
    values = [grad if grad.layout == torch.strided else grad._values() for grad in gradients]
    if values:
        torch._foreach_mul_(values, factor)

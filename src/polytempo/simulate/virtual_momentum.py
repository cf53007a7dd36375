"""Momentum at each simulated worker, of one model in turn: what is pushed, and what a worker computes on.

`sync/momentum.py` has the rule and `optim/worker_momentum.py` its tensors, as in a live job; here are the workers. Each has
an optimizer of its own, made at its first push and dropped when it leaves, on the one model into which the weights of a step
are loaded. Its state changes in the order of its pushes, those that are not applied included: it has made them.

In `delay:k` a worker computes on the values read plus its own unanswered pushes, as `reducer/own_pushes.py` has it: those
that were applied after the version that it has read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from polytempo.optim.worker_momentum import ChangeMomentum, GradientMomentum, known_name
from polytempo.sync.momentum import LOOKAHEAD, MomentumForm, check_kept, form_of
from polytempo.sync.spec import Spec

#: What is pushed: of each parameter a tensor, or nothing where it has no gradient.
Pushable = list[torch.Tensor | None]


@dataclass
class OwnPush:
    """A push, and the first version that has it: for one that is not applied, that of its answer."""

    tensors: Pushable
    version: int


@dataclass
class WorkerState:
    """What one worker keeps."""

    optimizer: torch.optim.Optimizer
    momentum: GradientMomentum | ChangeMomentum
    pushes: list[OwnPush] = field(default_factory=list)  #: of its own, that a step to come may lack


class VirtualMomentum:
    """The momentum of all workers.

    Args:
        parameters: Of the model into which the weights of a step are loaded.
        make_optimizer: Makes the optimizer of one worker.
        spec: It keeps momentum at workers.
        workers: Their number.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        spec: Spec,
        workers: int,
    ) -> None:
        self._parameters, self._make_optimizer = parameters, make_optimizer
        self._looks_ahead, self._spike = spec.worker_momentum == LOOKAHEAD, spec.spike
        self._own_rate = spec.own_push_rate(workers)
        self._states: dict[int, WorkerState] = {}
        kind = make_optimizer(parameters)
        check_kept(spec.text, known_name(kind), type(kind).__name__)
        self.form = form_of(known_name(kind), kind.param_groups)

    def end(self, worker: int) -> None:
        """A worker has left; if it comes back, it starts anew."""
        self._states.pop(worker, None)

    def add_own(self, worker: int, read: int) -> bool:
        """Add a worker's own unanswered pushes to the values of the version that it has read, which are loaded.

        Returns:
            Were there any?
        """
        if not self._own_rate:
            return False
        state = self._state(worker)
        state.pushes = [push for push in state.pushes if push.version > read]  # later steps read this version or newer
        factors = self._own_factors(state.optimizer)
        with torch.no_grad():
            for push in state.pushes:
                for parameter, tensor, factor in zip(self._parameters, push.tensors, factors, strict=True):
                    if tensor is not None:
                        parameter.add_(tensor, alpha=factor)
        return bool(state.pushes)

    def push(self, worker: int, gradient: Pushable) -> Pushable:
        """What a worker pushes of a gradient, taken on the loaded values, which stay; its momentum moves on.

        The gradient is used up."""
        state = self._state(worker)
        if isinstance(state.momentum, ChangeMomentum):
            return self._change(state.optimizer, state.momentum, gradient)
        dense = [grad if grad is None or grad.layout == torch.strided else grad.to_dense() for grad in gradient]
        with torch.no_grad():
            for parameter, grad in zip(self._parameters, dense, strict=True):
                if grad is not None:
                    state.momentum.push(parameter, grad, grad)
        return dense

    def settle(self, worker: int, tensors: Pushable, version: int) -> None:
        """A push was applied, or dropped; the answer to it has this version."""
        if self._own_rate:
            self._state(worker).pushes.append(OwnPush(tensors, version))

    def _change(self, optimizer: torch.optim.Optimizer, momentum: ChangeMomentum, gradient: Pushable) -> Pushable:
        for parameter, grad in zip(self._parameters, gradient, strict=True):
            parameter.grad = grad
        before = [parameter.detach().clone() for parameter in self._parameters]
        optimizer.step()
        with torch.no_grad():
            for parameter, change in zip(self._parameters, before, strict=True):
                momentum.push(parameter, change)
        return [None if grad is None else change for grad, change in zip(gradient, before, strict=True)]

    def _state(self, worker: int) -> WorkerState:
        if worker not in self._states:
            optimizer = self._make_optimizer(self._parameters)
            if self.form is MomentumForm.GRADIENT:
                momentum: GradientMomentum | ChangeMomentum = GradientMomentum(optimizer, self._looks_ahead, self._spike)
            else:
                momentum = ChangeMomentum(optimizer, self._looks_ahead)
            self._states[worker] = WorkerState(optimizer, momentum)
        return self._states[worker]

    def _own_factors(self, optimizer: torch.optim.Optimizer) -> list[float]:
        """On the tensors of an unanswered push, for each parameter."""
        if self.form is MomentumForm.CHANGE:
            return [self._own_rate] * len(self._parameters)
        rates = {id(param): float(group["lr"]) for group in optimizer.param_groups for param in group["params"]}
        return [-self._own_rate * rates[id(parameter)] for parameter in self._parameters]

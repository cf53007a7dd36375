"""A worker's own momentum: what it pushes in place of its gradient, or of its change (`sync/momentum.py` has the rule).

`GradientMomentum` is SGD's form. What is pushed is the gradient that torch's SGD would step along, operation by operation as
torch makes it: with `looks_ahead` that of `nesterov=True`. Servers then run SGD without momentum and without weight decay.
`ChangeMomentum` is the form of every other rule: the wrapped optimizer makes its change, which is extrapolated.

Their state lies in the state of the worker's own optimizer, under torch's names where torch has one, so that `state_dict()`
and checkpoints have it. Both go through memory in pieces that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from polytempo.sync.momentum import RULES, share_of_joiner

#: Elements that are worked on at a time.
PIECE = 1 << 16
#: In the state of an optimizer: a parameter's last change, without decoupled weight decay, for each unit of the rate.
DIRECTION = "direction"


def pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one form, side by side, in pieces of at most `PIECE` elements; whole where they are not contiguous."""
    size = tensors[0].numel()
    if size <= PIECE or not all(tensor.is_contiguous() for tensor in tensors):
        yield list(tensors)
        return
    flats = [tensor.view(-1) for tensor in tensors]
    for start in range(0, size, PIECE):
        yield [flat[start : start + PIECE] for flat in flats]


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The number of each parameter's group, by the parameter's `id`."""
    return {id(param): number for number, group in enumerate(optimizer.param_groups) for param in group["params"]}


class GradientMomentum:
    """The momentum of one worker, of SGD.

    Args:
        optimizer: The worker's SGD, whose parameter groups say what to do in each step.
        looks_ahead: Push the look-ahead; otherwise what torch's SGD steps along.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, looks_ahead: bool) -> None:
        self._optimizer, self._looks_ahead = optimizer, looks_ahead
        self._group_of = _groups_of(optimizer)

    def push(self, param: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, keeps: bool = True) -> float:
        """Write what is pushed of a parameter into `out`, which may be `gradient` itself.

        Args:
            param: The parameter, at the values that the gradient was taken on.
            gradient: Its gradient, in the parameter's form.
            out: In that form.
            keeps: Is this the step itself? Otherwise the velocity stays as it is.

        Returns:
            The sum of what is pushed: it is not finite where an element is not.
        """
        group = self._optimizer.param_groups[self._group_of[id(param)]]
        momentum, decay, ahead = group["momentum"], group["weight_decay"], self._looks_ahead or group["nesterov"]
        velocity = self._velocity(param, keeps) if momentum else None
        tensors = [param.detach(), gradient, out, *(() if velocity is None else (velocity,))]
        total = 0.0
        for values, grad, target, *of_velocity in pieces(tensors):
            if grad is not target:
                target.copy_(grad)
            if group["maximize"]:
                target.neg_()
            if decay:
                target.add_(values, alpha=decay)
            if of_velocity:
                own = of_velocity[0] if keeps else of_velocity[0].clone()
                own.mul_(momentum).add_(target)
                if ahead:
                    target.add_(own, alpha=momentum)
                else:
                    target.copy_(own)
            total += target.sum().item()  # while it is in the cache
        return total

    def _velocity(self, param: torch.Tensor, keeps: bool) -> torch.Tensor:
        velocity: torch.Tensor | None = self._optimizer.state.get(param, {}).get("momentum_buffer")
        if velocity is None:
            velocity = torch.zeros_like(param, memory_format=torch.preserve_format)
            if keeps:  # a backward without a step leaves no state
                self._optimizer.state[param]["momentum_buffer"] = velocity
        return velocity


class ChangeMomentum:
    """The momentum of one worker, of any rule with a known one: its optimizer's change, extrapolated.

    Args:
        optimizer: The worker's optimizer.
        looks_ahead: Push the look-ahead; otherwise the change as it is.
        joins: Is the job under way when this worker begins?
    """

    def __init__(self, optimizer: torch.optim.Optimizer, looks_ahead: bool, joins: bool = False) -> None:
        self._optimizer, self._looks_ahead, self._joins = optimizer, looks_ahead, joins
        self._rule = RULES[type(optimizer).__name__]
        self._group_of = _groups_of(optimizer)

    def push(self, param: torch.Tensor, out: torch.Tensor) -> float:
        """Write what is pushed of a parameter into `out`, and put the parameter back: servers make the change.

        Args:
            param: The parameter, which the optimizer has just changed; without a gradient its momentum stays as it was.
            out: Its values before that, in its form.

        Returns:
            The sum of what is pushed: it is not finite where an element is not.
        """
        group = self._optimizer.param_groups[self._group_of[id(param)]]
        rate, ahead = float(group["lr"]), self._rule.extrapolation(group) if self._looks_ahead else 0.0
        last: list[torch.Tensor] = []
        if ahead and param.grad is not None:
            ahead, direction = 0.0 if self._is_unknown(param) else ahead, self._direction(param)
            last = [direction] if rate else []
        decay, share = rate * self._rule.decay_in(group), self._share(param)
        total = 0.0
        for values, target, *before in pieces([param.detach(), out, *last]):
            change = values - target
            values.copy_(target)
            if before:
                now = torch.add(change, target, alpha=decay).div_(rate) if decay else change / rate
                target.copy_(change).add_(before[0].neg_().add_(now), alpha=ahead * rate)
                before[0].copy_(now)
            else:
                target.copy_(change)
            if share < 1:
                target.mul_(share)
            total += target.sum().item()  # while it is in the cache
        return total

    def _share(self, param: torch.Tensor) -> float:
        """What the push counts for."""
        step = self._optimizer.state.get(param, {}).get("step") if self._joins else None
        return 1.0 if step is None else share_of_joiner(type(self._optimizer).__name__, float(step))

    def _is_unknown(self, param: torch.Tensor) -> bool:
        """Has the optimizer made changes before, in a job that did not keep them? Then there is nothing to extrapolate."""
        state = self._optimizer.state[param]
        return DIRECTION not in state and float(state.get("step", 1)) > 1

    def _direction(self, param: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = self._optimizer.state[param]
        if DIRECTION not in state:
            state[DIRECTION] = torch.zeros_like(param, memory_format=torch.preserve_format)
        direction: torch.Tensor = state[DIRECTION]
        return direction

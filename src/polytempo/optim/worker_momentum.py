"""A worker's own momentum: what it pushes in place of its gradient, or of its change (`sync/momentum.py` has the rule).

`GradientMomentum` is SGD's form. What is pushed is the gradient that torch's SGD would step along, operation by operation as
torch makes it: with `looks_ahead` that of `nesterov=True`. Servers then run SGD without momentum and without weight decay.
`ChangeMomentum` is the form of every other rule: the wrapped optimizer makes its change, which is extrapolated.

Their state lies in the state of the worker's own optimizer, under torch's names where torch has one, so that `state_dict()`
and checkpoints have it. Both go through memory in pieces that stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from polytempo.sync import momentum

#: Elements that are worked on at a time: calls for smaller pieces cost more than their cache saves (100 MB: 19 ms; in pieces
#: of a quarter of this 28 ms, in one 24 to 31 ms).
PIECE = 1 << 18
#: In the state of an optimizer: a parameter's last change, without decoupled weight decay, for each unit of the rate.
DIRECTION = "direction"
#: In the same place: the running mean of the length of a parameter's gradient.
USUAL = "usual_length"
#: What only workers make use of.
OF_WORKERS = (DIRECTION, USUAL)
#: From so few elements, or up to twice as many, the length of a larger gradient is taken.
SAMPLED = 1 << 14


def known_name(optimizer: torch.optim.Optimizer) -> str:
    """The name by which the rule knows an optimizer: that of its class, where it is torch's own; else empty."""
    kind = type(optimizer)
    return kind.__name__ if getattr(torch.optim, kind.__name__, None) is kind else ""


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


def _grouped(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]
) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
    """Parameter groups, each with those of these parameters that are in it."""
    chosen = {id(param) for param in params}
    for group in optimizer.param_groups:
        if members := [param for param in group["params"] if id(param) in chosen]:
            yield group, members


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a dense tensor: itself, unless it is sparse."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _sample(gradient: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Elements of a gradient by whose length its own is judged, all of a small one; and how many times as long it is."""
    every = gradient.numel() // SAMPLED
    if not every or not gradient.is_contiguous():
        return gradient, 1.0
    sample = gradient.view(-1)[:: every + 1]
    return sample, math.sqrt(gradient.numel() / sample.numel())


class GradientMomentum:
    """The momentum of one worker, of SGD.

    Args:
        optimizer: The worker's SGD, whose parameter groups say what to do in each step.
        looks_ahead: Push the look-ahead; otherwise what torch's SGD steps along.
        spike: A gradient that is longer than this many times what is usual for its parameter is shortened; 0: none is.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, looks_ahead: bool, spike: float = 0.0) -> None:
        self._optimizer, self._looks_ahead, self._spike = optimizer, looks_ahead, spike
        self._group_of = _groups_of(optimizer)

    def push(self, param: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, keeps: bool = True) -> float:
        """Write what is pushed of a parameter on the CPU into `out`, which may be `gradient` itself.

        Args:
            param: The parameter, at the values that the gradient was taken on.
            gradient: Its gradient, in the parameter's form.
            out: In that form.
            keeps: Is this the step itself? Otherwise the velocity stays as it is.

        Returns:
            The sum of what is pushed: it is not finite where an element is not.
        """
        group = self._optimizer.param_groups[self._group_of[id(param)]]
        velocity, total = [self._velocity(param, keeps)] if group["momentum"] else [], 0.0
        factor = 1.0
        if self._spike:  # what is kept is of 32 bits, and worked out in 64, as on a device
            sample, times = _sample(gradient)
            length = float((torch.linalg.vector_norm(sample) * times).float())
            before = float(self._optimizer.state.get(param, {}).get(USUAL, 0.0))
            factor, usual = momentum.calmed(length, before, self._spike)
            if keeps:
                self._optimizer.state[param][USUAL] = torch.tensor(usual)
        for values, grad, target, *own in pieces([param.detach(), gradient, out, *velocity]):
            calm = grad if factor == 1 else torch.mul(grad, factor, out=target)
            self._step(group, [values], [calm], [target], own if keeps else [one.clone() for one in own])
            total += target.sum().item()  # while it is in the cache
        return total

    def push_all(
        self, params: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """What is pushed of all these parameters on the CPU, in the memory of their gradients."""
        pushed = [None if gradient is None else dense(gradient) for gradient in gradients]
        with torch.no_grad():
            for param, out in zip(params, pushed, strict=True):
                if out is not None:
                    self.push(param, out, out)
        return pushed

    def pushes(self, params: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """What is pushed of parameters on a device, by their `id`; the host waits for nothing. Those without a gradient are
        left out."""
        found: dict[int, torch.Tensor] = {}
        for group, members in _grouped(self._optimizer, [param for param in params if param.grad is not None]):
            out = [dense(param.grad).clone() for param in members]
            velocities = [self._velocity(param, keeps=True) for param in members] if group["momentum"] else []
            if self._spike:
                self._calm_all(members, out)
            self._step(group, [param.detach() for param in members], out, out, velocities)
            found |= {id(param): pushed for param, pushed in zip(members, out, strict=True)}
        return found

    def _step(
        self,
        group: dict[str, Any],
        values: list[torch.Tensor],
        gradients: list[torch.Tensor],
        out: list[torch.Tensor],
        velocities: list[torch.Tensor],
    ) -> None:
        """Make of gradients what is pushed, in `out`, which may be the same tensors."""
        if group["maximize"] or group["weight_decay"] or not velocities:
            torch._foreach_copy_(out, gradients)
            gradients = out
        if group["maximize"]:
            torch._foreach_neg_(out)
        if group["weight_decay"]:
            torch._foreach_add_(out, values, alpha=group["weight_decay"])
        if not velocities:
            return
        # Two operations on the velocity, as torch makes them: one that multiplies and adds rounds once, not twice.
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, gradients)
        if not self._looks_ahead and not group["nesterov"]:
            torch._foreach_copy_(out, velocities)
        elif gradients is out:
            torch._foreach_add_(out, velocities, alpha=group["momentum"])
        else:  # without a copy first: the gradient is read once
            for gradient, velocity, target in zip(gradients, velocities, out, strict=True):
                torch.add(gradient, velocity, alpha=group["momentum"], out=target)

    def _calm_all(self, params: Sequence[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """On a device, in place: `calmed` on all lengths together."""
        states = [self._optimizer.state[param] for param in params]
        samples, times = zip(*map(_sample, gradients), strict=True)
        norms = torch._foreach_mul(torch._foreach_norm(samples), times)
        lengths = torch.stack([norm.float() for norm in norms]).double()
        usual = torch.stack([state.get(USUAL, lengths.new_zeros(())).to(lengths) for state in states])
        counted = torch.minimum(lengths, self._spike * usual)
        learns = (usual > 0) & (lengths > 0) & lengths.isfinite()
        factors = torch.where(learns, counted / lengths, 1.0)
        first = torch.where(lengths.isfinite(), lengths, 0.0)
        kept = torch.where(usual > 0, torch.where(learns, usual + momentum.FOLLOWS * (counted - usual), usual), first)
        for gradient, state, factor, one in zip(gradients, states, factors.unbind(), kept.float().unbind(), strict=True):
            gradient.mul_(factor)
            state[USUAL] = one

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
        self._rule = momentum.RULES[type(optimizer).__name__]
        self._group_of = _groups_of(optimizer)

    def push(self, param: torch.Tensor, out: torch.Tensor) -> float:
        """Write what is pushed of a parameter on the CPU, and put the parameter back: servers make the change.

        Args:
            param: The parameter, which the optimizer has just changed; without a gradient its momentum stays as it was.
            out: Its values before that, in its form.

        Returns:
            The sum of what is pushed: it is not finite where an element is not.
        """
        group, total = self._optimizer.param_groups[self._group_of[id(param)]], 0.0
        directions, ahead = self._last(group, param)
        share = self._share(param)
        for values, target, *last in pieces([param.detach(), out, *directions]):
            self._step(group, [values], [target], last, ahead)
            if share < 1:
                target.mul_(share)
            total += target.sum().item()  # while it is in the cache
        return total

    def push_all(
        self, params: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Let the optimizer make its change along these gradients, and give what is pushed of all these parameters on the
        CPU, which stay as they were."""
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        before = [param.detach().clone() for param in params]
        self._optimizer.step()
        with torch.no_grad():
            for param, out in zip(params, before, strict=True):
                self.push(param, out)
        return [None if gradient is None else out for gradient, out in zip(gradients, before, strict=True)]

    def pushes(self, params: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The same of parameters on a device, by their `id`: `before`, their earlier values, become what is pushed."""
        found = {id(param): values for param, values in zip(params, before, strict=True)}
        for group, members in _grouped(self._optimizer, params):
            alike: dict[tuple[int, float, float], list[tuple[torch.Tensor, list[torch.Tensor]]]] = {}
            for param in members:
                directions, ahead = self._last(group, param)
                alike.setdefault((len(directions), ahead, self._share(param)), []).append((param, directions))
            for (_, ahead, share), pairs in alike.items():
                out, last = [found[id(param)] for param, _ in pairs], [one for _, of in pairs for one in of]
                self._step(group, [param.detach() for param, _ in pairs], out, last, ahead)
                if share < 1:
                    torch._foreach_mul_(out, share)
        return found

    def _share(self, param: torch.Tensor) -> float:
        step = self._optimizer.state.get(param, {}).get("step") if self._joins else None
        return 1.0 if step is None else momentum.share_of_joiner(type(self._optimizer).__name__, float(step))

    def _last(self, group: dict[str, Any], param: torch.Tensor) -> tuple[list[torch.Tensor], float]:
        """The last change of a parameter, for each unit of the rate, and how far the next is extrapolated. The first of a
        rule that divides by the gradient's size is not: it is as large as any, whatever the gradient."""
        ahead = self._rule.extrapolation(group) if self._looks_ahead else 0.0
        if not ahead or not float(group["lr"]) or param.grad is None:
            return [], 0.0
        state: dict[str, Any] = self._optimizer.state[param]
        if DIRECTION in state:
            return [state[DIRECTION]], ahead
        state[DIRECTION] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return [state[DIRECTION]], ahead if self._rule.linear else 0.0

    def _step(
        self,
        group: dict[str, Any],
        values: list[torch.Tensor],
        out: list[torch.Tensor],
        directions: list[torch.Tensor],
        ahead: float,
    ) -> None:
        """Make of earlier values, which are in `out`, what is pushed, and of `values` the earlier ones."""
        changes = torch._foreach_sub(values, out)
        torch._foreach_copy_(values, out)
        if directions:
            rate, decay = float(group["lr"]), self._rule.decay_in(group)
            # Decoupled decay is no part of what is extrapolated.
            now = torch._foreach_add(changes, out, alpha=rate * decay) if decay else changes
            now = torch._foreach_div(now, rate)
        torch._foreach_copy_(out, changes)
        if ahead:
            torch._foreach_neg_(directions)
            torch._foreach_add_(directions, now)
            torch._foreach_add_(out, directions, alpha=ahead * rate)
        if directions:
            torch._foreach_copy_(directions, now)

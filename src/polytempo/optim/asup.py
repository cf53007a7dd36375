"""The update rule of ASU-P: asynchronous workers, and one RMSProp with momentum for all of them, on the server.

    s = rho * s + (1 - rho) * g^2;  v = momentum * v + lr * g / sqrt(s + eps);  w = w - v

It is not `torch.optim.RMSprop`: `eps` is inside the root, and the rate is inside `v`, so a decay of the rate acts with
delay, as published. ASU-P was described without a paper; what that leaves open is settled here: `s` begins at `initial`
(with 0 the first step is lr / sqrt(1 - rho) whatever the gradient, with 1 it is small), and `weight_decay` is coupled:
added to `g` before `s` is updated.

Every element is treated by itself, so a server may run this on any stretch of a flat tensor. Stretches are worked through in
blocks: the steps of the rule then meet their numbers in the cache, and the one temporary is a block and not a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from polytempo.errors import UsageError

Four: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

#: For each option: the least value, may it be exactly that, and the value it must stay below.
RANGES = {
    "lr": (0.0, True, math.inf),
    "momentum": (0.0, True, 1.0),
    "rho": (0.0, True, 1.0),
    "eps": (0.0, False, math.inf),
    "initial": (0.0, True, math.inf),
    "weight_decay": (0.0, True, math.inf),
}
#: Elements of a block for each thread. The five stretches of one fit in a second level cache, about.
BLOCK = 1 << 17


class AsuP(torch.optim.Optimizer):  # type: ignore[misc]
    """RMSProp with momentum as ASU-P has it, for any mode; the mode `asup` runs the same rule on the servers.

    State of a parameter: "square" and "velocity". It differs from `torch.optim.RMSprop`: `eps` is inside the root, and
    the learning rate inside the velocity.

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate.
        momentum: Of the velocity, from 0 to below 1.
        rho: The decay of the mean of squares, from 0 to below 1.
        eps: Added to the mean of squares inside the root, above 0.
        initial: The first value of the mean of squares; with 0 the first step is `lr / sqrt(1 - rho)` whatever the
            gradient.
        weight_decay: Coupled: added to the gradient.

    Raises:
        UsageError: An option is out of range, or a dtype cannot hold `eps`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        momentum: float = 0.9,
        rho: float = 0.9,
        eps: float = 1e-10,
        initial: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "rho": rho, "eps": eps, "initial": initial, "weight_decay": weight_decay}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: As torch's optimizers take it; its options are checked.
        """
        options = {**self.defaults, **param_group}
        for name, (least, allowed, below) in RANGES.items():
            value = options[name]
            try:
                good = (least <= value if allowed else least < value) and value < below
            except TypeError:
                good = False
            if not good:
                bounds = f"{'at least' if allowed else 'more than'} {least:g}"
                bounds += f" and less than {below:g}" if below == 1 else ""
                raise UsageError(f"AsuP: {name} must be a number, {bounds}, not {value!r}")
        super().add_param_group(param_group)
        eps = self.param_groups[-1]["eps"]
        for dtype in [param.dtype for param in self.param_groups[-1]["params"]]:
            if not dtype.is_floating_point:
                raise UsageError(f"AsuP works on parameters of floating point, not {dtype}")
            if float(torch.tensor(eps, dtype=dtype)) == 0:
                raise UsageError(f"AsuP: eps {eps:g} is nothing in {dtype}; use eps={torch.finfo(dtype).tiny:.1g} or more")

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step for every parameter that has a gradient.

        Args:
            closure: Evaluates the loss, as torch's optimizers take it.

        Returns:
            The loss, where a closure computes it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    raise UsageError("AsuP works on dense gradients, and got a sparse one; use nn.Embedding(sparse=False)")
                state = self.state[param]
                if not state:
                    state["square"] = torch.full_like(param, group["initial"])
                    state["velocity"] = torch.zeros_like(param)
                for value, gradient, square, velocity in _pieces(param, param.grad, state["square"], state["velocity"]):
                    if group["weight_decay"]:
                        gradient = gradient.add(value, alpha=group["weight_decay"])
                    square.mul_(group["rho"]).addcmul_(gradient, gradient, value=1 - group["rho"])
                    root = square.add(group["eps"]).sqrt_()
                    velocity.mul_(group["momentum"]).addcdiv_(gradient, root, value=float(group["lr"]))
                    value.sub_(velocity)
        return loss


def _pieces(value: torch.Tensor, gradient: torch.Tensor, square: torch.Tensor, velocity: torch.Tensor) -> Iterable[Four]:
    """The same elements of all, in blocks."""
    tensors = value, gradient, square, velocity
    size = BLOCK * torch.get_num_threads()
    if value.numel() <= size or value.device.type != "cpu" or not all(tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    return zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True)

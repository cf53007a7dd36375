"""Delay compensation (DC-ASGD): an estimate of the gradient at the present weights, from that at the weights that were read.

    g + lambda * g * g * (now - read)

g * g stands for the diagonal of the Hessian. The adaptive form divides lambda by the root of a running mean of g * g.
Written as g * (1 + lambda * g * (now - read)), so that a gradient that is not late stays what it is, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.errors import UsageError

#: Under the root of the adaptive form, as published.
EPS = 1e-7


def compensated(
    gradient: Sequence[torch.Tensor | None],
    now: Sequence[torch.Tensor],
    read: Sequence[torch.Tensor],
    strength: float,
    adaptive: bool,
    memory: float,
    mean_square: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor | None]:
    """New gradients; those given are not written to, `mean_square` (the adaptive form's) is. None stays None."""
    if adaptive and mean_square is None:
        raise UsageError("the adaptive form of delay compensation needs mean_square, a tensor of zeros for each gradient")
    squares: Sequence[torch.Tensor | None] = mean_square if adaptive and mean_square is not None else [None] * len(gradient)
    made: list[torch.Tensor | None] = []
    with torch.no_grad():
        for g, new, old, square in zip(gradient, now, read, squares, strict=True):
            if g is None:
                made.append(None)
                continue
            moved = new - old
            one = torch.ones((), dtype=moved.dtype, device=moved.device)
            if square is None:
                made.append(torch.addcmul(one, g, moved, value=strength, out=moved).mul_(g))
                continue
            square.mul_(memory).addcmul_(g, g, value=1 - memory)
            root = square.add(EPS).sqrt_()
            made.append(torch.addcdiv(one, moved.mul_(g), root, value=strength, out=moved).mul_(g))
    return made

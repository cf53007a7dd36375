"""Rules for an L1 penalty, which make numbers exactly zero: the proximal gradient step and FTRL-proximal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

State = dict[str, Tensor]
Hyper = Mapping[str, float]


def shrink(values: Tensor, by: float) -> Tensor:
    """Each number moved towards 0, and no further."""
    return values - values.clamp(-by, by)


def prox(rows: Tensor, state: State, pushed: Tensor, hyper: Hyper, rate: float) -> None:
    """row = shrink(row - lr * gradient, lr * l1): a gradient step, then the proximal operator of l1 * |row|."""
    lr = hyper["lr"] * rate
    rows.add_(pushed, alpha=-lr)
    rows.copy_(shrink(rows, lr * hyper["l1"]))


def ftrl(rows: Tensor, state: State, pushed: Tensor, hyper: Hyper, rate: float) -> None:
    """FTRL-proximal (McMahan et al., KDD 2013). The row follows from `z` and `n`, so it must start at zeros.

    sigma = (sqrt(n + g^2) - sqrt(n)) / alpha;  z += g - sigma * row;  n += g^2
    row = -shrink(z, l1) / ((beta + sqrt(n)) / alpha + l2)
    """
    alpha, z, n = hyper["alpha"] * rate, state["z"], state["n"]
    before = n.sqrt()
    n.add_(pushed.pow(2))
    root = n.sqrt()
    z.add_(pushed).sub_((root - before).div_(alpha).mul_(rows))
    bottom = (root + hyper["beta"]).div_(alpha).add_(hyper["l2"])
    # bottom is 0 only where all that was ever pushed is 0
    rows.copy_(torch.where(bottom > 0, -shrink(z, hyper["l1"]) / bottom, 0.0))

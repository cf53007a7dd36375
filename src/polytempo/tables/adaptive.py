"""Rules that scale a row's step by the gradients it has seen: Adagrad (by element and by row) and Adam.

`adam` counts the pushes of each row by itself: a rare row's first steps are corrected as the first steps of Adam are.
`sparse_adam` counts the updates of the whole table, as torch.optim.SparseAdam does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

State = dict[str, Tensor]
Hyper = Mapping[str, float]


def adagrad(rows: Tensor, state: State, pushed: Tensor, hyper: Hyper, rate: float) -> None:
    """sum += g^2; row -= lr / (sqrt(sum) + eps) * g, number by number, in the order of torch.optim.Adagrad."""
    total, first = state["sum"], hyper["initial_accumulator_value"]
    if first:  # a sum is 0 only before its first push, and never after one that began above 0
        total.masked_fill_(total == 0, first)
    total.add_(pushed.pow(2))
    lr = hyper["lr"] * rate / (1 + (hyper["step"] - 1) * hyper["lr_decay"])
    rows.add_(pushed / total.sqrt().add_(hyper["eps"]), alpha=-lr)


def rowwise_adagrad(rows: Tensor, state: State, pushed: Tensor, hyper: Hyper, rate: float) -> None:
    """sum += mean of g^2 over the row; row -= lr / (sqrt(sum) + eps) * g: one number beside a row instead of a row."""
    total = state["sum"].add_(pushed.pow(2).mean(1, keepdim=True))
    rows.addcmul_(pushed, hyper["lr"] * rate / total.sqrt().add_(hyper["eps"]), value=-1)


def adam(rows: Tensor, state: State, pushed: Tensor, hyper: Hyper, rate: float) -> None:
    """Adam on the rows of a push, with the bias correction of each row's own pushes.

    The correction 1 - beta^t is kept as the running mean of ones: it needs no power, and is right when a beta changes.
    """
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    mean = state["mean"].mul_(beta1).add_(pushed, alpha=1 - beta1)
    square = state["square"].mul_(beta2).add_(pushed.pow(2), alpha=1 - beta2)
    correct1 = state["mean_of_ones"].mul_(beta1).add_(1 - beta1)
    correct2 = state["square_of_ones"].mul_(beta2).add_(1 - beta2)
    bottom = (square / correct2).sqrt_().add_(hyper["eps"])
    rows.add_(mean / correct1 / bottom, alpha=-hyper["lr"] * rate)


def sparse_adam(rows: Tensor, state: State, pushed: Tensor, hyper: Hyper, rate: float) -> None:
    """torch.optim.SparseAdam, operation by operation: its bias correction counts the updates of the table."""
    beta1, beta2, step = hyper["beta1"], hyper["beta2"], hyper["step"]
    top = _approach(state["exp_avg"], pushed, 1 - beta1)
    bottom = _approach(state["exp_avg_sq"], pushed.pow(2), 1 - beta2).sqrt_().add_(hyper["eps"])
    size = hyper["lr"] * rate * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    rows.add_(-size * top.div_(bottom))


def _approach(average: Tensor, new: Tensor, part: float) -> Tensor:
    """Move a running average a part of the way; a copy of it, rounded as torch's is."""
    change = new.sub(average).mul_(part)
    result: Tensor = torch.add(change, average)
    average.add_(change)
    return result

"""Clipping by the norm of the gradients of the whole model, of which no rank has more than a part.

Every rank adds the square of what it counts; the sum is everybody's. What several ranks hold (replicas of a stage, copies of
a tied parameter) is counted by the first of them. All stages meet here, before the update: this costs a message each way,
and schedules that never flush have no such moment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from polytempo.collectives.group import Group


class Clipping:
    """`most`: the norm that is left at most. `counted`: parameters that this rank counts."""

    def __init__(self, group: Group, most: float, counted: Sequence[nn.Parameter]) -> None:
        self.group, self._most, self._counted = group, most, counted
        self.norm: float | None = None  #: before the last clipping

    def clip(self, params: Sequence[nn.Parameter]) -> None:
        """Shorten the gradients of these as torch's `clip_grad_norm_` does those of the whole model."""
        found = [param.grad for param in self._counted if param.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=_wide(gradient)).double() for gradient in found]
        squares = torch.stack(norms).square().sum().reshape(1).cpu() if norms else torch.zeros(1, dtype=torch.float64)
        self.group.all_reduce([squares]).wait()
        total = squares.sqrt().squeeze()
        self.norm = float(total)
        nn.utils.clip_grads_with_norm_(params, self._most, total)


def _wide(gradient: torch.Tensor) -> torch.dtype:
    """Squares of half-precision numbers are not half-precision numbers."""
    return torch.promote_types(gradient.dtype, torch.float32)

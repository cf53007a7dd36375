"""Clipping by the norm of the gradients of the whole model, of which no rank has more than a part.

Every rank adds the square of what it counts; the sum is everybody's. What several ranks hold (replicas of a stage, copies of
a tied parameter) is counted by the first of them. All stages meet here, before the update: this costs a message each way,
and schedules that never flush have no such moment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from polytempo.collectives.group import RankGroup


class Clipping:
    """`most`: the norm that is left at most. `counted`: parameters that this rank counts."""

    def __init__(self, group: RankGroup, most: float, counted: Sequence[nn.Parameter]) -> None:
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


# Gradients before an update: replicas of a stage take the mean over all microbatches that went into it; copies of a tied
# parameter, which stand in several stages, get the sum of what all of them have, and so stay equal. Then they are clipped.


class GradientSync:
    """The groups of one rank: of its stage (None for a single replica), for parameters it shares with others, and of all
    (None if nothing is clipped)."""

    def __init__(
        self,
        replicas: RankGroup | None,
        tied: Sequence[tuple[RankGroup, Sequence[nn.Parameter]]],
        clipping: Clipping | None = None,
    ) -> None:
        self._replicas, self._tied, self.clipping = replicas, tied, clipping
        self._apart = {param for _, params in tied for param in params}

    @property
    def groups(self) -> list[RankGroup]:
        """All of them."""
        own = [self._replicas, self.clipping.group if self.clipping is not None else None]
        return [*(group for group in own if group is not None), *(group for group, _ in self._tied)]

    def start_equal(self, params: Sequence[torch.Tensor]) -> None:
        """All replicas, and all copies, take the values of the first."""
        tensors = [param.detach() for param in params]
        if self._replicas is not None and tensors:
            self._replicas.broadcast(tensors, 0).wait()
        for group, shared in self._tied:
            group.broadcast([param.detach() for param in shared], 0).wait()

    def add_up(self, params: Sequence[nn.Parameter], backwards: int, expected: int) -> None:
        """Make each gradient the mean over the microbatches of this update; `backwards` of them were here. Gradients are
        as if there were `expected` of them everywhere. Clip them, if that is wanted."""
        total = backwards
        if self._replicas is not None:
            own = [param for param in params if param not in self._apart]
            total = _summed(self._replicas, own, backwards)
        for group, shared in self._tied:
            _summed(group, shared, backwards)
        if total != expected:
            for param in params:
                if param.grad is not None:
                    param.grad.mul_(expected / total)
        if self.clipping is not None:
            self.clipping.clip(params)


def _summed(group: RankGroup, params: Sequence[nn.Parameter], backwards: int) -> int:
    """Add gradients up. Who has none adds nothing; where nobody has one there is none. How many backwards there were."""
    wanting = [param for param in params if param.requires_grad]
    facts = torch.tensor([backwards, *(param.grad is not None for param in wanting)], dtype=torch.float64)
    for param in wanting:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    group.all_reduce([facts, *(param.grad for param in wanting if param.grad is not None)]).wait()
    for param, present in zip(wanting, facts[1:], strict=True):
        if not present:
            param.grad = None
    return int(facts[0])

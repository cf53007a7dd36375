"""Gradients before an update: summed over replicas and tied copies, then clipped by the norm of the whole model.

Replicas of a stage take the mean over all microbatches of the update. Copies of a tied parameter, which several stages hold,
get the sum of the gradients of all copies, and so stay equal.

For clipping, no rank has the gradients of the whole model: each adds the squares of those it counts, and an all-reduce gives
the total. A parameter that several ranks hold is counted by the first of them. All stages take part before the update, which
costs one message each way; schedules that never flush have no such moment.

On the data axis gradients are first summed over tied copies, then averaged over the replicas of the model where the mode
averages gradients (`DistributedOptimizer.synchronize`), then clipped by the norm of that mean over one replica's ranks. In
other modes each replica clips its own gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from polytempo.collectives.group import RankGroup


class Clipping:
    """Clips to `max_norm`. `counted`: the parameters whose gradients this rank adds to the norm."""

    def __init__(self, group: RankGroup, max_norm: float, counted: Sequence[nn.Parameter]) -> None:
        self.group, self._max_norm, self._counted = group, max_norm, counted
        self.norm: float | None = None  #: before the last clipping

    def clip(self, params: Sequence[nn.Parameter]) -> None:
        """Scale the gradients of these parameters as torch's `clip_grad_norm_` on the whole model would."""
        norms = []
        for gradient in (param.grad for param in self._counted if param.grad is not None):
            wide = torch.promote_types(gradient.dtype, torch.float32)  # where squares of half precision do not overflow
            norms.append(torch.linalg.vector_norm(gradient, dtype=wide).double())
        squares = torch.stack(norms).square().sum().reshape(1).cpu() if norms else torch.zeros(1, dtype=torch.float64)
        if self.group.size > 1:
            self.group.all_reduce([squares]).wait()
        total = squares.sqrt().squeeze()
        self.norm = float(total)
        nn.utils.clip_grads_with_norm_(params, self._max_norm, total)


class GradientSync:
    """The groups of one rank: the replicas of its stage (None for a single one), the holders of each tied parameter, and
    all ranks (None without clipping)."""

    def __init__(
        self,
        replicas: RankGroup | None,
        tied: Sequence[tuple[RankGroup, Sequence[nn.Parameter]]],
        clipping: Clipping | None = None,
    ) -> None:
        self._replicas, self._tied, self.clipping = replicas, tied, clipping
        self._tied_params = {param for _, params in tied for param in params}

    @property
    def groups(self) -> list[RankGroup]:
        """All groups of this rank."""
        own = [self._replicas, self.clipping.group if self.clipping is not None else None]
        return [*(group for group in own if group is not None), *(group for group, _ in self._tied)]

    def broadcast_initial(self, params: Sequence[torch.Tensor]) -> None:
        """All replicas, and all copies of tied parameters, take the values of the first."""
        tensors = [param.detach() for param in params]
        if self._replicas is not None and tensors:
            self._replicas.broadcast(tensors, 0).wait()
        for group, shared in self._tied:
            group.broadcast([param.detach() for param in shared], 0).wait()

    def reduce(self, params: Sequence[nn.Parameter], backwards: int, expected: int) -> None:
        """Make each gradient the mean over the microbatches of this update, of which `backwards` were on this rank. Losses
        were divided by `expected`."""
        total = backwards
        if self._replicas is not None:
            own = [param for param in params if param not in self._tied_params]
            total = _summed(self._replicas, own, backwards)
        for group, shared in self._tied:
            _summed(group, shared, backwards)
        if total != expected:
            for param in params:
                if param.grad is not None:
                    param.grad.mul_(expected / total)

    def changes_gradients(self) -> bool:
        """Do gradients change on this rank after its last backward?"""
        return self._replicas is not None or bool(self._tied) or self.clipping is not None


def _summed(group: RankGroup, params: Sequence[nn.Parameter], backwards: int) -> int:
    """Sum gradients over a group; a parameter without a gradient on any rank keeps none. Returns the number of backwards."""
    trainable = [param for param in params if param.requires_grad]
    facts = torch.tensor([backwards, *(param.grad is not None for param in trainable)], dtype=torch.float64)
    for param in trainable:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    group.all_reduce([facts, *(param.grad for param in trainable if param.grad is not None)]).wait()
    for param, present in zip(trainable, facts[1:], strict=True):
        if not present:
            param.grad = None
    return int(facts[0])

"""How far the gradients of different workers are apart: a figure that tells shards that differ from shards that are alike.

    sqrt(mean over i of |g_i - mean|^2) / |mean|        over the latest gradient g_i of each worker

It is taken at every update from two workers on, from at most 1,024 coordinates that lie evenly over the parameters, and its
mean over the run is reported. Two running sums make it cheap, since the mean of |g_i - mean|^2 is that of |g_i|^2 less
|mean|^2; they are made anew once a round of gradients, so that rounding does not pile up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

COORDINATES = 1024


class Spread:
    """Takes gradients as they are computed, and looks at the latest of each worker when told to."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        stride = max(1, math.ceil(sum(sizes) / COORDINATES))
        self._picks = list(_picks(sizes, stride))
        count = sum(len(pick) for pick in self._picks)
        self._latest: dict[int, torch.Tensor] = {}
        self._sum = torch.zeros(count, dtype=torch.float64)
        self._squares = 0.0
        self._taken = 0  # since the sums were made anew
        self._total, self._looks = 0.0, 0

    @property
    def mean(self) -> float:
        """Over all looks; 0 when there were never two workers."""
        return self._total / self._looks if self._looks else 0.0

    def take(self, worker: int, gradient: Sequence[torch.Tensor | None]) -> None:
        """A worker's new gradient, in the place of the one before."""
        parts = [_part(grad, pick) for grad, pick in zip(gradient, self._picks, strict=True)]
        new = torch.cat(parts).to(dtype=torch.float64, device="cpu")
        old = self._latest.get(worker)
        self._latest[worker] = new
        self._taken += 1
        if self._taken >= len(self._latest):
            self._taken = 0
            every = torch.stack(list(self._latest.values()))
            self._sum, self._squares = every.sum(0), float((every * every).sum())
        else:
            self._sum += new if old is None else new - old
            self._squares += float(new @ new) - (0.0 if old is None else float(old @ old))

    def look(self) -> None:
        """Count the spread as it is now."""
        count = len(self._latest)
        mean = float(self._sum @ self._sum) / count**2 if count > 1 else 0.0
        if mean > 0 and math.isfinite(self._squares):
            self._total += math.sqrt(max(self._squares / count / mean - 1, 0.0))
            self._looks += 1


def _picks(sizes: Sequence[int], stride: int) -> list[torch.Tensor]:
    """Of each parameter the coordinates to look at: every `stride`-th of all of them, one after another."""
    picks, first = [], 0
    for size in sizes:
        picks.append(torch.arange(min(first, size), size, stride))
        first = (first - size) % stride
    return picks


def _part(grad: torch.Tensor | None, pick: torch.Tensor) -> torch.Tensor:
    if grad is None:  # the parameter was not used
        return torch.zeros(len(pick))
    return grad.detach().reshape(-1)[pick.to(grad.device)]

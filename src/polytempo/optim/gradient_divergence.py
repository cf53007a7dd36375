"""Gradient divergence between workers: it is large when their shards of the data differ.

    sqrt(mean over i of |g_i - mean|^2) / |mean|        over the latest gradient g_i of each worker

It is taken from two workers on, once for as many new gradients as there are workers, from at most 1,024 coordinates that lie
evenly over the parameters. Its mean over the run is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

COORDINATES = 1024


class GradientDivergence:
    """Keeps the latest gradient of each worker, and measures their divergence on request.

    On a GPU a look is counted by `settle`, which waits for the GPU; until then its figures stay there.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self._stride = max(1, math.ceil(sum(sizes) / COORDINATES))
        self._firsts = [-sum(sizes[:index]) % self._stride for index in range(len(sizes))]  # of each parameter
        self._latest: dict[int, torch.Tensor] = {}
        self._new = 0  # gradients since the last look
        self._total, self._looks = 0.0, 0
        self._open: list[tuple[torch.Tensor, int]] = []  # looks that are not counted yet

    @property
    def mean(self) -> float:
        """Over all looks that are counted; 0 when there were never two workers."""
        return self._total / self._looks if self._looks else 0.0

    def take(self, worker: int, gradient: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]) -> None:
        """A worker's new gradient, in the place of the one before; where there is none, the parameter was not used."""
        self._new += 1
        given = [torch.zeros_like(p) if g is None else g for g, p in zip(gradient, parameters, strict=True)]
        self._latest[worker] = torch.cat(
            [g.reshape(-1)[f :: self._stride] for g, f in zip(given, self._firsts, strict=True)]
        )

    def look(self) -> None:
        """Count the spread as it is now, if it is time."""
        if self._new < len(self._latest) or len(self._latest) < 2:
            return
        self._new = 0
        every = torch.stack(list(self._latest.values())).to(torch.float64)
        mean = every.mean(0)
        self._open.append((torch.stack([mean.norm(), (every - mean).norm()]), len(every)))
        if every.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Count the looks that are not counted yet."""
        looks, self._open = self._open, []
        for norms, workers in looks:
            size, deviation = norms.tolist()
            if size > 0 and math.isfinite(size):
                self._total += deviation / math.sqrt(workers) / size
                self._looks += 1

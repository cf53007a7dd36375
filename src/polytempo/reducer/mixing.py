"""The sum that a worker mixes in a step: x = P_ii x_i + sum of P_ij x_j, and the push-sum weight alike; the model is x / w.

Parts are added in the order of ranks, the worker's own among them, so that workers which mix the same parts at the same
weights get the same bits. Halves (float16, bfloat16) are added up in float32. What left this worker is taken away as it was
sent: after a cast x_i - sum of P_ji q_i, where q_i is the message, so that sums over all workers are kept.
"""

from __future__ import annotations

import torch

from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.server.pull_compression import Flats

#: A weight as close to 1 as this is 1: sums of rounded shares are not quite, and then nothing is divided.
CLOSE = 1e-12


class MixingSum:
    """Adds up the parts of one step, into the memory of `target` where its dtype allows."""

    def __init__(self, target: FlatBuffer) -> None:
        self._target = target
        self._total: Flats = {
            dtype: flat if flat.element_size() > 2 else torch.empty_like(flat, dtype=torch.float32)
            for dtype, flat in target.tensors.items()
        }
        self.start()

    def start(self) -> None:
        """Begin with nothing."""
        self.weight, self._empty = 0.0, True

    def add(self, values: Flats, weight: float, share: float) -> None:
        """Add a share of these values and of their weight."""
        for dtype, total in self._total.items():
            if not self._empty:
                total.add_(values[dtype], alpha=share)
            elif values[dtype].dtype == total.dtype:
                torch.mul(values[dtype], share, out=total)
            else:
                total.copy_(values[dtype]).mul_(share)
        self.weight, self._empty = self.weight + share * weight, False

    def finish(self) -> float:
        """Make `target` the model; the weight of its values."""
        if abs(self.weight - 1.0) <= CLOSE:
            self.weight = 1.0
        for dtype, total in self._total.items():
            if self.weight != 1.0:
                total.div_(self.weight)
            if total is not self._target.tensors[dtype]:
                self._target.tensors[dtype].copy_(total)
        self._target.changed_all()
        return self.weight

"""Data for training in virtual time: the samples of each worker's steps.

`Shards` gives the samples of a step as `DistributedSampler` would, as a pure function of worker and step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polytempo.errors import UsageError, WrongType
from polytempo.simulate.dealing import EpochRange
from polytempo.tasks import TensorPair


def as_tensors(data: Any, name: str) -> TensorPair:
    """Inputs and targets from a pair of tensors, or from a data set of (input, target) items."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data):
        inputs, targets = data
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        items = [data[index] for index in range(len(data))]
        inputs = torch.stack([torch.as_tensor(x) for x, _ in items])
        targets = torch.stack([torch.as_tensor(y) for _, y in items])
    else:
        raise WrongType(f"expected {name} as (inputs, targets) or as a data set with items, got {type(data).__name__}")
    if len(inputs) != len(targets) or len(inputs) == 0:
        raise UsageError(f"{name}: expected as many inputs as targets, got {len(inputs)} and {len(targets)}")
    return inputs, targets


class Shards:
    """The training samples of each worker: a new shuffle each epoch, each worker every n-th of it, whole batches only."""

    def __init__(self, size: int, ranks: int, batches: Sequence[int], seed: int) -> None:
        self._size, self._batches, self._seed = size, batches, seed
        self.workers = ranks  #: among which the samples are dealt
        self._shuffles: dict[int, torch.Tensor] = {}
        short = size // ranks
        if short < max(batches):
            raise UsageError(
                f"{size} samples over {ranks} workers are {short} each, less than a batch of {max(batches)}; "
                f"use a smaller batch or fewer workers"
            )

    def batch(self, worker: int, step: int) -> torch.Tensor:
        """The indices of a worker's samples in its step."""
        batch = self._batches[worker]
        steps = (self._size // self.workers) // batch
        epoch, place = divmod(step, steps)
        mine = self.order(epoch)[worker :: self.workers]
        return mine[place * batch : (place + 1) * batch]

    def at(self, places: Sequence[EpochRange]) -> torch.Tensor:
        """The indices of samples that were dealt out."""
        return torch.cat([self.order(epoch)[start:stop] for epoch, start, stop in places])

    def order(self, epoch: int) -> torch.Tensor:
        """The indices of all samples in the order of an epoch."""
        if epoch not in self._shuffles:
            if len(self._shuffles) > 64:  # workers are rarely further apart; a shuffle is made again if one is
                self._shuffles.clear()
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._shuffles[epoch] = torch.randperm(self._size, generator=generator)
        return self._shuffles[epoch]

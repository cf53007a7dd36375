"""`DistributedSampler`: shares a data set among the workers, and goes on where a checkpoint left off.

An epoch is one seeded order of all samples; worker r of n takes places r, r + n, r + 2n, ... of it. After a checkpoint the
samples that pushes before it were made of are left out, exactly, and the rest is shared anew, by however many there are now.
Without a checkpoint every worker gets equally many samples (the first few are used twice where it does not divide).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch

from polytempo.protocol.values import Position
from polytempo.train.session import Session, current


class DistributedSampler(torch.utils.data.Sampler[int]):  # type: ignore[misc]
    """Hand it to a `DataLoader`; call `set_epoch` before each epoch."""

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        session: Session | None = None,
    ) -> None:
        self._session = session or current()
        self._length = len(dataset)
        self._shuffle, self._drop_last = shuffle, drop_last
        self._seed = self._session.job.seed if seed is None else seed
        self._earlier: Sequence[dict[str, Any]] = self._session.job.positions
        self.epoch = max((part["epoch"] for part in self._earlier), default=0)
        self._drawn = 0  # in this epoch
        self._trained = 0  # in this epoch, where step() was told
        self._session.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: another order."""
        self.epoch = epoch
        self._drawn = self._trained = 0

    def __iter__(self) -> Iterator[int]:
        self._drawn = self._trained = 0
        for index in self._mine():
            self._drawn += 1
            yield index

    def __len__(self) -> int:
        return len(self._mine())

    def trained(self, samples: float | None) -> None:
        """So many samples went into a push."""
        self._trained += int(samples or 0)

    def position(self) -> Position:
        """How far this worker is: samples trained on where `step(samples=...)` says so, else samples drawn by the loader."""
        return Position(self.epoch, self._trained or self._drawn)

    def _mine(self) -> list[int]:
        rest = remaining(self._order(), [part for part in self._earlier if part["epoch"] == self.epoch])
        rank, size = self._session.rank, self._session.size
        each = len(rest) // size if self._drop_last else math.ceil(len(rest) / size)
        if rest and not self._drop_last:
            rest = rest + rest[: each * size - len(rest)]
        return rest[rank : each * size : size]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        return torch.randperm(self._length, generator=generator).tolist()  # type: ignore[no-any-return]


def remaining(order: Sequence[int], parts: Sequence[dict[str, Any]]) -> list[int]:
    """What is left of an epoch after jobs of given sizes in which each worker took so many."""
    rest = list(order)
    for part in parts:
        size, taken = part["size"], part["taken"]
        rest = [index for place, index in enumerate(rest) if place // size >= taken[place % size]]
    return rest

"""Weights as they were: one copy of each version that somebody may still read, and no other.

The newest version lives in the model's own tensors and is copied only when it is about to change while it has readers. All
readers of a version share its copy, and the copy goes with the last of them.
"""

from __future__ import annotations

from collections import Counter

import torch


class Versions:
    """Counts the readers of each version of `tensors` and keeps the old ones they need."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.newest = 0
        self._tensors = tensors
        self._readers: Counter[int] = Counter()
        self._copies: dict[int, list[torch.Tensor]] = {}

    def keep(self, version: int) -> None:
        """One reader more."""
        self._readers[version] += 1

    def drop(self, version: int) -> None:
        """One reader less; the last one takes the copy along."""
        self._readers[version] -= 1
        if self._readers[version] == 0:
            del self._readers[version]
            self._copies.pop(version, None)

    def read(self, version: int) -> list[torch.Tensor]:
        """The tensors of a version that has readers. Not to be changed."""
        return self._tensors if version == self.newest else self._copies[version]

    def advance(self) -> None:
        """The newest version is about to change in place: keep it if it has readers."""
        if self._readers[self.newest]:
            self._copies[self.newest] = [tensor.detach().clone() for tensor in self._tensors]
        else:
            del self._readers[self.newest]
        self.newest += 1

    @property
    def copies(self) -> int:
        """How many old versions are kept."""
        return len(self._copies)

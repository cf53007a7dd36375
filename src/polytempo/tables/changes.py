"""Which rows have changed since a version.

A version for each slot would answer that alone, but by looking at all rows there are. So the slots of the last updates are
kept as lists too, and answer for workers that lag by little; those that lag by more are answered from the versions.
"""

from __future__ import annotations

from collections import deque

import torch

#: Slots that are kept as lists, if a table is small; of a large one a part of its rows.
FEW = 1 << 16
PART = 8


class Changes:
    """The slots of the last updates, newest last."""

    def __init__(self) -> None:
        self._updates: deque[tuple[int, torch.Tensor]] = deque()
        self._kept = 0
        self._lost = -1  # lists are complete for what came after this version

    def add(self, version: int, slots: torch.Tensor | slice, rows: int) -> None:
        """These slots have changed, of a table of so many rows. Versions do not go back."""
        limit = max(FEW, rows // PART)
        if isinstance(slots, slice):
            whole = slots.stop - slots.start > limit
            slots = torch.arange(0) if whole else torch.arange(slots.start, slots.stop)
            self._lost = version if whole else self._lost
        self._updates.append((version, slots.clone()))  # they may be the memory of a push
        self._kept += slots.numel()
        while self._updates and (self._kept > limit or self._updates[0][0] <= self._lost):
            self._lost, gone = max(self._lost, self._updates[0][0]), self._updates.popleft()[1]
            self._kept -= gone.numel()

    def forget(self, version: int) -> None:
        """Rows were changed up to this version in ways that are not listed here."""
        self._updates.clear()
        self._kept, self._lost = 0, version

    def since(self, version: int) -> torch.Tensor | None:
        """The slots that changed after a version, each once; nothing where it is too long ago to know."""
        if version < self._lost:
            return None
        later = [slots for at, slots in self._updates if at > version]
        return torch.cat(later).unique() if later else torch.arange(0)

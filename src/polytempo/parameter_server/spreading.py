"""The spread of gradients between workers, on the first shard: looked at in windows, so that it costs next to nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from polytempo.optim.spread import Spread

#: Of so many updates the first few are looked at.
EVERY, WINDOW = 128, 16


class SpreadWatch:
    """Watches the pushes of one store."""

    def __init__(self, values: Sequence[torch.Tensor], active: bool) -> None:
        self._values = values
        self._spread = Spread(values) if active and any(flat.numel() for flat in values) else None

    @property
    def mean(self) -> float:
        """Over all looks so far; 0 where nobody looks, or there was only ever one worker."""
        return self._spread.mean if self._spread is not None else 0.0

    def see(self, version: int, gradients: Iterable[tuple[int, Sequence[torch.Tensor]]]) -> None:
        """The gradients of an update, by worker."""
        if self._spread is None or version % EVERY >= WINDOW:
            return
        for worker, tensors in gradients:
            self._spread.take(worker, tensors, self._values)
        self._spread.look()

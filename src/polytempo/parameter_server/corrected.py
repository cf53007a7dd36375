"""Corrections for stale gradients that need tensors or hyper-parameters: what of `sync/corrections.py` a shard carries out.

Delay compensation needs the values that a worker computed its gradient on. They are kept for each worker from the moment
they are sent until it has pushed what it made of them: one copy a worker, a few where its pushes overlap. Who has none
(after a restart of the servers) is not compensated, once; the mean of squares of the adaptive form begins anew then, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polytempo.optim.compensation import compensated
from polytempo.sync.corrections import Corrections

Flats = dict[str, torch.Tensor]


class Corrected:
    """The corrections of one store."""

    def __init__(self, corrections: Corrections) -> None:
        self._corrections = corrections
        self._given: dict[int, dict[int, Flats]] = {}  # worker: version: values
        self._squares: Flats = {}

    def given(self, worker: int, version: int, values: Flats) -> None:
        """A worker is sent these values."""
        if self._corrections.compensation is not None:
            self._given.setdefault(worker, {})[version] = {dtype: flat.clone() for dtype, flat in values.items()}

    def gradient(self, worker: int, version: int, gradient: Flats, now: Flats) -> Flats:
        """What this gradient, made on the values of a version, would be on those of now."""
        about = self._corrections.compensation
        given = self._given.get(worker, {})
        for old in [known for known in given if known < version]:
            del given[old]
        if about is None or version not in given:
            return gradient
        if about.adaptive and not self._squares:
            self._squares = {dtype: torch.zeros_like(flat) for dtype, flat in now.items()}
        dtypes = list(gradient)
        grads, squares = [gradient[d] for d in dtypes], [self._squares[d] for d in dtypes] if about.adaptive else None
        values, read = [now[d] for d in dtypes], [given[version][d] for d in dtypes]
        result = compensated(grads, values, read, about.strength, about.adaptive, about.memory, squares)
        return {dtype: flat for dtype, flat in zip(dtypes, result, strict=True) if flat is not None}

    def hyper(self, groups: Sequence[dict[str, Any]], mean_staleness: float) -> Sequence[dict[str, Any]]:
        """Hyper-parameters whose momentum allows for that of stale gradients."""
        if not self._corrections.adapts_momentum:
            return groups
        return [{**g, "momentum": self._corrections.momentum_for(g["momentum"], mean_staleness)} for g in groups]

    def forget(self, worker: int) -> None:
        """A worker is gone."""
        self._given.pop(worker, None)

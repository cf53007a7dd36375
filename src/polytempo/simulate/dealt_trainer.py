"""Gradients beside a simulated run in which samples are dealt out: `bsp+balance` and `anytime`.

A push is a number of micro-batches, each of places in the order of an epoch. The update is the sum over all micro-batches of
samples times mean gradient, in order of rank and of computing, divided by the divisor of the round, or by the samples. One
that was finished late is computed on the older weights it was begun on. A round without samples changes nothing.

The orders are those of `Shards`. There, each of n workers takes every n-th place: the joint batch of a round of `bsp` has
the same samples as that of `bsp+balance`, as long as shares are even and no epoch has ended (`bsp` leaves the rest of an
epoch that fills no joint batch; here it is a short one).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.simulate.dealing import MicroBatch
from polytempo.simulate.gradient_trainer import Gradient, VirtualTrainer, add_weighted
from polytempo.sync.actions import Apply


class VirtualDealtTrainer(VirtualTrainer):
    """Real training beside a simulated run of a mode that deals out samples."""

    #: Compute micro-batches of a push in one pass: the same sum, if the loss is a mean over samples and no layer (batch
    #: norm, dropout) depends on what else is in a batch; several times faster.
    one_pass = False

    @property
    def length(self) -> int:  # type: ignore[override]
        return len(self._train[0])

    def apply(self, apply: Apply, versions: Sequence[int], contents: Sequence[list[MicroBatch]], part: int) -> None:
        pushes, made_of, rate, divisor = apply.pushes, contents, apply.rate, apply.divisor
        total = divisor or sum(batch.samples for batches in made_of for batch in batches)
        mean: Gradient = [None] * len(self._parameters)
        for push, batches, version in zip(pushes, made_of, versions, strict=True):
            for batch in _joined(batches) if self.one_pass else batches:
                self._load(batch.version if batch.late else version)
                add_weighted(mean, self._gradient_of(push.worker, self._index(batch)), batch.samples / total)
        for version in versions:
            self.versions.drop(version)
        if any(made_of):
            self._update(mean, [self.versions.newest - version for version in versions], rate)
        else:
            self.versions.advance()

    def _index(self, batch: MicroBatch) -> torch.Tensor:
        parts = [self._shards.order(epoch)[start:stop] for epoch, start, stop in batch.places]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The same samples; all that are not late as one."""
    fresh = [batch for batch in batches if not batch.late]
    samples, places = sum(batch.samples for batch in fresh), tuple(place for batch in fresh for place in batch.places)
    return [*(batch for batch in batches if batch.late), *([MicroBatch(samples, places)] if fresh else [])]

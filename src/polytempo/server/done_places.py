"""Which places of an epoch's order are done, in modes that deal out batches: those of pushes that are applied.

A push names the places that it was made of. What is pending, discarded or abandoned is not done. Of a sampler the last
epoch is kept; where places are leased, also those before it of which places have returned and are not done. Places that are
done again are those of another time through the epoch: it starts over then, without what earlier jobs have done of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from polytempo.protocol.values import Position
from polytempo.sync.sample_queue import Range, merged, without

#: Epochs of a sampler that are kept, where places are leased.
EPOCHS = 4


@dataclass
class EpochPlaces:
    """Of one sampler, in one epoch."""

    length: int  #: places of what was left of the epoch's order
    done: list[Range] = field(default_factory=list)
    again: bool = False  #: was the epoch gone through before, in this job?

    @property
    def is_whole(self) -> bool:
        """Are all places done?"""
        return self.done == [(0, self.length)]


class DonePlaces:
    """Of all samplers of a job."""

    def __init__(self) -> None:
        self._samplers: dict[str, dict[int, EpochPlaces]] = {}

    def apply(self, positions: Iterable[Position], leased: bool = False) -> None:
        """An update was made of these; `leased`: what is not done of an epoch is leased again in the next."""
        found: dict[tuple[str, int, int], list[Range]] = {}
        for one in positions:
            if one.length:
                found.setdefault((one.sampler, one.epoch, one.length), []).extend(one.done)
        for (sampler, epoch, length), ranges in found.items():
            epochs = self._samplers.setdefault(sampler, {})
            self._add(epochs, epoch, length, merged(ranges))
            last = max(epochs)
            kept = {last, *(old for old in sorted(epochs)[-EPOCHS:] if leased and not epochs[old].is_whole)}
            self._samplers[sampler] = {old: places for old, places in epochs.items() if old in kept}

    def _add(self, epochs: dict[int, EpochPlaces], epoch: int, length: int, ranges: list[Range]) -> None:
        known = epochs.get(epoch)
        if known is None:
            known = epochs[epoch] = EpochPlaces(length)
        elif known.length != length or _size(without(ranges, known.done)) < _size(ranges):
            known = epochs[epoch] = EpochPlaces(length, again=True)
        known.done = merged([*known.done, *ranges])

    def parts(self, earlier: list[dict[str, Any]]) -> tuple[set[str], list[dict[str, Any]]]:
        """For a checkpoint: the names of the samplers, and what is done of each, after what earlier jobs have done of it."""
        result: list[dict[str, Any]] = []
        for name, epochs in self._samplers.items():
            for epoch, known in sorted(epochs.items()):
                if not known.again:
                    result += [part for part in earlier if (part.get("sampler", ""), part["epoch"]) == (name, epoch)]
                done = [list(place) for place in known.done]
                result.append({"sampler": name, "epoch": epoch, "length": known.length, "done": done})
        return set(self._samplers), result


def _size(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)

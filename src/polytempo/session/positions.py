"""How far a worker is in its data: which samplers train, and how many samples of each went into pushes.

A sampler trains when a push follows its draws. Which draws a push was made of is told by what happened in between:

    draws of a pass that goes on        they train: the loop is inside this pass
    draws of a pass that has ended      they were looked at (an evaluation), unless a loader has read the whole pass ahead:
                                        then the sampler has trained before, and all of its last pass is used up
    draws while gradients are disabled  they were looked at

A pass is one time through a sampler: evaluating on the training data is another pass, and does not disturb the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from polytempo.protocol.values import Position


class Pass:
    """One time through a sampler."""

    def __init__(self, sampler: str, epoch: int, share: tuple[int, int] | None = None) -> None:
        self.sampler, self.epoch = sampler, epoch
        self._share = share or (-1, 0)
        self.drawn = self.trained = 0
        self.handed = 0  #: samples of the batches that the loader has given to the script, where it tells
        self._pushed = 0  # samples that were drawn, or handed out, before the last push
        self.ended = False
        self.fresh = False  #: has drawn since the last push

    def draw(self, counts: bool) -> None:
        """A sample is handed to the loader."""
        self.drawn += 1
        self.fresh = self.fresh or counts

    @property
    def used_up(self) -> bool:
        """Was all of it trained on, as far as `step(samples=...)` tells?"""
        return self.ended and self.trained >= self.drawn

    def push(self, samples: float | None) -> int:
        """A push is made of what came since the last, of this many samples by the script's word; the number that came."""
        came = self.handed or self.drawn
        fresh, self._pushed = came - self._pushed, came
        self.trained += int(samples) if samples is not None else fresh if self.handed else 0
        return fresh

    def position(self) -> Position:
        """Samples trained on where `step(samples=...)` or the loader says so, else those drawn by the loader."""
        taken = min(self.trained, self.drawn) if self.trained else self.drawn
        return Position(self.epoch, taken, self.sampler, *self._share)


class Positions:
    """Of one worker."""

    def __init__(self) -> None:
        self._datasets: dict[int, list[Callable[[], object]]] = {}  # by length, in the order in which samplers came
        self._samplers = 0
        self._passes: list[Pass] = []
        self._training: dict[str, Pass] = {}
        self.size: float | None = None  #: samples of the last push, as far as samplers know; None: none has drawn them

    def identify(self, dataset: object, length: int, shuffled: bool, name: str, nameless: bool) -> str:
        """A name for a sampler that is the same on all workers, and in a job that goes on from a checkpoint.

        `nameless`: that checkpoint is of a version that knew one sampler, which had no name. The first one takes it.
        """
        self._samplers += 1
        if nameless and self._samplers == 1:
            return ""
        if name:
            return f"{name} of {length}"
        known = self._datasets.setdefault(length, [])
        number = next((index for index, other in enumerate(known) if other() is dataset), len(known))
        if number == len(known):
            known.append(_reference(dataset))
        return f"{'shuffled' if shuffled else 'ordered'} {number} of {length}"

    def begin(self, sampler: str, epoch: int, share: tuple[int, int] | None = None) -> Pass:
        """A sampler is gone through once more; `share`: the part of the data that it gives, of how many, where workers do
        not take one each."""
        self._passes.append(Pass(sampler, epoch, share))
        return self._passes[-1]

    def last(self) -> Pass:
        """The pass that was begun last."""
        return self._passes[-1]

    def pushed(self, samples: float | None) -> tuple[Position, ...]:
        """A push is made: how far it is in every sampler that trains."""
        fresh = [one for one in self._passes if one.fresh]
        going_on = [one for one in fresh if not one.ended]
        for one in going_on or self._read_ahead(fresh):
            before = self._training.get(one.sampler)
            if before is None or before not in going_on:
                self._training[one.sampler] = one
        for one in fresh:
            one.fresh = False
        self._passes = [one for one in self._passes if not one.ended]
        came = [one.push(samples) for one in self._training.values()]
        self.size = float(sum(came)) if came else None
        return tuple(one.position() for one in self._training.values())

    def now(self) -> tuple[Position, ...]:
        """How far it is in every sampler that trains, as of the last push."""
        return tuple(one.position() for one in self._training.values())

    def used(self, one: Pass) -> bool:
        """Is nothing left of this pass to train on? An empty one counts; one that was only looked at does not."""
        return one.drawn == 0 or self._training.get(one.sampler) is one

    def _read_ahead(self, fresh: Sequence[Pass]) -> Sequence[Pass]:
        """No pass goes on: which of those that have ended since the last push may have been read ahead?"""
        if not self._training:
            return fresh[-1:]
        return [one for one in fresh if one.sampler in self._training and self._training[one.sampler].used_up]


def _reference(thing: object) -> Callable[[], object]:
    try:
        return weakref.ref(thing)
    except TypeError:  # a list, a range
        return lambda: thing

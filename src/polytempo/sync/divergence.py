"""When a training has diverged: the rule of the guard. What workers have seen of their steps in, a verdict out.

Of each step in a push a worker tells four numbers; samples of its tensors will do (`train/observers.py`):

    loss      of its batch, where it is known
    gradient  the norm of the gradient
    size      the norm of the values that it was taken on
    change    how far these are from the values of this worker's step before, as a share of their size

Loss, gradient and size are compared with their levels at the start, so that nothing depends on their units. These are taken
from the first pushes, two of each worker and at least 8: of gradients the median; of losses the upper quartile, since a few
batches may be easy; of sizes the least, since from zero growth says nothing. Of the last steps, 4 of each worker and at
least 16, two in three must show

    thrown    the loss is above its level, and the values are thrown about: they change by more than 15 % at gradients of 3
              times their level, or by so much that rise * change^2 is above 1 %, or gradients are 10,000 times as large

or of three times as many

    lost      the loss is half above its level, and values change by more than 5 % in a step; or it is above its level, and
              values have grown to 10 times their size; or it is no lower than at the start, values have grown to 3 times
              their size, and the gradient has shrunk: units have died

Without a loss the values must change by more than 40 %, at gradients above 3.5 times their level: that misses more. A number
that is not finite, among the gradients that were pushed or the values, is enough by itself.

In a healthy training values change by 0.1 to 10 % in a step, and by more only in the first steps from zero, or at a rate
that is too high, while the loss falls. So single spikes, warm-up, restarts, and losses that start high or rise slowly are no
divergence, and neither is noise around a loss of zero, nor a loss that says little, as in reinforcement learning.

A training has come back when nine in ten losses are a quarter below their level at the start; after a number that was not
finite, when as many steps in a row are finite.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

#: Pushes at the start with which steps are compared: of each worker, and at least.
START_STEPS, START_PUSHES = 2, 8
#: From the first to the second half of these, a loss that has grown by this factor has been spoiled.
SPOILED = 4
#: Steps that are looked at together: of each worker, and at least; for `lost` this many times more.
STEPS, TOGETHER, LONGER = 4, 16, 3
#: The share of them that must show it.
MOST = 2 / 3
#: Below its level at the start by this share, a loss has come back; how many of them must have.
BACK, MOST_BACK = 0.25, 0.9


@dataclass(frozen=True)
class Divergence:
    """What the last pushes have shown."""

    loss: float | None = None  #: the median of the last
    start: float | None = None  #: its level at the start
    change: float = 0.0  #: the median of the last
    gradient: float = 1.0  #: the same, as a multiple of its level at the start
    size: float = 1.0  #: likewise
    finite: bool = True  #: else a number was not
    recovered: bool = False


class Seen(NamedTuple):
    """What a worker has seen of a step."""

    loss: float | None
    gradient: float
    change: float
    size: float


@dataclass(frozen=True)
class _Relative:
    """A step, compared with the start."""

    rise: float | None  #: of the loss, as a share of its level; None where it is not known
    gradient: float
    change: float
    size: float

    @property
    def is_thrown(self) -> bool:
        """Are the values thrown about?"""
        bursts = self.gradient > 1e4 and self.change > 0.05
        if self.rise is None:
            return bursts or (self.gradient > 3.5 and self.change > 0.4)
        steep = self.gradient > 3 and self.change > 0.15
        high = self.rise > 0.2 and self.change > 0.02 and self.rise * self.change**2 > 0.01
        return self.rise > 0 and (bursts or steep or high)

    @property
    def is_lost(self) -> bool:
        """Has the training lost what it had?"""
        if self.rise is None:
            return False
        dead = self.rise > -0.05 and self.gradient < 0.6 and self.size > 3
        return dead or (self.rise > 0 and self.size > 10) or (self.rise > 0.5 and self.change > 0.05)

    @property
    def is_back(self) -> bool:
        """Is the loss well below its level at the start?"""
        return self.rise is not None and self.rise < -BACK


class DivergenceRule:
    """Looks at the pushes of one optimizer's workers, in their order."""

    def __init__(self, workers: int) -> None:
        few = max(STEPS * workers, TOGETHER)
        self._awaited = max(START_STEPS * workers, START_PUSHES)
        self._firsts: list[Seen] = []  # the first steps of the first pushes
        self._early: list[Seen] = []  # all of their steps
        self._start: Seen | None = None  # the levels
        self._last: deque[Seen] = deque(maxlen=few)
        self._thrown: deque[bool] = deque(maxlen=few)
        self._lost: deque[bool] = deque(maxlen=LONGER * few)
        self._back: deque[bool] = deque(maxlen=few)
        self._finite = 0  # steps since one was not
        self.found: Divergence | None = None  #: the last, as it is now

    def add(self, steps: Sequence[Seen]) -> Divergence | None:
        """One more push, of these steps; the divergence, when it is the first to show it, or the first after a recovery."""
        if not all(math.isfinite(step.size) for step in steps):
            return self.add_nonfinite()
        self._finite += len(steps)
        if self._start is None:
            steps = self._begin(steps)
        if self._start is not None:
            for step in steps:
                self._compare(step, self._start)
        return self._verdict()

    def _begin(self, steps: Sequence[Seen]) -> Sequence[Seen]:
        """One of the first pushes; all their steps, once the levels are known that these are to be compared with."""
        self._firsts.extend(steps[:1])
        self._early.extend(steps)
        if len(self._firsts) < self._awaited:
            return ()
        self._start = _levels(self._firsts)
        early, self._early, self._firsts = self._early, [], []
        return early

    def add_nonfinite(self) -> Divergence | None:
        """One more push, with a number that is not finite."""
        self._finite = 0
        known, self.found = self.found, Divergence(finite=False)
        return self.found if known is None or known.recovered else None

    def _compare(self, step: Seen, start: Seen) -> None:
        rise = (step.loss - start.loss) / abs(start.loss) if step.loss is not None and start.loss else None
        seen = _Relative(rise, _ratio(step.gradient, start.gradient), step.change, _ratio(step.size, start.size))
        self._last.append(step)
        self._thrown.append(seen.is_thrown)
        self._lost.append(seen.is_lost)
        self._back.append(seen.is_back)

    def _verdict(self) -> Divergence | None:
        found = self.found
        if found is None or found.recovered:
            if self._start is None or not (_show(self._thrown, MOST) or _show(self._lost, MOST)):
                return None
            now = _medians(self._last)
            self._back.clear()
            self.found = Divergence(
                now.loss,
                self._start.loss,
                now.change,
                _ratio(now.gradient, self._start.gradient),
                _ratio(now.size, self._start.size),
            )
            return self.found
        if _show(self._back, MOST_BACK) if found.finite else self._finite >= TOGETHER:
            self._thrown.clear()
            self._lost.clear()
            self.found = replace(found, recovered=True)
        return None


def _levels(pushes: Sequence[Seen]) -> Seen:
    """At the start. A rate that is far too high has spoiled the second steps already: then only the first ones count."""
    half = len(pushes) // 2
    first, second = _medians(pushes[:half]), _medians(pushes[half:])
    spoiled = first.loss is not None and second.loss is not None and second.loss > SPOILED * abs(first.loss)
    used = pushes[:half] if spoiled else pushes
    losses = sorted(push.loss for push in used if push.loss is not None)
    loss = losses[3 * len(losses) // 4] if losses else None
    return _medians(used)._replace(loss=loss, size=min(push.size for push in pushes))


def _medians(steps: Collection[Seen]) -> Seen:
    losses = [step.loss for step in steps if step.loss is not None]
    gradient, change, size = (median(column) for column in list(zip(*steps, strict=True))[1:])
    return Seen(median(losses) if losses else None, gradient, change, size)


def _ratio(value: float, level: float) -> float:
    return value / level if level > 0 else 1.0


def _show(shown: deque[bool], share: float) -> bool:
    """Do so large a share of them show it, and are there as many as are looked at?"""
    return len(shown) == shown.maxlen and sum(shown) >= share * len(shown)

"""`dssp:l..u`: dynamic bounded staleness (Zhao et al., ICDCS 2019), strict.

Up to l steps ahead no worker waits. Beyond that a forecast decides: from the last interval of the worker and of the slowest
one, how many more steps should the worker take so that it stops closest to a push of the slowest?

    worker       ...--|--|--|--|--|          stops here: 2 more steps end when the slowest pushes
    slowest      ...------|-----------|
                                 now ^

These steps are granted as credit, up to a lead of u. A worker without credit waits until its lead
is back at l.

Where this departs from the published listings (which are `dssp-paper`, in their own file):
1. the lead never exceeds u; the listings grant again and again and have no bound at all;
2. a grant of r means r steps, not r + 1;
3. every worker that is too far ahead may ask; where only the fastest may, the second-fastest starves;
4. intervals are measured from release to push, so that waiting does not pass for slowness, and on every push;
5. the slowest is the worker with the fewest pushes; among equals the one whose next push is expected last, then the lowest
   rank;
6. no forecast is made when an interval is unknown or not positive, or when the slowest is overdue by three intervals: it may
   be dead, and waiting is the safe answer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from polytempo.sync.asynchronous import AsynchronousPolicy, Gate
from polytempo.sync.capabilities import Promises
from polytempo.sync.mode import SCALE, SPAN, Mode
from polytempo.sync.progress import Progress

#: A worker that has not pushed for this many of its intervals is not forecast any more.
OVERDUE = 3

Forecast = Callable[[float, float, float, float, int], int]


def extra_steps(last: float, interval: float, slow_last: float, slow_interval: float, most: int) -> int:
    """How many more steps, 0 to `most`, let a worker stop nearest to one of the slowest one's next pushes.

    `last` is the moment of the latest push, `interval` the time of a step. Of equally near ones the smallest is taken.
    """
    best, best_distance = 0, math.inf
    for extra in range(most + 1):
        stop = last + extra * interval
        ahead = min(max(round((stop - slow_last) / slow_interval), 1), most + 1)
        distance = abs(slow_last + ahead * slow_interval - stop)
        if distance < best_distance - 1e-9 * interval:  # less is the noise of floating point, not a better stop
            best, best_distance = extra, distance
    return best


class Forecaster:
    """The latest push and interval of every worker, and the slowest of them."""

    def __init__(self, forecast: Forecast = extra_steps) -> None:
        self.pushes: dict[int, tuple[float, float]] = {}  # worker: moment of its latest push, seconds of a step
        self._forecast = forecast
        self._slowest: list[tuple[float, int]] = []  # heap of (-expected push, worker) at the slowest step
        self._slowest_step = -1

    def ask(self, worker: int, progress: Progress, now: float, most: int) -> int:
        """The extra steps the forecast gives a worker that has just pushed, 0 when there is no sound forecast."""
        slow = self.pushes.get(self._slowest_worker(progress))
        if slow is None or worker not in self.pushes:
            return 0
        last, interval = self.pushes[worker]
        slow_last, slow_interval = slow
        if interval <= 0 or slow_interval <= 0 or now > slow_last + OVERDUE * slow_interval:
            return 0
        return self._forecast(last, interval, slow_last, slow_interval, most)

    def welcome(self, worker: int) -> None:
        """A worker without known intervals came to the slowest step."""
        self._slowest_step = -1

    def _slowest_worker(self, progress: Progress) -> int:
        # Only a joiner can come to the slowest step once it is the slowest, so the heap is filled once a step.
        if self._slowest_step != progress.slowest:
            self._slowest_step = progress.slowest
            self._slowest = [(-self._expected(worker), worker) for worker in progress.at_slowest()]
            heapq.heapify(self._slowest)
        while self._slowest and progress.pushed.get(self._slowest[0][1]) != self._slowest_step:
            heapq.heappop(self._slowest)
        return self._slowest[0][1] if self._slowest else next(progress.at_slowest())

    def _expected(self, worker: int) -> float:
        last, interval = self.pushes.get(worker, (math.inf, 0.0))
        return last + interval


class DynamicBound(Gate):
    """At least `lower` steps ahead for every worker, at most `upper` where the forecast grants it."""

    timed = True

    def __init__(self, lower: int, upper: int, forecast: Forecast = extra_steps) -> None:
        self.lower = lower
        self.upper = upper
        self._bound = f"{lower}" if lower == upper else f"{lower}..{upper}"
        self._forecaster = Forecaster(forecast)
        self._credit: dict[int, int] = {}

    def required(self, step: int) -> int:
        return step - self.lower

    def admits(self, worker: int, step: int, progress: Progress, now: float) -> bool:
        lead = step - progress.slowest
        if lead <= self.lower:
            return True
        if lead > self.upper:
            return False
        credit = self._credit.get(worker, 0)
        if credit == 0:
            granted = self._forecaster.ask(worker, progress, now, self.upper - self.lower)
            credit = min(granted, self.upper + 1 - lead)
        if credit:
            self._credit[worker] = credit - 1
        return credit > 0

    def reason(self, step: int, slowest: int, first: int) -> str:
        return f"{step - slowest} ahead of worker {first}, bound {self._bound}"

    def observe(self, worker: int, step: int, started: float, now: float) -> None:
        self._forecaster.pushes[worker] = (now, now - started)

    def welcome(self, worker: int) -> None:
        self._forecaster.welcome(worker)

    def forget(self, worker: int) -> None:
        self._forecaster.pushes.pop(worker, None)
        self._credit.pop(worker, None)


DSSP = Mode(
    "dssp",
    "dssp:3..15",
    "a bound between L and U, moved by a forecast, never beyond U",
    lambda workers, bounds, scale=None: AsynchronousPolicy(workers, DynamicBound(*bounds), scale),
    argument=SPAN,
    options=SCALE,
    keeps_momentum=True,
    split=None,
    promises=Promises(lead=lambda bounds, **_: bounds[1], waits=lambda bounds, **_: bounds[0]),
)

"""`ssp:s`: stale synchronous parallel (Ho et al. 2013), in its gate form.

A worker may start step c only while c - slowest <= s, where slowest is the next step of the slowest active worker. So a
worker that computes is at most s ahead; one that is held has pushed one step more and shows a lead of s + 1.

    s = 1    worker 0   |--0--|--1--|  held  |--2--|
             worker 1   |-------0-------|-------1-------|
                                         ^ slowest becomes 1: step 2 may start

A read contains all updates of all workers up to step c - s - 1, all of the reader's own, and possibly later ones of others.
The weights are pulled after the release, so reads are fresher than the definition asks for. With s = 0 every worker sees the
whole last round, yet pushes are applied as they come: exact rounds are `bsp`.

A finite bound absorbs passing delays. A worker that is always slow sets the pace of all, whatever s is.
"""

from __future__ import annotations

from polytempo.options import whole_number
from polytempo.sync.asynchronous import AsynchronousPolicy, Gate
from polytempo.sync.capabilities import Promises
from polytempo.sync.mode import SCALE, Mode
from polytempo.sync.progress import Progress


class Bound(Gate):
    """At most `bound` steps ahead of the slowest."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def required(self, step: int) -> int:
        return step - self.bound

    def admits(self, worker: int, step: int, progress: Progress, now: float) -> bool:
        return step - self.bound <= progress.slowest

    def reason(self, step: int, slowest: int, first: int) -> str:
        return f"{step - slowest} ahead of worker {first}, bound {self.bound}"


SSP = Mode(
    "ssp",
    "ssp:3",
    "at most S steps ahead of the slowest worker",
    lambda workers, bound, scale=None: AsynchronousPolicy(workers, Bound(bound), scale),
    argument=whole_number("S", at_least=0),
    options=SCALE,
    keeps_momentum=True,
    split=None,
    promises=Promises(lead=lambda bound, **_: bound, waits=lambda bound, **_: bound),
)

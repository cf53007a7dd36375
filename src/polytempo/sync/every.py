"""`every:k`: free inside a block of k steps, a barrier at its end.

A worker may start step c only when every worker has reached c's block: floor(c/k) <= floor(slowest/k). Inside a block pushes
are applied as they come, as in `asp`; at the barrier all have been applied and every worker pulls the same weights, which
makes it a natural place for evaluation, checkpoints and a change of members. A worker that computes is at most k - 1 ahead.

`every:k,wait=x` is a soft barrier: it opens at the latest x steps' time after the first worker reached it, and a worker that
is not there yet catches up without waiting; its late pushes are applied, stale as they are. "A step's time" is the mean over
the block that the first worker has just finished. With a worker that is always slower the lead then has no bound.
"""

from __future__ import annotations

from polytempo.options import positive_number, whole_number
from polytempo.sync.asynchronous import AsynchronousPolicy, Gate
from polytempo.sync.capabilities import Promises
from polytempo.sync.mode import SCALE, Mode


class Periodic(Gate):
    """A barrier before each multiple of `period`, soft when `wait` is given."""

    def __init__(self, period: int, wait: float | None = None) -> None:
        self.period = period
        self.timed = wait is not None
        self._wait = wait or 0.0
        self._opened = 0  # blocks up to this one may start, whichever workers are missing
        self._deadlines: dict[int, float] = {}  # of the barriers at which a worker waits
        self._in_block: dict[int, tuple[int, float]] = {}  # each worker's steps in its block, and their seconds

    def required(self, step: int) -> int:
        block = step // self.period
        return 0 if block <= self._opened else block * self.period

    def reason(self, step: int, slowest: int, first: int) -> str:
        barrier = self.required(step)
        return f"barrier before step {barrier}: worker {first} is at step {slowest}"

    def observe(self, worker: int, step: int, started: float, now: float) -> None:
        steps, seconds = self._in_block.get(worker, (0, 0.0)) if step % self.period else (0, 0.0)
        self._in_block[worker] = (steps + 1, seconds + now - started)

    def forget(self, worker: int) -> None:
        self._in_block.pop(worker, None)

    def patience(self, worker: int, step: int, now: float) -> float | None:
        block = step // self.period
        if block in self._deadlines:
            return None
        steps, seconds = self._in_block[worker]
        self._deadlines[block] = now + self._wait * seconds / steps
        return self._deadlines[block]

    def expire(self, now: float) -> None:
        due = [block for block, deadline in self._deadlines.items() if deadline <= now]
        for block in due:
            del self._deadlines[block]
        self._opened = max([self._opened, *due])


EVERY = Mode(
    "every",
    "every:8",
    "free inside, a barrier each K steps; wait=X: wait at most X steps' time",
    lambda workers, period, wait=None, scale=None: AsynchronousPolicy(workers, Periodic(period, wait), scale),
    argument=whole_number("K", at_least=1),
    options={"wait": positive_number("wait"), **SCALE},
    keeps_momentum=True,
    split=None,
    promises=Promises(lead=lambda period, wait=None, **_: None if wait else period - 1, waits=0),
)

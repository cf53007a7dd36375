"""The next step of every active worker, and the held workers.

`Progress` keeps workers in buckets by the number of their next step. Steps only grow, and a joiner starts at the slowest
one's step, so the slowest step only grows too and finding it costs nothing on average, for ten workers or ten thousand.
Within a bucket the order is that of arrival: the worker that has been at a step for longest comes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from polytempo.sync.actions import NAMED_AT_MOST


class StepBucket:
    """The workers at one step: their number, and their order of arrival, from which moved workers are removed lazily."""

    __slots__ = ("order", "size")

    def __init__(self) -> None:
        self.size = 0
        self.order: deque[int] = deque()


class Progress:
    """The next step of each active worker: `pushed[w]` is 0 at the start and c + 1 once step c was accepted."""

    __slots__ = ("_at", "_left", "fastest", "pushed", "slowest")

    def __init__(self) -> None:
        self.pushed: dict[int, int] = {}
        self.slowest = 0
        self.fastest = 0
        self._at: dict[int, StepBucket] = {}
        self._left: set[int] = set()

    def enter(self, worker: int, step: int) -> None:
        """Add a worker whose next step is `step`, never one before the slowest."""
        if worker in self._left:  # what it left behind in an earlier life must not count
            for bucket in self._at.values():
                bucket.order = deque(other for other in bucket.order if other != worker)
        if not self._at:  # it is the only one
            self.slowest = self.fastest = step
        self.pushed[worker] = step
        there = self._at.setdefault(step, StepBucket())
        there.size += 1
        there.order.append(worker)
        self.fastest = max(self.fastest, step)

    def move(self, worker: int, step: int) -> bool:
        """Put a worker's next step forward to `step`; true when the slowest step changed by it."""
        at = self._at
        old = self.pushed[worker]
        self.pushed[worker] = step
        there = at.get(step)
        if there is None:
            at[step] = there = StepBucket()
            if step > self.fastest:
                self.fastest = step
        there.size += 1
        there.order.append(worker)
        here = at[old]
        here.size -= 1
        if here.size:
            return False
        del at[old]
        return self._climb()

    def remove(self, worker: int) -> bool:
        """Forget a worker; true when the slowest step changed by it."""
        step = self.pushed.pop(worker)
        self._left.add(worker)
        here = self._at[step]
        here.size -= 1
        if here.size:
            return False
        del self._at[step]
        if step == self.fastest and self._at:
            self.fastest = max(self._at)
        return self._climb()

    def _climb(self) -> bool:
        at = self._at
        if self.slowest in at or not at:
            return False
        while self.slowest not in at:
            self.slowest += 1
        return True

    def at_slowest(self) -> Iterator[int]:
        """The workers at the slowest step, the first to come first."""
        step = self.slowest
        bucket = self._at.get(step)
        return (worker for worker in bucket.order if self.pushed.get(worker) == step) if bucket else iter(())

    def at(self, step: int) -> tuple[tuple[int, ...], int]:
        """The workers whose next step is this one: the first few, the first to come first, and their number."""
        return (tuple(self._first(step, NAMED_AT_MOST)), self._at[step].size) if step in self._at else ((), 0)

    def behind(self, step: int) -> tuple[tuple[int, ...], int]:
        """The workers whose next step is before `step`: the first few, slowest first, and their number."""
        at = self._at
        steps: list[int] | range = range(self.slowest, step)
        if step - self.slowest > len(at):  # a hung worker far behind: do not walk the empty steps between
            steps = sorted(s for s in at if s < step)
        named: list[int] = []
        count = 0
        for at_step in steps:
            if at_step in at:
                count += at[at_step].size
                if len(named) < NAMED_AT_MOST:
                    named += self._first(at_step, NAMED_AT_MOST - len(named))
        return tuple(named), count

    def _first(self, step: int, most: int) -> list[int]:
        """The first few workers of a bucket. A worker that has moved on is removed once, so this is cheap on average."""
        pushed, order = self.pushed, self._at[step].order
        found: list[int] = []
        looked = 0
        for worker in order:
            if len(found) == most:
                break
            looked += 1
            if pushed.get(worker) == step:
                found.append(worker)
        if looked > 2 * len(found) + NAMED_AT_MOST:
            for _ in range(looked):
                order.popleft()
            order.extendleft(reversed(found))
        return found


class HeldWorkers:
    """Held workers, by the step they want to start: always their next one."""

    __slots__ = ("by_step",)

    def __init__(self) -> None:
        self.by_step: dict[int, dict[int, None]] = {}

    def __bool__(self) -> bool:
        return bool(self.by_step)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((worker, step) for step, workers in self.by_step.items() for worker in workers)

    def has(self, worker: int, step: int) -> bool:
        """Is this worker held for this step?"""
        return step in self.by_step and worker in self.by_step[step]

    def enter(self, worker: int, step: int) -> None:
        """Hold a worker that wants to start `step`."""
        here = self.by_step.get(step)
        if here is None:
            self.by_step[step] = {worker: None}
        else:
            here[worker] = None

    def remove(self, worker: int, step: int) -> None:
        """Forget a worker that may be held for `step`."""
        if self.has(worker, step):
            del self.by_step[step][worker]
            if not self.by_step[step]:
                del self.by_step[step]

    def admit(self, may_start: Callable[[int], bool]) -> list[tuple[int, int]]:
        """Take out all workers whose step may start: lower steps first, then in order of arrival."""
        steps = sorted(filter(may_start, self.by_step))
        return [(worker, step) for step in steps for worker in self.by_step.pop(step)]

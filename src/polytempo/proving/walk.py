"""Every order in which the machines and the policy of a mode can meet in a small job: both halves of each mode together.

The walk goes through all worlds that can be reached, each once, those of the fewest moves first: what it finds broken is
found after a shortest sequence of moves. The driver looks at every order; here it is looked at that every way ends, and how:
all workers have gone home, and each of their pushes has been decided on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from polytempo.proving.driver import Driver
from polytempo.proving.small_job import AWAY, Job, JobWorld, Move, stuck
from polytempo.proving.states import Broken

#: After how many worlds it is asked again whether the time is over.
OFTEN = 64

#: Moves; and which of the worlds after each, where a step may take this or that long.
MovesMade = tuple[tuple[Move, int], ...]


class BrokenOnTheWay(Exception):
    """A walk has found something broken.

    Args:
        cause: What.
        way: The shortest sequence of moves after which it is.
    """

    def __init__(self, cause: Exception, way: MovesMade) -> None:
        super().__init__(f"{cause} ({type(cause).__name__}) after {[move for move, _ in way]}")
        self.cause, self.way = cause, way


class Walk:
    """All worlds of a job, and what leads from one to the next.

    Args:
        job: What is walked through.
        most: Worlds at most; None: all.
        is_over: Says when there is no more time; what was not reached by then is not looked at.

    Raises:
        BrokenOnTheWay: A promise is broken.
    """

    def __init__(self, job: Job, most: int | None = None, is_over: Callable[[], bool] = lambda: False) -> None:
        self.driver = Driver(job)
        self.exhaustive = True  #: was every world reached?
        first = self.driver.first()
        self._numbers: dict[JobWorld, int] = {first: 0}
        self._came: list[tuple[int, Move, int]] = [(0, (), 0)]  # from where, by which move, and which world after it
        self._after: list[list[int]] = [[]]
        unseen, made = deque([first]), 0
        while unseen:
            made += 1
            if (most is not None and self.worlds >= most) or (not made % OFTEN and is_over()):
                self.exhaustive = False
                return
            unseen.extend(self._go_on(unseen.popleft()))
        self._look_at_cycles()

    @property
    def worlds(self) -> int:
        """Worlds that were come across."""
        return len(self._came)

    @property
    def seen(self) -> Counter[str]:
        """How often each kind of action and order was come across, and "end"."""
        return self.driver.seen

    def _go_on(self, world: JobWorld) -> list[JobWorld]:
        """Make every move; the worlds that were not known."""
        new: list[JobWorld] = []
        here, moved = self._numbers[world], False
        for moves, forced in ((self.driver.moves(world), True), (self.driver.chances(world), False)):
            for move in moves:
                moved |= forced
                new += self._make(world, here, move)
        if not moved:
            self.driver.seen["end"] += 1
            self._look_at_end(world, here)
        return new

    def _look_at_end(self, world: JobWorld, here: int) -> None:
        left = [rank for rank, doing in enumerate(world.workers) if doing.status != AWAY]
        if left:
            raise BrokenOnTheWay(stuck(left), self._way(here))
        if world.pending:
            pushes = ", ".join(
                f"step {step} of worker {rank if rank >= 0 else -1 - rank}" for _, rank, step in world.pending
            )
            raise BrokenOnTheWay(Broken(f"pushes were never decided on: {pushes}", promise="exactly once"), self._way(here))

    def _make(self, world: JobWorld, here: int, move: Move) -> list[JobWorld]:
        new, which = [], 0
        try:
            for which, twin in enumerate(self.driver.after(world, move)):
                number = self._numbers.setdefault(twin, len(self._came))
                if number == len(self._came):
                    self._came.append((here, move, which))
                    self._after.append([])
                    new.append(twin)
                self._after[here].append(number)
        except Exception as error:  # of a mode of ours, which is not watched, or of the driver, on orders it cannot perform
            raise BrokenOnTheWay(error, (*self._way(here), (move, which))) from error
        return new

    def _way(self, here: int) -> MovesMade:
        way = []
        while here:
            here, move, which = self._came[here]
            way.append((move, which))
        return tuple(way[::-1])

    def _look_at_cycles(self) -> None:
        """Every way ends: no world can come twice."""
        into = [0] * self.worlds
        for after in self._after:
            for number in after:
                into[number] += 1
        free, ended = [0], 0
        while free:
            ended += 1
            for number in self._after[free.pop()]:
                into[number] -= 1
                if not into[number]:
                    free.append(number)
        if ended < self.worlds:
            again = next(number for number in range(self.worlds) if into[number])
            raise BrokenOnTheWay(Broken("the job could go on for ever", promise="liveness"), self._way(again))

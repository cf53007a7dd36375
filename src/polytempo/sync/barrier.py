"""`bsp` and `bsp+backup:b`: rounds with a barrier.

    round r     every worker computes on the weights of round r and pushes step r
    arrival     the push is kept; its worker is held for step r + 1
    close       when enough have arrived, their mean weighted by samples is applied once; all workers are released

Plain `bsp` waits for every active worker, so all of them always hold the same weights. With b backup workers (Chen et al.
2016) a round closes with the first n - b pushes. A push that comes later for a round that is closed is discarded and
counted, and its worker goes on at the current round: without that jump it would stay late for ever.

Where this departs from the paper: n - b is counted over the workers the job started with (or has now, if more joined), and
never exceeds the number that can still arrive, so b deaths cost nothing and more only make the rounds smaller. A worker that
leaves after its push keeps its part in the round: an accepted push is applied exactly once. A joiner enters at the round
that is open, whose weights it can read; should it have pushed for that round in an earlier life, both pushes count.

The pushes of a round are applied in order of rank: the update does not depend on the order of arrival. They must have been
made with equal hyper-parameters; one that differs is refused by name. A worker that has run out of data for now pushes
without any, and with weight zero; a block that ends early, with its worker's data, is not compared.
"""

from __future__ import annotations

from polytempo.errors import SpecError
from polytempo.options import whole_number
from polytempo.sync.actions import Action, Apply, Discard, Hold, Refuse, Release
from polytempo.sync.events import Pushed
from polytempo.sync.mode import Mode
from polytempo.sync.policy import Policy


class Period:
    """How many local steps a worker makes before each push: none to count in plain rounds. Modes with blocks have their own
    (`local_sgd.py`, `adacomm.py`)."""

    now = 0  #: local steps in the next block

    def begin_at(self, step: int) -> None:
        """The job goes on from a checkpoint, with this round."""

    def start(self, now: float) -> None:
        """A worker takes its first step."""

    def close(self, pushes: tuple[Pushed, ...], now: float) -> None:
        """A round has closed with these pushes: the next block may be shorter or longer."""


class Barrier(Policy):
    """Rounds that close with all pushes, or with all but `backups`; `period` sets the local steps of each."""

    def __init__(self, workers: int, backups: int = 0, period: Period | None = None) -> None:
        super().__init__(workers)
        if backups >= workers:
            fix = f"at most bsp+backup:{workers - 1}" if workers > 1 else "bsp"
            raise SpecError(f"bsp+backup:{backups} needs more than {backups} workers, got {workers}; use {fix}")
        self.backups = backups
        self.period = period or Period()
        self.round = 0
        self._arrived: list[Pushed] = []
        self._waiting: set[int] = set()  # members whose push is among them

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self.round = step
        self.period.begin_at(step)

    def _entry_step(self) -> int:
        return self.round

    def _started(self, worker: int, step: int, now: float) -> list[Action]:
        self.period.start(now)
        return [Release(worker, step, self.progress.slowest, self.period.now)]

    def _pushed(self, push: Pushed, now: float) -> list[Action]:
        if push.step < self.round:
            return self._late(push)
        difference = self._difference(push)
        if difference:
            return [Refuse(push.worker, push.step, difference)]
        self._arrived.append(push)
        self._waiting.add(push.worker)
        self.progress.move(push.worker, self.round + 1)
        self.room.enter(push.worker, self.round + 1)
        if self._complete():
            return self._close(now)
        if not self.explains:
            return [Hold(push.worker, self.round + 1, (), 0, "")]
        return [self._hold(push.worker, self.round + 1)]

    def _freed(self, worker: int, now: float) -> list[Action]:
        self._waiting.discard(worker)
        return self._close(now) if self._arrived and self._complete() else []

    def _quorum(self) -> int:
        gone = len(self._arrived) - len(self._waiting)  # after their push: they count for this round
        members = len(self.progress.pushed) + gone
        return min(max(self.workers, members) - self.backups, members)

    def _complete(self) -> bool:
        return len(self._arrived) >= self._quorum()

    def _close(self, now: float) -> list[Action]:
        pushes = tuple(sorted(self._arrived, key=lambda push: push.worker))
        self._arrived = []
        self._waiting = set()
        self.round += 1
        slowest = self.progress.slowest
        self.period.close(tuple(push for push in pushes if push.samples) or pushes, now)
        period, released = self.period.now, self.room.admit(lambda step: True)
        return [Apply(pushes, 1.0), *(Release(worker, step, slowest, period) for worker, step in released)]

    def _late(self, push: Pushed) -> list[Action]:
        self.progress.move(push.worker, self.round)
        reason = f"late: round {push.step} closed without it, the job is at round {self.round}"
        return [
            Discard(push.worker, push.step, reason),
            Release(push.worker, self.round, self.progress.slowest, self.period.now),
        ]

    def _hold(self, worker: int, step: int) -> Hold:
        named, count = self.progress.behind(step)
        if self.backups:
            reason = f"round {self.round} has {len(self._arrived)} of {self._quorum()} pushes"
        else:
            reason = f"1 ahead of worker {named[0]}, bound 0"
        return Hold(worker, step, named, count, reason)

    def _is_compared(self, push: Pushed) -> bool:
        """Must its hyper-parameters be those of the others? Not where its worker has run out of data for now, or ends a
        block early: then it stands at another step of a schedule."""
        has_no_data = not push.samples and not push.hyper
        return not has_no_data and self.period.now in (0, push.count)

    def _difference(self, push: Pushed) -> str:
        """The first hyper-parameter in which a push differs from the round's first push."""
        first = next((arrived for arrived in self._arrived if self._is_compared(arrived)), None)
        if first is None or not self._is_compared(push) or first.hyper == push.hyper:
            return ""
        theirs, ours = dict(first.hyper), dict(push.hyper)
        for name in {**theirs, **ours}:
            here, there = ours.get(name, "not given"), theirs.get(name, "not given")
            if here != there:
                return (
                    f"hyper-parameters differ: {name} is {here} at worker {push.worker} and {there} at worker "
                    f"{first.worker}; a barrier mode needs them equal"
                )
        return ""


BSP = Mode("bsp", "bsp", "barrier each step, mean over workers", lambda workers: Barrier(workers), barrier=True)

BACKUP = Mode(
    "bsp+backup",
    "bsp+backup:1",
    "barrier over all but B workers, the late ones' pushes discarded",
    lambda workers, backups: Barrier(workers, backups),
    argument=whole_number("B", at_least=1),
    barrier=True,
    all_reduce=False,
)

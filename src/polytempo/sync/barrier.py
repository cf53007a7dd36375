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

import math
from collections.abc import Collection

from polytempo.errors import SpecError
from polytempo.options import whole_number
from polytempo.sync.actions import Action, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.events import Pushed
from polytempo.sync.mode import Mode
from polytempo.sync.policy import Policy
from polytempo.sync.shares import ShareWeights

#: A worker is overdue when it is late by this share of a round's deadline.
PATIENCE = 0.5


class RoundRule:
    """What workers do in a round: one step each, here. Modes with blocks of local steps (`local_sgd.py`, `adacomm.py`), with
    shares by speed (`balance.py`) and with deadlines (`anytime.py`) have rules of their own."""

    period = 0  #: local steps in the next block
    compares = True  #: must the pushes of a round have equal hyper-parameters?
    weights: ShareWeights = ()  #: shares of the joint batch by speed: (rank, relative share)
    since: tuple[int, int] | None = None  #: the first batch that is cut by these weights
    changed = False  #: did the last round change them?
    deadline = 0.0  #: seconds of the next round; 0: none

    def begin_at(self, step: int) -> None:
        """The job goes on from a checkpoint, with this round."""

    def start(self, now: float) -> None:
        """A worker takes its first step."""

    def close(self, pushes: tuple[Pushed, ...], members: Collection[int], now: float) -> None:
        """A round has closed with these pushes; the next is for these members."""

    def divisor(self, pushes: tuple[Pushed, ...]) -> float:
        """What the weighted sum of these pushes is divided by; 0: the sum of their weights."""
        return 0.0


class Barrier(Policy):
    """Rounds that close with all pushes, or with all but `backups`; `rule` says what workers do in each.

    Under a rule with deadlines a round also closes without workers that are overdue: half a deadline after the later of the
    deadline and the moment at which half of the members had pushed. Such a worker is not waited for again until it has
    pushed; that push is discarded, and the worker goes on with the round after the open one.
    """

    def __init__(self, workers: int, backups: int = 0, rule: RoundRule | None = None) -> None:
        super().__init__(workers)
        if backups >= workers:
            fix = f"at most bsp+backup:{workers - 1}" if workers > 1 else "bsp"
            raise SpecError(f"bsp+backup:{backups} needs more than {backups} workers, got {workers}; use {fix}")
        self.backups = backups
        self.rule = rule or RoundRule()
        self.round = 0
        self._opened = 0.0  # the moment at which the round was opened
        self._overdue_at = math.inf  # the moment at which it closes without workers that have not pushed
        self._overdue: set[int] = set()  # members without which a round has closed, and which have not pushed since
        self._behind: dict[int, int] = {}  # members that are back: how many rounds they have missed
        self._arrived: list[Pushed] = []
        self._waiting: set[int] = set()  # members whose push is among them

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self.round = step
        self.rule.begin_at(step)

    def _entry_step(self) -> int:
        return self.round

    def _started(self, worker: int, step: int, now: float) -> list[Action]:
        self.rule.start(now)
        self._opened = now if self.round == step and not self._arrived else self._opened
        return [self._release(worker, step, starts=True)]

    def _release(self, worker: int, step: int, starts: bool = False, catching_up: tuple[int, ...] = ()) -> Release:
        rule = self.rule
        release = Release(worker, step, self.progress.slowest, rule.period, deadline=rule.deadline)
        if starts or rule.changed:
            release.weights, release.since = rule.weights, rule.since
        release.behind, release.catching_up = self._behind.get(worker, 0), catching_up
        return release

    def _pushed(self, push: Pushed, now: float) -> list[Action]:
        if push.step < self.round:
            return self._late(push, now)
        difference = self._difference(push)
        if difference:
            return [Refuse(push.worker, push.step, difference)]
        self._arrived.append(push)
        self._waiting.add(push.worker)
        self.progress.move(push.worker, self.round + 1)
        self.room.enter(push.worker, self.round + 1)
        if self._complete():
            return self._close(now)
        held = self._hold(push.worker, self.round + 1) if self.explains else Hold(push.worker, self.round + 1, (), 0, "")
        return [held, *self._patience(now)]

    def _patience(self, now: float) -> list[Action]:
        """Half of the members have pushed: from now on the others may be overdue."""
        deadline = self.rule.deadline
        if not deadline or self._overdue_at < math.inf or 2 * len(self._arrived) < self._quorum():
            return []
        self._overdue_at = max(self._opened + deadline, now) + PATIENCE * deadline
        return [Wake(self._overdue_at)]

    def _ticked(self, now: float) -> list[Action]:
        if now < self._overdue_at:
            return []
        self._overdue |= {member for member in self.members if self.progress.pushed[member] <= self.round}
        return self._close(now)

    def _freed(self, worker: int, now: float) -> list[Action]:
        self._waiting.discard(worker)
        self._overdue.discard(worker)
        self._behind.pop(worker, None)
        return self._close(now) if self._arrived and self._complete() else []

    def _quorum(self) -> int:
        gone = len(self._arrived) - len(self._waiting)  # after their push: they count for this round
        members = len(self.progress.pushed) + gone
        awaited = members - len(self._overdue) - len(self._behind)
        return min(max(self.workers, members) - self.backups, awaited)

    def _complete(self) -> bool:
        return len(self._arrived) >= self._quorum()

    def _close(self, now: float) -> list[Action]:
        pushes = tuple(sorted(self._arrived, key=lambda push: push.worker))
        self._arrived = []
        self._waiting = set()
        self.round += 1
        self._opened, self._overdue_at = now, math.inf
        apply = Apply(pushes, 1.0, divisor=self.rule.divisor(pushes))
        self.rule.close(tuple(push for push in pushes if push.samples) or pushes, self.members, now)
        released, back = self.room.admit(lambda step: True), tuple(sorted(self._behind))
        releases = [self._release(worker, step, worker in self._behind, back) for worker, step in released]
        self._behind = {}
        return [apply, *releases]

    def _late(self, push: Pushed, now: float) -> list[Action]:
        worker, reason = push.worker, f"late: round {push.step} closed without it, the job is at round {self.round}"
        discard = Discard(worker, push.step, reason)
        if worker not in self._overdue:
            self.progress.move(worker, self.round)
            return [discard, self._release(worker, self.round)]
        self._overdue.discard(worker)
        self._behind[worker] = self.round - push.step
        self.progress.move(worker, self.round + 1)
        self.room.enter(worker, self.round + 1)
        if not self._arrived and not self._quorum():  # no member is left that the round waits for
            return [discard, *self._close(now)]
        return [discard, self._hold(worker, self.round + 1)]

    def _hold(self, worker: int, step: int) -> Hold:
        named, count = self.progress.behind(step)
        if self.backups or worker in self._behind or not named:
            reason = f"round {self.round} has {len(self._arrived)} of {self._quorum()} pushes"
        else:
            reason = f"1 ahead of worker {named[0]}, bound 0"
        return Hold(worker, step, named, count, reason)

    def _is_compared(self, push: Pushed) -> bool:
        """Must its hyper-parameters be those of the others? Not where its worker has run out of data for now, or ends a
        block early: then it stands at another step of a schedule."""
        has_no_data = not push.samples and not push.hyper
        return self.rule.compares and not has_no_data and self.rule.period in (0, push.count)

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

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
from collections.abc import Collection, Mapping, Sequence, Set

from polytempo.errors import SpecError
from polytempo.options import whole_number
from polytempo.sync.actions import Action, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.capabilities import Capabilities, MadeOf, Unsound
from polytempo.sync.directives import Directive, NextBlock, NextShares
from polytempo.sync.events import Pushed
from polytempo.sync.mode import Mode
from polytempo.sync.policy import Policy
from polytempo.sync.shares import ShareWeights

#: A round with a deadline that half of its workers have pushed to waits for the others this much longer, in parts of the
#: time it has taken so far (of the deadline, where that is more); one that fewer have pushed to, FEW. More than 1: where
#: pushes pass one link after another, the second half of them takes as long as the first.
PATIENCE, FEW = 1.25, 2.5
#: The time that a round has taken so far counts for that up to this number of deadlines: a job may have been stopped.
LONGEST = 100


class RoundRule:
    """What workers do in a round: one step each, here. Modes with blocks of local steps (`local_sgd.py`, `adacomm.py`), with
    shares by speed (`balance.py`) and with deadlines (`anytime.py`) have rules of their own."""

    period = 0  #: local steps in the next block
    compares = True  #: must the pushes of a round have equal hyper-parameters?
    planned = False  #: do releases carry weights or deadlines, and do joiners wait for the next round?
    weights: ShareWeights = ()  #: shares of the joint batch by speed: (rank, relative share)
    since: tuple[int, int] | None = None  #: the first batch that is cut by these weights
    changed = False  #: did the last round change them?
    deadline = 0.0  #: seconds of the next round; 0: none
    overdue: Set[int] = frozenset()  #: members that rounds do not wait for; the barrier's own set, as it is now

    def begin_at(self, step: int) -> None:
        """The job goes on from a checkpoint, with this round."""

    def saved(self) -> dict[str, float]:
        """What a checkpoint must hold of the rule."""
        return {}

    def restore(self, saved: Mapping[str, float]) -> None:
        """The job goes on from a checkpoint that holds this."""

    def gather(self, members: Collection[int]) -> None:
        """These workers start; none is in a round."""

    def start(self, now: float) -> None:
        """A worker takes its first step."""

    def close(self, pushes: tuple[Pushed, ...], members: Collection[int], now: float) -> None:
        """A round has closed with these pushes; the next is for these members."""

    def missed(self, push: Pushed) -> None:
        """This push came after its round had closed, and is discarded."""

    def directive(self, starts: bool = False, behind: int = 0, catching_up: tuple[int, ...] = ()) -> Directive | None:
        """What a worker is told of the next round.

        Args:
            starts: Is it new?
            behind: Rounds that have closed without it.
            catching_up: The workers without which some have.
        """
        return NextBlock(self.period) if self.period else None

    def divisor(self, pushes: tuple[Pushed, ...]) -> float:
        """What the weighted sum of these pushes is divided by; 0: the sum of their weights."""
        return 0.0


def with_data(pushes: tuple[Pushed, ...]) -> tuple[Pushed, ...]:
    """Those that weigh something; all where none does. Others are of workers that have run out of data for now."""
    return tuple(push for push in pushes if push.samples) or pushes


def said_once(actions: Sequence[Action]) -> list[Action]:
    """The same actions; of several releases with weights, which are the same, all but one repeat them."""
    told = [one for one in actions if type(one) is Release and type(one.directive) is NextShares and one.directive.weights]
    for release in told[1:]:
        release.repeats = True
    return list(actions)


class Barrier(Policy):
    """Rounds that close with all pushes, or with all but `backups`; `rule` says what workers do in each.

    Under a rule with shares or deadlines a worker that joins while a round is under way starts with the next one.

    Under a rule with deadlines a round also closes without workers that are overdue (`PATIENCE`). Such a worker is not
    waited for again until it has pushed; that push is discarded, and the worker goes on with the next round. A round that no
    worker computes for closes at once. Every round makes one update: of no pushes where there are none.
    """

    def __init__(self, workers: int, backups: int = 0, rule: RoundRule | None = None) -> None:
        super().__init__(workers)
        if backups >= workers:
            fix = f"at most bsp+backup:{workers - 1}" if workers > 1 else "bsp"
            raise SpecError(f"bsp+backup:{backups} needs more than {backups} workers, got {workers}; use {fix}")
        self.backups = backups
        self.rule = rule or RoundRule()
        self.round = 0
        self._arrived: list[Pushed] = []
        self._waiting: set[int] = set()  # members whose push is among them
        self._opened = 0.0  # the moment at which the round was opened
        self._overdue_at = math.inf  # the moment at which it closes without members that have not pushed
        self._half = False  # had half of its members pushed when that was set?
        self._overdue: set[int] = set()  # members without which a round has closed, and which have not pushed since
        self._behind: dict[int, int] = {}  # members held for the next round without a push in this one: rounds they missed
        self.rule.overdue = self._overdue

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self.round = step
        self.rule.begin_at(step)

    def saved(self) -> dict[str, float]:
        return self.rule.saved()

    def restore(self, saved: Mapping[str, float]) -> None:
        self.rule.restore(saved)

    @property
    def reached(self) -> int:
        """Overdue workers, whose steps are of earlier rounds, do not count."""
        return self.round if self.rule.planned else self.progress.slowest

    # Workers that start, in this round or the next.

    def _entry_step(self) -> int:
        return self.round + (self.rule.planned and not self._awaited and self._in_round() > 0)

    def _in_round(self) -> int:
        """Members that compute for the open round, or have pushed to it."""
        return len(self.progress.pushed) - len(self._overdue) - len(self._behind)

    def _start(self, now: float) -> list[Action]:
        self.rule.gather(self.members)
        return said_once(super()._start(now))

    def _started(self, worker: int, step: int, now: float) -> list[Action]:
        if step > self.round:
            return self._enter_next(worker, 0, now)
        if self.rule.planned and self._in_round() == 1 and not self._overdue:
            self.rule.gather(self.members)
        self.rule.start(now)
        self._opened = now
        return [Release(worker, step, self.progress.slowest, self.rule.directive(starts=True))]

    def _enter_next(self, worker: int, missed: int, now: float) -> list[Action]:
        """A member whose step is that of the next round waits for it."""
        self._behind[worker] = missed
        self.room.enter(worker, self.round + 1)
        held = self._hold(worker, self.round + 1) if self.explains else Hold(worker, self.round + 1, (), 0, "")
        return [held, *self._patience(now)]

    # Pushes and rounds.

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
        if len(self._arrived) >= self._quorum():
            return self._close(now)
        held = self._hold(push.worker, self.round + 1) if self.explains else Hold(push.worker, self.round + 1, (), 0, "")
        return [held, *self._patience(now)] if self.rule.deadline else [held]

    def _freed(self, worker: int, now: float) -> list[Action]:
        self._waiting.discard(worker)
        self._overdue.discard(worker)
        self._behind.pop(worker, None)
        if not self._arrived and not self._behind:
            return []
        return self._close(now) if len(self._arrived) >= self._quorum() else self._patience(now)

    def _quorum(self) -> int:
        gone = len(self._arrived) - len(self._waiting)  # after their push: they count for this round
        members = len(self.progress.pushed) + gone
        if self.rule.planned:
            return members - len(self._overdue) - len(self._behind)
        return min(max(self.workers, members) - self.backups, members)

    def _close(self, now: float) -> list[Action]:
        pushes = tuple(sorted(self._arrived, key=lambda push: push.worker))
        self._arrived = []
        self._waiting = set()
        self.round += 1
        rule, following, self._behind = self.rule, self._behind, {}
        update = Apply(pushes, 1.0, divisor=rule.divisor(pushes))
        rule.close(pushes, self.members, now)
        released = self.room.admit(lambda step: True)
        if not rule.planned:
            slowest, directive = self.progress.slowest, rule.directive()
            return [update, *(Release(worker, step, slowest, directive) for worker, step in released)]
        self._opened, self._overdue_at, self._half = now, math.inf, False
        back = tuple(sorted(worker for worker, missed in following.items() if missed))
        slowest = self.progress.slowest
        told = {worker: rule.directive(worker in following, following.get(worker, 0), back) for worker, _ in released}
        return [update, *said_once([Release(worker, step, slowest, told[worker]) for worker, step in released])]

    # Late pushes, and workers that are overdue.

    def _late(self, push: Pushed, now: float) -> list[Action]:
        worker, reason = push.worker, f"late: round {push.step} closed without it, the job is at round {self.round}"
        discard = Discard(worker, push.step, reason)
        if worker not in self._overdue:
            self.progress.move(worker, self.round)
            return [discard, Release(worker, self.round, self.progress.slowest, self.rule.directive())]
        self._overdue.discard(worker)
        self.rule.missed(push)
        self.progress.move(worker, self.round + 1)
        held = self._enter_next(worker, self.round + 1 - push.step, now)
        return [discard, *(held if self._quorum() else self._close(now))]

    def _patience(self, now: float) -> list[Action]:
        """From when on are workers overdue that have not pushed? Set when the first has pushed, and when half have."""
        deadline = self.rule.deadline
        if not deadline or self._half or not (self._waiting or self._behind):
            return []
        here = len(self._arrived) + len(self._behind)
        half = 2 * here >= self._quorum() + len(self._behind)
        if self._overdue_at < math.inf and not half:
            return []
        taken = max(now - self._opened, deadline)
        wait = (PATIENCE if half else FEW) * min(taken, LONGEST * deadline)
        self._half, self._overdue_at = half, self._opened + taken + wait
        return [Wake(self._overdue_at)]

    def _ticked(self, now: float) -> list[Action]:
        if now < self._overdue_at:
            return []
        if not (self._waiting or self._behind):  # those that waited are gone: there is no hurry, until another one waits
            self._overdue_at, self._half = math.inf, False
            return []
        self._overdue.update(worker for worker, step in self.progress.pushed.items() if step <= self.round)
        return self._close(now)

    # Reasons.

    def _hold(self, worker: int, step: int) -> Hold:
        named, count = self.progress.at(self.round) if self.rule.planned else self.progress.behind(step)
        if self.backups or self.rule.deadline or worker in self._behind:
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
        if not self._is_compared(push):  # first: in a round in which none is, there is nothing to look for
            return ""
        first = next((arrived for arrived in self._arrived if self._is_compared(arrived)), None)
        if first is None or first.hyper == push.hyper:
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


BSP = Mode(
    "bsp",
    "bsp",
    "barrier each step, mean over workers",
    lambda workers: Barrier(workers),
    capabilities=Capabilities(update=MadeOf.ALL),
    split=None,
)

BACKUP = Mode(
    "bsp+backup",
    "bsp+backup:1",
    "barrier over all but B workers, the late ones' pushes discarded",
    lambda workers, backups: Barrier(workers, backups),
    argument=whole_number("B", at_least=1),
    capabilities=Capabilities(update=MadeOf.ROUND),
    split=Unsound("stages could leave out different replicas from a round", ("bsp", "ssp:1")),
    price="no stale gradient; late work is lost",
)

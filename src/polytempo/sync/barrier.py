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

from collections.abc import Collection, Mapping, Sequence

from polytempo.errors import SpecError
from polytempo.options import whole_number
from polytempo.sync.actions import Action, Apply, Discard, Hold, Refuse, Release
from polytempo.sync.capabilities import EACH_ROUND, Capabilities, MadeOf, Promises, Unsound
from polytempo.sync.directives import Directive, NextBlock, NextShares
from polytempo.sync.events import Pushed
from polytempo.sync.mode import Mode
from polytempo.sync.policy import Policy
from polytempo.sync.shares import ShareWeights


class RoundRule:
    """What workers do in a round: one step each, here. Modes with blocks of local steps (`local_sgd.py`, `adacomm.py`), with
    shares by speed (`balance.py`) and with deadlines (`anytime.py`) have rules of their own."""

    period = 0  #: local steps in the next block
    compares = True  #: must the pushes of a round have equal hyper-parameters?
    planned = False  #: do releases carry weights or deadlines, and do joiners wait for the next round?
    weights: ShareWeights = ()  #: shares of the joint batch by speed: (rank, relative share)
    since: tuple[int, int] | None = None  #: the first batch that is cut by these weights
    changed = False  #: did the last round change them?

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
        self._behind: dict[int, int] = {}  # members held for the next round without a push in this one: rounds they missed

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
        """Workers without which rounds have closed do not count."""
        return self.round if self.rule.planned else self.progress.slowest

    # Workers that start, in this round or the next.

    def entry_step(self) -> int:
        return self.round + (self.rule.planned and not self._awaited and self._in_round() > 0)

    def _in_round(self) -> int:
        """Members that compute for the open round, or have pushed to it."""
        return len(self.progress.pushed) - len(self._behind)

    def _start(self, now: float) -> list[Action]:
        self.rule.gather(self.members)
        return said_once(super()._start(now))

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        if step > self.round:
            return self._enter_next(worker, 0, now)
        if self.rule.planned and self._in_round() == 1:
            self.rule.gather(self.members)
        self.rule.start(now)
        return [Release(worker, step, self.progress.slowest, self.rule.directive(starts=True))]

    def _enter_next(self, worker: int, missed: int, now: float) -> list[Action]:
        """A member whose step is that of the next round waits for it."""
        self._behind[worker] = missed
        self.room.enter(worker, self.round + 1)
        return self._held(worker, now)

    def _held(self, worker: int, now: float) -> list[Action]:
        return [self.hold(worker, self.round + 1), *self._patience(now)]

    def _patience(self, now: float) -> list[Action]:
        """From when on is the round not to wait any more? Here it waits for all that it needs."""
        return []

    # Pushes and rounds.

    def on_push(self, push: Pushed, now: float) -> list[Action]:
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
        return self._held(push.worker, now)

    def on_leave(self, worker: int, now: float) -> list[Action]:
        self._waiting.discard(worker)
        self._behind.pop(worker, None)
        if not self._arrived and not self._behind:
            return []
        return self._close(now) if len(self._arrived) >= self._quorum() else self._patience(now)

    def _quorum(self) -> int:
        gone = len(self._arrived) - len(self._waiting)  # after their push: they count for this round
        members = len(self.progress.pushed) + gone
        if self.rule.planned:
            return members - len(self._behind)
        return min(max(self.workers, members) - self.backups, members)

    def _close(self, now: float) -> list[Action]:
        # In order of rank: sums of floats differ by the order, and that of arrival would be another one in each run.
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
        back = tuple(sorted(worker for worker, missed in following.items() if missed))
        slowest = self.progress.slowest
        told = {worker: rule.directive(worker in following, following.get(worker, 0), back) for worker, _ in released}
        return [update, *said_once([Release(worker, step, slowest, told[worker]) for worker, step in released])]

    def _late(self, push: Pushed, now: float) -> list[Action]:
        """A push of a round that has closed without it."""
        self.progress.move(push.worker, self.round)
        release = Release(push.worker, self.round, self.progress.slowest, self.rule.directive())
        return [self._discarded(push), release]

    def _discarded(self, push: Pushed) -> Discard:
        reason = f"late: round {push.step} closed without it, the job is at round {self.round}"
        return Discard(push.worker, push.step, reason)

    # Reasons.

    @property
    def _leaves_out(self) -> bool:
        """May the round close without some members?"""
        return self.backups > 0

    def why_held(self, worker: int, step: int) -> Hold:
        named, count = self.progress.at(self.round) if self.rule.planned else self.progress.behind(step)
        if self._leaves_out or worker in self._behind:
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
    promises=EACH_ROUND,
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
    promises=Promises(waits=0, quorum=lambda workers, backups: workers - backups),
)

"""`anytime:SECONDS`, `anytime:auto`: rounds with a deadline (anytime mini-batches, Ferdinand et al. 2020).

    round       every worker computes micro-batches on the weights of the round until the deadline, then pushes the sum of
                their gradients and the number of their samples
    update      the sum over all workers, divided by the EXPECTED number of samples: a round to which few contributed moves
                less; `divide=actual` divides by the number that came
    deadline    SECONDS; or, with `auto`, such that the expected number of micro-batches is `micro` for each worker, from
                the median speed of each over the last rounds, changed where it is off by more than HYSTERESIS

No gradient is stale and no worker waits for another: one that is stuck contributes what it has finished, or nothing. A round
to which none contributed changes nothing, and the next begins. With equal speeds it is `bsp` with the joint batch. The first
round of `auto` has no deadline: each worker takes `micro` micro-batches, and their time is measured.

`auto` moves the deadline by up to SLACK, to where the workers' last micro-batches end: what is left of a round after a
worker's last micro-batch is lost. The micro-batch that is unfinished at the deadline is abandoned (`late=drop`: its samples
return to the queue) or finished and counted once, in the round that is open then: one round stale, or as many as it took
(`late=keep`).

Who counts for the deadline and for the expected number: members that are not overdue (`barrier.py`) and have finished a
micro-batch in the last ROUNDS rounds. For the others `auto` gives the rest more time, up to GROWTH times as much, so that
the joint batch stays what it is. Where all are stuck (they evaluate, say) nothing changes. A member of which nothing is
known yet counts as an average one.

A worker whose micro-batch takes longer than the deadline contributes nothing under `late=drop`, at any number of rounds:
its micro-batches should be smaller, or `late=keep`. The deadline is not made longer for it, for all others would take
more micro-batches on old weights. A push without samples may say `work` and `computed` of a micro-batch that was abandoned
and has ended: so its speed is known, and `auto` follows where all workers become that slow.

Where this departs from the paper: an exact mean over all workers in place of dual averaging and rounds of consensus, and the
expected number as the divisor. Hyper-parameters of a round are those of its lowest rank that contributed, so schedulers that
are stepped by micro-batch may differ between workers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from polytempo.options import ArgumentReader, choice, positive_number, whole_number
from polytempo.summation import in_order
from polytempo.sync.actions import Action, Release, Wake
from polytempo.sync.barrier import Barrier, RoundRule
from polytempo.sync.capabilities import Capabilities, MadeOf, Promises, PushedWork, Unsound
from polytempo.sync.directives import NextDeadline
from polytempo.sync.events import Pushed
from polytempo.sync.machine import (
    ABANDON,
    FINISHED,
    GO,
    NO_ORDERS,
    BudgetUsed,
    Computed,
    EndBlock,
    Fetched,
    Orders,
    SendPush,
    TimeUp,
    WorkerEvent,
    WorkerMachine,
)
from polytempo.sync.mode import Mode
from polytempo.sync.shares import ROUNDS, WorkerSpeeds

#: Micro-batches of a worker in a round, on average, unless `micro` says.
MICRO = 8
#: The deadline, or the expected number of samples, is changed where it is off by more than this.
HYSTERESIS = 0.05
#: `auto` moves the deadline by at most this, to where micro-batches end.
SLACK = 0.1
#: A micro-batch that takes this much longer than usual still fits before the deadline.
MARGIN = 0.02
#: With workers that are stuck, the joint batch is expected to become at most this much larger for each of the others.
GROWTH = 2
#: Of more workers than these, some stand for all where lost time is counted, and where micro-batches end.
SAMPLE, ENDS = 256, 16

#: A round with a deadline that half of its workers have pushed to waits for the others this much longer, in parts of the
#: time it has taken so far (of the deadline, where that is more); one that fewer have pushed to, FEW. More than 1: where
#: pushes pass one link after another, the second half of them takes as long as the first.
PATIENCE, FEW = 1.25, 2.5
#: The time that a round has taken so far counts for that up to this number of deadlines: a job may have been stopped.
LONGEST = 100

#: Micro-batches over which a worker's own pace is taken.
LAST = 5


class DeadlineRule(RoundRule):
    """The deadline of each round, and what its sum is divided by."""

    planned = True
    compares = False

    def __init__(self, seconds: float | None, micro: int = MICRO, divide: str = "expected") -> None:
        self.deadline = seconds or 0.0  #: seconds of the next round; 0: none
        self.overdue: set[int] = set()  #: members without which a round has closed, and which have not pushed since
        self._auto, self._micro, self._by_actual = seconds is None, micro, divide == "actual"
        self._speeds = WorkerSpeeds()  # micro-batches a second
        self._sizes = WorkerSpeeds()  # samples a micro-batch
        self._idle: dict[int, int] = {}  # rounds since a worker has finished a micro-batch
        self._chosen_for = 0.0  # the deadline before it was moved to where micro-batches end
        self._expected = 0.0  # samples in the next round; 0 while unknown

    def directive(self, starts: bool = False, behind: int = 0, catching_up: tuple[int, ...] = ()) -> NextDeadline:
        return NextDeadline(self.deadline, behind, catching_up)

    def divisor(self, pushes: tuple[Pushed, ...]) -> float:
        return 0.0 if self._by_actual else self._expected

    def missed(self, push: Pushed) -> None:
        """This push came after its round had closed, and is discarded."""
        self._measure(push)

    def close(self, pushes: tuple[Pushed, ...], members: Collection[int], now: float) -> None:
        for push in pushes:
            self._measure(push)
        self._speeds.forget(members)
        self._sizes.forget(members)
        self._idle = {worker: rounds for worker, rounds in self._idle.items() if worker in members}
        active = [worker for worker in sorted(members) if worker not in self.overdue and self._idle.get(worker, 0) < ROUNDS]
        speeds = self._speeds.of(active)
        if not speeds:  # not measured yet, or all are stuck
            return
        if self._auto:
            self._choose(sorted(speeds.values()), len(members))
        sizes = self._sizes.of(active)
        if not sizes:  # all that ended were abandoned
            return
        expected = in_order(finished(self.deadline, speed) * sizes[worker] for worker, speed in speeds.items())
        if abs(expected - self._expected) > HYSTERESIS * self._expected:
            self._expected = expected

    def _measure(self, push: Pushed) -> None:
        worker, measured, count = push.worker, push.measured, push.count if push.samples else 0
        if count or measured.work:  # work without samples: that of one which was abandoned
            self._speeds.add(worker, max(count, 1), measured.computed)
        if count:
            self._sizes.add(worker, push.samples, count)
            self._idle.pop(worker, None)
        else:
            self._idle[worker] = self._idle.get(worker, 0) + 1

    def _choose(self, speeds: list[float], members: int) -> None:
        wanted = self._micro * min(members, GROWTH * len(speeds))
        deadline, some = wanted / in_order(speeds), speeds[:: -(-len(speeds) // SAMPLE)]
        moved = abs(deadline - self._chosen_for) > HYSTERESIS * self._chosen_for
        if not moved and lost(self.deadline, some) <= HYSTERESIS:
            return
        best = aligned(deadline, some)
        if moved or lost(self.deadline, some) - lost(best, some) > HYSTERESIS:
            self.deadline, self._chosen_for = best, deadline


class DeadlineBarrier(Barrier):
    """Rounds that also close without workers that are overdue (`PATIENCE`).

    Such a worker is not waited for again until it has pushed; that push is discarded, and the worker goes on with the next
    round. A round that no worker computes for closes at once. Every round makes one update: of no pushes where there are
    none.
    """

    rule: DeadlineRule

    def __init__(self, workers: int, rule: DeadlineRule) -> None:
        super().__init__(workers, rule=rule)
        self._overdue = rule.overdue
        self._opened = 0.0  # the moment at which the round was opened
        self._overdue_at = math.inf  # the moment at which it closes without members that have not pushed
        self._half = False  # had half of its members pushed when that was set?

    def _in_round(self) -> int:
        return super()._in_round() - len(self._overdue)

    def _quorum(self) -> int:
        return super()._quorum() - len(self._overdue)

    @property
    def _leaves_out(self) -> bool:
        return self.rule.deadline > 0

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        if step <= self.round:
            self._opened = now
        return super().on_start(worker, step, now)

    def on_leave(self, worker: int, now: float) -> list[Action]:
        self._overdue.discard(worker)
        return super().on_leave(worker, now)

    def _close(self, now: float) -> list[Action]:
        self._opened, self._overdue_at, self._half = now, math.inf, False
        return super()._close(now)

    def _late(self, push: Pushed, now: float) -> list[Action]:
        worker = push.worker
        if worker not in self._overdue:
            return super()._late(push, now)
        discard = self._discarded(push)
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

    def on_tick(self, now: float) -> list[Action]:
        if now < self._overdue_at:
            return []
        if not (self._waiting or self._behind):  # those that waited are gone: there is no hurry, until another one waits
            self._overdue_at, self._half = math.inf, False
            return []
        self._overdue.update(worker for worker, step in self.progress.pushed.items() if step <= self.round)
        return self._close(now)


class Pace:
    """The seconds that a worker's own micro-batches take: the median of the last ones; one stall does not move it."""

    __slots__ = ("_last", "seconds")

    def __init__(self) -> None:
        self._last: list[float] = []
        self.seconds = 0.0  #: of the next one; 0 while unknown

    def add(self, seconds: float) -> None:
        """A micro-batch took this long."""
        last = self._last
        last.append(seconds)
        if len(last) > LAST:
            del last[0]
        self.seconds = sorted(last)[len(last) // 2]


def fits(elapsed: float, pace: float, deadline: float) -> bool:
    """Would a worker's next micro-batch end in time? `elapsed` since the round began; `pace`: seconds that one takes."""
    return elapsed + pace <= latest(deadline)


def latest(deadline: float) -> float:
    """When a worker in the middle of a micro-batch contributes what it has finished, from the start of the round."""
    return deadline * (1 + MARGIN)


def finished(deadline: float, speed: float) -> int:
    """Micro-batches that a worker of this speed, in micro-batches a second, finishes in a round."""
    return int(latest(deadline) * speed)


def aligned(deadline: float, speeds: Sequence[float]) -> float:
    """The moment near a deadline at which the least of the workers' time is lost after their last micro-batches."""
    low, high = (1 - SLACK) * deadline, (1 + SLACK) * deadline
    some = speeds[:: -(-len(speeds) // ENDS)]
    ends = [count / speed for speed in some for count in range(math.ceil(low * speed), int(high * speed) + 1) if count]
    return min([*ends, deadline], key=lambda end: (round(lost(end, speeds), 3), abs(end - deadline), end))


def lost(deadline: float, speeds: Sequence[float]) -> float:
    """The part of the workers' time that is left after their last micro-batches."""
    used = in_order(min(finished(deadline, speed) / speed, deadline) for speed in speeds)
    return 1 - used / (deadline * len(speeds)) if deadline else 1.0


class DeadlineMachine(WorkerMachine):
    """Rounds of one worker: micro-batches until the deadline, by its own pace; then its push.

    One that is not done at the deadline is finished beside the push, which the communication thread makes with what was
    done before; and beside the pushes without anything of further rounds that end meanwhile. Then it is abandoned, or kept
    for the worker's next push, unless the budget is used up; and the worker goes on with what is left of the round that is
    open. The deadline is counted from the moment at which the worker hears of the round.

    A micro-batch that the script begins once it has taken newer values (`Fetched`) is not late, whenever it was ordered.
    """

    brings = "batches"

    def __init__(self, micro: int = MICRO, keeps: bool = False, last: float = math.inf) -> None:
        super().__init__(last)
        self.in_round = False  #: does the round that is open still want its push?
        self.seconds = 0.0  #: of the round; 0: it has no deadline
        self.ends_at = math.inf  #: the deadline of that round
        self.finished = 0  #: micro-batches for the next push
        self.late = False  #: is the micro-batch that it computes of a round that has ended?
        self.pace = Pace()
        self.micro = micro
        self._keeps = keeps  # a micro-batch that is late
        self._opened = 0.0  # when this worker heard of the round

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        match event:
            case Computed(seconds):
                return self._computed(seconds, now)
            case Release():
                return self._released(event, now)
            case TimeUp(step) if self.in_round and step == self.step:
                self.late = self.late or self.computes
                return (self._push(beside=self.computes),)
            case EndBlock() if self.in_round:
                self.computes = self.late = False
                return (self._push(beside=False),)
            case Fetched():
                self.late = False
            case BudgetUsed():
                self._keeps = False
            case _:
                return super().handle(event, now, part)
        return NO_ORDERS

    def _released(self, release: Release, now: float) -> Orders:
        self.may_make(release.step)
        if self.leaving and not self.computes:
            return NO_ORDERS
        if self.done:
            return NO_ORDERS if self.computes else FINISHED
        if self.step > self.allowed:
            return NO_ORDERS
        self.seconds = release.directive.seconds if isinstance(release.directive, NextDeadline) else 0.0
        self._opened, self.in_round = now, True
        self.ends_at = now + latest(self.seconds) if self.seconds else math.inf
        return NO_ORDERS if self.computes else self._work(now)

    def _computed(self, seconds: float, now: float) -> Orders:
        self.computes = False
        self.pace.add(seconds)
        late, self.late = self.late, False
        if not late or self._keeps:
            self.finished += 1
        orders: Orders = (ABANDON,) if late and not self._keeps else NO_ORDERS
        if late and self.leaving:
            return orders
        if not self.in_round:
            return (*orders, *(FINISHED if self.done and self.step <= self.allowed else NO_ORDERS))
        return (*orders, *self._work(now)) if orders else self._work(now)

    def _work(self, now: float) -> Orders:
        """Compute another micro-batch, if one fits. One that takes longer than a whole round is begun at its start."""
        if not self.seconds:
            goes_on = self.finished < self.micro
        else:
            elapsed, pace, whole = now - self._opened, self.pace.seconds, self.ends_at - self._opened
            goes_on = fits(elapsed, pace, self.seconds) or (not self.finished and pace > whole)
        if not goes_on:
            return (self._push(beside=False),)
        self.computes = True
        return GO

    def _push(self, beside: bool) -> SendPush:
        push = SendPush(self.step, self.finished, beside=beside)
        self.step, self.finished, self.in_round = self.step + 1, 0, False
        return push


def _read_deadline(text: str) -> float | None:
    return None if text == "auto" else float(positive_number("SECONDS").read(text))


ANYTIME = Mode(
    "anytime",
    "anytime:auto",
    "rounds end at a deadline, each worker contributes the micro-batches it has finished; auto: about micro=8 each",
    lambda workers, seconds=None, micro=MICRO, late="drop", divide="expected": DeadlineBarrier(
        workers, DeadlineRule(seconds, micro, divide)
    ),
    argument=ArgumentReader("auto or a number of seconds above 0", _read_deadline, "auto"),
    options={
        "micro": whole_number("micro", at_least=1, example="8"),
        "late": choice("late", ("drop", "keep")),
        "divide": choice("divide", ("expected", "actual")),
    },
    machine=lambda worker, last, seconds=None, micro=MICRO, late="drop", **_: DeadlineMachine(micro, late == "keep", last),
    capabilities=lambda seconds=None, micro=MICRO, late="drop", **_: Capabilities(
        update=MadeOf.ROUND, work=PushedWork.DEADLINE, waits=False, micro=micro, keeps_late=late == "keep"
    ),
    split=Unsound("stages would end a round after different micro-batches", ("bsp",)),
    price="no stale gradient; batches vary",
    promises=Promises(alone=False),
)

"""`diloco:k,quorum=K`: decoupled DiLoCo (Douillard et al. 2026). No worker waits for a slow or dead one.

    block       k steps of the worker's own optimizer; then it pushes its change since the anchor that it took last,
                and computes on
    pending     the push is kept. Its worker leaves out turns until it is answered: one push of each worker at most
    quorum      pushes of K workers are pending, or those of all active workers
    merge       when all active workers are in, or `grace` is over since the quorum: one outer step (`diloco.py`) with the
                weighted mean of all pending pushes. Their workers are released: the answer is the new anchor

    w_i = samples_i * samples_i / steps_i       normalised over the merge: more samples in a block, and more samples to a
                                                step, weigh more

Each fragment of the model has a clock of its own, so this policy sees pushes of one fragment.

    grace=T         seconds from the quorum to the merge. `auto`, the default, waits while the slack allows it: until half
                    of a block's time has passed since a pending push, for the first of them, so that no worker of the
                    quorum loses a turn by it. `inf` waits for all active workers, and so does each worker for its
                    answer: with equal samples it is `diloco:k`
    drop=S          a push on an anchor more than S merges old is not merged; its worker goes on from the newest values

A push of a worker that has left since is merged all the same: an accepted push is applied exactly once. A worker that joins
or comes back starts from the newest values, at the step of the slowest one.

Where this departs from the paper, of which a summary was read: what travels is the change since the worker's own anchor, not
its values, so a late worker contributes its work and does not pull the model back; a worker keeps what it has changed since
the sending when the new anchor comes; and the form of the adaptive grace is our own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

from polytempo.errors import OrderError, SpecError, counted
from polytempo.options import ArgumentReader, number, whole_number
from polytempo.sync.actions import NAMED_AT_MOST, Action, Apply, Discard, Hold, Release, Wake
from polytempo.sync.blocks import Averaging
from polytempo.sync.corrections import Corrections
from polytempo.sync.directives import NextBlock
from polytempo.sync.events import Pushed
from polytempo.sync.policy import Policy

#: The grace that is bounded by the slack of the pushes that are pending.
AUTO = "auto"
#: The share of a block's time that such a grace may use.
SLACK = 0.5


class DecoupledDiloco(Policy):
    """Merges of a quorum."""

    def __init__(self, workers: int, period: int, quorum: int, grace: float | str = AUTO, drop: int | None = None) -> None:
        super().__init__(workers)
        if quorum > workers:
            raise SpecError(f"quorum={quorum} needs at least {quorum} workers, got {workers}; use at most quorum={workers}")
        self.period, self.quorum, self.grace = period, quorum, grace
        self._block = NextBlock(period)
        self.waits = grace == math.inf  #: does a worker wait for the answer to its push?
        self._too_old = Corrections(most=drop)
        self._merges = 0
        self._pending: list[Pushed] = []
        self._distinct: set[int] = set()  # their workers
        self._waiting: dict[int, None] = {}  # members whose push is among them, in order of arrival
        self._reached: float | None = None  # when the quorum was there
        self._slack = math.inf  # the moment until which the pending pushes leave time
        self._anchor: dict[int, int] = {}  # the merges in the values that each member computes on
        self._since: dict[int, float] = {}  # when each member started or pushed last
        self._next = 0  # the step after the last that was pushed

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self._next = step

    def holds(self) -> list[Hold]:
        """The workers whose answer is still to come, though most of them compute meanwhile."""
        return super().holds() if self._awaited else [self.why_held(w, self.progress.pushed[w]) for w in self._waiting]

    def entry_step(self) -> int:
        return self.progress.slowest if self.progress.pushed else self._next

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        merged = self._overdue(now)
        self._since[worker] = now
        return [*merged, self._go(worker, step)]

    def on_push(self, push: Pushed, now: float) -> list[Action]:
        worker, step = push.worker, push.step + 1
        if worker in self._waiting:
            raise OrderError(f"worker {worker} pushed step {push.step}; its push of step {push.step - 1} is not merged yet")
        self.progress.move(worker, step)
        self._next = max(self._next, step)
        took, self._since[worker] = now - self._since[worker], now
        actions = self._overdue(now)
        too_old = self._too_old.verdict(self._merges - self._anchor[worker]).drop
        if too_old:
            return [*actions, Discard(worker, push.step, too_old), self._go(worker, step)]
        self._pending.append(push)
        self._distinct.add(worker)
        self._waiting[worker] = None
        self._slack = min(self._slack, now + SLACK * took * min(1.0, self.period / max(push.count, 1)))
        if self.waits:
            self.room.enter(worker, step)
        if self._reached is None and len(self._distinct) >= self.quorum:
            self._reached = now
        if self._all_in() or now >= self._deadline():
            return [*actions, *self._merge()]
        if self.waits:
            return [*actions, self.hold(worker, step)]
        return actions if self._reached is None else [*actions, Wake(self._deadline())]

    def on_leave(self, worker: int, now: float) -> list[Action]:
        self._waiting.pop(worker, None)
        del self._anchor[worker], self._since[worker]
        return self._merge() if self._pending and (self._all_in() or now >= self._deadline()) else []

    def on_tick(self, now: float) -> list[Action]:
        return self._overdue(now)

    def _overdue(self, now: float) -> list[Action]:
        """A merge whose moment has come before this event."""
        return self._merge() if now >= self._deadline() else []

    def _all_in(self) -> bool:
        return len(self._waiting) == len(self.progress.pushed)

    def _deadline(self) -> float:
        if self._reached is None:
            return math.inf
        return max(self._reached, self._slack) if isinstance(self.grace, str) else self._reached + self.grace

    def _merge(self) -> list[Action]:
        pushes = tuple(sorted(self._pending, key=lambda push: push.worker))
        released, self._waiting = self._waiting, {}
        self._pending, self._distinct, self._reached, self._slack = [], set(), None, math.inf
        self._merges += 1
        self.room.admit(lambda step: True)  # empty, unless workers wait for the answer
        steps = self.progress.pushed
        return [Apply(pushes, 1.0, merge_weights(pushes)), *(self._go(worker, steps[worker]) for worker in released)]

    def _go(self, worker: int, step: int) -> Release:
        """The worker takes the newest values."""
        self._anchor[worker] = self._merges
        return Release(worker, step, self.progress.slowest, self._block)

    def why_held(self, worker: int, step: int) -> Hold:
        if self.waits:
            named, count = self.progress.behind(step)
            return Hold(worker, step, named, count, f"1 ahead of worker {named[0]}, bound 0")
        missing = sorted((s, w) for w, s in self.progress.pushed.items() if w not in self._waiting)
        named = tuple(w for _, w in islice(missing, NAMED_AT_MOST))
        reason = f"the merge has pushes of {counted(len(self._distinct), 'worker')}, its quorum is {self.quorum}"
        return Hold(worker, step, named, len(missing), reason)


def merge_weights(pushes: tuple[Pushed, ...]) -> tuple[float, ...]:
    """What each push weighs in a merge; empty where these are the samples.

    They are w = samples * samples / steps divided by the largest samples / steps: where these are all the same, the weights
    are the samples themselves, as in modes with rounds.
    """
    dense = [push.samples / max(push.count, 1) for push in pushes]
    most = max(dense)
    if not most > 0 or min(dense) == most:
        return ()
    return tuple(push.samples * (each / most) for push, each in zip(pushes, dense, strict=True))


def _read_grace(text: str) -> float | str:
    if text in (AUTO, "inf"):
        return text if text == AUTO else math.inf
    return float(number("", lambda value: value >= 0).read(text))


#: Options of the decoupled mode; `quorum` makes it one.
OPTIONS: dict[str, ArgumentReader] = {
    "quorum": whole_number("quorum", at_least=1, example="3"),
    "grace": ArgumentReader("a number of seconds of at least 0, auto, or inf,", _read_grace, "0.5"),
    "drop": whole_number("drop", at_least=0, example="8"),
}


def decoupled(averaging: Averaging, grace: float | str = AUTO) -> Averaging:
    """The same average, but no worker waits for it, unless `grace` is unbounded."""
    if averaging.overlap:
        raise SpecError(f"overlap={averaging.overlap} has no place beside quorum: no worker waits for a merge; leave it out")
    return replace(averaging, decoupled=True, waits=grace == math.inf)

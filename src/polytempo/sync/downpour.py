"""`downpour:push=P,fetch=F`: Downpour SGD (DistBelief, Dean et al. 2012), as the servers see it.

A worker takes local steps on weights of its own, sends the sum of its gradients after every P of them and fetches the
servers' weights every F; it waits for neither. One step of this policy is one push:

    worker    |-local-|-local-|-local-|-local-|  waits for the answer to push 0  |-local-|-local-|      P = 2
                              `push 0         `push 1
    servers                               apply 0        apply 1

Every push is applied when it comes, and its answer carries the permission to begin with the push after the next: one push
may be in flight while the next is accumulated, as in `delay:1`.

`warm=N` is the warm start: the worker of the lowest rank trains alone until N local steps are made (whole pushes of them),
the others are held at their first. If it leaves, the next one takes its place and goes on counting where it was.

Where this departs from the printed listing:
1. the listing pushes when step % P = 0, so its first push holds one gradient; here each push holds exactly P, except that
   the last one of a worker may hold fewer;
2. a worker waits when a push becomes due while the one before is not answered yet; the listing has no bound, and a slow
   server would pile them up;
3. a fetch overwrites local progress there; here the local steps that the fetched weights cannot contain yet are added to
   them, so that P = F = 1 with one worker is plain SGD whatever the network does;
4. the update rule is the user's optimizer, not always Adagrad, at its rate divided by the active workers (`scale=1`: whole);
   where the rule divides by the gradient's size, divided by the root of n / P, and never more than whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polytempo.options import positive_number, whole_number
from polytempo.sync.actions import Action, Hold, Release
from polytempo.sync.capabilities import NEVER, Capabilities, Promises, PushedWork, Unsound
from polytempo.sync.delay import Delay
from polytempo.sync.events import Pushed
from polytempo.sync.machine import (
    ASK_AGAIN,
    COMPUTE,
    FINISHED,
    NO_ORDERS,
    Asked,
    Begin,
    Computed,
    EndBlock,
    Fetched,
    Install,
    Orders,
    RequestValues,
    SendPush,
    StepHere,
    WorkerEvent,
    WorkerMachine,
    WorkerOrder,
)
from polytempo.sync.mode import SCALE, Mode, Scale


@dataclass(frozen=True)
class LocalSteps:
    """The local steps of a worker between pushes."""

    push: int = 1  #: local steps in a push
    fetch: int = 1  #: local steps from one fetch to the next
    alpha: float | None = None  #: rate of a local step; None: the optimizer's


class DownpourPolicy(Delay):
    """One push in flight for each worker, and a warm start."""

    def __init__(self, workers: int, push: int = 1, warm: int = 0, scale: Scale = None) -> None:
        super().__init__(workers, 1, scale)
        self.push = push
        self.warm = warm
        self._warm_pushes = math.ceil(warm / push)
        self._made = 0  # pushes of the warm start
        self._alone: int | None = None  # the worker that makes them

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self._made = step

    @property
    def joint(self) -> float:
        """Where the rate follows a power of them, each counts for its P gradients."""
        return max(1.0, super().joint / self.push) if isinstance(self.scale, str) else super().joint

    def on_push(self, push: Pushed, now: float) -> list[Action]:
        actions = super().on_push(push, now)
        if self._made < self._warm_pushes:
            self._made += 1
            if self._made == self._warm_pushes:
                actions += self._start(now)
        return actions

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        if self._made < self._warm_pushes:
            if self._alone is not None:
                self.room.enter(worker, step)
                return [self.why_held(worker, step)]
            self._alone = worker
        return super().on_start(worker, step, now)

    def on_leave(self, worker: int, now: float) -> list[Action]:
        if worker != self._alone:
            return []
        self._alone = None
        if not self.room:
            return []
        successor, step = min(self.room)
        self.room.remove(successor, step)
        return self.on_start(successor, step, now)

    def why_held(self, worker: int, step: int) -> Hold:
        assert self._alone is not None
        made = min(self._made * self.push, self.warm)
        reason = f"warm start: worker {self._alone} has made {made} of {self.warm} steps"
        return Hold(worker, step, (self._alone,), 1, reason)


class DownpourMachine(WorkerMachine):
    """Local steps, accumulated pushes and fetches of one worker; `step` counts its pushes, `last` its local steps.

    A push is begun with the permission for it, sent when it holds P local steps, and waited for only where the next becomes
    due before its answer. One fetch is under way at a time; one that is due meanwhile is made when the other is there.
    """

    brings = "sum"

    def __init__(self, local: LocalSteps, last: float = math.inf) -> None:
        super().__init__(last)
        self.local = local  #: what a driver must know of its steps
        self._made = 0  # local steps in this life
        self._pending = 0  # of them, not yet in a push
        self._filled = False  # has any of these a gradient?
        self._fetching = self._fetched = False
        self._due = False  # a fetch is to be made
        self._started = False

    @property
    def made(self) -> int:
        """Local steps that pushes hold, and those since."""
        return self.step * self.local.push + self._pending

    @property
    def done(self) -> bool:
        return self.made >= self.last

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        if isinstance(event, Computed):
            return self._computed(event.empty)
        if isinstance(event, EndBlock):
            return self._push()
        if isinstance(event, Release):
            return self._released(event)
        if isinstance(event, Asked):
            return NO_ORDERS if self.computes else self._go()
        if isinstance(event, Fetched):
            self._fetched = True
        return super().handle(event, now, part)

    def _released(self, release: Release) -> Orders:
        self.may_make(release.step)
        begins: Orders = NO_ORDERS if self._started else (Begin(),)
        self._started = True
        return begins if self.computes else [*begins, *self._go()]

    def _computed(self, empty: bool) -> Orders:
        self.computes = False
        number = self.made
        self._made, self._pending, self._filled = self._made + 1, self._pending + 1, self._filled or not empty
        due = self._made % self.local.push == 0 or self.leaving or self.done
        if not (due and self._filled):
            return (StepHere(number), *self._go())
        return (StepHere(number), *self._push(), ASK_AGAIN)

    def _push(self) -> Orders:
        """What there is; nothing where no local step has a gradient."""
        if not self._filled:
            return NO_ORDERS
        push = SendPush(self.step, self._pending)
        self._pending, self._filled, self.step = 0, False, self.step + 1
        return (push,)

    def _go(self) -> Orders:
        if self.leaving or self.done or (self.step > self.allowed and not self._pending):
            return FINISHED if self.step * self.local.push >= self.last and self.step <= self.allowed else NO_ORDERS
        orders: list[WorkerOrder] = []
        if self._fetched:
            self._fetching = self._fetched = False
            orders.append(Install())
        self._due = self._due or (self._made > 0 and self._made % self.local.fetch == 0)
        if self._due and not self._fetching:
            self._due, self._fetching = False, True
            orders.append(RequestValues())
        self.computes = True
        return [*orders, COMPUTE]


DOWNPOUR = Mode(
    "downpour",
    "downpour:push=5,fetch=5",
    "local steps; a push each P and a fetch each F of them, waiting for neither; warm=N: one worker alone at first",
    lambda workers, push=1, warm=0, scale=None, **of_worker: DownpourPolicy(workers, push, warm, scale),
    machine=lambda worker, last, push=1, fetch=1, alpha=None, **_: DownpourMachine(LocalSteps(push, fetch, alpha), last),
    options={
        "push": whole_number("push", at_least=1, example="5"),
        "fetch": whole_number("fetch", at_least=1, example="5"),
        "warm": whole_number("warm", at_least=0, example="100"),
        "alpha": positive_number("alpha", "0.1"),
        **SCALE,
    },
    capabilities=Capabilities(work=PushedWork.LOCAL, waits=False, ahead=1),
    split=Unsound(
        "a stage fetches and pushes on its own, so that stages would compute with different blocks of local steps",
        ("local:8",),
    ),
    promises=Promises(waits=lambda warm=0, **_: None if warm else NEVER),
)

"""`bsp+balance`: rounds with a barrier, in which each worker's share of the joint batch is in proportion to its speed.

    round       each worker takes its share of the joint batch and pushes; the mean is weighted by samples (`barrier.py`)
    measure     speed = work / computed of each push, the median over the last rounds (`shares.py`)
    shares      in proportion to speed, between LEAST and `most` even shares; new ones only where a round would become
                shorter by more than HYSTERESIS

The joint batch stays what it is, and so does the update: it equals that of one process on the joint batch. Shares make up
for lasting differences of speed, not for passing stalls.

Loaders read ahead: batches that are drawn keep their cut. Every push says which batch its worker has drawn last, and no
worker draws between its push and the answer, so new weights hold from the first batch on that no worker has drawn. Until
that batch earlier weights hold: a worker keeps those of several changes. A worker has no share in batches that are cut by
weights in which it does not stand, and pushes nothing for them; one that joins starts with the next round, by whose weights
it has a share, from their batch `since` on.

A fixed time of each step makes speed depend on the share: speed is measured anew with each share, and shares settle where
all workers take the same time.

With `micro=M` a worker pushes after a number of whole micro-batches, M on average; then new weights hold from the next round
on. Hyper-parameters must be equal in a round, so schedulers are stepped by round, not by micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from polytempo.options import number, whole_number
from polytempo.sync.actions import Release
from polytempo.sync.barrier import Barrier, RoundRule
from polytempo.sync.capabilities import EACH_ROUND, Capabilities, MadeOf, PushedWork, Unsound
from polytempo.sync.directives import NextShares
from polytempo.sync.events import Pushed
from polytempo.sync.machine import GO, Compute, Orders, StepMachine, WorkerEvent
from polytempo.sync.mode import Mode
from polytempo.sync.shares import ShareWeights, WorkerSpeeds, even, round_time, weights_by_speed

#: The smallest share, in even shares, and the largest by default: a larger batch needs more memory.
LEAST, MOST = 0.1, 2.0
#: Shares are changed where rounds would become shorter by this factor.
HYSTERESIS = 1.03


class SharesBySpeed(RoundRule):
    """The shares of `bsp+balance`."""

    planned = True

    def __init__(self, workers: int, most: float = MOST) -> None:
        self.weights = even(range(workers))
        self._most = most
        self._speeds = WorkerSpeeds()
        self._drawn: tuple[int, int] | None = None  # the last batch that any worker has drawn

    def gather(self, members: Collection[int]) -> None:
        """Even shares, of the batches from the next one on."""
        if members and self._ranks() != sorted(members):
            self.weights = even(members)
            self.since = self._drawn = None

    def directive(self, starts: bool = False, behind: int = 0, catching_up: tuple[int, ...] = ()) -> NextShares:
        return NextShares(self.weights, self.since) if starts or self.changed else NextShares()

    def close(self, pushes: tuple[Pushed, ...], members: Collection[int], now: float) -> None:
        for push in pushes:
            measured = push.measured
            self._speeds.add(push.worker, measured.work, measured.computed)
            if measured.drawn is not None:
                self._drawn = max(self._drawn or measured.drawn, measured.drawn)
        self._speeds.forget(members)
        proposed = self._proposed(sorted(members))
        self.changed = proposed != self.weights
        if self.changed:
            self.weights = proposed
            self.since = None if self._drawn is None else (self._drawn[0], self._drawn[1] + 1)

    def _ranks(self) -> list[int]:
        return [worker for worker, _ in self.weights]

    def _proposed(self, members: list[int]) -> ShareWeights:
        speeds = self._speeds.of(members)
        if not speeds:  # not measured yet, or none is left
            return self.weights if self._ranks() == members else even(members)
        proposed = weights_by_speed(speeds, LEAST, self._most)
        if self._ranks() != members:
            return proposed
        gain = round_time(self.weights, speeds) / round_time(proposed, speeds)
        return proposed if gain > HYSTERESIS else self.weights


class ShareMachine(StepMachine):
    """One push a step, made of this worker's share of the joint batch, by the newest weights. A driver that draws batches
    ahead keeps their cut: the order says from which on the weights hold."""

    brings = "share"

    def __init__(self, micro: int = 0, last: float = math.inf) -> None:
        super().__init__(last)
        self.micro = micro
        self._shares = Compute()

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        if isinstance(event, Release) and isinstance(event.directive, NextShares):
            told = event.directive
            if told.weights and told.weights != self._shares.weights:
                self._shares = Compute(told.weights, told.since)
        orders = super().handle(event, now, part)
        return (self._shares,) if orders is GO else orders


BALANCE = Mode(
    "bsp+balance",
    "bsp+balance",
    "barrier each step, shares of the joint batch by measured speed; micro=M: of whole micro-batches, M each on average",
    lambda workers, micro=0, most=MOST: Barrier(workers, rule=SharesBySpeed(workers, most)),
    options={
        "micro": whole_number("micro", at_least=1, example="8"),
        "most": number("a number most of at least 1", lambda most: most >= 1),
    },
    machine=lambda worker, last, micro=0, **_: ShareMachine(micro, last),
    capabilities=lambda micro=0, **_: Capabilities(update=MadeOf.ALL, work=PushedWork.SHARE, micro=micro),
    split=Unsound("each stage would measure a speed of its own, and cut the joint batch differently", ("bsp",)),
    promises=EACH_ROUND,
)

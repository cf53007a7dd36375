"""Blocks of local steps at a worker: `local`, `adacomm`, `diloco`, with fragments, overlap and a quorum.

    step         the worker's own optimizer runs on its own values; nothing is sent
    turn         after each period / P local steps one of the P fragments is sent, in the order 1, 2, ..., P - 1, 0, on all
                 workers alike; a fragment's push holds all local steps since its last
    the answer   without overlap the worker waits for it. With overlap S it goes on, and takes the values S local steps after
                 the sending, for which it waits if it must. Where no worker waits for a merge (`quorum`) it takes them
                 between two steps when they are there, and leaves out a turn whose push before is not answered
    the end      all that is unsent is sent, and taken

A worker that joins begins at the turn of the fragment that has made the fewest rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from polytempo.sync.actions import Admit, Release
from polytempo.sync.directives import NextBlock
from polytempo.sync.machine import (
    ASK_AGAIN,
    COMPUTE,
    FINISHED,
    NO_ORDERS,
    AllArrived,
    Asked,
    Computed,
    GoHome,
    Install,
    Leaving,
    Orders,
    SendPush,
    StartsAt,
    StepHere,
    WorkerEvent,
    WorkerMachine,
    WorkerOrder,
)


@dataclass(frozen=True)
class Averaging:
    """What workers do with their models at the end of a block."""

    period: int  #: local steps in the first block
    outer_lr: float = 1.0  #: of the outer step from the anchor towards the mean
    outer_momentum: float = 0.0
    nesterov: bool = False
    in_lr: bool = False  #: the outer momentum is kept in units of the learning rate (block momentum)
    state: str = "keep"  #: what an average does to optimizer state: "keep", "mean" or "reset"
    loss: bool = False  #: pushes bring the mean loss of their block
    lr: bool = False  #: and the learning rate of its last step
    holds_lr: bool = False  #: a fall of the learning rate waits until the period is 1
    fragments: int = 1  #: parts of the model, averaged one after another
    overlap: int = 0  #: local steps from the sending of a fragment to the moment at which its average is taken
    decoupled: bool = False  #: a quorum of pushes is merged, over servers
    waits: bool = True  #: does a worker wait for the average?

    @property
    def plain(self) -> bool:
        """Is the average itself the new model, without an outer step?"""
        return self.outer_lr == 1.0 and self.outer_momentum == 0.0


class FragmentTurns:
    """One fragment of a worker's model."""

    __slots__ = ("allowed", "made", "next", "ready", "started")

    def __init__(self) -> None:
        self.next = 0  # the step of its next push
        self.allowed = -1  # the last step that was released
        self.started = False  # it has its first values
        self.ready = False  # new values have come and are not taken yet
        self.made = 0  # the worker's local steps at the last sending


class BlockMachine(WorkerMachine):
    """Blocks of one worker; `step` and `last` are local steps."""

    brings = "values"

    def __init__(self, averaging: Averaging, last: float = math.inf) -> None:
        super().__init__(last)
        self.parts = averaging.fragments
        self.measures = frozenset(name for name, asked in (("loss", averaging.loss), ("lr", averaging.lr)) if asked)
        self.goes_on = averaging.decoupled  #: one that comes back takes up its data where it left it
        self.turn = 0  #: the next to come
        self.since = 0  #: local steps since the last turn
        self.made = 0  #: local steps in this life
        self._parts = [FragmentTurns() for _ in range(averaging.fragments)]
        self._interval = max(1, averaging.period // averaging.fragments)  # local steps between two turns
        self._takes_early = not averaging.waits
        # Workers that leave do not wait for answers in several fragments: two could wait for each other in different ones.
        self._hurries = self._takes_early and averaging.fragments > 1
        self._overlap: float = math.inf if self._takes_early else averaging.overlap
        self.overlaps = bool(self._overlap)

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        if isinstance(event, Computed):
            return self._computed()
        if isinstance(event, Release):
            return self._released(event, self._parts[part], part)
        if isinstance(event, Asked):
            return NO_ORDERS if self.computes or self.leaving else self._go()
        if isinstance(event, AllArrived):
            return self._end()
        if isinstance(event, Leaving):
            self.leaving = True
        elif isinstance(event, StartsAt):
            self.step = event.made
        elif isinstance(event, Admit):
            self._parts[part].next = event.step
            count = len(self._parts)
            self.turn = min(one.next * count + (number - 1) % count for number, one in enumerate(self._parts))
        return NO_ORDERS

    def _computed(self) -> Orders:
        self.computes = False
        self.made, self.since, self.step = self.made + 1, self.since + 1, self.step + 1
        last = self.leaving or self.done
        if self.since < self._interval and not last:
            return (StepHere(self.step - 1), *self._go())
        count, first = len(self._parts), self.turn
        self.turn, self.since = first + 1, 0
        turns = range(first, first + count if last else first + 1)
        return (StepHere(self.step - 1), *self._sends([(turn + 1) % count for turn in turns]), ASK_AGAIN)

    def _sends(self, numbers: list[int]) -> list[WorkerOrder]:
        """Of these fragments, those that have something to send, and the answer to the push before."""
        orders: list[WorkerOrder] = []
        for number in numbers:
            part = self._parts[number]
            if part.made < self.made and part.next <= part.allowed:
                orders.append(SendPush(part.next, self.made - part.made, number))
                part.made, part.next = self.made, part.next + 1
        return orders

    def _released(self, release: Release, part: FragmentTurns, number: int) -> Orders:
        part.next = part.allowed = release.step
        if isinstance(release.directive, NextBlock):
            self._interval = max(1, release.directive.period // len(self._parts))
        first, part.started, part.ready = not part.started, True, part.started
        taken = [Install(number)] if first else []
        return taken if self.computes else [*taken, *self._go()]

    def _go(self) -> Orders:
        if self.leaving or self._waits() or self.done:
            return FINISHED if self.done else NO_ORDERS
        self.computes = True
        return [*self._takes(), COMPUTE]

    def _waits(self) -> bool:
        """Must this worker wait for values, those of its start or those of a push?"""
        overlap = self.since >= self._overlap
        return any(not part.started or (overlap and part.next > part.allowed) for part in self._parts)

    def _takes(self) -> list[WorkerOrder]:
        takes: list[WorkerOrder] = []
        if self._takes_early or self.done or self.since >= self._overlap:
            for number, part in enumerate(self._parts):
                if part.ready:
                    part.ready = False
                    takes.append(Install(number))
        return takes

    def _end(self) -> Orders:
        """All steps are made, and nothing is under way: send what is left, or go with all answers."""
        orders = self._takes()
        if left := self._sends(list(range(len(self._parts)))):
            return [*orders, *left]
        answered = all(part.next <= part.allowed for part in self._parts)
        return [*orders, GoHome()] if self._hurries or answered else orders


def machine_of_blocks(averaging: Callable[..., Averaging]) -> Callable[..., WorkerMachine]:
    """Makes the machines of a mode, from its argument and options."""
    return lambda worker, last, *argument, **options: BlockMachine(averaging(*argument, **options), last)

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
from collections.abc import Callable, Sequence
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
    EndBlock,
    GoHome,
    Install,
    Leaving,
    Orders,
    SatOut,
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
    own: bool = False  #: does each worker keep a model of its own, which goes a part of the way to the job's?

    @property
    def plain(self) -> bool:
        """Is the average itself the new model, without an outer step?"""
        return self.outer_lr == 1.0 and self.outer_momentum == 0.0


class FragmentTurns:
    """One fragment of a worker's model."""

    __slots__ = ("allowed", "count", "due", "made", "next", "ready", "sent_at", "started")

    def __init__(self) -> None:
        self.next = 0  # the step of its next push
        self.allowed = -1  # the last step that was released
        self.started = False  # it has its first values
        self.ready = False  # new values have come and are not taken yet
        self.made = 0  # the worker's local steps at the last sending
        self.due = 0  # it is sent after this local step
        self.sent_at = 0  # the local step after which the push under way was sent
        self.count = 0  # local steps in that push

    @property
    def is_under_way(self) -> bool:
        """Is the answer to a push of it still to come?"""
        return self.started and self.next > self.allowed


class BlockMachine(WorkerMachine):
    """Blocks of one worker; `step` and `last` are local steps."""

    brings = "values"

    def __init__(self, averaging: Averaging, last: float = math.inf) -> None:
        super().__init__(last)
        self.averaging = averaging  #: what a driver must know of it
        self.parts = averaging.fragments
        self.measures = frozenset(name for name, asked in (("loss", averaging.loss), ("lr", averaging.lr)) if asked)
        self.goes_on = averaging.decoupled  #: one that comes back takes up its data where it left it
        self.turn = 0  #: turns that have come, those of all fragments
        self.at_turn = False  #: has one come with the last local step?
        self.left_out = 0  #: turns of the first fragment at which nothing was sent
        self.made = 0  #: local steps in this life
        self._parts = [FragmentTurns() for _ in range(averaging.fragments)]
        self._period = averaging.period
        self._takes_early = not averaging.waits
        # Workers that leave do not wait for answers in several fragments: two could wait for each other in different ones.
        self._hurries = self._takes_early and averaging.fragments > 1
        self._overlap: float = math.inf if self._takes_early else averaging.overlap
        self.overlaps = bool(self._overlap)
        self._ends = False  # what was made is sent and taken, before any further step
        self._restarts = False  # and then the turns start anew

    @property
    def upcoming(self) -> int:
        """The fragment whose turn is next: all workers begin and finish rounds in this order."""
        return self._in_turn()[0]

    @property
    def awaited(self) -> list[int]:
        """The fragments whose answers this worker waits for: the first of them, or where no worker waits, any."""
        under_way = [number for number in self._in_turn() if self._parts[number].is_under_way]
        return under_way if self._takes_early else under_way[:1]

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        if isinstance(event, Computed):
            return self._computed()
        if isinstance(event, Release):
            return self._released(event, self._parts[part], part)
        if isinstance(event, Asked):
            if self.computes:  # the script is between two steps
                return self._takes() if self._takes_early else NO_ORDERS
            return NO_ORDERS if self.leaving or self._ends else self._go()
        if isinstance(event, AllArrived):
            return self._end()
        if isinstance(event, EndBlock):
            self._ends, self.computes, self._restarts = True, False, event.restarts
            return self._end_block()
        if isinstance(event, Leaving):
            self.leaving = True
        elif isinstance(event, SatOut):
            self._parts[part].due += max(self._period, 1)
        elif isinstance(event, StartsAt):
            self.step = event.made
        elif isinstance(event, Admit):
            self._parts[part].next = event.step
            count = len(self._parts)
            self.turn = min(one.next * count + (number - 1) % count for number, one in enumerate(self._parts))
            self._start_turns()
        return NO_ORDERS

    # Turns.

    def _start_turns(self) -> None:
        """The fragments are due in their order, from the turn that is next on."""
        count, done = len(self._parts), self.turn % len(self._parts)
        for number, part in enumerate(self._parts):
            place = number or count  # in a cycle: 1, 2, ..., P - 1, 0
            cycle = 0 if place > done else self._period
            part.due = self.made + cycle + place * self._period // count - done * self._period // count

    def _in_turn(self) -> list[int]:
        """All fragments, the one whose turn is next first."""
        count = len(self._parts)
        return sorted(range(count), key=lambda number: (self._parts[number].due, (number - 1) % count))

    def _computed(self) -> Orders:
        self.computes = False
        self.made, self.step = self.made + 1, self.step + 1
        # What is sent of values that a worker takes between any two steps is a difference to those taken last.
        takes = self._takes() if self._takes_early else []
        last = self.leaving or self.done
        due = [number for number in self._in_turn() if last or self._parts[number].due <= self.made]
        self.at_turn = bool(due)
        if not due:
            return (StepHere(self.step - 1), *takes, *self._go())
        self.turn += 1 if last else len(due)
        sends = self._sends(due)
        if self._takes_early:
            for number in due:
                self._parts[number].due += max(self._period, 1)
            self.left_out += 0 in due and not any(send.part == 0 for send in sends)
        return (StepHere(self.step - 1), *takes, *sends, ASK_AGAIN)

    def _sends(self, numbers: Sequence[int], empty: bool = False) -> list[SendPush]:
        """Of these fragments, those that have something to send (or `empty`), and the answer to the push before."""
        orders = []
        for number in numbers:
            part = self._parts[number]
            if (part.made < self.made or empty) and not part.is_under_way:
                part.count = self.made - part.made
                orders.append(SendPush(part.next, part.count, number))
                part.made, part.sent_at, part.next = self.made, self.made, part.next + 1
        return orders

    # Answers.

    def _released(self, release: Release, part: FragmentTurns, number: int) -> Orders:
        if isinstance(release.directive, NextBlock):
            self._period = release.directive.period
        if part.is_under_way and not self._takes_early:
            part.due += max(self._period, 1)  # from when it was due: fragments keep their order
        part.next = part.allowed = release.step
        first, part.started, part.ready = not part.started, True, part.started
        if first and self.made == 0:
            self._start_turns()
        taken: list[WorkerOrder] = [Install(number)] if first else []
        if self._ends:
            return [*taken, *self._end_block()]
        return taken if self.computes else [*taken, *self._go()]

    def _go(self) -> Orders:
        if self.leaving or self._waits() or self.done:
            return FINISHED if self.done else NO_ORDERS
        self.computes = True
        return [*self._takes(), COMPUTE]

    def _waits(self) -> bool:
        """Must this worker wait for values, those of its start or those of a push?"""
        return any(not part.started or (part.is_under_way and self._is_over(part)) for part in self._parts)

    def _is_over(self, part: FragmentTurns) -> bool:
        """Has it made all local steps that it may make on the values before?"""
        return self.made >= part.sent_at + self._overlap

    def _takes(self) -> list[WorkerOrder]:
        takes: list[WorkerOrder] = []
        for number, part in enumerate(self._parts):
            if part.ready and (self._takes_early or self.done or self._ends or self._is_over(part)):
                part.ready, part.count = False, 0
                takes.append(Install(number))
        return takes

    # The end of a block, and of all.

    def _end_block(self) -> Orders:
        """Take what is under way, then send and take what was made since: one fragment after another, as in a block, so
        that workers which are in one follow the same order. Where no worker waits for a merge it has a push of every
        fragment pending meanwhile, an empty one where it has no change: workers that leave at the same time wait for each
        other's pushes, and none is missing in a merge that another waits for."""
        orders, turns = self._takes(), self._in_turn()
        unsent = [number for number in turns if self._parts[number].made < self.made]
        if self._takes_early:
            if unsent or any(part.is_under_way and part.count for part in self._parts):
                return [*orders, *self._sends(turns, empty=True)]
        elif any(part.is_under_way for part in self._parts):
            return orders
        elif unsent:
            return [*orders, *self._sends(unsent[:1])]
        self._ends, self.computes = False, True
        if self._restarts:
            self.turn += -self.turn % len(self._parts)
            self._start_turns()
        return [*orders, COMPUTE]

    def _end(self) -> Orders:
        """All steps are made, and nothing is under way: send what is left, or go with all answers."""
        orders = self._takes()
        if left := self._sends(range(len(self._parts))):
            return [*orders, *left]
        answered = not any(part.is_under_way for part in self._parts)
        return [*orders, GoHome()] if self._hurries or answered else orders


def machine_of_blocks(averaging: Callable[..., Averaging]) -> Callable[..., WorkerMachine]:
    """Makes the machines of a mode, from its argument and options."""
    return lambda worker, last, *argument, **options: BlockMachine(averaging(*argument, **options), last)

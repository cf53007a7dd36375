"""What follows a call that failed on some ranks: all ranks give up the same calls, and go on with the next.

Ranks may be at different calls when they learn of a failure: one has only sent and is far ahead, another has not begun. One
that has not come to the call that failed ends the calls before it first: who failed has sent all that these need.
Calls keep their numbers, so ranks need to agree on one number only: up to which call all is void. Each rank tells all others
how many calls it had made when it opened the lane again; the largest number counts. Void calls end with the failure on
every rank, whichever of them they had made already; a rank none of whose calls was under way gets it with its next one.

What is told travels behind everything this rank has sent before. So whoever has heard it from all ranks has all that is left
of the void calls, and drops it. Numbers of meetings go on from the largest, since what was heard of them stays heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import numpy

from polytempo.collectives.failures import LAST_CALL
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.tasks import CallQueue, Settled, Steps
from polytempo.errors import PeerError
from polytempo.transport.peer_link import DATA, LinkMessage


class Recovery:
    """Of one group, on one rank."""

    def __init__(self, engine: ProgressEngine, lane: CallQueue, start_over: Callable[[], object]) -> None:
        self._engine, self._lane = engine, lane
        self._start_over = start_over  # what ranks may have done in part
        self._why: Exception | None = None
        self._agreed = True
        self.meetings: Iterator[int] = count(1)  #: numbers of the notes

    def open_again(self, calls: int) -> None:
        """If the lane has failed, but not for good, open it: this rank has made so many calls."""
        lane = self._lane
        while lane.failed is not None and not lane.final:
            self._why, self._agreed = lane.failed, False
            lane.void = max(lane.void, calls if lane.told else calls + 1)
            lane.open_again()

    def agree(self) -> Steps:
        """At once, and not only with the next call: another rank's call may wait for it."""
        if not self._agreed:
            yield from self._agree()

    def clear(self, number: int) -> Steps:
        """Before a call: it is refused if it is void."""
        self._refuse(number)
        if not self._agreed:
            yield from self._agree()
            self._refuse(number)

    def _refuse(self, number: int) -> None:
        if number <= self._lane.void and self._why is not None:
            raise Settled(self._why)

    def _agree(self) -> Steps:
        lane, generation = self._lane, self._lane.generation
        tag, others = -LAST_CALL - generation, [rank for rank in self._lane.ranks if rank != self._engine.rank]
        mine = numpy.array([lane.void, next(self.meetings)], dtype=numpy.int64)
        receipts = [self._engine.expect(lane.context, tag, rank, mine.nbytes) for rank in others]
        for rank in others:
            self._engine.send(rank, LinkMessage(DATA, lane.context, tag), mine.view(numpy.uint8))
        views = [mine]
        for receipt in receipts:
            if not receipt.done:
                yield self._engine.until(receipt)
            if receipt.problem or receipt.buffer is None:
                raise PeerError(receipt.problem or f"rank {receipt.source} said nothing")
            views.append(receipt.buffer.view(numpy.int64).copy())
            self._engine.pool.give(receipt.buffer)
        lane.void, met = (int(number) for number in numpy.max(views, axis=0))
        self.meetings = count(met + 1)
        self._engine.forget(lane.context, lane.void)
        self._start_over()
        self._agreed = True
        self._engine.has_ended(lane, lane.void)

"""The calls of groups on one rank: their order, that ranks make the same ones, and what follows when one fails.

All ranks of a group make the same calls in the same order, so a call is known by its number. The first message of a call
carries its description; a rank that makes a different call under that number fails it on all ranks.

Recovery. Ranks may be at different calls when they learn of a failure: one has only sent and is far ahead, another has not
begun. A rank that has not come to the failed call ends the calls before it first: the rank that failed has sent all that
these need. Calls keep their numbers, so ranks agree on one number only: up to which call all is void. Each rank tells the
others how many calls it had made when it opened its queue again; the largest number counts. Void calls end with the
failure on every rank, whichever of them it had made already; a rank none of whose calls was under way gets the failure with
its next one.

What is told travels behind everything that a rank has sent before. So a rank that has heard it from all others has all that
is left of the void calls, and drops it. Numbers of barriers continue from the largest, since a notification stays.

    tag of FAILED:   rank lost + 1, or 0  |  generation of the queue << 32  |  1 << 62 where it is final
    meta of FAILED:  the number of the call that failed, or 0 where that does not matter, and the text
    tags of DATA:    the number of the call, or less than 0 to measure; below -LAST_CALL: what recovery agrees on
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from operator import itemgetter

import numpy

from polytempo.collectives.messaging import Messaging
from polytempo.collectives.tasks import Settled, Steps, Task
from polytempo.errors import PeerError, RankLost
from polytempo.transport.deadline import listed
from polytempo.transport.peer_link import DATA, FAILED, LinkMessage

#: Tags of calls are not larger than this, either way.
LAST_CALL = (1 << 40) - 1
_RANKS, _GENERATIONS, _FINAL = (1 << 32) - 1, (1 << 30) - 1, 1 << 62
#: Bytes of the text of a failure.
_LONGEST = 60_000
#: Calls of a group whose descriptions are remembered, to compare them with those of ranks that are behind.
REMEMBERED = 256


class CallQueue:
    """Calls in their order. `failed`: why nothing of it can go on, and what to raise, until it is opened again."""

    def __init__(self, context: int, ranks: tuple[int, ...]) -> None:
        self.context = context
        self.ranks = ranks  #: that take part
        self.failed: Exception | None = None
        self.final = False  #: it stays failed
        self.told = False  #: a call of this rank has ended with the failure
        self.generation = 0  #: how often it was opened again
        self.void = 0  #: calls up to this number have failed, here or elsewhere
        self.finished = 0  #: calls up to this number have ended here
        self.later: tuple[int, Exception] | None = None  #: a call that this rank has not come to has failed elsewhere
        self.early: dict[int, tuple[Exception, bool]] = {}  #: failures of generations that this rank has not reached
        self.heard: LinkMessage | None = None  #: the last failure that another rank has told
        self.tasks: deque[Task] = deque()
        self.when_failed: Callable[[], object] = lambda: None  #: opens it again, unless that is final

    def open_again(self) -> None:
        """A new generation, in which other ranks may have failed already."""
        self.generation += 1
        self.later = None
        error, self.final = self.early.pop(self.generation, (None, False))
        self.told, self.failed = False, error


def failure(queue: CallQueue, error: Exception, final: bool, number: int) -> LinkMessage:
    """For all other ranks of the queue: call `number` has failed."""
    lost = error.ranks[0] + 1 if isinstance(error, RankLost) else 0
    tag = lost | queue.generation << 32 | (_FINAL if final else 0)
    return LinkMessage(FAILED, queue.context, tag, f"{number} {error}".encode()[:_LONGEST])


def read_failure(message: LinkMessage) -> tuple[PeerError, int, bool, int]:
    """The error, the generation in which it happened, whether it is final, and the number of the call."""
    whole = message.meta.decode(errors="replace")
    number, _, text = whole.partition(" ")
    if not (number.isascii() and number.isdigit() and len(number) < 20):
        number, text = "0", whole  # whatever it is: it has failed
    lost = message.tag & _RANKS
    error = RankLost(text, (lost - 1,)) if lost else PeerError(text)
    return error, message.tag >> 32 & _GENERATIONS, bool(message.tag & _FINAL), int(number)


class CallQueues:
    """The queues of all groups of a process."""

    def __init__(self, messages: Messaging) -> None:
        self._messages = messages
        self._queues: dict[int, CallQueue] = {}  # by context
        self._calls: dict[int, dict[int, str]] = {}  # of this rank, by context and number
        self._others: dict[int, dict[int, list[tuple[int, str]]]] = {}  # of ranks that are ahead
        messages.on_call = self._call_elsewhere
        messages.on_failure(self._failure_elsewhere)

    def __iter__(self) -> Iterator[CallQueue]:
        return iter(list(self._queues.values()))  # another thread may open one meanwhile

    def open(self, context: int, ranks: tuple[int, ...]) -> CallQueue:
        """A queue for calls of these ranks."""
        queue = self._queues.setdefault(context, CallQueue(context, ranks))  # at once: others may fail in it at this moment
        queue.ranks = ranks
        return queue

    def declare(self, queue: CallQueue, number: int, call: str) -> None:
        """This rank now makes call `number` of a group: this one."""
        calls = self._calls.setdefault(queue.context, {})
        calls[number] = call
        calls.pop(number - REMEMBERED, None)
        for source, theirs in self._others.get(queue.context, {}).pop(number, ()):
            self._compare(queue, number, source, theirs)
        if queue.failed is not None:
            raise queue.failed
        if number <= queue.void:
            raise PeerError(f"{call} has failed")  # just now, in `_compare`: its task has ended with the cause
        if lost := [rank for rank in queue.ranks if rank in self._messages.crashed]:  # one that left may have done its part
            raise self._messages.loss(lost)

    def _compare(self, queue: CallQueue, number: int, source: int, theirs: str) -> None:
        mine = self._calls[queue.context].get(number)
        if mine is not None and mine != theirs and queue.failed is None and number > queue.void:
            both = f"rank {self._messages.rank} calls {mine} where rank {source} calls {theirs}"
            where = f"call {number} of group {listed(queue.ranks)}"
            wrong = PeerError(f"{both} ({where}); all ranks must make the same calls in the same order")
            self.fail(queue, wrong, number=number)

    def fail(
        self,
        queue: CallQueue,
        error: Exception,
        tell: bool = True,
        final: bool = False,
        told: bool = False,
        number: int | None = None,
    ) -> None:
        """Nothing of this queue can go on: for good, where it is final, or until it is opened again (`Recovery`).

        `number`: of the call that has failed; the one after the last that has ended, if it is not said.
        """
        final |= isinstance(error, RankLost)
        if queue.failed is not None:
            queue.final |= final
            return
        message = failure(queue, error, final, 0 if final else queue.finished + 1 if number is None else number)
        queue.told = told or any(not task.done for task in queue.tasks)
        queue.final = final
        queue.failed = error  # last: a caller that sees it may open the queue again at once
        if tell:
            self.spread(queue, message)
        self._messages.mailbox.drop(queue.context, LAST_CALL)
        while queue.tasks:
            queue.tasks.popleft().finish(None, error)
        if not final:
            queue.when_failed()

    def spread(self, queue: CallQueue, message: LinkMessage) -> None:
        """Send to all other ranks of a queue."""
        for rank in queue.ranks:
            if rank != self._messages.rank and rank not in self._messages.left:
                self._messages.links[rank].send(message)

    def pass_on(self) -> None:
        """Repeat the failures that others have told, before this rank leaves because of them: a rank that was not told yet
        would see this one go, and name it as the cause."""
        for queue in self:
            if queue.heard is not None:
                self.spread(queue, queue.heard)

    def forget(self, context: int, number: int) -> None:
        """Drop what is left of calls up to this one: all ranks have given them up."""
        self._messages.mailbox.drop(context, number)
        others = self._others.get(context, {})
        for old in [call for call in others if call <= number]:
            del others[old]

    def finish(self, queue: CallQueue, number: int) -> None:
        """Calls up to this one have ended here: a failure elsewhere of the call after it counts from now on."""
        queue.finished = max(queue.finished, number)
        if queue.later is not None and queue.later[0] <= queue.finished + 1:
            self.fail(queue, queue.later[1], tell=False)

    def _failure_elsewhere(self, message: LinkMessage) -> None:
        queue = self._queues.setdefault(message.context, CallQueue(message.context, ()))
        if not queue.final:
            queue.heard = message
        error, generation, final, number = read_failure(message)
        if final or (generation == queue.generation and number <= queue.finished + 1):
            self.fail(queue, error, tell=False, final=final)
        elif generation == queue.generation:  # calls before it can end here: all that they need was sent before this
            queue.later = (number, error) if queue.later is None else min(queue.later, (number, error), key=itemgetter(0))
        elif generation > queue.generation:
            queue.early.setdefault(generation, (error, final))

    def _call_elsewhere(self, source: int, message: LinkMessage) -> None:
        """Meta: the number of a call, and the call."""
        number, _, call = message.meta.decode(errors="replace").partition(" ")
        if not (number.isascii() and number.isdigit() and len(number) < 20):
            raise PeerError("it sent something that is no message")
        queue, made = self._queues.get(message.context), int(number)
        if queue is not None and made <= queue.void:
            return
        if queue is not None and made in self._calls.get(message.context, {}):
            self._compare(queue, made, source, call)
        elif queue is None or made > max(self._calls.get(message.context, {}), default=-1):
            self._others.setdefault(message.context, {}).setdefault(made, []).append((source, call))


class Recovery:
    """Of one group, on one rank."""

    def __init__(self, messages: Messaging, queues: CallQueues, queue: CallQueue, start_over: Callable[[], object]) -> None:
        self._messages, self._queues, self._queue = messages, queues, queue
        self._start_over = start_over  # what ranks may have done in part
        self._why: Exception | None = None
        self._agreed = True
        self.barriers: Iterator[int] = count(1)  #: numbers of the group's barriers

    def open_again(self, calls: int) -> None:
        """If the queue has failed, but not for good, open it: this rank has made this many calls."""
        queue = self._queue
        while queue.failed is not None and not queue.final:
            self._why, self._agreed = queue.failed, False
            queue.void = max(queue.void, calls if queue.told else calls + 1)
            queue.open_again()

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
        if number <= self._queue.void and self._why is not None:
            raise Settled(self._why)

    def _agree(self) -> Steps:
        messages, queue, generation = self._messages, self._queue, self._queue.generation
        tag, others = -LAST_CALL - generation, [rank for rank in queue.ranks if rank != messages.rank]
        mine = numpy.array([queue.void, next(self.barriers)], dtype=numpy.int64)
        receipts = [messages.expect(queue.context, tag, rank, mine.nbytes) for rank in others]
        for rank in others:
            messages.send(rank, LinkMessage(DATA, queue.context, tag), mine.view(numpy.uint8))
        views = [mine]
        for receipt in receipts:
            if not receipt.done:
                yield messages.until(receipt)
            if receipt.problem or receipt.buffer is None:
                raise PeerError(receipt.problem or f"rank {receipt.source} sent an empty message")
            views.append(receipt.buffer.view(numpy.int64).copy())
            messages.pool.give(receipt.buffer)
        queue.void, reached = (int(number) for number in numpy.max(views, axis=0))
        self.barriers = count(reached + 1)
        self._queues.forget(queue.context, queue.void)
        self._start_over()
        self._agreed = True
        self._queues.finish(queue, queue.void)

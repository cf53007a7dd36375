"""Messages between the workers of an optimizer beside their collectives: tensors, and notes that only grow.

`PeerMessages` are those of rounds in which workers add up what they have; a rank that is lost is an error there.

`NeighbourLinks` send and receive in the background, by rank and tag, over the links of the world. A rank that is gone ends
every wait for it: its link has closed, or the sequencer has said that it left (a link between hosts may stay open for a
while after its process has died). What it had sent before its link closed is still received. A rank that is there and does
not take or bring what is due is reported by name after a while, and is an error after `LONGEST`.

`RequestService` answers other workers at any time, while the worker itself computes: one thread for all kinds of requests of
an optimizer. It must have ended before the process does: the interpreter's end would abort it inside of torch.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.point_to_point import listen, receive, send
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.tasks import Steps, Task, Wait
from polytempo.collectives.world import World
from polytempo.errors import PeerError, RankLost
from polytempo.session.session import Session
from polytempo.transport.deadline import Deadline

#: The part of an optimizer's contexts that the messages of rounds have.
BESIDE = 1
#: Seconds after which a rank that leaves no longer waits until what it has sent is gone.
LAST_WAIT = 10.0
#: Seconds in which a message must come through, once it is on its way.
LONGEST = 600.0
#: Seconds in which what a rank has sent may still come, once the sequencer has said that it is gone.
LAST_WORDS = 3.0
#: Seconds between two calls of `tick`, while it asks for them.
TICK = 0.2
#: Messages on their way, and to which rank.
Sending = list[tuple[int, Task]]


def traffic_of(engine: ProgressEngine) -> tuple[int, int]:
    """Bytes to and from other ranks of the job so far."""
    messages = engine.messages
    return sum(link.payload_sent for link in messages.links.values()), messages.payload_received


class PeerMessages:
    """The messages of one optimizer, on one rank.

    Args:
        world: All ranks of the job.
        members: Those of the optimizer.
        number: The number of the optimizer in the job.
    """

    def __init__(self, world: World, members: Sequence[int], number: int) -> None:
        self.world, self.rank, self.number = world, world.rank, number
        self.group = world.group_of_optimizer(members, number, BESIDE)
        self._notes = self.group.context + 1  # the context of notes
        self._tasks: list[Task] = []  # what is sent in the background

    def send(self, tensors: Iterable[torch.Tensor], rank: int, tag: int) -> None:
        """Send tensors of the host to a rank, in the background; they stay as they are from now on."""
        to = self.group.ranks.index(rank)
        self._tasks = [task for task in self._tasks if not task.done]
        self._tasks += [send(self.group, tensor, to, tag, background=True) for tensor in tensors]

    def receive(self, tensors: Iterable[torch.Tensor], rank: int, tag: int) -> None:
        """Fill tensors of the host with what a rank has sent.

        Raises:
            RankLost: The rank is lost.
        """
        source = self.group.ranks.index(rank)
        for tensor in tensors:
            receive(self.group, tensor, source, tag).wait()

    def settle(self) -> None:
        """Wait, for a while, until what was sent is gone: a rank that is stopped does not receive."""
        with suppress(PeerError):
            for task in self._tasks:
                task.wait(LAST_WAIT)

    # Notes: whole numbers that only grow.

    def note(self, ranks: Iterable[int], number: int) -> None:
        """Tell these ranks a number; those that are lost are left out."""
        messages, context = self.world.engine.messages, self._notes

        def steps() -> Steps:
            there = [rank for rank in ranks if rank != self.rank and rank not in messages.left]
            messages.notify(there, context, number)
            return
            yield

        self._run("telling how a round went", steps())

    def noted(self, rank: int) -> int:
        """The last number that a rank has told; -1 before the first."""
        return self.world.engine.messages.notified.get((rank, self._notes), -1)

    def wait_for(self, missing: Callable[[], list[int]], name: str) -> None:
        """Wait until no rank is missing, by what ranks have told, and which are lost."""

        def steps() -> Steps:
            yield Wait(lambda: not missing(), missing)

        self._run(name, steps())

    def is_lost(self, rank: int) -> bool:
        """Has a rank ended, as far as this one knows?"""
        return rank in self.world.engine.messages.left

    def _run(self, name: str, steps: Steps) -> Any:
        engine = self.world.engine
        return engine.start(CallQueue(-1, self.group.ranks), name, steps, False, self.group.timeout).wait()

    # Figures.

    def traffic(self) -> tuple[int, int]:
        """Bytes to and from other ranks of the job."""
        return traffic_of(self.world.engine)

    def handed(self, context: int) -> int:
        """Bytes handed to other ranks in the group of a context."""
        handed = self.world.engine.messages.handed
        return handed[context] + handed[context + 1]


class NeighbourLinks:
    """One optimizer's messages. All workers make their optimizers in the same order, so each has tags of its own."""

    def __init__(self, session: Session) -> None:
        group = session.world().new_group(range(session.size))
        assert group is not None
        group.timeout = LONGEST
        self._session, self._group, self.rank = session, group, session.rank
        self._departed: set[int] = set()
        session.when_departed(self._departed.add)

    def is_gone(self, rank: int) -> bool:
        """Has a rank left the job, or died?"""
        return rank in self._departed or rank in self._group.engine.messages.left

    def has_crashed(self, rank: int) -> bool:
        """Has the link to a rank closed without a goodbye?"""
        return rank in self._group.engine.messages.crashed

    # Sending.

    def send(self, data: torch.Tensor, to: Iterable[int], tag: int) -> Sending:
        """Send to these ranks in the background; `data` must not change before `settle` has returned."""
        return [(rank, send(self._group, data, rank, tag, background=True)) for rank in to]

    def settle(self, sending: Sending) -> None:
        """Wait until what was sent may be changed again."""
        for rank, task in sending:
            self.finish(task, rank)
        sending.clear()

    # Receiving.

    def receive(self, data: torch.Tensor, source: int, tag: int, patience: float = LONGEST) -> bool:
        """Receive from a rank. False: it is gone, or brings nothing for `patience` seconds; `data` may change later then."""
        return self.finish(self.start_receive(data, source, tag), source, patience)

    def start_receive(self, data: torch.Tensor, source: int, tag: int, due: bool = True) -> Task:
        """Receive in the background. Where it is not `due` yet, the wait for it begins with `finish`."""
        task = receive(self._group, data, source, tag, background=True)
        task.idle = not due
        return task

    def listen(self, data: torch.Tensor, tag: int) -> Task:
        """Receive from any rank what need not come; the task ends with an error when the links are closed."""
        return listen(self._group, data, tag)

    # Waiting.

    def finish(self, task: Task, rank: int, patience: float = LONGEST) -> bool:
        """Wait for a message from or to a rank; whether it came through.

        Raises:
            PeerError: The links of this worker are closed, or the rank neither ended nor moved for `LONGEST` seconds.
        """
        deadline, gone = Deadline(self.rank, patience), None
        while not task.done and not deadline.over:
            task.wait_quietly(deadline.until_next_look)
            if not task.done:
                if task.idle:  # the engine reports the others
                    deadline.report(lambda: f"in {task.name}, for rank {rank}")
                self._listen()
                if rank in self._departed and gone is None:
                    gone = Deadline(self.rank, LAST_WORDS, firm=True)
                if gone is not None and gone.over:
                    return False
        if not task.done and patience == LONGEST:
            raise PeerError(deadline.line(f"in {task.name}, for rank {rank}"))
        if task.error is not None and not isinstance(task.error, RankLost):
            raise PeerError(str(task.error))
        if task.error is not None and rank not in self._departed:
            self._session.world().confirm_loss([self.rank, rank])
        return task.done and task.error is None

    def _listen(self) -> None:
        """Hear which workers have left."""
        session = self._session
        if session.client is not None and session.lock.acquire(blocking=False):
            try:
                session.client.poll()
            finally:
                session.lock.release()

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from other workers so far."""
        return traffic_of(self._group.engine)


class RequestService:
    """The requests of one optimizer.

    A kind of request has a tag and memory for one message. Its handler is called with the rank that sent it; the next
    message of the kind is received after that. The thread ends with `stop`, or when the links are closed or all other
    workers are gone.
    """

    def __init__(self, links: NeighbourLinks) -> None:
        self._links = links
        self._kinds: dict[int, tuple[torch.Tensor, Callable[[int], None]]] = {}
        self._came: SimpleQueue[tuple[int, Task] | None] = SimpleQueue()
        self.tick: Callable[[], bool] = lambda: False  #: called after each request; and soon again, if it says so
        self._thread = threading.Thread(target=self._serve, name="polytempo-requests", daemon=True)

    def on(self, tag: int, data: torch.Tensor, handle: Callable[[int], None]) -> None:
        """Receive requests of a kind into `data`; before `start`."""
        self._kinds[tag] = data, handle

    def start(self) -> None:
        """Answer from now on."""
        for tag in self._kinds:
            self._listen(tag)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more; returns when the thread has ended."""
        self._came.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _listen(self, tag: int) -> None:
        self._links.listen(self._kinds[tag][0], tag).when_done(lambda task: self._came.put((tag, task)))

    def _serve(self) -> None:
        left, again = set(self._kinds), False
        with torch.no_grad():
            while left:
                try:
                    came = self._came.get(timeout=TICK if again else None)
                    if came is None:
                        return
                    if came[1].error is None:
                        self._handle(came[0], int(came[1].result))
                    else:
                        left.discard(came[0])
                except Empty:
                    pass
                again = self.tick()

    def _handle(self, tag: int, source: int) -> None:
        try:
            self._kinds[tag][1](source)
        except Exception:  # noqa: BLE001  the workers that ask must be answered, and this one must hear of it
            sys.stderr.write(f"polytempo: rank {self._links.rank} failed to answer:\n{traceback.format_exc()}")
        self._listen(tag)

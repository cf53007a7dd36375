"""What drives all links and tasks of a process: one thread at a time.

A blocking call drives by itself: nothing is handed to anybody. From the first task that nobody waits for at once, a thread
of its own drives for good; calls then reach it through a queue, and who waits, waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from operator import itemgetter

from polytempo.collectives.failures import LAST_CALL, failure, read_failure
from polytempo.collectives.mailbox import Mailbox, Receipt
from polytempo.collectives.shutdown import Links, abruptly_closed, let_go_after_fork, politely_closed
from polytempo.collectives.tasks import CallQueue, Steps, Task, Wait
from polytempo.errors import PeerError, RankLost
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes
from polytempo.transport.deadline import Deadline, listed, named
from polytempo.transport.memory import WakeUp
from polytempo.transport.peer_link import BYE, DATA, FAILED, NOTE, SEGMENT, LinkMessage, PeerLink
from polytempo.transport.poller import Poller
from polytempo.transport.shared_memory import Segment

#: Calls of a group whose descriptions are remembered, to compare them with those of ranks that are behind.
REMEMBERED = 256
#: What is under way when a member crashes may end well if it needs it no more: it is given so many seconds.
GRACE = 0.5


class ProgressEngine:
    """The links and tasks of one process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.links = Links()
        self.payload_received = 0
        self.left: dict[int, str] = {}  #: who is gone, and why
        self.pool = Pool()
        self.post = Mailbox(self.pool)
        self.heard: dict[tuple[int, int], int] = {}  #: (source, context) -> the highest note
        self.segments: dict[tuple[int, int, int], Segment] = {}  #: (source, context, tag)
        self._lanes: dict[int, CallQueue] = {}  # by context
        self._free: list[Task] = []  # tasks of no lane
        self._calls: dict[int, dict[int, str]] = {}  # of mine, by context and number
        self._others: dict[int, dict[int, list[tuple[int, str]]]] = {}  # of others who are ahead
        self._polite: set[int] = set()  # who has said goodbye
        self._crashed: dict[int, float] = {}  # who has not, and since when
        self._submitted: deque[Task] = deque()
        self._poller = Poller()
        self._bell = WakeUp()
        self._poller.register(self._bell.fileno, 1)
        self._driving, self._starting = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._reserve: threading.Thread | None = None
        self._needed = threading.Event()
        self._closing = False
        self._closes: Callable[[PeerLink], None] | None = None
        self._closed = threading.Event()
        self.when_closed: Callable[[], None] = lambda: None
        self._idle = Deadline(rank)  # without a time-out
        self._looks_at = 0.0
        let_go_after_fork(self.links)

    def attach(self, links: Iterable[PeerLink]) -> None:
        """Use these links from now on."""
        for link in links:
            self.links[link.rank] = link
            link.attach(self._poller)

    # What tasks use.

    def send(
        self, to: int, message: LinkMessage, payload: Bytes | None = None, sent: Callable[[], object] | None = None
    ) -> None:
        """Send to a rank; `PeerError` when it is gone."""
        if to in self.left:
            raise self._loss([to])
        self.links[to].send(message, payload, sent)

    def expect(self, context: int, tag: int, sender: int | None, length: int, buffer: Bytes | None = None) -> Receipt:
        """Post a receive; wait for it with `until`."""
        return self.post.expect(context, tag, sender, length, buffer)

    def until(self, receipt: Receipt, among: Iterable[int] = ()) -> Wait:
        """Until a receipt is done; `among`: whoever it may come from."""
        return Wait(lambda: receipt.done, lambda: [receipt.sender] if receipt.sender is not None else list(among))

    def tell(self, ranks: Iterable[int], context: int, number: int, meta: bytes = b"") -> None:
        """Send a note: I am so far."""
        for rank in ranks:
            self.send(rank, LinkMessage(NOTE, context, number, meta))

    def until_heard(self, ranks: Iterable[int], context: int, number: int) -> Wait:
        """Until all of these are so far."""
        others, heard = [(rank, context) for rank in ranks], self.heard

        def ready() -> bool:
            return all([heard.get(key, -1) >= number for key in others])  # noqa: C419  a list is faster, and they are few

        return Wait(ready, lambda: [key[0] for key in others if heard.get(key, -1) < number])

    def declare(self, lane: CallQueue, number: int, call: str) -> None:
        """This rank now makes call `number` of a group: this one."""
        calls = self._calls.setdefault(lane.context, {})
        calls[number] = call
        calls.pop(number - REMEMBERED, None)
        for source, theirs in self._others.get(lane.context, {}).pop(number, ()):
            self._compare(lane, number, source, theirs)
        if lane.failed is not None:
            raise lane.failed
        if number <= lane.void:
            raise PeerError(f"{call} has failed")  # just now, in `_compare`: its task has ended with the cause
        if lost := [rank for rank in lane.ranks if rank in self._crashed]:  # who has left may have done its part
            raise self._loss(lost)

    def _compare(self, lane: CallQueue, number: int, source: int, theirs: str) -> None:
        mine = self._calls[lane.context].get(number)
        if mine is not None and mine != theirs and lane.failed is None and number > lane.void:
            both = f"rank {self.rank} calls {mine} where rank {source} calls {theirs}"
            where = f"call {number} of group {listed(lane.ranks)}"
            wrong = PeerError(f"{both} ({where}); all ranks must make the same calls in the same order")
            self.fail(lane, wrong, number=number)

    def fail(
        self,
        lane: CallQueue,
        error: Exception,
        tell: bool = True,
        final: bool = False,
        told: bool = False,
        number: int | None = None,
    ) -> None:
        """Nothing of this lane can go on: for good, where it is final, or until it is opened again (`recovery.py`).

        `number`: of the call that has failed; the one after the last that has ended, if it is not said.
        """
        final |= isinstance(error, RankLost)
        if lane.failed is not None:
            lane.final |= final
            return
        message = failure(lane, error, final, 0 if final else lane.finished + 1 if number is None else number)
        lane.told = told or any(not task.done for task in lane.queue)
        lane.final = final
        lane.failed = error  # last: a caller who sees it may open the lane again at once
        if tell:
            self.spread(lane, message)
        self.post.drop(lane.context, LAST_CALL)
        while lane.queue:
            lane.queue.popleft().finish(None, error)
        if not final:
            lane.when_failed()

    def spread(self, lane: CallQueue, message: LinkMessage) -> None:
        """To all others of a lane."""
        for rank in lane.ranks:
            if rank != self.rank and rank not in self.left:
                self.links[rank].send(message)

    def forget(self, context: int, number: int) -> None:
        """What is left of calls up to this one: all ranks have given them up."""
        self.post.drop(context, number)
        others = self._others.get(context, {})
        for old in [count for count in others if count <= number]:
            del others[old]

    # What callers use.

    def open_lane(self, context: int, ranks: tuple[int, ...]) -> CallQueue:
        """A lane for calls of these ranks."""
        lane = self._lanes.setdefault(context, CallQueue(context, ranks))  # at once: others may fail in it at this moment
        lane.ranks = ranks
        return lane

    def start(
        self, lane: CallQueue, name: str, steps: Steps, background: bool, timeout: float | None = None, number: int = 0
    ) -> Task:
        """Put a task in its lane's queue; with `background`, it goes on whether or not anybody waits."""
        task = Task(self, lane, name, steps, timeout)
        task.number = number
        if self._closing:
            task.finish(None, PeerError("the group was closed"))
            return task
        self._submitted.append(task)
        if background:
            self._drive_in_background()
        if self._driving.locked():
            self._bell.ring()
        if self._closing:  # just now
            task.finish(None, PeerError("the group was closed"))
        return task

    def has_submitted(self, lane: CallQueue) -> bool:
        """Has a task of this lane been handed over that is not in its queue yet? For who drives."""
        return any(task.lane is lane for task in list(self._submitted))

    def begin(self, lane: CallQueue, name: str, steps: Steps, timeout: float | None = None) -> Task:
        """Start a task and let it go as far as it can at once, in this thread if no other drives; the rest goes on whether
        or not anybody waits."""
        task = self.start(lane, name, steps, False, timeout)
        self._unless_driven(self._advance)
        if not task.done:
            self._drive_in_background()
        return task

    def wait_for(self, task: Task, timeout: float | None) -> None:
        """Until the task has ended."""
        deadline = Deadline(self.rank, timeout)
        while not task.done:
            if self._thread is not None or self._closing:
                task.wait_quietly(deadline.left)
            elif self._driving.acquire(blocking=False):
                try:
                    self._drive(lambda: task.done or self._closing or self._thread is not None, deadline)
                finally:
                    self._driving.release()
            else:  # another thread drives, for something of its own: it must not be waited for
                self._drive_in_background()
            if not task.done and deadline.over:
                raise PeerError(f"rank {self.rank} has waited {timeout:g} s for {task.name}{self._missing(task)}")

    def _drive_in_background(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing:
                self._thread = self._reserve or self._driver(self._drive_on)
                self._bell.ring()  # whoever drives gives way
                if self._thread is self._reserve:
                    self._needed.set()
                else:
                    self._thread.start()

    def _driver(self, drive: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=drive, name="polytempo-progress", daemon=True)

    def keep_in_reserve(self) -> None:
        """Make the thread that may have to drive at the end of the process: from Python 3.12 on none is started then."""
        with self._starting:
            if self._thread is None and self._reserve is None and not self._closing:
                self._reserve = self._driver(self._drive_if_needed)
                self._reserve.start()

    def _drive_if_needed(self) -> None:
        self._needed.wait()
        if self._thread is self._reserve:
            self._drive_on()

    def wake(self) -> None:
        """Something that no link tells of has happened. Any thread may say so."""
        self._bell.ring()

    def look(self) -> None:
        """Move on what can move now."""
        self._unless_driven(self._advance, partial(self._hear, 0), self._advance)

    def _unless_driven(self, *actions: Callable[[], object]) -> None:
        if self._thread is None and self._driving.acquire(blocking=False):
            try:
                for act in actions:
                    act()
            finally:
                self._driving.release()

    def close(self, politely: bool = True) -> None:
        """End all links. What is under way fails. Returns when it is done, unless called by the thread that drives."""
        with self._starting:
            first, self._closing = not self._closes, True
            self._closes = self._closes or (politely_closed if politely else abruptly_closed)
        self._bell.ring()
        self._needed.set()
        if threading.current_thread() is self._thread:
            return  # it closes when it is back
        if self._thread is not None:
            self._thread.join()
        if first:
            with self._driving:
                self._close_all()
        self._closed.wait()

    def _close_all(self) -> None:
        if self._closed.is_set() or self._closes is None:
            return
        with (
            ExitStack() as last
        ):  # from the last to the first, and all of it: threads wait for what follows a step that fails
            last.callback(self._closed.set)
            last.callback(self.when_closed)
            last.callback(self._bell.close)
            last.callback(self._poller.unregister, self._bell.fileno)
            last.callback(self.segments.clear)
            last.callback(self._end_all, PeerError("the group was closed"))
            for link in reversed(self.links.values()):
                last.callback(self._closes, link)

    def _end_all(self, error: Exception) -> None:
        for lane in list(self._lanes.values()):  # another thread may open one meanwhile
            self.fail(lane, error, tell=False, final=True)
        for task in [*self._free, *self._submitted]:
            task.finish(None, error)
        self._free.clear()
        self._submitted.clear()

    # Driving.

    def _drive_on(self) -> None:
        with self._driving:
            try:
                self._drive(lambda: self._closing, self._idle)
            except Exception as error:  # noqa: BLE001  nobody waits for this thread: those who wait for tasks must learn of it
                self._closing = True
                self._end_all(PeerError(f"rank {self.rank} cannot go on: {type(error).__name__}: {error}"))
            self._close_all()

    def _drive(self, over: Callable[[], bool], deadline: Deadline) -> None:
        while not over() and not deadline.over:
            self._turn(deadline.until_next_look, over)

    def _turn(self, seconds: float, over: Callable[[], bool] = lambda: False) -> None:
        if not (self._advance() or over()):
            self._hear(seconds)

    def hear_all(self) -> None:
        """Take whatever has been sent so far. For tasks only."""
        while self._hear(0):
            pass

    def _hear(self, seconds: float) -> bool:
        ready = self._poller.poll(int(seconds * 1000))
        if time.monotonic() >= self._looks_at:
            self._look_at_the_clock(time.monotonic())
        if self._bell.fileno in ready:
            self._bell.silence()
        for link in list(self.links.values()):
            link.handle(ready)
        return bool(ready)

    def _advance(self) -> bool:
        while self._submitted:
            task = self._submitted.popleft()
            (self._free if task.lane.context < 0 else task.lane.queue).append(task)
        moved = False
        for lane in list(self._lanes.values()):
            while lane.queue and (lane.queue[0].done or self._move(lane.queue[0])):
                moved = True
                if not (lane.queue and lane.queue[0].done):
                    break
                self._retire(lane)
        for task in list(self._free):
            moved |= self._move(task)
            if task.done:
                self._free.remove(task)
        return moved

    def _retire(self, lane: CallQueue) -> None:
        """A call that went wrong after it had begun has left ranks at different places: nothing can follow it."""
        task = lane.queue.popleft()
        if task.error is not None and task.deadline is not None and not task.settled:
            said = PeerError(f"rank {self.rank} failed in {task.name}: {task.error}")
            self.fail(lane, task.error if isinstance(task.error, PeerError) else said, final=task.final, told=True)
        elif task.number:
            self.has_ended(lane, task.number)

    def has_ended(self, lane: CallQueue, number: int) -> None:
        """Calls up to this one have ended here: a failure elsewhere of the call after it counts from now on."""
        lane.finished = max(lane.finished, number)
        if lane.later is not None and lane.later[0] <= lane.finished + 1:
            self.fail(lane, lane.later[1], tell=False)

    def _move(self, task: Task) -> bool:
        if task.lane.failed is not None and not task.done:
            task.lane.told = True
            task.finish(None, task.lane.failed)
            return True
        moved = task.advance()
        if self.left and not task.done and task.waits is not None:
            lost = [rank for rank in task.waits.missing() if rank in self.left]
            if lost and (task.lane.context >= 0 or len(lost) == len(task.waits.missing())):
                task.finish(None, self._loss(lost, task))
                return True
        return moved

    def _loss(self, ranks: list[int], task: Task | None = None) -> RankLost:
        name = f" in {task.name}" if task is not None else ""
        reasons = "; ".join(f"rank {rank} {self.left[rank]}" for rank in ranks)
        return RankLost(f"{reasons}: rank {self.rank} needs it{name}", tuple(ranks))

    def _look_at_the_clock(self, now: float) -> None:
        """Who waits for too long says so, or gives up."""
        self._looks_at = now + self._idle.until_next_look
        heads = [lane.queue[0] for lane in list(self._lanes.values()) if lane.queue]
        for task in heads:
            lost = [rank for rank in task.lane.ranks if now - self._crashed.get(rank, now) > GRACE]
            if lost and task.deadline is not None:  # it may wait for one who will not come because of them
                task.finish(None, self._loss(lost, task))
        for task in [*heads, *self._free]:
            if task.deadline is None:
                continue
            if task.deadline.over:
                task.final = True  # as with torch's other back ends: a rank that hangs would be waited for again and again
                task.finish(None, PeerError(task.deadline.line(self._waits_in(task))))
            else:
                task.deadline.report(partial(self._waits_in, task))

    def _waits_in(self, task: Task) -> str:
        return f"in {task.name}{self._missing(task)}"

    def _missing(self, task: Task) -> str:
        missing = task.waits.missing() if task.waits is not None else []
        return f", for {named(missing)}" if missing else ""

    # What links call.

    def room(self, source: int, message: LinkMessage, length: int) -> Bytes:
        """Memory for what is about to arrive."""
        try:
            if message.kind != DATA:
                return self.pool.take(length)
            return self.post.room(source, message.context, message.tag, length)
        except (MemoryError, ValueError):
            raise PeerError(f"it has announced {length} bytes, and there is no memory for them") from None

    def arrived(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        """A whole message."""
        kind, context, tag = message.kind, message.context, message.tag
        if message.meta and kind != FAILED:
            self._hear_call(source, message)
        if kind == DATA:
            self.payload_received += payload.nbytes if payload is not None else 0
            self.post.arrived(source, context, tag, payload)
        elif kind == NOTE:
            self.heard[source, context] = max(tag, self.heard.get((source, context), -1))
        elif kind == SEGMENT and message.segment is not None:
            self.segments[source, context, tag] = message.segment
        elif kind == FAILED:
            self._hear_failure(self._lanes.setdefault(context, CallQueue(context, ())), message)
        elif kind == BYE:
            self._polite.add(source)

    def _hear_failure(self, lane: CallQueue, message: LinkMessage) -> None:
        error, generation, final, number = read_failure(message)
        if final or (generation == lane.generation and number <= lane.finished + 1):
            self.fail(lane, error, tell=False, final=final)
        elif generation == lane.generation:  # calls before it can end here: all that they need was sent before this
            lane.later = (number, error) if lane.later is None else min(lane.later, (number, error), key=itemgetter(0))
        elif generation > lane.generation:
            lane.early.setdefault(generation, (error, final))

    def _hear_call(self, source: int, message: LinkMessage) -> None:
        """Meta: the number of a call, and the call."""
        number, _, call = message.meta.decode(errors="replace").partition(" ")
        if not (number.isascii() and number.isdigit() and len(number) < 20):
            raise PeerError("it sent something that is no message")
        lane, count = self._lanes.get(message.context), int(number)
        if lane is not None and count <= lane.void:
            return
        if lane is not None and count in self._calls.get(message.context, {}):
            self._compare(lane, count, source, call)
        elif lane is None or count > max(self._calls.get(message.context, {}), default=-1):
            self._others.setdefault(message.context, {}).setdefault(count, []).append((source, call))

    def gone(self, source: int, reason: str) -> None:
        """A link has ended."""
        self.left[source] = "has left the job" if source in self._polite else f"is gone ({reason})"
        if source not in self._polite:
            self._crashed[source] = time.monotonic()

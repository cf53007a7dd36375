"""The progress engine: drives all links and tasks of a process, one thread at a time.

A blocking call drives by itself, so nothing is handed to another thread. From the first task that runs in the background, a
thread of its own drives for good; calls then reach it through a queue, and a caller waits for its task to end.

    `messaging.py`    what links bring: data, notifications, segments, lost ranks
    `call_queues.py`  the order of a group's calls, failures and recovery
    `tasks.py`        one call under way: a generator that yields what it waits for
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from polytempo.collectives.call_queues import CallQueue, CallQueues
from polytempo.collectives.device_call import DeviceCall, Streams
from polytempo.collectives.messaging import Messaging, close_as_crashed, close_with_goodbye
from polytempo.collectives.tasks import Steps, Task
from polytempo.errors import PeerError, PolytempoError
from polytempo.transport.channel import Poller
from polytempo.transport.deadline import LISTED, Deadline, RankWatch, named, said_of
from polytempo.transport.memory import WakeUp
from polytempo.transport.peer_link import WAITS, LinkMessage, PeerLink

#: Seconds between two looks at a device, where a task waits for one: no descriptor tells when it is done.
DEVICE_POLL = 50e-6
#: Bytes of the text that says in which calls a rank waits.
LONGEST = 4000


class ProgressEngine:
    """Drives the links and tasks of one process."""

    def __init__(self, rank: int, watch: RankWatch | None = None) -> None:
        self.rank, self.watch = rank, watch or RankWatch()
        self.messages = Messaging(rank)
        self.queues = CallQueues(self.messages)
        self.started = 0  #: tasks: collectives and messages
        self._free: list[Task] = []  # tasks of no queue
        self._submitted: deque[Task] = deque()
        self._poller = Poller()
        self._wake_up = WakeUp()
        self._poller.register(self._wake_up.fileno, 1)
        self._driving, self._starting = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._reserve: threading.Thread | None = None
        self._needed = threading.Event()
        self._closing = False
        self._closes: Callable[[PeerLink], None] | None = None
        self._closed = threading.Event()
        self.when_closed: Callable[[], None] = lambda: None
        self.natives: list[Any] = []  #: torch's own process groups beside the engine's groups (`native.py`)
        self.streams = Streams()  #: of its calls on tensors of devices
        self._polls = False  # a task waits for a device
        self._with_work: list[Task] = []  # tasks that wait, and have something to do meanwhile
        self._idle = Deadline(rank)  # without a time-out
        self._check_at = 0.0
        self._told = ""  # the calls in which this rank waits for long, as the other ranks know it

    def attach(self, links: Iterable[PeerLink]) -> None:
        """Use these links from now on."""
        self.messages.attach(links, self._poller)

    # What callers use.

    def start(
        self,
        queue: CallQueue,
        name: str,
        steps: Steps,
        background: bool,
        timeout: float | None = None,
        number: int = 0,
        on: DeviceCall | None = None,
        kind: str = "",
    ) -> Task:
        """Append a task to its queue; with `background`, it goes on whether or not a caller waits for it."""
        task = Task(self, queue, name, steps, timeout, kind)
        task.number, task.on = number, on
        self.started += 1
        if self._closing:
            task.finish(None, PeerError("the group was closed"))
            return task
        self._submitted.append(task)
        if background:
            self._drive_in_background()
        if self._driving.locked():
            self._wake_up.ring()
        if self._closing:  # just now
            task.finish(None, PeerError("the group was closed"))
        return task

    def has_submitted(self, queue: CallQueue) -> bool:
        """Whether a task was handed over that is not in its queue yet. For the thread that drives."""
        return any(task.queue is queue for task in list(self._submitted))

    def begin(self, queue: CallQueue, name: str, steps: Steps, timeout: float | None = None) -> Task:
        """Start a task and let it go as far as it can at once, in this thread if no other drives; the rest goes on in the
        background."""
        task = self.start(queue, name, steps, False, timeout)
        self._unless_driven(self._advance)
        if not task.done:
            self._drive_in_background()
        return task

    def wait_for(self, task: Task, timeout: float | None) -> None:
        """Wait until a task has ended.

        Raises:
            PeerError: It has not ended in `timeout` seconds.
        """
        deadline = Deadline(self.rank, timeout, firm=True)  # what its caller asks for: the task has its own
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
        if self._told:
            self._unless_driven(partial(self._tell, []))

    def wake(self) -> None:
        """Look again at what tasks wait for: something has happened that no link reports. Any thread may call this."""
        self._wake_up.ring()

    def look(self) -> None:
        """Advance what can advance now."""
        self._unless_driven(self._advance, partial(self._poll, 0), self._advance)

    def _unless_driven(self, *actions: Callable[[], object]) -> None:
        if self._thread is None and self._driving.acquire(blocking=False):
            try:
                for act in actions:
                    act()
            finally:
                self._driving.release()

    # The thread in the background.

    def _drive_in_background(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing:
                self._thread = self._reserve or self._made_thread(self._drive_until_closed)
                self._wake_up.ring()  # the thread that drives gives way
                if self._thread is self._reserve:
                    self._needed.set()
                else:
                    self._thread.start()

    def _made_thread(self, drive: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=drive, name="polytempo-progress", daemon=True)

    def keep_in_reserve(self) -> None:
        """Make the thread that may have to drive at the end of the process: from Python 3.12 on none is started then."""
        with self._starting:
            if self._thread is None and self._reserve is None and not self._closing:
                self._reserve = self._made_thread(self._drive_if_needed)
                self._reserve.start()

    def _drive_if_needed(self) -> None:
        self._needed.wait()
        if self._thread is self._reserve:
            self._drive_until_closed()

    def _drive_until_closed(self) -> None:
        with self._driving:
            try:
                self._drive(lambda: self._closing, self._idle)
            except Exception as error:  # noqa: BLE001  no caller waits for this thread: the callers of tasks must learn of it
                self._closing = True
                self._end_all(PeerError(f"rank {self.rank} cannot go on: {type(error).__name__}: {error}"))
            self._close_all()

    # Driving.

    def _drive(self, over: Callable[[], bool], deadline: Deadline) -> None:
        while not over() and not deadline.over:
            if not (self._advance() or over()):
                if not self._polls:
                    pause = min([task.use_the_wait() for task in self._with_work], default=deadline.until_next_look)
                    self._poll(min(pause, deadline.until_next_look))
                elif not self._poll(0):
                    time.sleep(DEVICE_POLL)

    def read_all(self) -> None:
        """Take whatever other ranks have sent so far. For tasks only."""
        while self._poll(0):
            pass

    def _poll(self, seconds: float) -> bool:
        ready = self._poller.poll(int(seconds * 1000))
        now = time.monotonic()
        if now >= self._check_at:
            self._check_deadlines(now)
        if self._wake_up.fileno in ready:
            self._wake_up.silence()
        for link in list(self.messages.links.values()):
            link.handle(ready)
        return bool(ready)

    def _advance(self) -> bool:
        while self._submitted:
            task = self._submitted.popleft()
            (self._free if task.queue.context < 0 else task.queue.tasks).append(task)
        moved = self._polls = False
        self._with_work.clear()
        for queue in self.queues:
            while queue.tasks and (queue.tasks[0].done or self._move(queue.tasks[0])):
                moved = True
                if not (queue.tasks and queue.tasks[0].done):
                    break
                self._retire(queue)
        for task in list(self._free):
            moved |= self._move(task)
            if task.done:
                self._free.remove(task)
        return moved

    def _move(self, task: Task) -> bool:
        if task.queue.failed is not None and not task.done:
            task.queue.told = True
            task.finish(None, task.queue.failed)
            return True
        moved = task.advance()
        if task.waits is not None:
            self._polls |= task.waits.polls
            if task.waits.meanwhile is not None:
                self._with_work.append(task)
        left = self.messages.left
        if left and not task.done and task.waits is not None:
            lost = [rank for rank in task.waits.missing() if rank in left]
            if lost and (task.queue.context >= 0 or len(lost) == len(task.waits.missing())):
                task.finish(None, self.messages.loss(lost, task.name))
                return True
        return moved

    def _retire(self, queue: CallQueue) -> None:
        """A call that failed after it had begun has left ranks at different places: no call can follow it."""
        task = queue.tasks.popleft()
        if task.error is not None and task.deadline is not None and not task.settled:
            cause = PeerError(f"rank {self.rank} failed in {task.name}: {task.error}")
            error = task.error if isinstance(task.error, PeerError) else cause
            self.queues.fail(queue, error, final=task.final, told=True)
        elif task.number:
            self.queues.finish(queue, task.number)

    def _check_deadlines(self, now: float) -> None:
        """Report tasks that wait for long; fail those that have timed out, or whose group has lost a rank."""
        self._check_at = now + self._idle.until_next_look
        heads = [queue.tasks[0] for queue in self.queues if queue.tasks]
        for task in heads:
            lost = self.messages.crashed_for_long(task.queue.ranks, now)
            if lost and task.deadline is not None:  # it may wait for a rank that will not come because of them
                task.finish(None, self.messages.loss(lost, task.name))
        waiting = [task for task in (*heads, *self._free) if task.deadline is not None and not task.idle and not task.done]
        self._tell([task for task in waiting if task.deadline is not None and task.deadline.is_long])
        for task in waiting:
            assert task.deadline is not None
            if task.deadline.over:
                task.final = True  # as with torch's other back ends: a rank that hangs would be waited for again and again
                task.finish(None, PeerError(task.deadline.line(f"in {task.name}{self._missing(task)}")))
            else:
                task.deadline.report(lambda task=task: f"in {task.name}{self._missing(task)}")  # type: ignore[misc]
        for task in heads:
            if task.done and task.queue.tasks and task.queue.tasks[0] is task:
                self._retire(task.queue)  # now: its caller may leave, and the others must have heard why

    def _tell(self, waiting: Sequence[Task]) -> None:
        """Let the other ranks know in which calls this one waits for long, if that has changed; they may wait for it."""
        calls = "; ".join(task.name for task in waiting[:LISTED])
        if calls != self._told:
            for rank, link in self.messages.links.items():
                if rank not in self.messages.left:
                    link.send(LinkMessage(WAITS, 0, 0, calls.encode()[:LONGEST]))
        if calls or self._told:
            try:
                self.watch.look(calls, sorted({rank for task in waiting for rank in task.missing}))
            except PolytempoError as error:  # the job has ended
                for task in waiting:
                    task.final = True
                    task.finish(None, error)
        self._told = calls

    def _missing(self, task: Task) -> str:
        """The ranks that a task waits for, and what they are in, as the end of a sentence."""
        if not task.missing:
            return ""
        calls = {**self.watch.calls, **{rank: f"is in {call}" for rank, call in self.messages.calls.items()}}
        return f", for {named(task.missing)}: {said_of(task.missing, calls)}"

    # The end.

    def close(self, politely: bool = True) -> None:
        """End all links. What is under way fails. Returns when it is done, unless called by the thread that drives."""
        with self._starting:
            first, self._closing = not self._closes, True
            self._closes = self._closes or (close_with_goodbye if politely else close_as_crashed)
        self._wake_up.ring()
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
        with ExitStack() as last:  # from the last to the first, and all of it, whichever fails: threads wait for the end
            last.callback(self._closed.set)
            last.callback(self.when_closed)
            last.callback(self._wake_up.close)
            last.callback(self._poller.unregister, self._wake_up.fileno)
            last.callback(self.messages.segments.clear)
            last.callback(self._end_all, PeerError("the group was closed"))
            for link in reversed(self.messages.links.values()):
                last.callback(self._closes, link)
            last.callback(self.queues.pass_on)

    def _end_all(self, error: Exception) -> None:
        for queue in self.queues:
            self.queues.fail(queue, error, tell=False, final=True)
        for task in [*self._free, *self._submitted]:
            task.finish(None, error)
        self._free.clear()
        self._submitted.clear()

"""A task: a generator that yields what it waits for, and the handle on its end.

    yield Wait(ready, missing)     go on when `ready()`; until then, `missing()` lists the ranks it waits for

Tasks of one call queue run one after another (the calls of a group); queues do not wait for each other.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polytempo.profile_ranges import profiled
from polytempo.transport.deadline import Deadline

if TYPE_CHECKING:
    from polytempo.collectives.call_queues import CallQueue
    from polytempo.collectives.device_call import DeviceCall
    from polytempo.collectives.progress_engine import ProgressEngine


@dataclass(slots=True)
class Wait:
    """What a task waits for. `missing` lists ranks. `polls`: no link tells when it is there, so it is asked for.

    `meanwhile`: what there is to do until then, in small pieces; each yields the seconds for which nothing may happen before
    the next one is due.
    """

    ready: Callable[[], bool]
    missing: Callable[[], list[int]]
    polls: bool = False
    meanwhile: Iterator[float] | None = None


Steps = Generator[Wait, None, Any]


class Settled(Exception):
    """Raised in a task for an error that all ranks raise in the same call: the calls after it go on."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Task:
    """The handle of a call with `async_op=True`, as torch's `Work`."""

    def __init__(
        self,
        engine: ProgressEngine,
        queue: CallQueue,
        name: str,
        steps: Steps,
        timeout: float | None = None,
        kind: str = "",
    ) -> None:
        self._engine, self.queue, self.name, self._steps = engine, queue, name, steps
        self.kind = kind  #: of the call, for a profiler: "all_reduce"
        self.timeout = timeout  #: seconds from its start, after which it fails
        self.on: DeviceCall | None = None  #: the stream of a call on tensors of a device
        self.number = 0  #: of the call, where it is one of a group
        self.deadline: Deadline | None = None  #: from its first step on
        self.waits: Wait | None = None
        self.result: Any = None
        self.error: Exception | None = None
        self.settled = False  #: all ranks have the same error
        self.final = False  #: if it fails, its queue fails for good
        self.idle = False  #: it waits for what need not come: such a wait is not reported
        self._done = threading.Event()
        self._callbacks: list[Callable[[Task], object]] = []
        self._lock = threading.Lock()

    # What users call.

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the call has ended. Where tensors are on a GPU, the current stream then waits for the result.

        Args:
            timeout: Seconds, after which waiting is given up; the call itself goes on.

        Returns:
            The result: of `irecv` the rank that sent the message, of collectives None.

        Raises:
            RankLost: A rank that takes part has ended.
            PeerError: The call failed on another rank, or the time is over.
        """
        if not self._done.is_set():
            with profiled("wait", self.kind):
                self._engine.wait_for(self, timeout)
        if self.error is not None:
            raise self.error
        self.order_stream()
        return self.result

    def order_stream(self) -> None:
        """Let the current stream wait, without the host, for what a call that has ended does to tensors on a GPU."""
        if self.on is not None:
            self.on.order_stream()

    def on_device_done(self) -> bool:
        """Whether a GPU has done all that a call that has ended gave it."""
        return self.on is None or self.on.ended is None or self.on.ended.reached()

    def is_completed(self) -> bool:
        """Whether the call has ended, with a result or an error."""
        if not self._done.is_set():
            self._engine.look()
        return self._done.is_set()

    def when_done(self, callback: Callable[[Task], object]) -> None:
        """Call `callback` with this task when it ends, in the thread that ends it; at once if it has ended.

        Args:
            callback: Must neither block nor raise.
        """
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    # What the engine calls.

    @property
    def done(self) -> bool:
        """Has it ended?"""
        return self._done.is_set()

    @property
    def missing(self) -> list[int]:
        """The ranks it waits for."""
        return self.waits.missing() if self.waits is not None else []

    def wait_quietly(self, timeout: float | None) -> bool:
        """Wait while another thread drives."""
        return self._done.wait(timeout)

    def advance(self) -> bool:
        """Go on as far as possible; was that anything at all?"""
        moved = False
        while not self.done and (self.waits is None or self.waits.ready()):
            moved = True
            if self.deadline is None:
                self.deadline = Deadline(self._engine.rank, self.timeout)
            try:
                self.waits = next(self._steps)
            except StopIteration as end:
                self.finish(end.value, None)
            except Settled as end:
                self.settled = True
                self.finish(None, end.error)
            except Exception as error:  # noqa: BLE001  its waiter raises it
                self.finish(None, error)
            if self.done:
                self.waits = None
                self._steps.close()
        return moved

    def use_the_wait(self) -> float:
        """Do a piece of what there is to do while it waits; seconds until the next one is due."""
        meanwhile = self.waits.meanwhile if self.waits is not None else None
        if meanwhile is not None and not self.done:
            try:
                return next(meanwhile, math.inf)
            except Exception as error:  # noqa: BLE001  its waiter raises it
                self.finish(None, error)
                return 0.0
        return math.inf

    def finish(self, result: Any, error: Exception | None) -> None:
        """The end."""
        if self.done:
            return
        if not getattr(self._steps, "gi_running", False):  # else what it does now has ended it: `advance` closes it
            self._steps.close()
        self.result, self.error, self.waits = result, error, None
        with self._lock:
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception as problem:  # noqa: BLE001  it must not stop the engine
                sys.stderr.write(f"polytempo: a callback of {self.name} failed: {problem!r}\n")

"""The `Work` of a call: wait, result, error and future; and errors that are torch's and Polytempo's at once.

Where tensors are on a GPU, `wait()` lets the current stream wait for the call's result, as the `Work` of NCCL does. The host
waits only until the call was handed to the GPU, on all ranks. Callbacks of the future run on a stream that waits for it.

A `Work` has a half in C++ and one in Python. Torch's C++ may keep its half alone (DDP's `join` does, and waits for it in
backward): without the other half it would wait for ever. So one that was not waited for yet is kept when Python drops it.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import DistBackendError

from polytempo.collectives.tasks import Task
from polytempo.errors import PeerError, PolytempoError, UsageError
from polytempo.torch_backend.device_backends import leave_uncompiled

#: Seconds that callbacks of futures have left when the process ends.
LAST_JOBS = 5.0
#: As many of a group's works that were dropped unawaited are kept, with results of one element: a script may forget each of
#: its works, and C++ waits for one in each step, and reads a number from it.
KEPT = 64

# Errors of the back end: each is an error of torch and one of Polytempo, so that either `except` clause catches it.


class GroupError(PeerError, DistBackendError):  # type: ignore[misc]
    """Another rank is lost, late, or made a different call."""


class CallError(UsageError, ValueError, RuntimeError):
    """A call with wrong arguments: a ValueError and a RuntimeError, since torch's back ends raise either."""


def as_torch_error(error: Exception, ranks: Sequence[int]) -> Exception:
    """The same text as an error of torch; in a group of some ranks with their ranks in the job, since numbers are the
    group's.
    """
    text = str(error)
    if list(ranks) != list(range(len(ranks))):
        text += f" (in the group of ranks {', '.join(map(str, ranks))}, where they count from 0)"
    if " has waited " in text:
        text += "; that was the timeout of the group or of the call"
    if isinstance(error, PeerError):
        return GroupError(text)
    if isinstance(error, UsageError):
        return CallError(text)
    return error


@leave_uncompiled
class TaskWork(Work):
    """The `Work` of one task, or of several tasks of one call queue, which end in their order.

    Args:
        tasks: The tasks.
        results: The tensors that they fill, or lists of them.
        ranks: The group's, in the job.
        dropped: Where it is kept if Python drops it before it was waited for.
    """

    _awaited = True  # until it is made: one that could not be made is not kept

    def __init__(self, tasks: Sequence[Task], results: list[Any], ranks: Sequence[int], dropped: deque[TaskWork]) -> None:
        super().__init__()
        self._tasks, self._results, self._ranks, self._dropped = tasks, results, ranks, dropped
        self._future: Any = None
        self._lock = threading.Lock()
        self._awaited = False

    def __del__(self) -> None:
        if not self._awaited:
            self._awaited = True
            if any(tensor.numel() > 1 for tensor in _tensors(self._results)):
                self._results = []
            self._dropped.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; torch's "no timeout" is zero."""
        self._awaited = True
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        try:
            for task in self._tasks:
                task.wait(seconds if seconds > 0 else None)
        except PolytempoError as error:
            raise as_torch_error(error, self._ranks) from None
        if self._future is not None and not self._future.done():
            self._future.wait()  # another thread is about to complete it, and torch reads its value without waiting
        return True

    def is_completed(self) -> bool:
        """Whether the result is there, on the GPU, too."""
        return all(task.is_completed() and task.on_device_done() for task in self._tasks)

    def is_success(self) -> bool:
        return all(task.is_completed() for task in self._tasks) and self.exception() is None

    def exception(self) -> Exception | None:
        errors = [task.error for task in self._tasks if task.error is not None]
        return as_torch_error(errors[0], self._ranks) if errors else None

    def result(self) -> list[Any]:
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """The rank that sent the message, for a receive from any source."""
        return int(self._tasks[-1].result)

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """The future, made on first use: most calls are only waited for."""
        with self._lock:
            self._awaited = True
            if self._future is None:
                devices = {tensor.device for tensor in _tensors(self._results) if tensor.device.type != "cpu"}
                source = torch.futures.Future(devices=sorted(devices, key=str))
                self._future = source.then(self._value)  # an error raised there reaches C++ too
                if self._tasks[-1].done:
                    source.set_result(None)  # in this thread: nothing hangs on it yet
                else:
                    self._tasks[-1].when_done(lambda _: _callback_threads.run(lambda: source.set_result(None)))
        return self._future

    def _value(self, _: Any) -> list[Any]:
        error = self.exception()
        if error is not None:
            raise error
        for task in self._tasks:
            task.order_stream()  # the one that torch has made current for callbacks
        return self._results


def _tensors(results: Sequence[Any]) -> list[torch.Tensor]:
    return [tensor for result in results for tensor in (result if isinstance(result, list) else [result])]


class _CallbackThreads:
    """Threads that run callbacks of futures. One is always free, since a callback may wait for other futures."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._threads = self._jobs = 0
        self._changed = threading.Condition()

    def run(self, job: Callable[[], object]) -> None:
        """Run a job soon, in one of the threads."""
        with self._changed:
            self._jobs += 1
            more = self._jobs > self._threads
            self._threads += more
        self._queue.put(job)
        if more:
            threading.Thread(target=self._serve, name="polytempo-futures", daemon=True).start()

    def _serve(self) -> None:
        while True:
            job = self._queue.get()
            job()
            del job  # its references must not live until the next job
            with self._changed:
                self._jobs -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """At the end of the process, wait for callbacks: a thread that is in C++ while Python shuts down crashes the
        process.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._jobs == 0, LAST_JOBS)


_callback_threads = _CallbackThreads()
atexit.register(_callback_threads.finish)  # runs after the groups have left, since they register later
os.register_at_fork(after_in_child=_callback_threads.__init__)  # type: ignore[misc]  # threads stay with the parent

"""The `Work` of a call: wait, result, error and future.

Where tensors are on a GPU, `wait()` lets the current stream wait for the call's result, as the `Work` of NCCL does. The host
waits only until the call was handed to the GPU, on all ranks. Callbacks of the future run on a stream that waits for it.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from polytempo.collectives.tasks import Task
from polytempo.errors import PolytempoError
from polytempo.torch_backend.errors import as_torch_error

#: Seconds that callbacks of futures have left when the process ends.
LAST_JOBS = 5.0


class TaskWork(Work):
    """The `Work` of one task, or of several tasks of one call queue, which end in their order."""

    def __init__(self, tasks: Sequence[Task], results: list[Any], ranks: Sequence[int]) -> None:
        super().__init__()
        self._tasks, self._results, self._ranks = tasks, results, ranks
        self._future: Any = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; torch's "no timeout" is zero."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        try:
            for task in self._tasks:
                task.wait(seconds if seconds > 0 else None)
        except PolytempoError as error:
            raise as_torch_error(error, self._ranks) from None
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
            if self._future is None:
                source = torch.futures.Future(devices=_devices(self._results))
                self._future = source.then(self._value)  # an error raised there reaches C++ too
                self._tasks[-1].when_done(lambda _: _callback_threads.run(lambda: source.set_result(None)))
        return self._future

    def _value(self, _: Any) -> list[Any]:
        error = self.exception()
        if error is not None:
            raise error
        for task in self._tasks:
            task.order_stream()  # the one that torch has made current for callbacks
        return self._results


def _devices(results: Sequence[Any]) -> list[torch.device]:
    tensors = [tensor for result in results for tensor in (result if isinstance(result, list) else [result])]
    return sorted({tensor.device for tensor in tensors if tensor.device.type != "cpu"}, key=str)


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

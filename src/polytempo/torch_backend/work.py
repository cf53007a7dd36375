"""The handle of a call: what torch waits for, asks, and hangs futures on."""

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

#: Seconds that what hangs on futures has left when the process ends.
LAST_JOBS = 5.0


class TaskWork(Work):
    """One task, or several of one queue, which end in their order."""

    def __init__(self, tasks: Sequence[Task], results: list[Any], ranks: Sequence[int]) -> None:
        super().__init__()
        self._tasks, self._results, self._ranks = tasks, results, ranks
        self._future: Any = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the end; torch's "no timeout" is zero."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        try:
            for task in self._tasks:
                task.wait(seconds if seconds > 0 else None)
        except PolytempoError as error:
            raise as_torch_error(error, self._ranks) from None
        return True

    def is_completed(self) -> bool:
        return all(task.is_completed() for task in self._tasks)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        errors = [task.error for task in self._tasks if task.error is not None]
        return as_torch_error(errors[0], self._ranks) if errors else None

    def result(self) -> list[Any]:
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Who sent it, for a receive from anybody."""
        return int(self._tasks[-1].result)

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """Made when it is asked for: most calls are only waited for."""
        with self._lock:
            if self._future is None:
                source = torch.futures.Future(devices=_devices(self._results))
                self._future = source.then(self._value)  # what is raised in there is an error to C++, too
                self._tasks[-1].when_done(lambda _: _callers.run(lambda: source.set_result(None)))
        return self._future

    def _value(self, _: Any) -> list[Any]:
        error = self.exception()
        if error is not None:
            raise error
        return self._results


def _devices(results: Sequence[Any]) -> list[torch.device]:
    tensors = [tensor for result in results for tensor in (result if isinstance(result, list) else [result])]
    return sorted({tensor.device for tensor in tensors if tensor.device.type != "cpu"}, key=str)


class _Callers:
    """Threads that run what hangs on futures. There is always a free one: what they run may wait for other futures."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._threads = self._jobs = 0
        self._changed = threading.Condition()

    def run(self, job: Callable[[], object]) -> None:
        """Soon, in one of them."""
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
            del job  # what it holds must not live until the next one
            with self._changed:
                self._jobs -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """At the end of the process: a thread that is in C++ when Python is taken down would take the process with it."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs == 0, LAST_JOBS)


_callers = _Callers()
atexit.register(_callers.finish)  # after the groups, which are made later, have left
os.register_at_fork(after_in_child=_callers.__init__)  # type: ignore[misc]  # threads stay with the parent

"""One loop over the child processes of a launcher or agent: their output, their ends, signals, and other descriptors."""

from __future__ import annotations

import os
import select
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from polytempo.launcher.child_process import ENDING, ChildProcess

#: Exit status of an interrupted job.
INTERRUPTED = 130
#: Seconds between the request to end and SIGKILL.
GRACE = 1.0


@dataclass(frozen=True)
class OutputLine:
    """A child wrote a line."""

    child: ChildProcess
    text: str
    error: bool


@dataclass(frozen=True)
class OutputRows:
    """A child has redrawn rows that have no newline yet, such as a progress bar; no rows: they are lines now, or erased."""

    child: ChildProcess
    rows: tuple[str, ...]
    again: bool  #: redrawn, such as a bar; not a line whose newline is still to come
    error: bool


@dataclass(frozen=True)
class Exited:
    """A child has ended, and all its output was read."""

    child: ChildProcess
    status: int


@dataclass(frozen=True)
class Signalled:
    """This process received a signal."""

    number: int


@dataclass(frozen=True)
class Readable:
    """Another descriptor that is watched is readable."""

    key: Any


MonitorEvent = OutputLine | OutputRows | Exited | Signalled | Readable


class ProcessMonitor:
    """Watches child processes; `close` gives back its descriptors and signal handlers."""

    def __init__(self) -> None:
        self.children: list[ChildProcess] = []
        self._selector = selectors.DefaultSelector()
        self._read_signal, self._write_signal = os.pipe()
        for descriptor in (self._read_signal, self._write_signal):
            os.set_blocking(descriptor, False)
        self._selector.register(self._read_signal, selectors.EVENT_READ, Signalled(0))
        # SIGHUP stays ignored under nohup; SIGINT does not: a shell ignores it for all background jobs.
        outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._before = {n: signal.signal(n, lambda *_: None) for n in ENDING if n != signal.SIGHUP or not outlives}
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, statuses would be lost
        self._wakeup = signal.set_wakeup_fd(self._write_signal, warn_on_full_buffer=False)

    def add(self, child: ChildProcess) -> None:
        """Watch a child from now on."""
        self.children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        for descriptor in child.pipes:
            self._selector.register(descriptor, selectors.EVENT_READ, child)

    def watch(self, descriptor: Any, key: Any) -> None:
        """Watch another descriptor; `Readable(key)` tells that it is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, Readable(key))

    def unwatch(self, descriptor: Any) -> None:
        """Stop watching a descriptor."""
        self._selector.unregister(descriptor)

    def turn(self, timeout: float) -> Iterator[MonitorEvent]:
        """Wait for events, at most `timeout` seconds; signals come first."""
        ready = [key for key, _ in self._selector.select(timeout)]
        for key in sorted(
            ready, key=lambda key: not isinstance(key.data, Signalled)
        ):  # a signal may be why a child has ended
            if isinstance(key.data, Readable):
                yield key.data
            elif isinstance(key.data, Signalled):
                for number in os.read(self._read_signal, 64):
                    if number == signal.SIGHUP:
                        leave_terminal()
                    yield Signalled(number)
            elif key.fd == key.data.pidfd:
                yield from self._ended(key.data)
            else:
                yield from self._read(key.data, key.fd)

    def _read(self, child: ChildProcess, descriptor: int) -> Iterator[MonitorEvent]:
        stream = child.pipes.get(descriptor)
        if stream is None:
            return
        lines = child.read(descriptor)
        if lines is None:
            self._selector.unregister(descriptor)
            child.forget_pipe(descriptor)
            return
        yield from (OutputLine(child, line, stream == 2) for line in lines)
        screen = child.screens[stream]
        if (rows := screen.news()) is not None:
            yield OutputRows(child, rows, screen.drawing, stream == 2)

    def _ended(self, child: ChildProcess) -> Iterator[MonitorEvent]:
        self._selector.unregister(child.pidfd)
        status = child.ended()
        for descriptor in list(
            child.pipes
        ):  # what is left; grandchildren may hold the pipe open, so its end is not waited for
            before = -1
            while descriptor in child.pipes and before != 0:
                events = list(self._read(child, descriptor))
                before = len(events)
                yield from events
        yield Exited(child, status)

    def running(self) -> list[ChildProcess]:
        """The children that have not ended."""
        return [child for child in self.children if child.status is None]

    def end(
        self, children: Iterable[ChildProcess], patience: float, at_once: Callable[[], bool] = lambda: False
    ) -> Iterator[MonitorEvent]:
        """End children: wait `patience` seconds, ask them to end, then kill them; kill them at once when `at_once()`.

        Returns: the events on the way.
        """
        waiting = list(children)
        steps: list[tuple[float, Callable[[ChildProcess], None]]] = [
            (patience, ChildProcess.ask_to_end),
            (GRACE, lambda child: child.kill(signal.SIGKILL)),
            (GRACE, lambda child: None),
        ]
        for seconds, then in steps:
            deadline = time.monotonic() + seconds
            while any(child.status is None for child in waiting) and (left := deadline - time.monotonic()) > 0:
                if at_once():
                    for child in waiting:
                        child.kill(signal.SIGKILL)
                yield from self.turn(left)
            for child in waiting:
                if child.status is None:
                    then(child)

    def dismiss(self) -> None:
        """Kill the children that are left, and the processes they started."""
        for child in self.children:
            child.close()

    def close(self, told_to_end: bool = False) -> None:
        """Kill the children that are left; restore the signal handlers. `told_to_end`: this process ends by a signal, and
        ignores those that still come: they must not take its exit status."""
        self.dismiss()
        self._selector.close()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            before = signal.SIG_DFL if handler is None else handler  # None: set by what is not Python
            signal.signal(number, signal.SIG_IGN if told_to_end and number in ENDING else before)
        os.close(self._read_signal)
        os.close(self._write_signal)


def leave_terminal() -> None:
    """The terminal is gone: standard streams lead to /dev/null from now on, so that a write is no error."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    gone = [descriptor for descriptor, state in poll.poll(0) if state & (select.POLLHUP | select.POLLERR)]
    for descriptor in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)

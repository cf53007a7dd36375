"""All children of a launcher or agent in one loop: their lines, their ends, signals, and whatever else is to be watched."""

from __future__ import annotations

import os
import select
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from polytempo.launch.child_process import ChildProcess

#: These end a job. Who was started to outlive its terminal (nohup) does, and SIGINT may be ignored where a shell has said so
#: for all its background jobs, which is no word of the user's.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: Between being asked to end, being told to, and being made to.
GRACE = 1.0


@dataclass(frozen=True)
class Said:
    """A child wrote a line."""

    child: ChildProcess
    text: str
    error: bool


@dataclass(frozen=True)
class Drew:
    """A child has changed rows that it has not ended, such as a progress bar; none: they are lines now, or gone."""

    child: ChildProcess
    rows: tuple[str, ...]
    again: bool  #: drawn again and again, not a line whose end is still to come
    error: bool


@dataclass(frozen=True)
class Exited:
    """A child has ended, and all it wrote was read."""

    child: ChildProcess
    status: int


@dataclass(frozen=True)
class Signalled:
    """This process was sent a signal."""

    number: int


@dataclass(frozen=True)
class Ready:
    """Something else that was watched has something to say."""

    key: Any


MonitorEvent = Said | Drew | Exited | Signalled | Ready


class ProcessMonitor:
    """Watches children. Everything it holds is given back by `close`."""

    def __init__(self) -> None:
        self.children: list[ChildProcess] = []
        self._selector = selectors.DefaultSelector()
        self._read_signal, self._write_signal = os.pipe()
        for descriptor in (self._read_signal, self._write_signal):
            os.set_blocking(descriptor, False)
        self._selector.register(self._read_signal, selectors.EVENT_READ, Signalled(0))
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
        """Watch something else."""
        self._selector.register(descriptor, selectors.EVENT_READ, Ready(key))

    def unwatch(self, descriptor: Any) -> None:
        """No longer."""
        self._selector.unregister(descriptor)

    def turn(self, timeout: float) -> Iterator[MonitorEvent]:
        """Wait for something to happen; what did."""
        ready = [key for key, _ in self._selector.select(timeout)]
        for key in sorted(ready, key=lambda key: not isinstance(key.data, Signalled)):  # they may be why a child has ended
            if isinstance(key.data, Ready):
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
        yield from (Said(child, line, stream == 2) for line in lines)
        screen = child.screens[stream]
        if (rows := screen.news()) is not None:
            yield Drew(child, rows, screen.drawing, stream == 2)

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
        """Those who have not ended."""
        return [child for child in self.children if child.status is None]

    def end(
        self, children: Iterable[ChildProcess], patience: float, at_once: Callable[[], bool] = lambda: False
    ) -> Iterator[MonitorEvent]:
        """Let children end: wait, then ask them to, then make them, `at_once` if wanted; what happened on the way."""
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
        """End whatever is left, and all that it has started."""
        for child in self.children:
            child.close()

    def close(self) -> None:
        """End whatever is left, and give everything back: signals do what they did before."""
        self.dismiss()
        self._selector.close()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read_signal)
        os.close(self._write_signal)


def leave_terminal() -> None:
    """The terminal is gone: what is still to be said is not, so that saying it is no error."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    gone = [descriptor for descriptor, state in poll.poll(0) if state & (select.POLLHUP | select.POLLERR)]
    for descriptor in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)

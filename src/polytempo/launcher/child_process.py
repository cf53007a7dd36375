"""Child processes: each leads a process group, is watched through a pidfd, and is never left behind. One loop of a launcher
or agent hears of their output, their ends, signals, and other descriptors.

A signal to the process group also ends what the child has started. The kernel kills a worker with its parent
(PR_SET_PDEATHSIG). A server sees the end of its parent as the end of its standard input: it has workers to tell. The
signals that end a job are the launcher's to hear: a server, and whatever else has a standard input, ignores them from its
first instruction on, also where a scheduler sends them to every process. Servers must outlive the last checkpoint.

A child that has ended is not reaped before `close`. Until then the kernel gives its process id to no other process or group,
so that no signal reaches another process.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from polytempo.errors import PeerError
from polytempo.launcher.forked_process import Body, ForkedProcess, die_with_parent
from polytempo.launcher.job_facts import JOB_VARIABLE, RANK_VARIABLE
from polytempo.launcher.orphan_cleanup import kill_processes
from polytempo.launcher.terminal_output import Screen
from polytempo.records.files import record_lost
from polytempo.transport.deadline import Deadline

#: These signals end a job.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: Exit status of an interrupted job.
INTERRUPTED = 130
#: Seconds between the request to end and SIGKILL.
GRACE = 1.0
TAIL = 80  #: lines of standard error that are kept, to be shown at the end


def ignore_endings() -> None:
    """Ignore the signals that end a job; a program that this process is turned into ignores them, too."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class Standing:
    """How a child stands to the launcher's own streams and terminal."""

    reads: bool = False  #: has its standard input; else the child's is empty
    direct: bool = False  #: has its output; else the launcher reads what the child writes
    in_foreground: bool = False  #: is in its process group, so that the terminal takes both for one


#: A child that leads its own group, and of which the launcher has all.
WATCHED = Standing()


def _prepare_for_terminal(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until its debugger takes it (`debugger.py`)


class ChildProcess:
    """One process of a job: its output and its exit status."""

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None = None,
        config: bytes | None = None,
        forks: bool = False,
        standing: Standing = WATCHED,
        body: Body | None = None,
    ) -> None:
        """Args: `environment`: added to this process's own; `log`: a file for its output; `config`: the first line of its
        standard input, which then stays open as long as this process is there, and whose end alone ends the child; `forks`:
        fork it from this process, which has loaded torch, instead of starting an interpreter (`forked_process.py`); `body`:
        what it does then, if that is not what the command says."""
        self.label, self.standing = label, standing
        self._marks = [f"{name}={value}" for name, value in environment.items() if name in (JOB_VARIABLE, RANK_VARIABLE)]
        self.status: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._log: IO[bytes] | None = None
        self.log_lost = ""  #: why its output is not logged, in words
        if log is not None:
            try:
                self._log = log.open("wb")
            except OSError as error:
                self._give_up_log(error, str(log))
        self.screens = {1: Screen(), 2: Screen()}
        self._reaped = False
        variables = {**os.environ, **environment}
        die = _prepare_for_terminal if standing.in_foreground else die_with_parent
        prepare = partial(die, os.getpid()) if config is None else ignore_endings
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if forks or body is not None:
            own = (standing.reads, standing.direct, not standing.in_foreground)
            self.process = ForkedProcess(command, variables, config is not None, prepare, *own, body)
        else:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if config is not None else None if standing.reads else subprocess.DEVNULL,
                stdout=None if standing.direct else subprocess.PIPE,
                stderr=None if standing.direct else subprocess.PIPE,
                env=variables,
                process_group=None if standing.in_foreground else 0,
                preexec_fn=prepare,  # safe where there are threads, as in a notebook: it takes no lock
            )
        if config is not None and self.process.stdin is not None:
            with suppress(BrokenPipeError):  # the child has ended already, as its pidfd will tell
                self.process.stdin.write(config + b"\n")
                self.process.stdin.flush()
        self.pidfd = os.pidfd_open(self.process.pid)
        numbered = ((self.process.stdout, 1), (self.process.stderr, 2))
        self.pipes = {pipe.fileno(): number for pipe, number in numbered if pipe is not None}
        for descriptor in self.pipes:
            os.set_blocking(descriptor, False)

    def read(self, descriptor: int) -> list[str] | None:
        """The complete lines on a pipe; None at its end. Rows that may still change stay on the child's screen."""
        stream = self.pipes[descriptor]
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return []
        if self._log is not None:
            try:
                self._log.write(data)
                self._log.flush()
            except OSError as error:
                self._give_up_log(error, self._log.name)
        texts = self.screens[stream].feed(data, last=not data)
        if stream == 2:
            self.tail.extend(texts)
        return texts if data else (texts or None)

    def _give_up_log(self, error: OSError, path: str) -> None:
        kept, self._log = self._log, None
        self.log_lost = record_lost(OSError(error.errno, error.strerror, path))
        if kept is not None:
            with suppress(OSError):  # its buffer still holds what could not be written
                kept.close()

    def ready_line(self, timeout: float) -> Any:
        """Wait for the first line of a child that says what it has made ready, as servers do; its content.

        Raises:
            PeerError: It has ended, or the line has not come in `timeout` seconds.
        """
        deadline, output = Deadline(-1, timeout, firm=True), next(pipe for pipe, stream in self.pipes.items() if stream == 1)
        lines: list[str] | None = []
        while not lines and not deadline.over:
            select.select([output], [], [], deadline.until_next_look)
            if (lines := self.read(output)) is None:
                break
        if not lines:
            raise PeerError(f"{self.label} has not started: {' '.join(self.tail) or f'no line from it in {timeout:g} s'}")
        return json.loads(lines[0])["ready"]

    def ended(self) -> int:
        """The exit status of a process that has ended; it is not reaped yet."""
        found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert found is not None
        self.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return self.status

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP, or another signal that stops, has stopped it, as the kernel says: one that is busy is not."""
        if self._reaped:
            return False
        found = os.waitid(os.P_PIDFD, self.pidfd, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None and found.si_code == os.CLD_STOPPED

    def ask_to_end(self) -> None:
        """Close the standard input of a server; send SIGTERM to a worker."""
        if self.process.stdin is None:
            self.kill(signal.SIGTERM)
        else:
            self._close_input()

    def _close_input(self) -> None:
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the process group."""
        if self._reaped:
            return
        try:
            if self.standing.in_foreground:  # the group is the launcher's
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.killpg(self.process.pid, number)
        except ProcessLookupError:  # the child has joined another group
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Kill what is left of the process group, reap the process, close its pipes."""
        if self._reaped:
            return
        self.kill(signal.SIGKILL)
        self.process.wait()
        if self.standing.in_foreground:
            kill_processes(*self._marks)  # what it has started; of other children the signal to the group was enough
        self._reaped = True
        self.status = self.process.returncode if self.status is None else self.status
        os.close(self.pidfd)
        self._close_input()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        if self._log is not None:
            self._log.close()


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
        # signals first: one may be why a child has ended
        for key in sorted(ready, key=lambda key: not isinstance(key.data, Signalled)):
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
            del child.pipes[descriptor]
            return
        yield from (OutputLine(child, line, stream == 2) for line in lines)
        screen = child.screens[stream]
        if (rows := screen.news()) is not None:
            yield OutputRows(child, rows, screen.drawing, stream == 2)

    def _ended(self, child: ChildProcess) -> Iterator[MonitorEvent]:
        self._selector.unregister(child.pidfd)
        status = child.ended()
        # what is left; grandchildren may hold the pipe open, so its end is not waited for
        for descriptor in list(child.pipes):
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

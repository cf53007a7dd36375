"""Child processes: started in groups of their own, watched by the kernel, never left behind.

Every child is the head of a process group, so that what it starts can be ended with it, and is watched through a pidfd. A
worker dies with its parent (PR_SET_PDEATHSIG). A server is told by a pipe that its parent is gone: it has others to tell.

A child that has ended is not reaped before `close`. Until then the kernel gives its number to no other process or group, so
that no signal can go to a stranger.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from polytempo.launch.forked_process import ForkedProcess, die_with_parent
from polytempo.launch.terminal_output import Screen
from polytempo.records.files import record_lost

TAIL = 80  #: lines of errors that are kept to be shown at the end


def _appended(log: IO[bytes], data: bytes) -> IO[bytes]:
    log.write(data)
    log.flush()
    return log


class ChildProcess:
    """One process of a job, its output and its end."""

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None = None,
        config: bytes | None = None,
        forks: bool = False,
    ) -> None:
        """Args: `environment`: added to this process's own; `log`: a file for its output; `config`: the first line of its
        standard input, which then stays open as long as this process is there; `forks`: fork it from this process, which
        has loaded torch, instead of starting an interpreter (`forked_process.py`)."""
        self.label = label
        self.status: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._log: IO[bytes] | None = None
        self.log_lost = ""  #: why what it says is not kept, in words
        if log is not None:
            self._keep(lambda: log.open("wb"), str(log))
        self.screens = {1: Screen(), 2: Screen()}
        self._reaped = False
        variables = {**os.environ, **environment}
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if forks:
            self.process = ForkedProcess(command, variables, stdin=config is not None, dies_with_parent=config is None)
        else:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if config is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=variables,
                process_group=0,
                preexec_fn=partial(die_with_parent, os.getpid()) if config is None else None,  # safe: no threads here
            )
        if config is not None and self.process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended already, which its pidfd will tell
                self.process.stdin.write(config + b"\n")
                self.process.stdin.flush()
        self.pidfd = os.pidfd_open(self.process.pid)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.pipes = {self.process.stdout.fileno(): 1, self.process.stderr.fileno(): 2}
        for descriptor in self.pipes:
            os.set_blocking(descriptor, False)

    def read(self, descriptor: int) -> list[str] | None:
        """Lines that have come to their end on a pipe; None when it has ended. What is still drawn stays on its screen."""
        stream = self.pipes[descriptor]
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return []
        kept = self._log
        if kept is not None:
            self._keep(lambda: _appended(kept, data), kept.name)
        texts = self.screens[stream].feed(data, last=not data)
        if stream == 2:
            self.tail.extend(texts)
        return texts if data else (texts or None)

    def _keep(self, act: Callable[[], IO[bytes]], path: str) -> None:
        """A log that cannot be written is given up; the process goes on."""
        try:
            self._log = act()
        except OSError as error:
            kept, self._log = self._log, None
            self.log_lost = record_lost(OSError(error.errno, error.strerror, path))
            if kept is not None:
                with suppress(OSError):  # it still holds what it could not write
                    kept.close()

    def forget_pipe(self, descriptor: int) -> None:
        """A pipe has ended."""
        del self.pipes[descriptor]

    def ended(self) -> int:
        """The process has ended: its status. It is not reaped yet: its number stays its own."""
        found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert found is not None
        self.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return self.status

    def ask_to_end(self) -> None:
        """What watches its standard input sees that end; all others get SIGTERM."""
        if self.process.stdin is None:
            self.kill(signal.SIGTERM)
        else:
            self._close_input()

    def _close_input(self) -> None:
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the process and all it started."""
        if self._reaped:
            return
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:  # it has joined another group
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Give everything back; whatever it started goes too."""
        if self._reaped:
            return
        self.kill(signal.SIGKILL)
        self.process.wait()
        self._reaped = True
        self.status = self.process.returncode if self.status is None else self.status
        os.close(self.pidfd)
        self._close_input()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        if self._log is not None:
            self._log.close()

"""Child processes: started in groups of their own, watched by the kernel, never left behind.

Every child dies with its parent (PR_SET_PDEATHSIG), is the head of a process group, so that what it starts can be ended with
it, and is watched through a pidfd.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
TAIL = 80  #: lines of errors that are kept to be shown at the end


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """One process of a job, its output and its end."""

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None = None,
        config: bytes | None = None,
    ) -> None:
        self.label = label
        self.status: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._log: IO[bytes] | None = log.open("wb") if log else None
        self._rest = {1: b"", 2: b""}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if config is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            process_group=0,
            preexec_fn=_die_with_parent,  # safe: the launcher has no threads
        )
        if config is not None and self.process.stdin is not None:
            self.process.stdin.write(config)
            self.process.stdin.close()
        self.pidfd = os.pidfd_open(self.process.pid)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.pipes = {self.process.stdout.fileno(): 1, self.process.stderr.fileno(): 2}
        for descriptor in self.pipes:
            os.set_blocking(descriptor, False)

    def read(self, descriptor: int) -> list[str] | None:
        """Whole lines that have come on a pipe; None when it has ended."""
        stream = self.pipes[descriptor]
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return []
        if self._log is not None:
            self._log.write(data)
            self._log.flush()
        *lines, rest = (self._rest[stream] + data).split(b"\n")
        if not data and rest:
            lines, rest = [*lines, rest], b""
        self._rest[stream] = rest
        texts = [line.decode(errors="replace").rstrip("\r") for line in lines]
        if stream == 2:
            self.tail.extend(texts)
        return texts if data else (texts or None)

    def forget_pipe(self, descriptor: int) -> None:
        """A pipe has ended."""
        del self.pipes[descriptor]

    def reap(self) -> int:
        """The process has ended: its status."""
        self.status = self.process.wait()
        return self.status

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the process and all it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Give everything back; whatever it started goes too."""
        self.kill(signal.SIGKILL)
        if self.status is None:
            self.reap()
        os.close(self.pidfd)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        if self._log is not None:
            self._log.close()

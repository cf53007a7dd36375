"""Groups of processes on one GPU that are measured in turn: started together, told over sockets, ended together.

A group that fails is left out with its reason, and the others go on. Every wait is bounded.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection, Listener
from pathlib import Path

SCRIPT = str(Path(__file__).parent / "gpu_worker.py")
#: Seconds until a group must be ready, and for a turn beyond the time that it should take.
START_LIMIT, TURN_LIMIT, END_LIMIT = 120.0, 60.0, 10.0


@dataclass(frozen=True)
class Way:
    """How a group trains.

    Attributes:
        name: In tables and on the command line.
        kind: "plain" (no communication), "ddp" or "ours".
        workers: Processes that train.
        flags: Of `polytempo run`.
        backend: Of torch.distributed.
    """

    name: str
    kind: str
    workers: int
    flags: tuple[str, ...] = ()
    backend: str = ""

    def commands(self, line: str, meeting: str, cpu: bool) -> list[list[str]]:
        """One for each process that is started here."""
        python = sys.executable
        script = [SCRIPT, self.kind, line, *(["--cpu"] if cpu else [])]
        if self.kind == "ours":
            return [[python, "-m", "polytempo", "run", "-q", "-n", str(self.workers), *self.flags, *script]]
        script += ["--backend", self.backend, "--meeting", meeting]
        return [[python, *script] for _ in range(self.workers)]


class GroupFailed(Exception):
    """This group gives no figures; the text says why."""


class Group:
    """The processes of a way."""

    def __init__(self, way: Way, cpu: bool) -> None:
        self.way = way
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-bench-", dir="/tmp"))  # short enough for a socket's path
        self._listener = Listener(str(self._folder / "line"), "AF_UNIX", backlog=way.workers)
        self._log = self._folder / "log"
        self._lines: dict[int, Connection] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        commands = way.commands(str(self._folder / "line"), str(self._folder / "meeting"), cpu)
        for rank, command in enumerate(commands):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(way.workers), "LOCAL_RANK": str(rank)}
            with self._log.open("ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=log, env={**os.environ, **variables}, start_new_session=True
                    )
                )

    def wait_until_ready(self) -> None:
        """Until every rank has joined.

        Raises:
            GroupFailed: One has not.
        """
        deadline = time.monotonic() + START_LIMIT
        accepting = self._listener._listener._socket  # type: ignore[attr-defined] # accept() itself has no time limit
        pending: list[Connection] = []
        while len(self._lines) < self.way.workers:
            accepting.settimeout(0.2)
            with suppress(TimeoutError):
                pending.append(self._listener.accept())
            for line in connection.wait(pending, 0):
                assert isinstance(line, Connection)
                self._lines[int(str(self._answer(line, "ready")))] = line
                pending.remove(line)
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise self._failure("it ended at once" if ended else f"not ready after {START_LIMIT:g} s")

    def turn(self, model: str, batch: int, steps: int, seconds: float) -> list[list[float]]:
        """For each rank the times of its steps.

        Raises:
            GroupFailed: A rank has failed, or takes too long.
        """
        for line in self._lines.values():
            line.send((model, batch, steps))
        waiting, times = dict(self._lines), {}
        deadline = time.monotonic() + seconds + TURN_LIMIT
        while waiting:
            ready = connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(
                    f"ranks {sorted(waiting)} have not done {steps} steps after {seconds + TURN_LIMIT:.0f} s"
                )
            for rank, line in list(waiting.items()):
                if line in ready:
                    times[rank] = self._answer(line, "times")
                    del waiting[rank]
        return [list(times[rank]) for rank in sorted(times)]  # type: ignore[call-overload]

    def _answer(self, line: Connection, kind: str) -> object:
        try:
            said, value = line.recv()
        except (EOFError, OSError):
            raise self._failure("a rank has ended") from None
        if said != kind:
            raise self._failure(str(value))
        return value

    def _failure(self, reason: str) -> GroupFailed:
        time.sleep(0.5)  # for the last words of what has failed
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        sys.stderr.write("\n".join([f"--- {self.way.name}: {reason}", *lines[-25:], ""]))
        return GroupFailed(reason)

    def close(self) -> None:
        """End every process: asked first, then killed with what it has started."""
        for line in self._lines.values():
            with suppress(OSError):
                line.send(None)
        deadline = time.monotonic() + END_LIMIT
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for line in self._lines.values():
            line.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

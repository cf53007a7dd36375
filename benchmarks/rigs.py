"""Processes to be measured: workers that wait, using no CPU, for a number of rounds of a work, and their servers.

A rig that is not being measured is stopped (SIGSTOP): TensorPipe for one polls without end, and would take a core from the
others. A rig owns all it started. `close` asks the workers to end, kills what has not ended and removes the rig's directory;
it may be called at any time and more than once. A worker that fails says why before it ends; the rig passes it on.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import psutil

#: One thread a process; the peers warn about themselves.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
#: Seconds that one measurement should take, and the most rounds it may have.
LONG_ENOUGH, MOST_ROUNDS = 0.2, 500
LEAST_ROUNDS = 3
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal to get when the parent dies
PATIENCE = 180.0

#: Does one round.
Round = Callable[[], object]
#: Prepares the rounds of a work and its variant.
MakeRound = Callable[[str, str], Round]


class RigFailed(Exception):
    """This rig gives no figures; the text says why."""


def described(error: Exception) -> str:
    """Why, in a table's cell."""
    return str(error) if isinstance(error, RigFailed) else f"{type(error).__name__}: {error}"


class Rig:
    """Workers, commanded over pipes, and servers beside them."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bench-", dir="/tmp"))  # short enough for a socket's path
        self.servers: list[subprocess.Popen[bytes]] = []
        self.environment: dict[str, str] = {}  # of the processes that are started from now on
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._rounds: dict[tuple[str, str], int] = {}
        self._failed = False
        self.pauses = True  # stopped while others are measured

    # Starting.

    def add_process(self, target: Callable[..., None], *arguments: Any) -> Any:
        """A process that is not commanded: a peer's server."""
        log = str(self.directory / f"{target.__name__}-{len(self._processes)}.log")
        process = self._context.Process(target=_logged, args=(log, target, *arguments), daemon=True)
        before = dict(os.environ)
        os.environ |= self.environment
        process.start()
        os.environ.clear()
        os.environ |= before
        self._processes.append(process)
        return process

    def add_workers(self, target: Callable[..., None], count: int, *arguments: Any) -> None:
        """`target(pipe, rank, *arguments)` in each of `count` processes; returns when all are ready."""
        for rank in range(count):
            ours, theirs = self._context.Pipe()
            self.add_process(_worker, target, theirs, rank, *arguments)
            theirs.close()
            self._pipes.append(ours)
        self._answers("ready")

    # Measuring.

    def measure(self, work: str, variant: str = "") -> float:
        """Seconds a round, of the slowest worker. The first time it is also found out how many rounds are enough."""
        key = work, variant
        if key not in self._rounds:
            seconds = max(self._ask(*key, 1), 1e-7)
            least = LEAST_ROUNDS if seconds < LONG_ENOUGH else 1
            self._rounds[key] = int(min(MOST_ROUNDS, max(least, LONG_ENOUGH / seconds)))
        return self._ask(*key, self._rounds[key])

    def _ask(self, work: str, variant: str, rounds: int) -> float:
        """All warm up, then all start together."""
        for pipe in self._pipes:
            pipe.send((work, variant, rounds))
        self._answers("warm")
        for pipe in self._pipes:
            pipe.send("go")
        return max(self._answers("seconds"))

    def _answers(self, kind: str) -> list[float]:
        """One answer from each worker. The first that fails ends it: the others may be waiting for that one."""
        waiting, values = list(self._pipes), []
        deadline = time.monotonic() + PATIENCE
        while waiting:
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"no answer within {PATIENCE:g} s")
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                values.append(self._answer(pipe, kind))
                waiting.remove(pipe)
        return values

    def _answer(self, pipe: connection.Connection, kind: str) -> float:
        try:
            said, value = pipe.recv()
        except (EOFError, OSError):
            self._fail(f"worker {self._pipes.index(pipe)} died")
        if said != kind:
            self._fail(str(value))
        return float(value)

    def _fail(self, reason: str) -> NoReturn:
        self._failed = True
        ended = [server.returncode for server in self.servers if server.poll() is not None]
        raise RigFailed(f"{reason}; a server ended with status {ended[0]}" if ended else reason)

    def cost(self, work: str, variant: str = "") -> tuple[float, float]:
        """Seconds a round, as `measure` has them, and the CPU seconds of all its processes and servers in that time."""
        if (work, variant) not in self._rounds:
            self.measure(work, variant)
        before = self._cpu_seconds()
        seconds = self.measure(work, variant)
        rounds = self._rounds[work, variant]
        return seconds, (self._cpu_seconds() - before) / (rounds + max(1, rounds // 10))

    def _cpu_seconds(self) -> float:
        family = [*self._family(), *(psutil.Process(server.pid) for server in self.servers)]
        return sum(used.user + used.system for used in (member.cpu_times() for member in family))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Stopped before and after. Our own servers are left alone: the case `idle` says what they use."""
        _signal(self._family(), signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        """Until it is measured."""
        if self.pauses:
            _signal(self._family(), signal.SIGSTOP)

    def _family(self) -> list[psutil.Process]:
        """All that are commanded, the peers' servers, and what these have started."""
        family = []
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                member = psutil.Process(process.pid)
                family += [member, *member.children(recursive=True)]
        return family

    # Ending.

    def close(self) -> None:
        """End every process, by force if need be, and those that they started."""
        family = self._family()
        _signal(family, signal.SIGCONT)
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + (1.0 if self._failed else 15.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        _signal(family, signal.SIGKILL)
        for process in self._processes:
            process.join()
        for server in self.servers:
            server.kill()
            server.wait()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self.servers = [], [], []
        shutil.rmtree(self.directory, ignore_errors=True)


def _signal(family: list[psutil.Process], number: int) -> None:
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


# In the processes.


def _logged(log: str, target: Callable[..., None], *arguments: Any) -> None:
    """What libraries print must not disturb the table: it goes to the rig's directory. Nobody outlives the benchmark."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    target(*arguments)


def _worker(target: Callable[..., None], pipe: connection.Connection, rank: int, *arguments: Any) -> None:
    try:
        target(pipe, rank, *arguments)
    except Exception as error:
        with suppress(OSError):
            pipe.send(("failed", described(error)))
        raise


def answer(pipe: connection.Connection, make: MakeRound) -> None:
    """A worker's loop: be ready, then measure what is asked until there is nothing more."""
    rounds_of: dict[tuple[str, str], Round] = {}
    pipe.send(("ready", 0.0))
    while (request := pipe.recv()) is not None:
        work, variant, rounds = request
        if (work, variant) not in rounds_of:
            rounds_of[work, variant] = make(work, variant)
        one_round = rounds_of[work, variant]
        timed(one_round, max(1, rounds // 10))
        pipe.send(("warm", 0.0))
        if pipe.recv() is None:
            return
        pipe.send(("seconds", timed(one_round, rounds)))


def timed(one_round: Round, rounds: int) -> float:
    """Seconds a round."""
    start = time.perf_counter()
    for _ in range(rounds):
        one_round()
    return (time.perf_counter() - start) / rounds

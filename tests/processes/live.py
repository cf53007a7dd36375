"""Runs the command as a user would, and looks afterwards whether anything was left behind."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from fork_server import popen

SCRIPTS = Path(__file__).parent / "scripts"
PACED = str(SCRIPTS / "paced.py")
MARK = "POLYTEMPO_TEST_MARK"


@dataclass
class Bench:
    """One test's place to run jobs: a folder, a temporary directory of its own, a mark on every process."""

    folder: Path
    temporary: Path
    forks: bool = True  #: from a process that has torch loaded; else every process is a new interpreter

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.temporary), MARK: str(self.folder), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
        """The command, forked from the fork server, its processes forked from it."""
        if self.forks and arguments[0] in ("run", "worker", "compare"):
            arguments = (arguments[0], "--fork", *arguments[1:])
        return self.popen([*prefix, sys.executable, "-m", "polytempo", *arguments])

    def popen(self, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        """Any command, from this test's folder and with its mark; with these variables, too."""
        start = popen if self.forks else subprocess.Popen
        pipe, environment = subprocess.PIPE, {**self.environment, **variables}
        return start(list(command), text=True, stdout=pipe, stderr=pipe, cwd=self.folder, env=environment)

    def python(self, *arguments: str, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
        """Python with these arguments: its output and end."""
        return finished(self.popen([sys.executable, *arguments], **variables), timeout)

    def run(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return finished(self.start(*arguments), timeout)

    def processes(self) -> list[psutil.Process]:
        """Every process that carries this test's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def child(self, of: int, word: str) -> psutil.Process:
        """The child of a launcher whose command line has this word."""
        return next(p for p in psutil.Process(of).children() if any(word in part for part in p.cmdline()))

    def events(self, record: str = "record") -> list[dict[str, Any]]:
        text = (self.folder / record / "events.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def meta(self, record: str = "record") -> dict[str, Any]:
        return dict(json.loads((self.folder / record / "meta.json").read_text()))

    def clock(self, rank: int) -> list[tuple[str, int, float]]:
        lines = (self.folder / f"clock-{rank}").read_text().splitlines()
        return [(kind, int(step), float(t)) for kind, step, t in (line.split() for line in lines)]


def finished(process: subprocess.Popen[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def said(process: subprocess.Popen[str], words: str, seconds: float = 60) -> str:
    """Read what a command writes on standard error until it has said this; all that it wrote. The rest is left to read."""
    assert process.stderr is not None
    text, deadline = "", time.monotonic() + seconds
    while words not in text or not text.endswith("\n"):
        left = deadline - time.monotonic()
        assert left > 0 and select.select([process.stderr], [], [], left)[0], f"it never said {words!r}: {text}"  # noqa: PT018
        data = os.read(process.stderr.fileno(), 1 << 16)
        assert data, f"it ended without {words!r}: {text}"
        text += data.decode()
    return text


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Look again and again until it is so; a failure when it never is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        threading.Event().wait(0.02)  # only so as not to keep a core busy with looking


def nothing_left(bench: Bench) -> None:
    """No process, no socket, no directory survives a job."""
    wait_until(lambda: not bench.processes(), 10)
    left = [str(p) for p in bench.temporary.rglob("*") if "torchinductor" not in str(p)]  # torch makes that one
    assert left == [], left


def bench_in(folder: Path, forks: bool = True) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="pt-") as short:  # the path of a socket must not be long
        bench = Bench(folder, Path(short), forks)
        try:
            yield bench
            nothing_left(bench)
        finally:
            for process in bench.processes():  # of a test that has failed
                with suppress(psutil.NoSuchProcess):
                    process.kill()

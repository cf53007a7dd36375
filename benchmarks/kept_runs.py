"""Runs that are kept: a line of JSON each, with all its settings, written when it ends. What is there is not run again.

The settings of a run are a frozen dataclass; all of them are the key of its line. So a run whose mode was settled otherwise
(`asp,momentum=lookahead`) is another run than one of plain `asp`, and an old file can be added to. When a mode itself has
changed, its lines are to be removed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

J = TypeVar("J")


def kept_runs(file: Path, kind: type[J], result: str) -> dict[J, Any]:
    """The runs of this kind that have been made before, and their results.

    Args:
        file: The lines; other kinds of runs may be among them.
        kind: The dataclass of their settings.
        result: The name of what came of a run.
    """
    if not file.exists():
        return {}
    names = [field.name for field in fields(kind)]
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {kind(**{name: line[name] for name in names}): line[result] for line in lines if {*names, result} <= line.keys()}


def make_runs(
    wanted: Sequence[J], work: Callable[[J], Any], file: Path, result: str, *, jobs: int = 1, seconds: float | None = None
) -> dict[J, Any]:
    """Make the runs that are not there, in this order; one line each, as they end.

    Args:
        wanted: Of one kind.
        work: Makes a run, in a process of its own.
        file: The lines; added to.
        result: The name of what comes of a run.
        jobs: Processes.
        seconds: After these no further run is started.

    Returns:
        The wanted runs that there are now.
    """
    if not wanted:
        return {}
    results = kept_runs(file, type(wanted[0]), result)
    missing = [job for job in dict.fromkeys(wanted) if job not in results]
    file.parent.mkdir(parents=True, exist_ok=True)
    ending = _as_they_end(missing, work, jobs, seconds)
    with file.open("a", encoding="utf-8") as lines:
        for job, found in track(ending, "runs", len(missing), console=Console(stderr=True)):
            lines.write(json.dumps({**asdict(job), result: found}) + "\n")
            lines.flush()
            results[job] = found
    return {job: results[job] for job in wanted if job in results}


def _as_they_end(
    missing: Sequence[J], work: Callable[[J], Any], jobs: int, seconds: float | None
) -> Iterator[tuple[J, Any]]:
    """The runs and what came of them."""
    began, waiting = time.monotonic(), iter(missing)
    running: dict[Future[Any], J] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        while True:
            while len(running) < jobs and (seconds is None or time.monotonic() - began < seconds):
                if (job := next(waiting, None)) is None:
                    break
                running[pool.submit(work, job)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()

"""A worker and the processes it starts: a rank is one process, and what that process starts has no part in the job.

    forked    (a data loader's workers, os.fork)         the connections it inherits are let go, its exit says nothing
    spawned   (spawn, forkserver: the script is imported anew, and `init` with it)
    started   (subprocess, with this worker's variables)

In each `rank()` and `size()` are the worker's, a wrapped optimizer runs alone, and what would talk is refused.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from polytempo.errors import UsageError
from polytempo.launcher.job_facts import claimed_by
from polytempo.transport.channel import Bytes, Channel


def started_by(place: str) -> str:
    """Which worker started this process, in words, if its place in the job is that worker's; else nothing."""
    worker = claimed_by(place)
    if worker not in (0, os.getpid()):
        return f"a worker of this rank, process {worker},"
    return "a worker of this rank" if is_importing_the_script() else ""


def is_importing_the_script() -> bool:
    """Is this a process of multiprocessing's that imports the script of the process that started it?"""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def refusal(parent: str) -> str:
    """What a process that `parent` started is told when it would take part."""
    return f"process {os.getpid()} was started by {parent} and takes no part in the job; only the worker itself can do this"


class InheritedChannel(Channel):
    """What a forked child has instead of its parent's connection."""

    def __init__(self, parent: str) -> None:
        self._parent = parent

    def _refuse(self) -> NoReturn:
        raise UsageError(refusal(self._parent))

    def send(self, header: bytes, buffers: Sequence[Bytes] = ()) -> int:
        self._refuse()

    def receive(self) -> tuple[bytes, list[Bytes]] | None:
        self._refuse()

    def pollable(self) -> Any:
        self._refuse()

    def close(self) -> None:
        """There is nothing to close."""

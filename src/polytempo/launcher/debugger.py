"""`breakpoint()` in a worker: which worker reads the terminal, and how the launcher makes room for it.

The launcher names `polytempo.launcher.debugger.enter` in PYTHONBREAKPOINT of each worker, and the user's own choice of a
debugger beside it. Python looks `enter` up at each `breakpoint()` and calls what it finds, so the frame below is the
script's, whichever debugger that is:

    the worker that has standard input   the user's debugger; before the first time, the launcher clears the terminal
    other workers                        a line that says how to stop there, once a place
    processes that a worker has started  the user's debugger, as under plain Python

The terminal is one: the worker is in the launcher's process group, so that the shell stops and continues both (Ctrl-Z, fg).
It ignores Ctrl-C, which is the launcher's, until its first `breakpoint()`. From then on Ctrl-C is the debugger's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from polytempo.launcher.job_facts import JOB_VARIABLE, chosen_debugger, job_of_environment

#: What PYTHONBREAKPOINT is for workers.
HOOK = f"{__name__}.enter"
#: The launcher's socket in the job's folder, at which a worker asks for the terminal.
SOCKET = "debugger"

_passed: set[tuple[str, int]] = set()
_entered = False


def __getattr__(name: str) -> Any:  # what `breakpoint()` calls here
    if name != "enter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = job_of_environment()
    if found is None or multiprocessing.parent_process() is not None:
        return _chosen()
    facts, rank = found
    if facts.reader != rank:
        return partial(_pass_over, f"worker {rank} has no terminal; to stop there: --debug {rank}")
    if os.path.samestat(os.fstat(0), os.stat(os.devnull)):
        return partial(_pass_over, "standard input is /dev/null; start the job from a terminal to stop there")
    _take_terminal()
    return _chosen()


def _chosen() -> Callable[..., Any]:
    """The user's debugger, as PYTHONBREAKPOINT named it outside of the job."""
    module, _, name = chosen_debugger().rpartition(".")
    found: Callable[..., Any] = getattr(import_module(module or "builtins"), name)
    return found


def _pass_over(why: str, *_: Any, **__: Any) -> None:
    frame = sys._getframe(1)
    place = frame.f_code.co_filename, frame.f_lineno
    if place not in _passed:
        _passed.add(place)
        sys.stderr.write(f"polytempo: breakpoint() at {place[0]}:{place[1]} is passed over: {why}\n")
        sys.stderr.flush()


def _take_terminal() -> None:
    """Once: have the launcher draw nothing any more, and write to the terminal directly."""
    global _entered
    if _entered:
        return
    _entered = True
    with socket.socket(socket.AF_UNIX) as launcher, suppress(ConnectionError):  # it has ended: so will this process
        launcher.connect(str(Path(os.environ[JOB_VARIABLE]).parent / SOCKET))
        launcher.recv(1)
    if os.isatty(0):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        terminal = os.open(os.ttyname(0), os.O_WRONLY | os.O_NOCTTY)
        for descriptor in (1, 2):
            os.dup2(terminal, descriptor)
        os.close(terminal)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

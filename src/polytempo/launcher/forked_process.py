"""Python programs forked from a process that has already loaded torch: `polytempo run --fork`.

Importing torch takes seconds of CPU time in every process. With `--fork` the launcher imports torch and this library once
(`preload`) and forks the servers and workers, so that each starts within milliseconds. A forked process is a child of the
launcher like any other: same process groups, pipes, signals and exit statuses.

After the fork the child takes on what `execve` would have given it: default signal handlers, only its own three standard
descriptors, its environment, working directory, `sys.argv` and `sys.path[0]`, a new `__main__`, and fresh seeds. What the C
libraries read at their start is set again: the number of OpenMP threads and the thresholds of malloc. The command line and
environment that /proc shows are overwritten (as setproctitle does), so that `ps` tells processes apart and the janitor of
the job folder finds them.

Differences that remain: modules loaded before the fork stay loaded, string hashes are the same in all processes, and a
process ends after its atexit handlers without tearing the interpreter down. No thread may run Python code in the launcher;
threads of OpenBLAS are stopped around a fork by its own handlers.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import io
import os
import runpy
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LIBC = ctypes.CDLL(None)  # opened here: between fork and exec a child of a process with threads takes no lock
#: What servers and training scripts load.
PRELOADED = (
    "torch",
    "polytempo.launcher.server_process",
    "polytempo.session.session",
    "polytempo.train.optimizer",
    "polytempo.train.communication",
)


@dataclass(frozen=True)
class Body:
    """What a forked process does instead of what its command line says."""

    call: Callable[[], object]
    kept: frozenset[int] = frozenset()  #: descriptors of the parent's, which stay open


def preload(modules: Sequence[str] = PRELOADED) -> None:
    """Import what all processes of a job need, before the first fork."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector no longer writes to these pages, so that they stay shared


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent, process `parent`, ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(1)


class ForkedProcess:
    """A forked Python process with pipes; the part of `subprocess.Popen` that `ChildProcess` uses."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdin: bool,
        prepare: Callable[[], None],
        reads: bool = False,
        direct: bool = False,
        leads: bool = True,
        body: Body | None = None,
    ) -> None:
        """Args: `command` as for `subprocess` (the interpreter, then `-m MODULE`, `-c CODE` or a script, and arguments);
        `environment`: all of it; `stdin`: open a pipe for standard input, else it is this process's own if `reads`, or
        empty; `prepare`: called in the child first, while signals are still blocked; `direct`: its output is this process's
        own, too, else there are pipes for it; `leads`: it leads a process group; `body`: what it does instead."""
        self.returncode: int | None = None
        inward = os.pipe() if stdin else (os.dup(0) if reads else os.open(os.devnull, os.O_RDONLY), -1)
        outward, errors = ((-1, os.dup(1)), (-1, os.dup(2))) if direct else (os.pipe(), os.pipe())

        def lead_group() -> None:
            if leads:
                os.setpgid(0, 0)
            prepare()

        self.pid = fork_python(command, environment, os.getcwd(), (inward[0], outward[1], errors[1]), lead_group, body)
        if leads:
            with suppress(ProcessLookupError, PermissionError):  # the child does it too; whichever comes first
                os.setpgid(self.pid, self.pid)
        for descriptor in (inward[0], outward[1], errors[1]):
            os.close(descriptor)
        self.stdin = io.FileIO(inward[1], "wb") if stdin else None
        self.stdout, self.stderr = (None if way[0] < 0 else io.FileIO(way[0]) for way in (outward, errors))

    def wait(self) -> int:
        """Wait for the end of the process and reap it.

        Returns: its exit status; -N when signal N killed it.
        """
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def fork_python(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    descriptors: tuple[int, int, int],
    prepare: Callable[[], None] = lambda: None,
    body: Body | None = None,
) -> int:
    """Fork a child that runs a Python command as if it had been started anew, or a `body`; the child's process id.

    Args: `command`: the interpreter, then `-m MODULE`, `-c CODE` or a script, and arguments; `descriptors`: its standard
    input, output and error; `prepare`: called in the child first, while signals are still blocked.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()  # or the child would write it as well
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no handler of the parent runs in the child
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 for threads of C libraries, see above
        child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return child
    try:
        prepare()
        _reset_signals(mask)
        _reset_descriptors(descriptors, body.kept if body is not None else frozenset())
        os.chdir(directory)
        _reset_environment(command, environment)
        _reset_libraries(environment)
    except BaseException as error:  # noqa: BLE001 the frames above are the parent's: they must not run in the child
        os.write(2, f"polytempo: a forked process could not start: {error!r}\n".encode())
        os._exit(1)
    _run(command, body)


def _reset_signals(mask: set[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _reset_descriptors(descriptors: tuple[int, int, int], kept: frozenset[int]) -> None:
    """Standard streams lead to `descriptors`; all others that are not `kept` are closed."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 3) for descriptor in descriptors]
    for number, descriptor in enumerate(above):
        os.dup2(descriptor, number)
    first = 3
    for number in sorted(descriptor for descriptor in kept if descriptor >= first):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _reset_environment(command: Sequence[str], environment: Mapping[str, str]) -> None:
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    os.environ.clear()
    os.environ.update(environment)
    _show_in_proc(command, {**changed, **environment})
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    encoding, strictness = sys.stdin.encoding, sys.stdin.errors
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding, strictness)  # type: ignore[misc]
    for number, name, errors in ((1, "stdout", strictness), (2, "stderr", "backslashreplace")):
        raw: Any = io.FileIO(number, "wb", closefd=False)
        binary = raw if unbuffered else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(binary, encoding, errors, line_buffering=number == 2, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show_in_proc(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Overwrite what /proc/self/cmdline and environ show, as far as there is room: changed variables come first.

    The environment of C no longer points into this memory, because every variable was set anew.
    """
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            areas = [int(field) for field in file.read().rpartition(")")[2].split()[45:49]]
        if 0 in areas:
            return  # not shown to this process
        texts = ["\0".join(command), "\0".join(f"{name}={value}" for name, value in environment.items())]
        for text, begin, end in zip(texts, areas[::2], areas[1::2], strict=True):
            data = os.fsencode(text)[: max(0, end - begin - 1)]
            ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def _reset_libraries(environment: Mapping[str, str]) -> None:
    """What libraries read from the environment when they were loaded, and their seeds."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    threads = environment.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdigit():
        torch.set_num_threads(int(threads))
    if numpy is not None:
        numpy.random.seed()
    names = {"MALLOC_MMAP_THRESHOLD_": M_MMAP_THRESHOLD, "MALLOC_TRIM_THRESHOLD_": M_TRIM_THRESHOLD}
    for name, option in names.items():
        if environment.get(name, "").isdigit():
            ctypes.CDLL(None).mallopt(option, int(environment[name]))
    tempfile.tempdir = None  # it depends on TMPDIR
    gc.freeze()  # nothing of the parent's is collected: a descriptor's number may be another file's by now


def _run(command: Sequence[str], body: Body | None) -> NoReturn:
    """Be `__main__`, or what the body says; then end without returning to the frames of the parent."""
    status = 1
    try:
        if body is not None:  # the parent's end is not the child's, nor has the child ended by the parent's last error
            atexit._clear()
            for name in ("last_type", "last_value", "last_traceback", "last_exc"):
                if hasattr(sys, name):
                    delattr(sys, name)
        status = exit_status((lambda: _run_main(command)) if body is None else body.call)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # noqa: BLE001
        with suppress(BaseException):
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
        status = status or 120
    ctypes.CDLL(None).fflush(None)
    os._exit(status)


def exit_status(main: Callable[[], object]) -> int:
    """Run a program; the exit status that Python would end with. Its traceback begins outside of this package."""
    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001
        trace = below_this_package(error.__traceback__)
        error = error.with_traceback(trace)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace  # as the interpreter notes it
        sys.excepthook(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def below_this_package(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that have called the program."""
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        trace = trace.tb_next
    return trace


def _run_main(command: Sequence[str]) -> None:
    _, first, *rest = command
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __file__=first, __cached__=None)
    sys.orig_argv = list(command)
    if first == "-m":
        module, *arguments = rest
        sys.argv = ["-m", *arguments]
        _set_first_path(os.getcwd())
        sys.modules.pop(module, None)  # it runs as __main__
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        return
    if first == "-c":
        code, *arguments = rest
        sys.argv = ["-c", *arguments]
        _set_first_path("")
        del main.__dict__["__file__"]
        exec(compile(code, "<string>", "exec", dont_inherit=True), main.__dict__)
        return
    sys.argv = [first, *rest]
    _set_first_path(os.path.dirname(os.path.realpath(first)))
    path = os.path.abspath(first)
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _set_first_path(entry: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = entry

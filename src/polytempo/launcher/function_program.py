"""`pt.launch`: workers that run a function of the process that calls it, and what comes back of it.

The function travels in one of two ways, as the caller's process allows:

    fork      the worker is forked from the caller and has all that the caller has; nothing is written
    by value  a new interpreter reads function and arguments from a file: a function that can be imported is imported,
              another one is a value, with the globals that it uses (cloudpickle). `__main__` is not run again

A fork is taken only where it is sound: torch's threads do not live on in a child, which would wait for them for ever, nor
does a CUDA context. Threads of OpenMP are ended before (they come back by themselves); others decide for the file.

The file lies in the job's private folder (mode 0700), where workers leave the value of rank 0, and errors. So what is
unpickled was written by processes of this job on this host; nothing that came over a network is.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from polytempo.errors import JobEnded, PolytempoError, UsageError
from polytempo.launcher.forked_process import Body, below_this_package, exit_status
from polytempo.launcher.job_facts import job_of_environment
from polytempo.launcher.program import Program

FUNCTION, RESULT, ERROR = "function", "result", "error-"
#: "Hard" of `omp_pause_resource_all`: the threads end.
OMP_PAUSE_HARD = 2


class WorkerTraceback(Exception):
    """The traceback of a worker, as text: the cause of the error that `launch` raises."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class WorkerError:
    """The error by which a worker has ended."""

    rank: int
    at: float  #: on the clock that all processes of a host share
    error: BaseException
    text: str

    @property
    def follows(self) -> bool:
        """Whether it may be the consequence of another worker's end."""
        return isinstance(self.error, PolytempoError) and isinstance(self.error, RuntimeError)


@dataclass(frozen=True)
class FunctionProgram(Program):
    """A function of the caller's, with its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    pickled: bytes = b""  #: empty where workers are forked from the caller
    kept: frozenset[int] = frozenset()  #: descriptors of the caller's, which forked workers keep

    @property
    def name(self) -> str:
        return f"{_name_of(self.function)}()"

    def check(self) -> None:
        """It is there."""

    def facts(self) -> dict[str, Any]:
        return {"script": self.name, "runs": "function"}

    def place(self, folder: Path) -> None:
        if self.pickled:
            _write(folder / FUNCTION, self.pickled)

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-m", "polytempo.launcher.function_program", str(folder / FUNCTION)]

    def body(self, folder: Path, rank: int) -> Body | None:
        if self.pickled:
            return None
        return Body(partial(run_function, partial(self.function, *self.args, **self.kwargs), folder, rank), self.kept)


def program_for(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> FunctionProgram:
    """How a function travels from this process.

    Raises: UsageError, one line that names it, for what cannot be shipped."""
    if not callable(function):
        raise UsageError(f"expected a function as the first argument of launch(), got {function!r}")
    if not why_no_fork():
        descriptors = set()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it was that of the listing itself
                os.fstat(int(name))
                descriptors.add(int(name))
        return FunctionProgram(function, tuple(args), dict(kwargs), kept=frozenset(descriptors))
    caller = {"path": [entry or os.getcwd() for entry in sys.path], "argv": list(sys.argv)}
    try:
        call = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:
        raise UsageError(_unshippable(function, args, kwargs, error)) from error
    return FunctionProgram(function, tuple(args), dict(kwargs), pickle.dumps(caller) + call)


# By a fork.


def why_no_fork() -> str:
    """Why workers cannot be forked from this process, in words; empty where they can."""
    if threading.active_count() > 1:
        return "other threads run in this process"
    session, torch = sys.modules.get("polytempo.session.session"), sys.modules.get("torch")
    if session is not None and session.is_initialized():
        return "init() was called in this process"
    if torch is not None and torch.cuda.is_initialized():
        return "this process uses a GPU"
    if any(name.startswith(("pt_", "cuda")) for name in _thread_names()):
        return "torch has started threads in this process"
    return _end_openmp_threads()


def _thread_names() -> Iterator[str]:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            yield (thread / "comm").read_text(encoding="utf-8", errors="replace")


def _end_openmp_threads() -> str:
    """Have OpenMP end the threads that it keeps for this one: a fork has none of them, and would wait for them."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    libraries = {line.split(maxsplit=5)[5] for line in mapped if any(f"/{name}" in line for name in ("libgomp", "libiomp5"))}
    for library in libraries:
        pause = getattr(ctypes.CDLL(library), "omp_pause_resource_all", None)
        if pause is None or pause(OMP_PAUSE_HARD) != 0:
            return f"the threads of {library} cannot be ended"
    return ""


# By value.


def _unshippable(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> str:
    name, said = _name_of(function), " ".join(str(error).split())
    for what, value in _parts(function, args, kwargs):
        try:
            cloudpickle.dumps(value)
        except Exception as found:  # noqa: BLE001  objects raise what they like
            said = " ".join(str(found).split())
            return f"launch() cannot ship {what} ({type(value).__name__}): {said}; make it inside {name}()"
    return f"launch() cannot ship {name}(): {said}"


def _parts(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"args[{place}]", value) for place, value in enumerate(args))
    yield from ((f"kwargs[{name!r}]", value) for name, value in kwargs.items())
    with suppress(TypeError):  # an object that can be called
        used = inspect.getclosurevars(function)
        yield from ((f"{name}, which {_name_of(function)}() uses", value) for name, value in used.nonlocals.items())
        yield from ((f"{name}, which {_name_of(function)}() uses", value) for name, value in used.globals.items())


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__)).replace("<locals>.", "")


# In the worker.


def load_call(file: Path) -> Callable[[], Any]:
    """The call in a file that the caller wrote; modules are found where the caller finds them."""
    with file.open("rb") as stream:
        caller = pickle.load(stream)
        sys.path[:], sys.argv[:] = caller["path"], caller["argv"]
        function, args, kwargs = pickle.load(stream)
    return partial(function, *args, **kwargs)


def run_function(call: Callable[[], Any], folder: Path, rank: int) -> None:
    """Make the call, and leave what comes of it in the job's folder."""
    try:
        value = call()
        if rank == 0:
            try:
                pickled = _pickled(value)
            except Exception as error:
                kind = type(value).__name__
                raise UsageError(f"launch() cannot bring back what worker 0 returned ({kind}): {error}") from error
            _write(folder / RESULT, pickled)
    except SystemExit:
        raise
    except BaseException as error:
        shown = "".join(traceback.format_exception(type(error), error, below_this_package(error.__traceback__)))
        _write(folder / f"{ERROR}{rank}", pickle.dumps((time.monotonic(), _pickled_error(error), shown)))
        raise


def _pickled_error(error: BaseException) -> bytes:
    """An error whose class cannot be made again from its arguments becomes the words that it has."""
    try:
        data = _pickled(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001
        return pickle.dumps(JobEnded(f"{type(error).__name__}: {error}"))
    return data


def _pickled(value: Any) -> bytes:
    """By reference where that is possible: the caller's own classes stay the same."""
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001  of a class that is not in a module of this process
        return bytes(cloudpickle.dumps(value))


def _write(file: Path, data: bytes) -> None:
    """Whole or not at all; for this user alone."""
    partial_file = file.with_suffix(".part")
    with open(os.open(partial_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(data)
    partial_file.replace(file)


# What comes back.


def result_in(folder: Path) -> bytes:
    """What worker 0 has returned, pickled; empty where it has returned nothing."""
    file = folder / RESULT
    return file.read_bytes() if file.exists() else b""


def errors_in(folder: Path) -> tuple[WorkerError, ...]:
    """The errors of the workers, the first one first."""
    found = []
    for file in folder.glob(f"{ERROR}*"):
        if not file.suffix:
            at, error, text = pickle.loads(file.read_bytes())
            found.append(WorkerError(int(file.name.removeprefix(ERROR)), at, pickle.loads(error), text))
    return tuple(sorted(found, key=lambda one: one.at))


def first_cause(errors: Sequence[WorkerError], named: int | None) -> WorkerError | None:
    """The error to raise: that of the worker by which the job has ended, unless it followed from another one's."""
    own = next((error for error in errors if error.rank == named), None)
    if own is not None and not own.follows:
        return own
    return errors[0] if errors else None


# A worker in a new interpreter: `python -m polytempo.launcher.function_program FILE`.


def main(file: Path) -> None:
    """Make the call, in the place that the environment says."""
    found = job_of_environment()
    assert found is not None, "pt.launch starts it"
    run_function(lambda: load_call(file)(), file.parent, found[1])


if __name__ == "__main__":
    path = Path(sys.argv[1])
    sys.exit(exit_status(lambda: main(path)))

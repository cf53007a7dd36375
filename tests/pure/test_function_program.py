"""A function of the caller's as what workers run: how it travels, what cannot, and what comes back."""

from __future__ import annotations

import inspect
import pickle
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import polytempo
from polytempo.cli.run import run
from polytempo.errors import JobEnded, RankLost, UsageError
from polytempo.launcher import function_program
from polytempo.launcher.function_program import (
    WorkerError,
    errors_in,
    first_cause,
    load_call,
    program_for,
    result_in,
    run_function,
    why_no_fork,
)

NOTEBOOK = """
import threading
rate, lock, seen = 0.5, threading.Lock(), []
class Mine(Exception):
    def __init__(self, first, second):
        super().__init__(first)
def helper(x):
    return x * rate
def train(x, scale=1):
    return helper(x) * scale
def locked():
    return lock
def outer():
    handle = threading.Lock()
    return lambda: handle
class Model:
    pass
def made():
    return Model()
def generates():
    return (x for x in seen)
def fails(kind):
    raise {"mine": Mine("a", "b"), "lookup": KeyError("k")}[kind]
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`__main__` as the cells of a notebook make it: in no file, and in a process with threads."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(function_program, "why_no_fork", lambda: "it is a notebook")
    exec(NOTEBOOK, main.__dict__)
    return main


def as_a_worker(folder: Path, function: Callable[..., Any], *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Ship it, and run it as a process that has none of the caller's `__main__` would."""
    program = program_for(function, args, kwargs)
    program.place(folder)
    path, argv, main = list(sys.path), list(sys.argv), sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        run_function(load_call(folder / "function"), folder, rank)
    finally:
        sys.modules["__main__"], sys.path[:], sys.argv[:] = main, path, argv


def test_a_function_goes_by_value_with_the_globals_it_uses(notebook: Any, tmp_path: Path) -> None:
    as_a_worker(tmp_path, notebook.train, 6, scale=2)
    assert pickle.loads(result_in(tmp_path)) == 6
    notebook.rate = 2.0  # a cell that was run again
    as_a_worker(tmp_path, notebook.train, 6)
    assert pickle.loads(result_in(tmp_path)) == 12
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == {"function": 0o600, "result": 0o600}
    assert (program_for(notebook.train, (), {}).name, program_for(partial(notebook.train), (), {}).name) == (
        "train()",
        "partial()",
    )


def test_classes_of_the_notebook_come_back_as_what_they_are(notebook: Any, tmp_path: Path) -> None:
    as_a_worker(tmp_path, notebook.made)
    assert type(pickle.loads(result_in(tmp_path))) is notebook.Model


def test_only_worker_0_leaves_its_value(notebook: Any, tmp_path: Path) -> None:
    as_a_worker(tmp_path, notebook.train, 6, rank=1)
    assert result_in(tmp_path) == b""
    assert errors_in(tmp_path) == ()


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("train", (threading.Lock(),), r"launch\(\) cannot ship args\[0\] \(lock\): .*; make it inside train\(\)"),
        ("locked", (), r"launch\(\) cannot ship lock, which locked\(\) uses \(lock\): cannot pickle '_thread.lock' object"),
        ("outer", (), r"launch\(\) cannot ship handle, which outer.<lambda>\(\) uses \(lock\)"),
    ],
)
def test_what_cannot_be_shipped_is_named(name: str, args: tuple[Any, ...], text: str, notebook: Any) -> None:
    function = notebook.outer() if name == "outer" else getattr(notebook, name)
    with pytest.raises(UsageError, match=text) as refused:
        program_for(function, args, {})
    assert "\n" not in str(refused.value)


def test_what_is_no_function(notebook: Any) -> None:
    with pytest.raises(UsageError, match=r"expected a function as the first argument of launch\(\), got 'train.py'"):
        program_for("train.py", (), {})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"cannot ship kwargs\['x'\] \(generator\)"):
        program_for(notebook.train, (), {"x": notebook.generates()})


def test_errors_keep_their_type_and_bring_the_workers_traceback(notebook: Any, tmp_path: Path) -> None:
    for rank, kind in ((1, "lookup"), (0, "mine")):
        with pytest.raises((KeyError, Exception), match=r"k|a"):
            as_a_worker(tmp_path, notebook.fails, kind, rank=rank)
    first, second = errors_in(tmp_path)
    assert (first.rank, second.rank) == (1, 0)
    assert (type(first.error), first.error.args) == (KeyError, ("k",))
    assert first.text.startswith("Traceback (most recent call last):\n")
    assert "in fails" in first.text
    assert "function_program" not in first.text
    assert isinstance(second.error, JobEnded), "its class cannot be made again from its arguments"
    assert str(second.error) == "Mine: a"


def test_a_value_that_cannot_come_back_is_an_error_of_worker_0(notebook: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot bring back what worker 0 returned \(generator\)"):
        as_a_worker(tmp_path, notebook.generates)
    assert [type(error.error) for error in errors_in(tmp_path)] == [UsageError]


def test_the_first_cause() -> None:
    lost, bad, later = (
        WorkerError(0, 2.0, RankLost("rank 1 is gone", (1,)), ""),
        WorkerError(1, 1.0, ValueError("no"), ""),
        WorkerError(2, 3.0, KeyError("k"), ""),
    )
    assert first_cause([bad, lost, later], 0) is bad, "worker 0 has ended because of it"
    assert first_cause([bad, lost, later], 2) is later
    assert first_cause([bad, lost, later], None) is bad
    assert first_cause([], 0) is None
    again = pickle.loads(pickle.dumps(lost.error))
    assert (str(again), again.ranks) == ("rank 1 is gone", (1,))


def test_workers_are_forked_only_where_nothing_is_lost_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    for name in ("torch", "polytempo.session.session"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert why_no_fork() == ""
    forked = program_for(time.sleep, (0,), {})
    assert forked.pickled == b""
    assert {0, 1, 2} <= forked.kept
    body = forked.body(Path(), 0)
    assert body is not None
    assert body.kept == forked.kept
    monkeypatch.setattr(function_program, "_thread_names", lambda: iter(["python", "pt_autograd_0"]))
    assert why_no_fork() == "torch has started threads in this process"
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert why_no_fork() == "this process uses a GPU"
    monkeypatch.setitem(sys.modules, "polytempo.session.session", SimpleNamespace(is_initialized=lambda: True))
    assert why_no_fork() == "init() was called in this process"
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert why_no_fork() == "other threads run in this process"


def test_launch_is_refused_where_no_job_can_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"size": 2}')
    with monkeypatch.context() as worker:
        worker.setenv("POLYTEMPO_JOB", str(tmp_path / "job.json"))
        worker.setenv("POLYTEMPO_RANK", "1")
        with pytest.raises(UsageError, match=r"launch\(\) starts a job, and this process is a worker of one"):
            polytempo.launch(time.time)
    caught: list[UsageError] = []

    def elsewhere() -> None:
        try:
            polytempo.launch(time.time)
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "in another thread than the main one" in str(caught[0])
    with pytest.raises(UsageError, match="expected at least 1 worker, got 0"):
        polytempo.launch(time.time, n=0)


def test_launch_takes_the_options_of_run() -> None:
    """Under their names and with their values where none is given, but for those of scripts and of other hosts."""
    command, call = (inspect.signature(function).parameters for function in (run, polytempo.launch))
    elsewhere = {"listen", "expect", "insecure", "host_timeout"}
    left_out = {"script", "arguments", "module", "workers", "max_restarts", "fork", "mode", *elsewhere}
    own = {"function", "args", "kwargs", "n", "modes"}
    assert command.keys() - call.keys() == left_out
    assert call.keys() - command.keys() == own
    assert all(call[name].default == command[name].default for name in call.keys() - own)

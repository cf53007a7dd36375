"""`pt.launch`: `polytempo run` with a function instead of a script, for notebooks and scripts that start their own jobs."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from polytempo.cli.run import run_job
from polytempo.door import bring_named, check_shared, read_sync, sources_of
from polytempo.errors import JobEnded, UsageError
from polytempo.launcher.child_process import INTERRUPTED
from polytempo.launcher.function_program import WorkerError, WorkerTraceback, errors_in, first_cause, program_for, result_in
from polytempo.launcher.job_facts import job_of_environment, placement_of_environment
from polytempo.sync.mode import Mode
from polytempo.sync.spec import Spec, spec_of

T = TypeVar("T")


def launch(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    n: int | None = None,
    servers: int | None = None,
    server_device: str = "auto",
    sync: str | Mode | Spec | None = None,
    modes: Sequence[str | os.PathLike[str]] = (),
    via: str | None = None,
    strategy: str | None = None,
    record: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    steps: int | None = None,
    samples: int | None = None,
    seconds: float | None = None,
    slow: str | None = None,
    hiccup: str | None = None,
    link: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 0,
    checkpoint_errors: str = "stop",
    grace: float = 20.0,
    resume: str | os.PathLike[str] | None = None,
    min_workers: int | None = None,
    on_divergence: str = "warn",
    seed: int = 0,
    timeout: float | None = None,
    debug: int | None = None,
    verbose: bool = False,
    quiet: bool = False,
) -> T:
    """Run a function in several worker processes on this host, as `polytempo run` runs a script.

    Each worker calls `function(*args, **kwargs)`; `pt.init()` and `pt.rank()` in it say which worker it is. What workers
    print, and how the job goes, is shown here. It works in scripts and in the cells of a notebook, in the main thread.

    Workers are forked from this process where that is sound: no other threads, no CUDA context, no `init`. Elsewhere, and
    in every notebook, the function goes by value into new interpreters: with the globals that it uses, as they are now, and
    with the modules of this process's `sys.path`. `__main__` is not run again.

    Args:
        function: What each worker calls.
        args: Its arguments.
        kwargs: Its arguments by name.
        n: The number of workers; by default 2, or what `strategy` needs.
        servers: Parameter-server shards, as `--servers`.
        server_device: Where servers keep the values.
        sync: The synchronisation mode, such as "ssp:3" or "lab/own_mode.py:NAME:2"; by default "bsp".
        modes: Files of modes that the function may name, as `--mode`.
        via: How gradients travel: "ps", "allreduce" or "auto".
        strategy: How the model is spread, such as "data=2,pipe=2".
        record: Directory for the record and the logs.
        overwrite: Replace a record that is there.
        steps: Budget: steps, summed over all workers.
        samples: Budget: samples.
        seconds: Budget: seconds from the first step.
        slow: Emulation: "RANK:FACTOR,...", as `--slow`.
        hiccup: Emulation: "PROBABILITY:SECONDS" of a stall in each step.
        link: Emulation: what each worker may send and receive, such as "100Mb/s,5ms".
        checkpoint: Directory for checkpoints.
        checkpoint_every: Checkpoint every N steps of the slowest worker.
        checkpoint_errors: When a checkpoint cannot be written: "stop" or "continue".
        grace: Seconds that an interrupted job may take to save a checkpoint.
        resume: Resume from the checkpoint of the latest step in this directory.
        min_workers: Go on while at least this number of workers is left.
        on_divergence: When the training has diverged: "warn", or "stop" the job.
        seed: Seed of samplers and emulation.
        timeout: Give up a worker that others have waited for longer than this, in seconds.
        debug: Give this worker the terminal, as `--debug`.
        verbose: Also show each process that is started.
        quiet: Show only the output of the workers, and errors.

    Returns:
        What the function has returned in worker 0.

    Raises:
        UsageError: An option cannot work, something cannot be shipped, or this process is a worker of a job itself. Nothing
            was started.
        KeyboardInterrupt: Ctrl-C, or the notebook's "interrupt", has ended the job. Nothing is left of it.
        JobEnded: A process was killed, or ended without an error to raise; the text is the first cause.
        Exception: What the function has raised in the worker that failed first: the error itself, with that worker's
            traceback as its cause.

    Example:
        ```python
        def train(rate):
            pt.init()
            optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), model)
            ...
            return accuracy

        accuracy = pt.launch(train, args=(0.1,), n=4, sync="ssp:3", samples=30_000)
        ```
    """
    given = dict(locals())
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("launch() was called in another thread than the main one, which has Ctrl-C; call it there")
    placement = placement_of_environment()
    if job_of_environment() is not None or (placement is not None and placement.size > 1):
        raise UsageError("launch() starts a job, and this process is a worker of one; call it outside of the job")
    for file in modes:
        bring_named(os.fspath(file))
    given |= {"sync": _text_of(sync), "mode": [os.fspath(file) for file in modes]}
    program = program_for(function, tuple(args), dict(kwargs or {}))
    folders = {name: Path(given[name]) for name in ("record", "checkpoint", "resume") if given[name] is not None}
    given = {name: given[name] for name in given if name not in ("function", "args", "kwargs", "n", "modes")} | folders
    given |= {"workers": n, "listen": None, "expect": 0, "host_timeout": 5.0, "insecure": False, "fork": False}
    result = b""
    errors: tuple[WorkerError, ...] = ()

    def collect(folder: Path) -> None:  # what workers have left there
        nonlocal result, errors
        result, errors = result_in(folder), errors_in(folder)

    status, job = run_job(program, given, collect)
    if status == INTERRUPTED:
        signal.raise_signal(job.ended_by or signal.SIGINT)  # it was the launcher's; now it is the caller's
        raise KeyboardInterrupt
    if status:
        named = job.cause.worker if job.cause is not None else None
        error = first_cause(errors, named)
        if error is None:
            raise JobEnded(job.cause.cause if job.cause is not None else "the job has failed")
        raise error.error from WorkerTraceback(f"worker {error.rank}: {error.text}")
    if 0 not in job.finished:
        raise JobEnded("worker 0 was lost, and with it what the function has returned; the others have finished")
    found: Any = pickle.loads(result) if result else None
    return cast(T, found)


def _text_of(sync: str | Mode | Spec | None) -> str | None:
    """The mode as the command line would have it: a file is loaded, since this call is this machine's own."""
    if sync is None or isinstance(sync, str):
        return None if sync is None else read_sync(sync)
    spec = spec_of(sync)
    check_shared(spec, sources_of([spec.text]) if spec.digest else ())
    return spec.text

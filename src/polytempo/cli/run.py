"""`polytempo run`, `polytempo worker` and `polytempo key`: live jobs. What they need is imported when they are called."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polytempo.cli.options import (
    Arguments,
    CheckpointOption,
    FailureOption,
    Fork,
    HiccupOption,
    HostOption,
    Insecure,
    JobOption,
    LinkOption,
    Modes,
    Module,
    OnDivergence,
    Option,
    OutputOption,
    Overwrite,
    Quiet,
    Samples,
    Script,
    Seconds,
    SeedOption,
    ShardCount,
    Slow,
    StepBudget,
    SyncOption,
    Workers,
    complete_mode,
    limits_and_emulation,
)
from polytempo.errors import UsageError
from polytempo.report.summary import summary_line

if TYPE_CHECKING:
    from polytempo.launcher.local_job import LocalJob
    from polytempo.launcher.program import Program

SYNC = "The synchronisation mode, by default bsp; all are listed below. Of a file of your own: FILE.py:NAME."
VIA = (
    "How gradients travel: ps (parameter servers), allreduce (among workers); auto, the default: allreduce unless servers "
    "are needed."
)
SERVER_DEVICE = (
    "Where servers keep the values: cpu, cuda, cuda:I (visible GPU I); auto, the default: on a GPU where the workers' "
    "parameters are."
)
MIN_WORKERS = (
    "Go on while at least this number of workers is left. Default: all under bsp, local, adacomm, diloco, and modes of your "
    "own that declare MadeOf.ALL; 1 in other modes. A worker whose script fails before its first push ends the job in every "
    "mode."
)
STRATEGY = (
    "How the model is spread, such as data=2,pipe=2 or pipe=2,tensor=2,microbatches=8; also mirrored, multi_worker, "
    "parameter_server, central_storage, auto. Without -n it says how many workers there are."
)
DEBUG = (
    "Give worker RANK the terminal: its breakpoint() stops there, and no time-out gives up a worker. A job of one worker "
    "needs no option."
)
COUNT = "Number of worker processes on this host; by default 2, or what --strategy needs."
#: Options that are not fields of a `RunRequest` by their own name.
OWN = (
    *("script", "arguments", "module", "steps", "samples", "seconds", "slow", "hiccup", "link"),
    *("max_restarts", "verbose", "quiet", "mode"),
)


def run(
    script: Script,
    arguments: Arguments = None,
    module: Module = False,
    workers: Annotated[int | None, JobOption("--workers", "-n", help=COUNT)] = None,
    sync: Annotated[str | None, SyncOption(autocompletion=complete_mode, help=SYNC)] = None,
    mode: Modes = None,
    via: Annotated[str | None, SyncOption(help=VIA)] = None,
    servers: ShardCount = None,
    server_device: Annotated[str, SyncOption(help=SERVER_DEVICE)] = "auto",
    strategy: Annotated[str | None, JobOption(help=STRATEGY)] = None,
    record: Annotated[Path | None, OutputOption(help="Write events.jsonl, meta.json and logs to this directory.")] = None,
    overwrite: Overwrite = False,
    steps: StepBudget = None,
    samples: Samples = None,
    seconds: Seconds = None,
    slow: Slow = None,
    hiccup: HiccupOption = None,
    link: LinkOption = None,
    listen: Annotated[str | None, HostOption(help="HOST:PORT at which workers on other hosts join.")] = None,
    expect: Annotated[int, HostOption(help="Number of workers that join from other hosts.")] = 0,
    checkpoint: Annotated[Path | None, CheckpointOption(help="Write checkpoints to this directory.")] = None,
    checkpoint_every: Annotated[int, CheckpointOption(help="Checkpoint every N steps of the slowest worker.")] = 0,
    checkpoint_errors: Annotated[
        str, CheckpointOption(help="When a checkpoint cannot be written: stop or continue the job.")
    ] = "stop",
    grace: Annotated[float, CheckpointOption(help="Seconds that an interrupted job may take to save a checkpoint.")] = 20.0,
    resume: Annotated[
        Path | None, CheckpointOption(help="Resume from the checkpoint of the latest step in this directory.")
    ] = None,
    min_workers: Annotated[int | None, FailureOption(help=MIN_WORKERS)] = None,
    on_divergence: OnDivergence = "warn",
    max_restarts: Annotated[int, Option(help="Planned: restart dead workers.", hidden=True)] = 0,
    seed: SeedOption = 0,
    timeout: Annotated[
        float | None,
        FailureOption(
            help="Give up a worker that others have waited for longer than this, in seconds; or a stopped server."
        ),
    ] = None,
    host_timeout: Annotated[
        float, HostOption(help="Give up another host without a heartbeat for longer than this, in seconds.")
    ] = 5.0,
    insecure: Insecure = False,
    debug: Annotated[int | None, JobOption(help=DEBUG)] = None,
    fork: Fork = False,
    verbose: Annotated[bool, OutputOption("--verbose", "-v", help="Also show each process that is started.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a training script in several processes; one option sets how they synchronise."""
    given = dict(locals())
    if max_restarts:
        raise UsageError("--max-restarts is planned but not available yet; leave it out")
    from polytempo.launcher.program import program_of

    raise typer.Exit(run_job(program_of(script, arguments, module), given)[0])


def run_job(
    program: Program, given: dict[str, Any], collect: Callable[[Path], object] | None = None
) -> tuple[int, LocalJob]:
    """Run a job from the options of `run`, and show how it went: its exit status, and the job.

    Args:
        program: What the workers run.
        given: The values of all options, by the names of `run`'s arguments.
        collect: The call that started the job, and goes on after it, takes its results from the job's folder.
    """
    from polytempo.launcher.display import Display
    from polytempo.launcher.local_job import LocalJob
    from polytempo.launcher.request import RunRequest, visible_gpus
    from polytempo.strategy.job_options import JobOptions

    strategy, quiet = given["strategy"], given["quiet"]
    fields: dict[str, Any] = {name: value for name, value in given.items() if name not in OWN}
    fields |= limits_and_emulation(given) | {"gpus": visible_gpus(), "modes": tuple(given["mode"] or ())}
    saves = next((f"--{name}" for name in ("checkpoint", "resume") if given[name] is not None), "")
    options = JobOptions(
        strategy, given["workers"], given["expect"], given["sync"], given["via"], given["min_workers"], saves
    )
    request = RunRequest(program, **fields | options.settled())
    job = LocalJob(request.checked(), Display(request.sync, quiet, given["verbose"]), collect)
    status = job.run()
    if status == 0 and not quiet:
        _show_summary(job)
    return status, job


def _show_summary(job: LocalJob) -> None:
    from polytempo.launcher.display import progress_line

    if job.progress is None or (job.summary.get("steps") and not job.progress.counted):
        from polytempo.records.files import spec_of
        from polytempo.records.step_figures import figures_from
        from polytempo.report.straggler_report import closing_line, straggler_report

        job.display.say(summary_line(job.request.sync, job.summary, len(job.finished), job.request.size, job.seconds))
        spec = spec_of({"job": job.summary, "spec": job.request.sync})
        refused = {*job.summary.get("refused", ()), *job.request.refused_modes()}
        record = str(job.request.record) if job.request.record else ""
        origin = spec.mode.origin
        modes = os.path.relpath(origin.code) if origin is not None and origin.source.endswith(".py") else ""
        if line := closing_line(straggler_report(figures_from(job.paces), spec, refused), record, modes):
            job.display.say(line)
    if job.progress is not None:
        job.display.say(progress_line(job.progress))
    if job.record_lost:
        job.display.say(f"warning: {job.record_lost}")


def worker(
    script: Script,
    arguments: Arguments = None,
    module: Module = False,
    join: Annotated[str, HostOption(help="HOST:PORT of the job: the value of its --listen.")] = "",
    key_file: Annotated[Path | None, HostOption(help="A copy of the key file that the job names.")] = None,
    workers: Workers = 1,
    mode: Modes = None,
    insecure: Insecure = False,
    host_timeout: Annotated[
        float,
        HostOption(
            help="End when nothing is received from the job for these seconds, or for its own --host-timeout if longer."
        ),
    ] = 15.0,
    fork: Fork = False,
    quiet: Quiet = False,
) -> None:
    """Join a job that runs on another host, with workers on this one."""
    if not join:
        raise UsageError("--join HOST:PORT is missing; it is what the job was given as --listen")
    if (key_file is None) != insecure:
        raise UsageError(
            "give either --key-file FILE, copied from the job's host, or --insecure where the job was started so"
        )
    from polytempo.launcher.agent import Agent, JoinRequest
    from polytempo.launcher.display import Display
    from polytempo.launcher.program import program_of
    from polytempo.transport.keys import read_key_file

    keys = read_key_file(key_file) if key_file else None
    request = JoinRequest(join, program_of(script, arguments, module), workers, keys, host_timeout, fork)
    request.check()
    raise typer.Exit(Agent(request, Display(f"joined {join}", quiet=True)).run())


def key(file: Annotated[Path, typer.Argument(help="The file to write; only you can read it.")]) -> None:
    """Make a key file, to be copied to all hosts: it encrypts the links between them, and only its holders can join."""
    from polytempo.transport.keys import make_keys, write_key_file

    try:
        write_key_file(file, make_keys().workers)
    except FileExistsError:
        raise UsageError(f"{file} is there already; use another name, or remove it") from None
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
    typer.echo(f"wrote {file}; copy it to every host, and give it to init(key_file=...) or POLYTEMPO_KEY_FILE")

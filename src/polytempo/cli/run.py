"""`polytempo run` and `polytempo worker`: live jobs. What they need is loaded when they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytempo.errors import UsageError
from polytempo.report.summary import summary_line
from polytempo.server.job_plan import Limits
from polytempo.units import parse_factors, parse_hiccup

Option = typer.Option
FORK = "Import torch once, in the launcher, and fork all processes from it: a faster start."


def run(
    script: Annotated[str, typer.Argument(help="A training script; what follows it is its own.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    workers: Annotated[int, Option("--workers", "-n", help="Worker processes on this host.")] = 2,
    servers: Annotated[int | None, Option(help="Parameter-server shards (1 where the mode needs a server).")] = None,
    sync: Annotated[str, Option(help="The synchronisation mode; all are listed below.")] = "bsp",
    via: Annotated[
        str,
        Option(
            help="How gradients travel: ps (servers), allreduce (among workers); auto: allreduce unless servers are needed."
        ),
    ] = "auto",
    record: Annotated[Path | None, Option(help="Write events.jsonl, meta.json and logs below this directory.")] = None,
    steps: Annotated[int | None, Option(help="Budget: steps, summed over all workers.")] = None,
    samples: Annotated[int | None, Option(help="Budget: samples, as told to step(samples=...), over all workers.")] = None,
    seconds: Annotated[float | None, Option(help="Budget: seconds from the first step.")] = None,
    slow: Annotated[str | None, Option(help="RANK:FACTOR,... make workers slower than they are.")] = None,
    hiccup: Annotated[str | None, Option(help="PROBABILITY:SECONDS of a stall in each step, seeded.")] = None,
    listen: Annotated[str | None, Option(help="HOST:PORT at which workers of other hosts join.")] = None,
    expect: Annotated[int, Option(help="So many workers will come from other hosts.")] = 0,
    checkpoint: Annotated[Path | None, Option(help="Save the job below this directory.")] = None,
    checkpoint_every: Annotated[int, Option(help="Save each so many steps of the slowest worker.")] = 0,
    checkpoint_errors: Annotated[
        str, Option(help="A checkpoint that cannot be written: stop or continue the job.")
    ] = "stop",
    grace: Annotated[float, Option(help="Seconds that an interrupted job may take to save a checkpoint.")] = 20.0,
    resume: Annotated[Path | None, Option(help="Go on from the checkpoint of the latest step in this directory.")] = None,
    min_workers: Annotated[
        int | None,
        Option(
            help="Go on while so many workers are left. Without it bsp needs all; in all other modes the job goes on "
            "while 1 is left. A worker whose script fails before its first push ends the job in every mode."
        ),
    ] = None,
    max_restarts: Annotated[int, Option(help="Planned: start dead workers again.", hidden=True)] = 0,
    seed: Annotated[int, Option(help="Of samplers and emulation.")] = 0,
    timeout: Annotated[float | None, Option(help="Give up a worker that others have waited for so many seconds.")] = None,
    host_timeout: Annotated[float, Option(help="Give up another host that was not heard of for so many seconds.")] = 5.0,
    insecure: Annotated[bool, Option("--insecure", help="With --listen: no keys, no encryption.")] = False,
    fork: Annotated[bool, Option("--fork", help=FORK)] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Also say what was started, and where.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Only what the workers say, and causes.")] = False,
) -> None:
    """Run a training script in several processes; one word sets how they wait for one another."""
    from polytempo.launch.display import Display, told_in_words
    from polytempo.launch.local_job import LocalJob
    from polytempo.launch.request import RunRequest

    if max_restarts:
        raise UsageError("--max-restarts is planned but not available yet; leave it out")
    request = RunRequest(
        script=script,
        arguments=tuple(arguments or ()),
        workers=workers,
        servers=servers,
        via=via,
        sync=sync,
        record=record,
        limits=limits_of(steps, samples, seconds),
        slow=parse_factors(slow) if slow else {},
        hiccup=parse_hiccup(hiccup) if hiccup else (0.0, 0.0),
        listen=listen,
        expect=expect,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        min_workers=min_workers,
        seed=seed,
        timeout=timeout,
        host_timeout=host_timeout,
        insecure=insecure,
        checkpoint_errors=checkpoint_errors,
        grace=grace,
        fork=fork,
    )
    job = LocalJob(request.checked(), Display(sync, quiet, verbose))
    status = job.run()
    if status == 0 and not quiet:
        if job.progress is None or job.summary.get("steps"):
            job.display.say(summary_line(sync, job.summary, job.finished, request.size, job.seconds))
        if job.progress is not None:
            job.display.say(told_in_words(job.progress))
        if job.record_lost:
            job.display.say(f"warning: {job.record_lost}")
    raise typer.Exit(status)


def worker(
    script: Annotated[str, typer.Argument(help="The same training script.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    join: Annotated[str, Option(help="HOST:PORT of the job, as given to its --listen.")] = "",
    key_file: Annotated[Path | None, Option(help="The key file that the job printed, copied here.")] = None,
    workers: Annotated[int, Option("--workers", "-n", help="Worker processes on this host.")] = 1,
    insecure: Annotated[bool, Option("--insecure", help="For a job that was started so.")] = False,
    host_timeout: Annotated[float, Option(help="End when nothing was heard of the job for so many seconds.")] = 15.0,
    fork: Annotated[bool, Option("--fork", help=FORK)] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Only what the workers say, and causes.")] = False,
) -> None:
    """Join a job that runs on another host, with workers on this one."""
    from polytempo.launch.agent import Agent, JoinRequest
    from polytempo.launch.display import Display
    from polytempo.transport.keys import read_key_file

    if not join:
        raise UsageError("--join HOST:PORT is missing; it is what the job was given as --listen")
    if (key_file is None) != insecure:
        raise UsageError(
            "give either --key-file FILE, copied from the job's host, or --insecure where the job was started so"
        )
    keys = read_key_file(key_file) if key_file else None
    request = JoinRequest(join, script, tuple(arguments or ()), workers, keys, host_timeout, fork)
    request.check()
    raise typer.Exit(Agent(request, Display(f"joined {join}", quiet=True)).run())


def limits_of(steps: int | None, samples: int | None, seconds: float | None) -> Limits:
    """The budget that was asked for."""
    given = {"steps": steps, "samples": samples, "seconds": seconds}
    return Limits(**{name: value for name, value in given.items() if value is not None})

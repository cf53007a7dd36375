"""The command `polytempo`: its list of commands, and how it ends.

Exit status: 0 well; 1 the job or the record failed; 2 a mistake in the command, said in one line; 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from functools import partial
from typing import Annotated

import typer

from polytempo.cli import modes
from polytempo.cli.advise import advise
from polytempo.cli.compare import compare
from polytempo.cli.options import Commands, add, add_group, join_broken_words
from polytempo.cli.plan import plan
from polytempo.cli.records import check, explain, picture
from polytempo.cli.run import key, worker
from polytempo.cli.run import run as run_job
from polytempo.cli.simulate import simulate
from polytempo.errors import PolytempoError, UsageError
from polytempo.launcher.standard_streams import open_standard_streams, silence
from polytempo.version import VERSION

#: Errors of a disk, which are no mistake in the command.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    cls=Commands,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    help="Distributed training in which synchronisation is a dial, not a fate.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The groups of commands, as their list shows them.
jobs, predictions, records = (partial(add, app, title) for title in ("Jobs", "Predictions", "Records"))
jobs(
    run_job,
    "polytempo run -n 4 train.py --lr 0.1",
    "polytempo run -n 4 --sync ssp:3 --samples 30000 --record out/job examples/digits.py",
    "polytempo run -n 2 --checkpoint saved --checkpoint-every 500 train.py",
    modes=True,
    passes_on=True,
)
jobs(
    worker,
    "polytempo worker --join 10.0.0.1:7077 --key-file workers.key -n 4 train.py",
    passes_on=True,
)
jobs(key, "polytempo key job.key")
jobs(
    compare,
    "polytempo compare -n 4 --slow 3:3 --samples 30720 --target 0.95 examples/digits.py",
    "polytempo compare --sync bsp --sync asp --repeats 3 --seconds 20 examples/digits.py",
    modes=True,
    passes_on=True,
)
predictions(
    simulate,
    "polytempo simulate --workers 32 --slow 30:3,31:3 --bandwidth 1Gb/s --model 20MB",
    "polytempo simulate --like out/job --sync every:8 --steps 960",
    "polytempo simulate --trace times.csv --sync bsp+balance --sync asp",
    modes=True,
)
predictions(
    advise,
    "polytempo advise --workers 8 --slow 7:2 --bandwidth 1Gb/s --model 100MB --step-time 200ms",
    "polytempo advise out/job",
)
predictions(
    plan,
    "polytempo plan examples/pipeline.py --devices 4:5GB/s",
    "polytempo plan examples/pipeline.py --devices 4x4:12GB/s,10Gb/s --memory 16GB -- --blocks 16",
    "polytempo plan --profile measured.json --devices 8:10Gb/s",
)
records(picture, "polytempo picture out/pipeline --last 2")
records(check, "polytempo check out/job")
records(explain, "polytempo explain out/job", "polytempo explain out/job --json stragglers.json")

add_group(app, "Modes", "modes", modes.app, "polytempo modes", "polytempo modes --mode lab/own_mode.py")
add(
    modes.app,
    None,
    modes.check_mode,
    "polytempo modes check own_mode.py:K_BATCH:2",
    "polytempo modes check ssp:3",
    name="check",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polytempo {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit."""
    open_standard_streams()
    join_broken_words(os.environ)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the command; its exit status."""
    try:
        return app(arguments or ["--help"], standalone_mode=False, prog_name="polytempo") or 0
    except typer.TyperException as error:
        text, context = error.format_message(), getattr(error, "ctx", None)
        sentence = text if text.endswith((".", "?", "!")) else f"{text}."
        command = context.command_path if context is not None else "polytempo"  # as far as it was understood
        return _fail(f"{sentence} Try: {command} --help", 2)
    except UsageError as error:
        return _fail(str(error), 2)
    except PolytempoError as error:
        return _fail(str(error), 1)
    except (BrokenPipeError, SystemExit) as end:
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            return int(end.code or 0)  # of typer's completion; of a closed output it makes a SystemExit too
        silence(sys.__stdout__ or sys.stdout)
        return _fail("standard output was closed before all was written to it", 1)
    except OSError as error:
        what = f"cannot use {error.filename}: " if error.filename else ""
        return _fail(f"{what}{error.strerror or error}", 1 if error.errno in FULL else 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)


def _fail(text: str, status: int) -> int:
    sys.stderr.write(f"polytempo: {' '.join(text.split())}\n")
    return status

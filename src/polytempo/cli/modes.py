"""`polytempo modes`: all modes that can be named here, a line each, and what they go with. `modes check` proves one."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from polytempo.cli.options import Modes, Option, write_json
from polytempo.door import bring_installed, installed, read_sync
from polytempo.errors import PolytempoError
from polytempo.proving.check import CheckReport, check
from polytempo.proving.endless import returning_within
from polytempo.proving.judge import PROMISES
from polytempo.proving.telling import counted_things
from polytempo.report.table import TextTable
from polytempo.sync.compatibility import Feature, conflict
from polytempo.sync.spec import MODES, Spec, brought, name_in, parse_spec

#: Columns of a terminal that the list takes, unless names are long.
WIDTH = 100
TITLE = "What modes go with (why, says docs/reference/modes.md); all of them can be simulated:"

#: Seconds beyond its own that a check may take, before the mode's code is taken to be endless.
SPARE = 10.0

app = typer.Typer(invoke_without_command=True)


@app.callback()
def modes(context: typer.Context, mode: Modes = None) -> None:
    """List all modes, those of installed packages and of files that --mode names among them; or check one of your own."""
    if context.invoked_subcommand is not None:
        return
    known, failed = dict(_ours()), []
    for name in installed():
        try:
            bring_installed(name)
        except PolytempoError as error:  # of one package: the others are listed all the same
            failed.append(str(error))
    known |= dict(_brought())
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    typer.echo(facts_table(known.values()).text(sys.maxsize))
    typer.echo()
    wide = max(map(len, known)) + 2
    for text, spec in known.items():
        meaning = textwrap.wrap(" ".join(spec.mode.meaning.split()), max(width - wide, 40))
        typer.echo(f"{text.ljust(wide)}{f'{chr(10)}{wide * chr(32)}'.join(meaning)}")
    for line in failed:
        typer.echo(f"polytempo: {line}", err=True)


def facts_table(specs: Iterable[Spec]) -> TextTable:
    """What each mode goes with."""
    rows = tuple((spec.text, *("yes" if goes(spec) else "-" for goes in COLUMNS.values())) for spec in specs)
    return TextTable(TITLE, ("mode", *COLUMNS), rows)


def _goes_with(feature: Feature) -> Callable[[Spec], bool]:
    return lambda spec: conflict(spec, feature) is None


#: Columns of the table: what of it is said with "yes".
COLUMNS: dict[str, Callable[[Spec], bool]] = {
    "\nservers": _goes_with(Feature.SERVERS),
    "all-\nreduce": _goes_with(Feature.ALLREDUCE),
    "\npeers": lambda spec: spec.capabilities.neighbours,
    "\ntorchrun": _goes_with(Feature.OTHER_LAUNCHER),
    "\ngroups": _goes_with(Feature.GROUP),
    "pipe-\nlines": _goes_with(Feature.PIPELINE),
    "\ntables": _goes_with(Feature.SERVER_EMBEDDING),
    "check-\npoints": _goes_with(Feature.CHECKPOINT),
}


def _ours() -> Iterator[tuple[str, Spec]]:
    for mode in MODES.values():
        yield mode.example, parse_spec(mode.example)


def _brought() -> Iterator[tuple[str, Spec]]:
    for name, mode in brought().items():
        text = name + mode.example.removeprefix(mode.name)
        yield text, parse_spec(text)


# modes check


def check_mode(
    text: Annotated[
        str, typer.Argument(metavar="FILE:NAME", help="A mode of a file, such as own_mode.py:K_BATCH:2; or ssp:3.")
    ],
    seconds: Annotated[float, Option(help="End after about this time, with what was played until then.")] = 50.0,
    seed: Annotated[int, Option(help="Seed of the random games.")] = 0,
    json_file: Annotated[Path | None, Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Play a mode: games, every order of small jobs, one worker. Says what is broken, and after what."""
    spec = spec_to_check(read_sync(text))
    with returning_within(spec, seconds + SPARE):
        report = check(spec, time.monotonic, seconds=seconds, seed=seed)
    write_json(json_file, report.as_dict())
    for line in told(report):
        typer.echo(line)
    if report.finding is not None:
        raise typer.Exit(1)


def spec_to_check(text: str) -> Spec:
    """The spec of a text; an argument that is not given is that of the mode's example."""
    name = name_in(text)
    mode = MODES.get(name) or brought().get(name)
    rest = text.strip()[len(name) :]
    if mode is not None and mode.argument is not None and not rest.startswith(":"):
        text = name + mode.example.removeprefix(mode.name).split(",")[0] + rest
    return parse_spec(text)


def told(report: CheckReport) -> Iterator[str]:
    """What was found, and what was played, in lines."""
    finding = report.finding
    if finding is not None:
        yield finding.line
        yield from (f"  {line}" for line in finding.story)
        yield ""
    played = f"{counted_things(report.games, 'game')} with {counted_things(report.events, 'event')}"
    yield f"{report.sync}: played for {report.seconds:.0f} s: {played}"
    for walk in report.walks:
        reached = "all" if walk.exhaustive else "not all"
        yield f"  every order of {walk.job}: {counted_things(walk.worlds, 'world')}, {reached}"
    if report.steps_alone:
        yield f"  one worker beside a plain loop: {counted_things(report.steps_alone, 'step')}"
    wide, states = max(map(len, PROMISES)), report.promises
    for name, meaning in PROMISES.items():
        yield f"  {name.ljust(wide)}  {states[name].ljust(14)}  {meaning}"
    if finding is None:
        yield f"{report.sync} keeps what it promises, as far as it was played"

"""`polytempo compare`: one training script under several modes, live, one after another; a table and a picture."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from polytempo.cli.run import limits_of
from polytempo.errors import UsageError, counted
from polytempo.records.reader import read_events, read_meta
from polytempo.report.live import LiveRun, live_run
from polytempo.report.picture import check_picture, draw_training
from polytempo.report.table import trained_comparison, verdict
from polytempo.simulate.units import parse_factors, parse_hiccup

Option = typer.Option


def compare(
    script: Annotated[str, typer.Argument(help="A script that logs a metric: pt.log(accuracy=...).", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    sync: Annotated[list[str] | None, Option(help="A mode; repeat it (bsp, ssp:3, dssp:3..15, asp).")] = None,
    workers: Annotated[int, Option("--workers", "-n", help="Worker processes.")] = 4,
    servers: Annotated[int, Option(help="Parameter-server shards.")] = 1,
    steps: Annotated[int | None, Option(help="Budget: steps, summed over all workers.")] = None,
    samples: Annotated[int | None, Option(help="Budget: samples, summed over all workers.")] = None,
    seconds: Annotated[float | None, Option(help="Budget: seconds from the first step.")] = None,
    slow: Annotated[str | None, Option(help="RANK:FACTOR,... make workers slower than they are.")] = None,
    hiccup: Annotated[str | None, Option(help="PROBABILITY:SECONDS of a stall in each step, seeded.")] = None,
    metric: Annotated[str, Option(help="The figure to compare, as the script logs it.")] = "accuracy",
    target: Annotated[float, Option(help="The value whose time is compared.")] = 0.95,
    out: Annotated[Path, Option(help="Where the records go.")] = Path("out/compare"),
    picture: Annotated[Path | None, Option(help="Draw it, to this .png, .svg or .pdf.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write all figures to this file.")] = None,
    seed: Annotated[int, Option(help="Of samplers and emulation.")] = 0,
) -> None:
    """Run a training script under several modes and compare time to a target, waiting and staleness."""
    from polytempo.launch.display import Display
    from polytempo.launch.local import LocalJob
    from polytempo.launch.request import RunRequest

    if picture:
        check_picture(picture)
    common: dict[str, Any] = {
        "arguments": tuple(arguments or ()),
        "workers": workers,
        "servers": servers,
        "limits": limits_of(steps, samples, seconds),
        "slow": parse_factors(slow) if slow else {},
        "hiccup": parse_hiccup(hiccup) if hiccup else (0.0, 0.0),
        "seed": seed,
    }
    modes = sync or ["bsp", "ssp:3", "dssp:3..15", "asp"]
    folders = {mode: out / mode.replace(":", "-").replace(",", "-") for mode in modes}
    checked = [RunRequest(script, sync=mode, record=folder, **common).checked() for mode, folder in folders.items()]
    runs: list[LiveRun] = []
    for job in checked:
        status = LocalJob(job, Display(job.request.sync, quiet=False)).run()
        if status:
            raise typer.Exit(status)
        runs.append(_summed_up(folders[job.request.sync], metric, script))
    title = f"{Path(script).name} live: {counted(workers, 'worker')}" + (f", slower: {slow}" if slow else "")
    _show(runs, target, title)
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps([run.as_dict() for run in runs], indent=1) + "\n", encoding="utf-8")
    if picture:
        draw_training(runs, target, picture, title, "seconds")
        typer.echo(f"picture: {picture}", err=True)


def _summed_up(record: Path, metric: str, script: str) -> LiveRun:
    run = live_run(read_events(record), read_meta(record), metric)
    if not run.curve:
        raise UsageError(f"{script} logged no {metric}; call pt.log({metric}=...) now and then, on one worker")
    return run


def _show(runs: list[LiveRun], target: float, title: str) -> None:
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
    table = trained_comparison(runs, target, title)
    typer.echo()
    typer.echo(table.text(width))
    typer.echo()
    typer.echo(verdict(runs, target))

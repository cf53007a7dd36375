"""`polytempo compare`: one training script under several modes, live, one after another; a table and a picture."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from polytempo.cli.completion import complete_mode
from polytempo.cli.options import (
    Arguments,
    ComparisonOption,
    Fork,
    HiccupOption,
    LinkOption,
    OutputOption,
    Samples,
    Seconds,
    SeedOption,
    Slow,
    StepBudget,
    SyncOption,
    Workers,
    emulation_of,
    limits_of,
)
from polytempo.errors import UsageError, counted
from polytempo.records.files import read_events, read_meta
from polytempo.report.live import LiveRun, RepeatedRun, live_run, repeated
from polytempo.report.picture import check_picture, draw_training
from polytempo.report.table import trained_comparison, verdict


def compare(
    script: Annotated[str, typer.Argument(help="A script that logs a metric: pt.log(accuracy=...).", metavar="SCRIPT")],
    arguments: Arguments = None,
    sync: Annotated[
        list[str] | None, SyncOption(autocompletion=complete_mode, help="A mode; repeatable (bsp, ssp:3, dssp:3..15, asp).")
    ] = None,
    workers: Workers = 4,
    servers: Annotated[int, SyncOption(help="Parameter-server shards.")] = 1,
    steps: StepBudget = None,
    samples: Samples = None,
    seconds: Seconds = None,
    slow: Slow = None,
    hiccup: HiccupOption = None,
    link: LinkOption = None,
    metric: Annotated[str, ComparisonOption(help="The metric to compare, as the script logs it.")] = "accuracy",
    target: Annotated[float, ComparisonOption(help="Compare the time until the metric reaches this value.")] = 0.95,
    out: Annotated[Path, OutputOption(help="Directory of the records.")] = Path("out/compare"),
    picture: Annotated[Path | None, OutputOption(help="Draw a picture: .png, .svg or .pdf.")] = None,
    json_file: Annotated[Path | None, OutputOption("--json", help="Write all figures to this file.")] = None,
    seed: SeedOption = 0,
    repeats: Annotated[
        int, ComparisonOption(help="Number of runs of each mode, in turns; the median by time is shown.")
    ] = 1,
    fork: Fork = False,
) -> None:
    """Run a training script under several modes and compare time to a target, waiting and staleness."""
    from polytempo.launch.display import Display
    from polytempo.launch.local_job import LocalJob
    from polytempo.launch.request import RunRequest

    if picture:
        check_picture(picture)
    common: dict[str, Any] = {
        "arguments": tuple(arguments or ()),
        "workers": workers,
        "servers": servers,
        "limits": limits_of(steps, samples, seconds),
        **emulation_of(slow, hiccup, link),
        "seed": seed,
        "fork": fork,
    }
    modes = sync or ["bsp", "ssp:3", "dssp:3..15", "asp"]
    if repeats < 1:
        raise UsageError(f"expected --repeats of at least 1, got {repeats}")
    places = [(mode, turn) for turn in range(repeats) for mode in modes]  # in turns: a machine that slows down slows all
    folders = {place: _folder(out, *place, repeats) for place in places}
    checked = {
        place: RunRequest(script, sync=place[0], record=folder, **common).checked() for place, folder in folders.items()
    }
    runs: dict[str, list[LiveRun]] = {mode: [] for mode in modes}
    for number, ((mode, turn), job) in enumerate(checked.items(), 1):
        title = f"{mode} ({_which(number, len(modes), turn, repeats)})"
        status = LocalJob(job, Display(title, quiet=False)).run()
        if status:
            raise typer.Exit(status)
        runs[mode].append(_summed_up(folders[mode, turn], metric, script))
    title = f"{Path(script).name} live: {counted(workers, 'worker')}" + (f", slower: {slow}" if slow else "")
    title += f", link: {link}" if link else ""
    middle = [repeated(found, target) for found in runs.values()]
    _show(middle, target, title, repeats)
    if json_file:
        _write_json(json_file, [run for found in runs.values() for run in found])
    if picture:
        draw_training(middle, target, picture, title, "seconds")
        typer.echo(f"picture: {picture}", err=True)


def _write_json(path: Path, runs: list[LiveRun]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([run.as_dict() for run in runs], indent=1) + "\n", encoding="utf-8")


def _folder(out: Path, mode: str, turn: int, repeats: int) -> Path:
    folder = out / mode.replace(":", "-").replace(",", "-")
    return folder if repeats == 1 else folder / f"run-{turn + 1}"


def _which(number: int, modes: int, turn: int, repeats: int) -> str:
    """Which of how many."""
    mode = f"mode {number - turn * modes} of {modes}"
    return mode if repeats == 1 else f"{mode}, run {turn + 1} of {repeats}"


def _summed_up(record: Path, metric: str, script: str) -> LiveRun:
    run = live_run(read_events(record), read_meta(record), metric)
    if not run.curve:
        raise UsageError(f"{script} logged no {metric}; call pt.log({metric}=...) now and then, on one worker")
    return run


def _show(runs: list[RepeatedRun], target: float, title: str, repeats: int) -> None:
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
    table = trained_comparison(runs, target, title)
    typer.echo()
    typer.echo(table.text(width))
    typer.echo()
    typer.echo(verdict(runs, target))
    typer.echo(
        "one run of each mode: a few percent between them may be chance; --repeats 5 runs each five times"
        if repeats == 1
        else f"of {repeats} runs of each mode the middle one by time; in brackets the shortest and the longest time"
    )

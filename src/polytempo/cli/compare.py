"""`polytempo compare`: one training script under several modes, live, one after another; a table and a picture."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from polytempo.cli.options import (
    Arguments,
    ComparisonOption,
    Fork,
    HiccupOption,
    LinkOption,
    Modes,
    Module,
    OnDivergence,
    OutputOption,
    Overwrite,
    Samples,
    Seconds,
    SeedOption,
    ShardCount,
    Slow,
    StepBudget,
    SyncOption,
    Workers,
    complete_mode,
    limits_and_emulation,
    write_json,
)
from polytempo.errors import UsageError, counted
from polytempo.records.files import read_events, read_meta, records_below
from polytempo.report.live import LiveRun, RepeatedRun, live_run, repeated
from polytempo.report.picture import check_picture, draw_comparison, draw_training
from polytempo.report.summary import divergence_in_words
from polytempo.report.table import short_of_bsp, speed_comparison, speed_verdict, trained_comparison, verdict

#: Where the records are, if it is not said; a number is added where there are records already.
OUT = Path("out/compare")


def compare(
    script: Annotated[str, typer.Argument(help="A script that logs a metric: pt.log(accuracy=...).", metavar="SCRIPT")],
    arguments: Arguments = None,
    module: Module = False,
    sync: Annotated[
        list[str] | None, SyncOption(autocompletion=complete_mode, help="A mode; repeatable (bsp, ssp:3, dssp:3..15, asp).")
    ] = None,
    mode: Modes = None,
    workers: Workers = 4,
    servers: ShardCount = None,
    steps: StepBudget = None,
    samples: Samples = None,
    seconds: Seconds = None,
    slow: Slow = None,
    hiccup: HiccupOption = None,
    link: LinkOption = None,
    metric: Annotated[str, ComparisonOption(help="The metric to compare, as the script logs it.")] = "accuracy",
    target: Annotated[float, ComparisonOption(help="Compare the time until the metric reaches this value.")] = 0.95,
    out: Annotated[
        Path | None, OutputOption(help="Directory of the records (out/compare, or the next of out/compare-2, -3 and so on).")
    ] = None,
    overwrite: Overwrite = False,
    picture: Annotated[Path | None, OutputOption(help="Draw a picture: .png, .svg or .pdf.")] = None,
    json_file: Annotated[Path | None, OutputOption("--json", help="Write all figures to this file.")] = None,
    on_divergence: OnDivergence = "warn",
    seed: SeedOption = 0,
    repeats: Annotated[int, ComparisonOption(help="Runs of each mode, in turns; the median by time is shown.")] = 1,
    fork: Fork = False,
) -> None:
    """Run a training script under several modes and compare time to a target, waiting and staleness."""
    given = dict(locals())
    from polytempo.launcher.display import Display
    from polytempo.launcher.local_job import LocalJob
    from polytempo.launcher.program import program_of
    from polytempo.launcher.request import RunRequest, visible_gpus
    from polytempo.strategy.job_options import JobOptions

    if picture:
        check_picture(picture)
    common: dict[str, Any] = {
        "program": program_of(script, arguments, module),
        "servers": servers,
        **limits_and_emulation(given),
        "seed": seed,
        "on_divergence": on_divergence,
        "fork": fork,
        "overwrite": overwrite,
        "gpus": visible_gpus(),
        "modes": tuple(mode or ()),
    }
    modes = list(dict.fromkeys(sync or ["bsp", "ssp:3", "dssp:3..15", "asp"]))
    if repeats < 1:
        raise UsageError(f"expected --repeats of at least 1, got {repeats}")
    places = [(one, turn) for turn in range(repeats) for one in modes]  # in turns: a machine that slows down slows all
    directory = out or _free_directory(OUT)
    folders, checked = {}, {}
    for one, turn in places:  # as `polytempo run` would start each
        folder = directory / one.replace(":", "-").replace(",", "-")
        folders[one, turn] = folder if repeats == 1 else folder / f"run-{turn + 1}"
        fields = common | {"record": folders[one, turn]} | JobOptions(workers=workers, sync=one).settled()
        checked[one, turn] = RunRequest(**fields).checked()
    runs: dict[str, list[LiveRun]] = {one: [] for one in modes}
    for number, ((one, turn), job) in enumerate(checked.items(), 1):
        title = f"{one} ({_which(number, len(modes), turn, repeats)})"
        status = LocalJob(job, Display(title, quiet=False)).run()
        if status:
            raise typer.Exit(status)
        record = folders[one, turn]
        runs[one].append(live_run(read_events(record), read_meta(record), metric))
        if number == 1 < len(places) and not runs[one][0].curve:
            typer.echo(f"polytempo: {_no_metric(script, metric, runs[one][0])}", err=True)
    title = f"{Path(script).name} live: {counted(workers, 'worker')}" + (f", slower: {slow}" if slow else "")
    title += f", link: {link}" if link else ""
    middle = [repeated(found, target) for found in runs.values()]
    _show(middle, target, title, repeats, script, metric)
    typer.echo(f"records: {directory}", err=True)
    write_json(json_file, [run.as_dict() for found in runs.values() for run in found])
    if picture:
        if any(run.curve for run in middle):
            draw_training(middle, target, picture, title, "seconds")
        else:
            draw_comparison([run.outcome for run in middle], picture, title)
        typer.echo(f"picture: {picture}", err=True)


def _free_directory(directory: Path) -> Path:
    """This directory, or the first with a number behind it, in which there are no records."""
    found, number = directory, 1
    while records_below(found):
        number += 1
        found = directory.with_name(f"{directory.name}-{number}")
    return found


def _which(number: int, modes: int, turn: int, repeats: int) -> str:
    mode = f"mode {number - turn * modes} of {modes}"
    return mode if repeats == 1 else f"{mode}, run {turn + 1} of {repeats}"


def _no_metric(script: str, metric: str, run: LiveRun) -> str:
    named = f", or give --metric NAME for one that rises to it (it logs {', '.join(run.logged)})" if run.logged else ""
    return (
        f"{script} logged no {metric}, so modes are compared by their speed alone; for the time to a target "
        f"call pt.log({metric}=...) now and then, on one worker{named}"
    )


def _show(runs: list[RepeatedRun], target: float, title: str, repeats: int, script: str, metric: str) -> None:
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
    if any(run.curve for run in runs):  # by the time to the target, where any run logged the metric
        table, says = trained_comparison(runs, target, title, metric), verdict(runs, target)
    else:
        table, says = speed_comparison(runs, title), speed_verdict([run.outcome for run in runs])
    typer.echo()
    typer.echo(table.text(width))
    typer.echo()
    typer.echo(says)
    for run in [one for several in runs for one in several.runs if one.diverged]:
        typer.echo(f"{run.outcome.sync}: {divergence_in_words(run.diverged)}")
    if short := short_of_bsp(runs, metric):
        typer.echo(short)
    if without := [run for run in runs if not run.curve]:
        names = ", ".join(run.outcome.sync for run in without)
        typer.echo(
            _no_metric(script, metric, without[0]) if len(without) == len(runs) else f"no {metric} was logged under {names}"
        )
    typer.echo(
        "one run of each mode: a few percent between them may be chance; --repeats 5 runs each five times"
        if repeats == 1
        else f"of {repeats} runs of each mode the middle one by time; in brackets the shortest and the longest time"
    )

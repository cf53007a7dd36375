"""The commands about what a job has recorded: `check`, `explain` and `picture`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from polytempo.cli.options import ModesOfRecord, Option, read_record, write_json
from polytempo.errors import UsageError, counted
from polytempo.pipeline.trace_files import read_traces
from polytempo.records.check import check_lines
from polytempo.records.files import read_events, refused_modes, spec_of
from polytempo.records.lines import MAIN, MEAN, of_optimizer
from polytempo.records.replay import replay
from polytempo.records.step_figures import figures_of
from polytempo.report.picture import draw_pipeline, last_updates
from polytempo.report.straggler_report import full_report, straggler_report


def check(
    directory: Annotated[Path, typer.Argument(help="A directory with events.jsonl and meta.json.")],
    mode: ModesOfRecord = None,
) -> None:
    """Check a record: the promises of its mode, and that a replay decides the same."""
    meta = read_record(directory)
    job, sync = meta.get("job", {}), meta["spec"]
    lines = decisions = 0
    for optimizer_id in job.get("optimizers") or [MAIN]:
        own, members = spec_of(meta, optimizer_id), job.get("members", {}).get(optimizer_id, ())
        policy = own.policy(meta["size"], members)
        policy.begin_at(0 if optimizer_id.endswith(MEAN) else meta.get("first_step", 0))
        policy.restore(job.get("restored", {}).get(optimizer_id, {}))
        lines += check_lines(of_optimizer(read_events(directory), optimizer_id), own, meta["size"], members)
        decisions += replay(of_optimizer(read_events(directory), optimizer_id), policy)
    if not decisions and job.get("progress"):
        raise UsageError(
            f"{directory} is the record of a pipeline, which follows its schedule and makes no decisions to check; "
            "let the script call pipeline.record(FOLDER), and polytempo picture FOLDER draws what each stage did"
        )
    if not decisions:
        typer.echo(f"{sync}: no step was pushed, so there is nothing to check in {counted(lines, 'line')}")
        return
    typer.echo(
        f"{sync}: {counted(lines, 'line')} keep every promise; replay gives the same {counted(decisions, 'decision')}"
    )


def explain(
    record: Annotated[Path, typer.Argument(help="A directory with events.jsonl and meta.json: run --record.")],
    json_file: Annotated[Path | None, Option("--json", help="Write all figures to this file.")] = None,
    mode: ModesOfRecord = None,
) -> None:
    """Explain a record: which worker is slow, since when and why, what it costs, and which mode would fit."""
    meta = read_record(record)
    figures = figures_of(read_events(record))
    if not figures:
        raise UsageError(f"{record} has no steps to explain; expected the record of a job that trains by pushes")
    job = meta.get("job", {})
    report = straggler_report(figures, spec_of(meta), refused_modes(meta))
    write_json(json_file, report.as_dict())
    width = shutil.get_terminal_size((100, 24)).columns
    typer.echo(full_report(report, job, width))


def picture(
    folder: Annotated[Path, typer.Argument(help="The folder that the ranks recorded: pipeline.record(FOLDER).")],
    out: Annotated[Path | None, Option(help="The picture: .png, .svg or .pdf (FOLDER/pipeline.png).")] = None,
    last: Annotated[int | None, Option(help="Draw only the last N updates of each stage.")] = None,
    between: Annotated[str | None, Option(help="Draw only FROM,TO: seconds after the first action.")] = None,
    title: Annotated[str | None, Option(help="Title of the picture.")] = None,
) -> None:
    """Draw the timeline of a pipeline: forward, backward, update and idle time of each stage."""
    if last is not None and last < 1:
        raise UsageError(f"expected --last of at least 1, got {last}")
    moments = None
    if between is not None:
        try:
            begin, end = (float(part) for part in between.split(","))
        except ValueError:
            raise UsageError(f"expected --between FROM,TO in seconds, such as 0.5,1.5; got {between!r}") from None
        moments = begin, end
    lines = last_updates(read_traces(folder), last) if last is not None else read_traces(folder)
    path = out or folder / "pipeline.png"
    bubble = draw_pipeline(lines, path, title or folder.name, moments)
    sys.stdout.write(f"written: {path}, bubble {100 * bubble:.1f} %\n")

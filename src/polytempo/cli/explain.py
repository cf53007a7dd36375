"""`polytempo explain RECORD`: which worker of a recorded job is slow, since when and why, its cost, and what would help."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from polytempo.cli.options import Option
from polytempo.errors import UsageError
from polytempo.records.files import read_events, read_meta, refused_modes, spec_of
from polytempo.records.step_figures import figures_of
from polytempo.report.straggler_report import full_report, straggler_report


def explain(
    record: Annotated[Path, typer.Argument(help="A directory with events.jsonl and meta.json: run --record.")],
    json_file: Annotated[Path | None, Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Explain a record: which worker is slow, since when and why, what it costs, and which mode would fit."""
    meta = read_meta(record)
    figures = figures_of(read_events(record))
    if not figures:
        raise UsageError(f"{record} has no steps to explain; expected the record of a job that trains by pushes")
    job = meta.get("job", {})
    report = straggler_report(figures, spec_of(meta), refused_modes(meta))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    width = shutil.get_terminal_size((100, 24)).columns
    typer.echo(full_report(report, job, width))

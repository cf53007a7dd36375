"""`polytempo picture`: the timeline of a pipeline: the actions of each stage, from the files that a run recorded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from polytempo.cli.options import Option
from polytempo.errors import UsageError
from polytempo.pipeline.trace_files import read_traces
from polytempo.report.pipeline_picture import draw_pipeline, last_updates


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
    lines = last_updates(read_traces(folder), last) if last is not None else read_traces(folder)
    path = out or folder / "pipeline.png"
    bubble = draw_pipeline(lines, path, title or folder.name, _moments(between) if between is not None else None)
    sys.stdout.write(f"written: {path}, bubble {100 * bubble:.1f} %\n")


def _moments(text: str) -> tuple[float, float]:
    try:
        begin, end = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"expected --between FROM,TO in seconds, such as 0.5,1.5; got {text!r}") from None
    return begin, end

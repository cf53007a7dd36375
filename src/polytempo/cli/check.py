"""`polytempo check DIR`: checks a record against the guarantees of its mode, and replays its decisions with a new policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytempo.errors import UsageError, counted
from polytempo.records.check import check_lines
from polytempo.records.files import read_events, read_meta, spec_of
from polytempo.records.lines import MAIN, MEAN, of_optimizer
from polytempo.records.replay import replay


def check(
    directory: Annotated[Path, typer.Argument(help="A directory with events.jsonl and meta.json.")],
) -> None:
    """Check a record: the promises of its mode, and that a replay decides the same."""
    meta = read_meta(directory)
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

"""`polytempo check DIR`: does a record keep the promises, and does a fresh policy decide the same?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytempo.records.check import check_lines
from polytempo.records.reader import read_events, read_meta
from polytempo.records.replay import replay
from polytempo.sync.spec import parse_spec


def check(
    directory: Annotated[Path, typer.Argument(help="A directory with events.jsonl and meta.json.")],
) -> None:
    """Check a record: the promises of its mode, and that a replay decides the same."""
    meta = read_meta(directory)
    spec = parse_spec(meta["spec"])
    lines = check_lines(read_events(directory), spec, meta["size"])
    decisions = replay(read_events(directory), spec.policy(meta["size"]))
    typer.echo(f"{spec.text}: {lines} lines keep every promise; replay gives the same {decisions} decisions")

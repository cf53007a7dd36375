"""Reads a trace from a file, by its suffix: operations of ranks (.npz), or step times of workers (.csv, .jsonl)."""

from __future__ import annotations

import shlex
from pathlib import Path

from polytempo.errors import UsageError
from polytempo.traces.job import JobTrace
from polytempo.traces.operations import read_operations
from polytempo.traces.step_times import step_times_from


def read_trace(path: Path) -> JobTrace:
    """The recorded job."""
    if path.is_dir():
        like = f"--like {shlex.quote(str(path))}"
        raise UsageError(f"{path} is a folder, expected a file; the record of a run is read by {like}")
    if not path.exists():
        raise UsageError(f"cannot read {path}: there is no such file")
    if path.suffix == ".npz":
        return read_operations(path)
    if path.suffix not in (".csv", ".jsonl"):
        raise UsageError(
            f"expected a trace that ends in .npz (operations of ranks), .csv or .jsonl (worker, step, seconds), got {path}"
        )
    try:
        return step_times_from(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None

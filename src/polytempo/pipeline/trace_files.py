"""Traces of a pipeline: each rank writes its actions to a file of its own; a picture is drawn from all of them.

One line of JSON for each action, in DIR/pipeline-RANK.jsonl. Times are those of the host's monotonic clock
(`time.monotonic`), which all processes of a host share: traces of different hosts cannot be merged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytempo.errors import UsageError

if TYPE_CHECKING:
    from polytempo.pipeline.runtime import CompletedAction

#: Fields of each line.
FIELDS = {"stage", "replica", "rank", "ranks", "kind", "microbatch", "version", "start", "end"}


def write_trace(log: Sequence[CompletedAction], rank: dict[str, int], directory: str | Path) -> Path:
    """Write a rank's actions, in place of an earlier trace; returns the file. `rank`: its stage, replica, rank and ranks."""
    path = Path(directory) / f"pipeline-{rank['rank']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    shift = time.monotonic() - time.perf_counter()  # 0 on Linux, where they are one clock
    with path.open("w", encoding="utf-8") as file:
        for done in log:
            what = {"kind": done.action.kind, "microbatch": done.action.microbatch, "version": done.version}
            when = {"start": done.start + shift, "end": done.end + shift}
            file.write(json.dumps(rank | what | when) + "\n")
    return path


def read_traces(directory: str | Path) -> list[dict[str, Any]]:
    """The actions of all ranks, in order of time; a rank that was lost may be missing."""
    if not Path(directory).is_dir():
        raise UsageError(f"there is no directory {directory}; expected one that pipeline.record(FOLDER) wrote")
    found = sorted(Path(directory).glob("pipeline-*.jsonl"))
    lines = [line for path in found for line in _read(path)]
    if not lines:
        raise UsageError(
            f"expected files pipeline-RANK.jsonl in {directory}, got none that has a line; "
            f"let every rank of the script call pipeline.record({str(directory)!r}) at its end"
        )
    if len(sizes := sorted({line["ranks"] for line in lines})) > 1:
        raise UsageError(
            f"expected the files of one run in {directory}, got runs of {sizes} ranks; give each its own folder"
        )
    return sorted(lines, key=lambda line: (line["start"], line["end"], line["rank"]))


def _read(path: Path) -> list[dict[str, Any]]:
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not line.keys() >= FIELDS:
            raise UsageError(
                f"{path}, line {number}: expected an action, got {text[:60]!r}; let the script call pipeline.record() again"
            )
        lines.append(line)
    return lines

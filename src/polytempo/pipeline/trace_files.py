"""What a pipeline did, in files: each rank writes its own, and whoever wants to see the whole puts them together.

One line of JSON an action, in DIR/pipeline-RANK.jsonl. Moments are those of the host's steady clock (`time.monotonic`),
which all processes of a host share: ranks of different hosts cannot be put together.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytempo.errors import UsageError

if TYPE_CHECKING:
    from polytempo.pipeline.pipeline import Pipeline

#: Of each line.
FIELDS = {"stage", "replica", "rank", "ranks", "kind", "microbatch", "version", "start", "end"}


def write_log(pipe: Pipeline, directory: str | Path) -> Path:
    """Write what this rank did so far, in place of what it wrote before; the file. Every rank calls this."""
    path = Path(directory) / f"pipeline-{pipe.rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    shift = time.monotonic() - time.perf_counter()  # 0 on Linux, where they are one clock
    where = {"stage": pipe.stage.number, "replica": pipe.replica, "rank": pipe.rank, "ranks": pipe.places.size}
    with path.open("w", encoding="utf-8") as file:
        for done in pipe.log:
            what = {"kind": done.action.kind, "microbatch": done.action.microbatch, "version": done.version}
            when = {"start": done.start + shift, "end": done.end + shift}
            file.write(json.dumps(where | what | when) + "\n")
    return path


def read_logs(directory: str | Path) -> list[dict[str, Any]]:
    """What all ranks wrote, in order of time; a rank that was lost may be missing."""
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

"""Reads a record; what cannot be read is named with file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from polytempo.errors import RecordError
from polytempo.records.lines import Line
from polytempo.records.writer import EVENTS, META


def read_events(directory: str | Path) -> Iterator[Line]:
    """The lines of events.jsonl, one after another."""
    path = Path(directory) / EVENTS
    try:
        with path.open(encoding="utf-8") as file:
            yield from parse_lines(file, str(path))
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}; expected a directory made with --record") from None


def parse_lines(texts: Iterable[str], name: str) -> Iterator[Line]:
    """Lines from their texts; `name` is what an error calls their source."""
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecordError(f"{name}, line {number}: not JSON ({error.msg}); the record may be cut short") from None
        if not isinstance(line, dict) or "kind" not in line or "t" not in line:
            raise RecordError(f"{name}, line {number}: expected an object with 't' and 'kind', got {text.strip()[:60]}")
        yield line


def read_meta(directory: str | Path) -> dict[str, Any]:
    """The content of meta.json."""
    path = Path(directory) / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}; without it the job did not end") from None
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}: not JSON ({error.msg})") from None
    missing = [key for key in ("spec", "size") if key not in meta]
    if missing:
        raise RecordError(f"{path} lacks {', '.join(missing)}")
    return dict(meta)

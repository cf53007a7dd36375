"""Writes a record: a directory with events.jsonl and meta.json."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from polytempo.records.lines import Line

EVENTS = "events.jsonl"
META = "meta.json"


class RecordWriter:
    """Takes lines as they happen; `meta` is written last, so a record without it was cut short."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / META).unlink(missing_ok=True)
        self._file = (self.directory / EVENTS).open("w", encoding="utf-8")

    def write(self, line: Line) -> None:
        """Append one line."""
        self._file.write(to_text(line) + "\n")

    def flush(self) -> None:
        """Let others read what was written so far."""
        self._file.flush()

    def abandon(self) -> None:
        """End without the meta: the record says that it was cut short."""
        self._file.close()

    def close(self, meta: dict[str, Any] | None = None) -> None:
        """Finish the record."""
        self._file.close()
        if meta is not None:
            text = json.dumps(meta, indent=1, ensure_ascii=False) + "\n"
            (self.directory / META).write_text(text, encoding="utf-8")

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def to_text(line: Line) -> str:
    """A line as it stands in events.jsonl."""
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False)

"""Reads a record; what cannot be read is named with file and line.

Names of files need not be text: what of them is no UTF-8 is written as JSON's escapes, and read back as it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from polytempo.checkpoints import write_file
from polytempo.errors import RecordError, UsageError
from polytempo.records.lines import MAIN, RecordLine
from polytempo.sync.spec import Spec, parse_spec, source_in

EVENTS = "events.jsonl"
META = "meta.json"
#: How a surrogate is written, which stands for a byte of a name that is no UTF-8: as JSON's escape of it.
ESCAPED = "backslashreplace"


def holds_record(directory: Path) -> bool:
    """Whether there is a record, or what is there of one that was cut short."""
    return (directory / EVENTS).exists() or (directory / META).exists()


def records_below(directory: Path) -> list[Path]:
    """Records in its folders, and in theirs: as of several modes, and of several runs of each."""
    found = {path.parent for depth in ("*", "*/*") for name in (EVENTS, META) for path in directory.glob(f"{depth}/{name}")}
    return sorted(found)


def read_events(directory: str | Path) -> Iterator[RecordLine]:
    """The lines of events.jsonl, one after another."""
    path = Path(directory) / EVENTS
    try:
        with path.open(encoding="utf-8", errors=ESCAPED) as file:
            for number, text in enumerate(file, 1):
                yield _parsed(text, path, number)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}; expected a directory made with --record") from None


def _parsed(text: str, path: Path, number: int) -> RecordLine:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}, line {number}: not JSON ({error.msg}); the record may be cut short") from None
    if not isinstance(line, dict) or "kind" not in line or "t" not in line:
        raise RecordError(f"{path}, line {number}: expected an object with 't' and 'kind', got {text.strip()[:60]}")
    return line


def read_meta(directory: str | Path) -> dict[str, Any]:
    """The content of meta.json.

    Raises: UsageError, when there is no record in the directory; RecordError, when what there is cannot be read."""
    path = Path(directory) / META
    directory = path.parent
    if not holds_record(directory):
        if inside := records_below(directory):
            names = ", ".join(map(str, inside[:4])) + (", ..." if len(inside) > 4 else "")
            raise UsageError(f"there is no record in {directory} itself; there is one in {names}")
        what = "" if directory.is_dir() else ": it is a file" if directory.exists() else ": there is no such directory"
        raise UsageError(f"there is no record in {directory}{what}; expected a directory written with --record")
    try:
        meta = json.loads(path.read_text(encoding="utf-8", errors=ESCAPED))
    except FileNotFoundError:
        raise RecordError(f"{path.parent} has no {META}: its job goes on, or did not end in order") from None
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}: not JSON ({error.msg})") from None
    missing = [key for key in ("spec", "size") if key not in meta]
    if missing:
        raise RecordError(f"{path} lacks {', '.join(missing)}")
    return dict(meta)


def spec_of(meta: Mapping[str, Any], optimizer_id: str = MAIN) -> Spec:
    """The mode of a recorded optimizer, with what it left to the script's optimizer; of one that is not named, the job's."""
    return parse_spec(meta.get("job", {}).get("optimizers", {}).get(optimizer_id, meta["spec"]))


def modes_in(meta: Mapping[str, Any]) -> dict[str, str]:
    """The modes of a record, as texts: the job's and those of its optimizers, each with the digest of its file."""
    texts, digests = (meta["spec"], *meta.get("job", {}).get("optimizers", {}).values()), meta.get("modes", {})
    return {text: digests.get(source_in(text), "") for text in texts}


def refused_modes(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Modes that the recorded job could not use: its optimizer would refuse them, or its command."""
    return (*meta.get("job", {}).get("refused", ()), *meta.get("options", {}).get("refused", ()))


# Writes a record: a directory with events.jsonl and meta.json.


def check_no_record(directory: Path, overwrite: bool) -> None:
    """Refuse to write where there is the record of an earlier job, unless told to overwrite it."""
    if holds_record(directory) and not overwrite:
        raise UsageError(f"{directory} holds the record of an earlier job; choose another directory, or add --overwrite")


class RecordWriter:
    """Takes lines as they happen; `meta` is written last, and whole, so a record without it was cut short.

    Whatever cannot be written is an OSError that names the file.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / META).unlink(missing_ok=True)
        self._file = (self.directory / EVENTS).open("w", encoding="utf-8", errors=ESCAPED)

    def write(self, line: RecordLine) -> None:
        """Append one line."""
        with _naming(self.directory / EVENTS):
            self._file.write(to_text(line) + "\n")

    def flush(self) -> None:
        """Let others read what was written so far."""
        with _naming(self.directory / EVENTS):
            self._file.flush()

    def abandon(self) -> None:
        """End without the meta: the record says that it was cut short."""
        with suppress(OSError):  # what a full disk did not take at first it does not take now
            self._file.close()

    def close(self, meta: dict[str, Any] | None = None) -> None:
        """Finish the record."""
        with _naming(self.directory / EVENTS):
            self._file.close()
        if meta is not None:
            text = _json(meta, indent=1) + "\n"
            with _naming(self.directory / META):
                write_file(self.directory / META, lambda path: path.write_text(text, encoding="utf-8", errors=ESCAPED))

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abandon()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of writing carry no name; those of opening do."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def record_lost(error: OSError) -> str:
    """In words, for a job that goes on."""
    return f"cannot write {error.filename}: {error.strerror}; the job goes on, its record is cut short"


def to_text(line: RecordLine) -> str:
    """A line as it stands in events.jsonl."""
    return _json(line, separators=(",", ":"))


def _json(value: Any, **form: Any) -> str:
    """JSON has no word for what is no finite number: it becomes a text that `float()` reads."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, **form)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, **form)
    if text.isascii():
        return text
    try:  # in a locale that is not UTF-8 a name's bytes beyond ASCII came as surrogates: those that are UTF-8 are joined
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # there are surrogates that stand for no byte
        return text


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value

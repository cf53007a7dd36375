"""Finding a checkpoint: its directory and manifest. Loads no torch, so that a launcher can look before anything starts."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytempo.errors import UsageError

MANIFEST = "manifest.json"


#: A directory with this ending is not finished, or no longer wanted: it is none.
PARTIAL = ".partial"


def whole_checkpoints(path: Path) -> list[Path]:
    """The checkpoints below a directory, the one of the latest step last; one that was not finished is none.

    The step is the manifest's. When a checkpoint was copied, the one with the name that a job gives is taken, or the later.
    """
    found = [p.parent for p in path.glob(f"step-*/{MANIFEST}") if p.parent.suffix != PARTIAL]
    return [checkpoint for _, checkpoint in sorted((_order(checkpoint), checkpoint) for checkpoint in found)]


def _order(checkpoint: Path) -> tuple[int, bool, int]:
    step = step_of(checkpoint)
    return step, checkpoint.name == name_of(step), stamp_of(checkpoint)[1]


def name_of(step: int) -> str:
    """What a job calls its checkpoint of this step."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint: what its manifest says, or its name where that cannot be read."""
    try:
        return int(json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        digits = checkpoint.name.removeprefix("step-").split("-")[0]
        return int(digits) if digits.isdigit() else -1


def stamp_of(checkpoint: Path) -> tuple[int, int]:
    """Tells a checkpoint from another that was given its name."""
    try:
        facts = (checkpoint / MANIFEST).stat()
    except FileNotFoundError:  # it has just been removed
        return 0, 0
    return facts.st_ino, facts.st_mtime_ns


def newest_since(path: Path, before: Mapping[Path, tuple[int, int]]) -> Path | None:
    """Of the whole checkpoints that were not there before, the one of the latest step: what the disk says, not a message."""
    fresh = [c for c in whole_checkpoints(path) if before.get(c) != stamp_of(c) and has_all_files(c)]
    return fresh[-1] if fresh else None


def partial_checkpoints(path: Path) -> set[Path]:
    """What was begun below a directory and is not whole."""
    return set(path.glob(f"step-*{PARTIAL}"))


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, or what there is of it; the manifest first, so that a half removed one is none."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def has_all_files(checkpoint: Path) -> bool:
    """Is everything there that the manifest names?"""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        return all((checkpoint / file["file"]).is_file() for file in manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def written_later(path: Path, chosen: Path) -> Path | None:
    """Another checkpoint below `path` that was written after the chosen one, though of an earlier step."""
    stamps = {checkpoint: stamp_of(checkpoint)[1] for checkpoint in whole_checkpoints(path)}
    last = max(stamps, key=lambda checkpoint: stamps[checkpoint], default=chosen)
    return last if step_of(last) < step_of(chosen) else None


def find_checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or that of the latest step below it, with its manifest; refused when none is whole."""
    found = [path] if (path / MANIFEST).exists() else whole_checkpoints(path)
    if not found:
        raise UsageError(f"there is no checkpoint in {path}; expected a directory written with --checkpoint")
    directory = found[-1]
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        for file in manifest["files"]:
            digest = hashlib.sha256((directory / file["file"]).read_bytes()).hexdigest()
            if digest != file["digest"]:
                raise UsageError(f"{directory / file['file']} is damaged: its digest is not the manifest's")
    except UsageError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"the checkpoint {directory} cannot be read: {error}") from None
    return directory, manifest

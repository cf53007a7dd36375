"""Checkpoint directories: written whole or not at all, synced to the disk, found and pruned. The one writer for servers
and pipelines; loads no torch, so that a launcher can look for a checkpoint before anything starts.

    DIR/step-00000120/           manifest.json and the files it names
    DIR/step-00000120.partial/   being written, or being removed: no checkpoint

Two ways to write:
- `write_synced` each file into the partial directory, then `publish` it with its manifest: the directory appears whole
  (servers: all shards save at one position of the log).
- `write_file` each file under its final name: the file appears whole, and the checkpoint counts when all of them are there
  (pipelines: stages save at their own time, without a barrier).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from polytempo.errors import UsageError

MANIFEST = "manifest.json"
#: The ending of a directory that is not finished, or no longer wanted.
PARTIAL = ".partial"
#: The ending of a file that is not finished.
DRAFT = ".draft"

#: Writes the content of a file at a path.
WriteTo = Callable[[Path], object]


# Writing.


def step_name(step: int) -> str:
    """The name of a checkpoint of this step."""
    return f"step-{step:08d}"


def write_synced(path: Path, write: WriteTo) -> None:
    """Write a file, and wait until it is on the disk."""
    write(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_file(path: Path, write: WriteTo) -> None:
    """Write a file that appears under its name when all of it is on the disk. Several processes may write the same."""
    draft = path.with_name(f"{path.name}.{os.urandom(4).hex()}{DRAFT}")
    try:
        write_synced(draft, write)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def manifest_text(manifest: Mapping[str, Any]) -> WriteTo:
    """Writes a manifest."""
    data = json.dumps(manifest, indent=1).encode()
    return lambda path: path.write_bytes(data)


def publish(
    directory: Path,
    name: str,
    manifest: Mapping[str, Any],
    files: Sequence[Mapping[str, Any]],
    keep: int,
    spared: Path | None = None,
) -> Path:
    """All files of a partial directory are written: make it the checkpoint `name`, and remove all but the last `keep`.

    Args:
        directory: Where the checkpoints of a job are.
        name: The name of the checkpoint; an earlier one of this name is replaced.
        manifest: What the checkpoint holds beside its files; `step` orders it among others.
        files: For each file its name ("file") and its digest ("digest").
        keep: How many checkpoints up to this step stay.
        spared: One that stays as well.

    Returns:
        The path of the checkpoint.
    """
    partial, final = directory / f"{name}{PARTIAL}", directory / name
    write_synced(partial / MANIFEST, manifest_text({"format": 1, **manifest, "files": list(files)}))
    sync_directory(partial)
    replaced = directory / f"{name}.replaced{PARTIAL}"
    shutil.rmtree(replaced, ignore_errors=True)
    with suppress(FileNotFoundError):  # there seldom is one
        final.rename(replaced)
    partial.rename(final)
    sync_directory(directory)
    earlier = [old for old in whole_checkpoints(directory) if step_of(old) <= manifest["step"]]
    for old in [replaced, *(one for one in earlier[:-keep] if one != spared)]:
        remove_checkpoint(old)
    return final


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file, as a manifest names it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, or what there is of it; the manifest first, so that one that is half removed is none."""
    with suppress(FileNotFoundError):
        (path / MANIFEST).unlink()
    shutil.rmtree(path, ignore_errors=True)


def error_text(error: Exception) -> str:
    """Why something could not be written, in one line."""
    said = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
    return " ".join(said.split())


# Finding.


def step_directories(directory: Path, names: Sequence[str]) -> list[Path]:
    """The directories of steps that hold all of these files, the latest step first."""
    found = sorted(directory.glob("step-*"), reverse=True) if directory.is_dir() else []
    return [one for one in found if all((one / name).is_file() for name in names)]


def whole_checkpoints(path: Path) -> list[Path]:
    """The checkpoints below a directory, the one of the latest step last; one that was not finished is none.

    The step is the manifest's. When a checkpoint was copied, the one with the name that a job gives is taken, or the later.
    """
    found = [p.parent for p in path.glob(f"step-*/{MANIFEST}") if p.parent.suffix != PARTIAL]
    ordered = []
    for checkpoint in found:
        step = step_of(checkpoint)
        ordered.append((step, checkpoint.name == step_name(step), stamp_of(checkpoint)[1], checkpoint))
    return [checkpoint for *_, checkpoint in sorted(ordered)]


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
    """The partial directories below a directory."""
    return set(path.glob(f"step-*{PARTIAL}"))


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
            if digest_of_file(directory / file["file"]) != file["digest"]:
                raise UsageError(f"{directory / file['file']} is damaged: its digest is not the manifest's")
    except UsageError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"the checkpoint {directory} cannot be read: {error}") from None
    return directory, manifest

"""Finding a checkpoint: its directory and manifest. Loads no torch, so that a launcher can look before anything starts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from polytempo.errors import UsageError

MANIFEST = "manifest.json"


def find_checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest below it, with its manifest; refused when none is whole."""
    found = [path] if (path / MANIFEST).exists() else sorted(path.glob(f"step-*/{MANIFEST}"), reverse=True)
    if not found:
        raise UsageError(f"there is no checkpoint in {path}; expected a directory written with --checkpoint")
    directory = found[0] if found[0] == path else found[0].parent
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        for file in manifest["files"]:
            digest = hashlib.sha256((directory / file["file"]).read_bytes()).hexdigest()
            if digest != file["digest"]:
                raise UsageError(f"{directory / file['file']} is damaged: its digest is not the manifest's")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"the checkpoint {directory} cannot be read: {error}") from None
    return directory, manifest

"""Finding a checkpoint: its directory and manifest. Loads no torch, so that a launcher can look before anything starts.

Also what a job says of a model to those who join it: `manifest_of`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from polytempo.errors import UsageError
from polytempo.protocol.values import Proposal

MANIFEST = "manifest.json"


def whole_checkpoints(path: Path) -> list[Path]:
    """The checkpoints below a directory, the newest last; one that was not finished is none."""
    manifests = [p for p in path.glob(f"step-*/{MANIFEST}") if p.parent.suffix != ".partial"]
    return [manifest.parent for manifest in sorted(manifests, key=lambda p: (p.stat().st_mtime_ns, p.parent.name))]


def find_checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest below it, with its manifest; refused when none is whole."""
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


def manifest_of(proposal: Proposal) -> str:
    """What a worker must know to build the model that the servers hold, as JSON."""
    described = msgspec.to_builtins(proposal)
    described["tensors"] = [
        {"name": info.name, "shape": list(info.shape), "dtype": info.dtype, "group": info.group} for info in proposal.tensors
    ]
    described["tables"] = [msgspec.structs.asdict(info) for info in proposal.tables]
    return json.dumps(described)

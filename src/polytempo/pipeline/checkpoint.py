"""Checkpoints of a pipeline: each stage writes its part by itself; a step counts when the parts of all stages are there.

    DIRECTORY/step-00000012/stage-0-of-4.safetensors ...
    DIRECTORY/step-00000012/manifest.json                     last, by the first stage

A part appears whole or not at all; what is no tensor stands in its head, as plain data: nothing is pickled. All ranks must
see the same directory.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from polytempo.errors import PeerError, UsageError
from polytempo.train.safe_serialization import decode, encode

#: Where a file's head says what is no tensor.
HEAD = "part"
#: So many steps are kept of those that are written as training goes on.
KEPT = 2


def write_part(directory: Path, step: int, stage: int, stages: int, writer: int, part: dict[str, Any]) -> None:
    """Write a stage's part; `writer` is its rank: replicas may write the same."""
    folder = directory / f"step-{step:08}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"stage-{stage}-of-{stages}.safetensors"
    draft = path.with_suffix(f".{writer}.draft")
    tensors: list[torch.Tensor] = []
    head = base64.b64encode(encode(part, tensors)).decode("ascii")
    apart = {str(number): tensor.detach().cpu().contiguous().clone() for number, tensor in enumerate(tensors)}
    save_file(apart, draft, {HEAD: head})
    os.replace(draft, path)


def write_manifest(directory: Path, step: int, facts: dict[str, Any]) -> None:
    """Say that all parts of a step are there."""
    folder = directory / f"step-{step:08}"
    draft = folder / "manifest.draft"
    draft.write_text(json.dumps({"step": step, **facts}, indent=1), encoding="utf-8")
    os.replace(draft, folder / "manifest.json")


def prune(directory: Path, stage: int, stages: int) -> None:
    """Remove this stage's parts of old steps; others are at most one step behind."""
    name = f"stage-{stage}-of-{stages}.safetensors"
    for folder in _steps(directory, [name])[KEPT:]:
        (folder / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # another stage, which was there at the same time, has removed it
            if not list(folder.glob("stage-*.safetensors")):
                shutil.rmtree(folder, ignore_errors=True)


def newest(directory: Path, stages: int) -> int:
    """The last step of which all parts are there."""
    found = _steps(directory, [f"stage-{stage}-of-{stages}.safetensors" for stage in range(stages)])
    if not found:
        there = sorted(path.name for path in directory.glob("step-*/stage-*.safetensors")) if directory.is_dir() else []
        counts = sorted({name.partition("-of-")[2].removesuffix(".safetensors") for name in there})
        what = f"parts of {' or '.join(counts)} stages are there, of no step all" if counts else "no parts are there"
        raise UsageError(f"{directory} holds no checkpoint of a pipeline with {stages} stages: {what}")
    return int(found[0].name.removeprefix("step-"))


def read_part(directory: Path, step: int, stage: int, stages: int) -> dict[str, Any]:
    """A stage's part."""
    path = directory / f"step-{step:08}" / f"stage-{stage}-of-{stages}.safetensors"
    try:
        with safe_open(path, "pt") as file:
            tensors: list[torch.Tensor] = []
            part: dict[str, Any] = decode(base64.b64decode(file.metadata()[HEAD]), tensors)
            for number, tensor in enumerate(tensors):
                tensor.copy_(file.get_tensor(str(number)))
    except (OSError, SafetensorError, PeerError, KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise UsageError(f"cannot read the checkpoint {path}: {' '.join(str(problem).split())[:200]}") from problem
    return part


def _steps(directory: Path, names: Sequence[str]) -> list[Path]:
    """The folders that hold all of these, newest first."""
    folders = sorted(directory.glob("step-*"), reverse=True) if directory.is_dir() else []
    return [folder for folder in folders if all((folder / name).is_file() for name in names)]

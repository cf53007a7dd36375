"""A pipeline's checkpoints: each stage writes its part by itself; a step counts when the parts of all stages are there.

    DIRECTORY/step-00000012/stage-0-of-4.safetensors ...
    DIRECTORY/step-00000012/manifest.json                     last, by the first stage

A part appears whole or not at all (`polytempo/checkpoints.py`); what is no tensor stands in its head, as plain data: nothing
is pickled. All ranks must see the same directory.
"""

from __future__ import annotations

import base64
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from polytempo.checkpoints import MANIFEST, manifest_text, remove_checkpoint, step_directories, step_name, write_file
from polytempo.errors import PeerError, UsageError
from polytempo.train.safe_serialization import decode, encode

#: Where a file's head says what is no tensor.
HEAD = "part"
#: How many steps are kept of those that are written as training goes on.
KEPT = 2


def part_name(stage: int, stages: int) -> str:
    """The file of a stage."""
    return f"stage-{stage}-of-{stages}.safetensors"


def write_part(directory: Path, step: int, stage: int, stages: int, part: dict[str, Any]) -> None:
    """Write a stage's part; replicas may write the same."""
    folder = directory / step_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: list[torch.Tensor] = []
    head = base64.b64encode(encode(part, tensors)).decode("ascii")
    apart = {str(number): tensor.detach().cpu().contiguous().clone() for number, tensor in enumerate(tensors)}
    write_file(folder / part_name(stage, stages), lambda path: save_file(apart, path, {HEAD: head}))


def write_manifest(directory: Path, step: int, facts: dict[str, Any]) -> None:
    """State that all parts of a step are there."""
    write_file(directory / step_name(step) / MANIFEST, manifest_text({"step": step, **facts}))


def prune(directory: Path, stage: int, stages: int) -> None:
    """Remove this stage's parts of old steps; other stages are at most one step behind."""
    name = part_name(stage, stages)
    for folder in step_directories(directory, [name])[KEPT:]:
        (folder / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # another stage, which pruned at the same time, has removed it
            if not list(folder.glob("stage-*.safetensors")):
                remove_checkpoint(folder)


def newest(directory: Path, stages: int) -> int:
    """The last step of which all parts are there."""
    found = step_directories(directory, [part_name(stage, stages) for stage in range(stages)])
    if not found:
        there = sorted(path.name for path in directory.glob("step-*/stage-*.safetensors")) if directory.is_dir() else []
        counts = sorted({name.partition("-of-")[2].removesuffix(".safetensors") for name in there})
        what = f"parts of {' or '.join(counts)} stages are there, of no step all" if counts else "no parts are there"
        raise UsageError(f"{directory} holds no checkpoint of a pipeline with {stages} stages: {what}")
    return int(found[0].name.removeprefix("step-"))


def read_part(directory: Path, step: int, stage: int, stages: int) -> dict[str, Any]:
    """A stage's part."""
    path = directory / step_name(step) / part_name(stage, stages)
    try:
        with safe_open(path, "pt") as file:
            tensors: list[torch.Tensor] = []
            part: dict[str, Any] = decode(base64.b64decode(file.metadata()[HEAD]), tensors)
            for number, tensor in enumerate(tensors):
                tensor.copy_(file.get_tensor(str(number)))
    except (OSError, SafetensorError, PeerError, KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise UsageError(f"cannot read the checkpoint {path}: {' '.join(str(problem).split())[:200]}") from problem
    return part

"""Checkpoints of a model that is spread, as files of the unsplit one: any strategy and plain PyTorch load them.

    DIRECTORY/step-00000012/model.safetensors       the state of the model, by its names
    DIRECTORY/step-00000012/optimizer.safetensors   tensors of the optimizer's state, as PARAMETER/ENTRY
    DIRECTORY/step-00000012/manifest.json           steps, samples, sampler positions, settings of the optimizer's groups

One rank writes; the directory appears whole or not at all (`polytempo/checkpoints.py`), and nothing is pickled. In plain
PyTorch:

    model.load_state_dict(safetensors.torch.load_file("saved/step-00000012/model.safetensors"))

and, for the optimizer, `read_checkpoint(...)` with torch's `set_optimizer_state_dict`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from polytempo.checkpoints import PARTIAL, digest_of_file, error_text, find_checkpoint, publish, step_name, write_synced
from polytempo.errors import UsageError
from polytempo.strategy.state import NamedState
from polytempo.train.safe_serialization import decode, encode

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
#: State of each rank, in modes with local steps.
RANKS = "ranks.safetensors"
#: What a manifest calls this kind of checkpoint.
KIND = "whole model"


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint holds."""

    step: int
    model: dict[str, torch.Tensor]
    optimizer: NamedState = field(default_factory=lambda: {"state": {}, "param_groups": []})
    facts: dict[str, Any] = field(default_factory=dict)  #: samples, positions, the strategy, what the script adds
    ranks: list[Any] = field(default_factory=list)  #: of each rank its own, where their optimizers are not alike


def write_checkpoint(directory: Path, saved: SavedState, keep: int = 2) -> Path:
    """Write a checkpoint; the last `keep` stay. Its path.

    Raises: UsageError where it cannot be written."""
    partial = directory / f"{step_name(saved.step)}{PARTIAL}"
    flat = {f"{name}/{entry}": value for name, own in saved.optimizer["state"].items() for entry, value in own.items()}
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    values = {key: value for key, value in flat.items() if key not in tensors}
    try:
        partial.mkdir(parents=True, exist_ok=True)
        written = []
        files = {MODEL: saved.model, OPTIMIZER: tensors, **({RANKS: _flat(saved.ranks)} if saved.ranks else {})}
        for name, content in files.items():
            apart = {key: value.detach().cpu().contiguous().clone() for key, value in content.items()}
            write_synced(partial / name, lambda path, apart=apart: save_file(apart, path))  # type: ignore[misc]
            written.append({"file": name, "digest": digest_of_file(partial / name)})
        groups = saved.optimizer["param_groups"]
        manifest = {**saved.facts, "kind": KIND, "step": saved.step, "optimizer": {"groups": groups, "values": values}}
        return publish(directory, step_name(saved.step), manifest, written, keep)
    except (OSError, SafetensorError) as problem:
        raise UsageError(f"cannot write a checkpoint to {directory}: {error_text(problem)}; choose another") from problem


def read_checkpoint(directory: str | Path) -> SavedState:
    """Read the checkpoint of the latest step in a directory, or the one at that path.

    Raises: UsageError when there is none, or it is damaged or of another kind."""
    path, manifest = find_checkpoint(Path(directory))
    if manifest.get("kind") != KIND:
        raise UsageError(
            f"{path} is a checkpoint of servers or of a pipeline, not of a whole model; resume it with --resume or "
            "pt.Pipeline(resume=...)"
        )
    try:
        model, tensors = load_file(path / MODEL), load_file(path / OPTIMIZER)
        ranks = _unflattened(load_file(path / RANKS)) if (path / RANKS).exists() else []
    except (OSError, SafetensorError) as problem:
        raise UsageError(f"cannot read the checkpoint {path}: {error_text(problem)}") from problem
    about = manifest.pop("optimizer")
    optimizer: NamedState = {"state": {}, "param_groups": [_tupled(group) for group in about["groups"]]}
    for key, value in [*about["values"].items(), *tensors.items()]:
        name, _, entry = key.rpartition("/")
        optimizer["state"].setdefault(name, {})[entry] = value
    return SavedState(manifest["step"], model, optimizer, manifest, ranks)


def _flat(data: Any) -> dict[str, torch.Tensor]:
    """Plain data with tensors as tensors alone: its structure, and the others by number."""
    aside: list[torch.Tensor] = []
    structure = torch.frombuffer(bytearray(encode(data, aside)), dtype=torch.uint8)
    return {"structure": structure, **{str(number): tensor for number, tensor in enumerate(aside)}}


def _unflattened(tensors: dict[str, torch.Tensor]) -> Any:
    aside: list[torch.Tensor] = []
    data = decode(tensors["structure"].numpy().tobytes(), aside)
    for number, tensor in enumerate(aside):
        tensor.copy_(tensors[str(number)])
    return data


def _tupled(group: dict[str, Any]) -> dict[str, Any]:
    """Settings that JSON made lists (betas) are tuples again."""
    return {name: tuple(value) if isinstance(value, list) and name != "params" else value for name, value in group.items()}

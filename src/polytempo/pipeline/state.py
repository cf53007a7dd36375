"""The state of a pipelined model: gathered on every rank, loaded, saved in parts and resumed from them.

Each stage writes its own part by itself; a step counts when the parts of all stages are there. When another rank is lost, a
stage writes its part as of the last step that it has completed, also in the middle of a step: parameters change at the
update only, and buffers, which forwards change, are copied before the step. The newest step of which all parts exist is the
one to resume from.

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
from polytempo.pipeline.builder import StageBuild
from polytempo.pipeline.training import TrainingLoop
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


class PipelineState:
    """This rank's share in the whole model's state. `folder`: where parts go by themselves, every `every` steps."""

    def __init__(self, built: StageBuild, training: TrainingLoop, folder: Path | None, every: int) -> None:
        self._built, self._training, self._stage = built, training, built.stage
        self._folder, self._every = folder, every
        self._stages = built.schedule.stages
        self._buffers_before: dict[str, torch.Tensor] = {}
        self._version_before = 0

    # The whole model.

    def gather(self) -> dict[str, torch.Tensor]:
        """The whole model's state, by broadcasts from the first replica of each stage."""
        self._check_unsplit()
        found = dict(self._built.unused)
        for number, tensors in enumerate(self._built.tensors):
            mine = self._stage.state() if number == self._stage.number else {}
            values = {
                name: mine[name].detach().cpu().clone() if name in mine else torch.empty(shape, dtype=dtype)
                for name, (shape, dtype) in tensors.items()
            }
            if values:
                self._built.group.broadcast(list(values.values()), self._built.position(number)).wait()
            found |= values
        return {name: found[name] for name in self._built.names}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take this stage's values from the state of a whole model."""
        names = self._built.names
        missing = [name for name in names if name not in state]
        unknown = [name for name in state if name not in names]
        if missing or unknown:
            raise UsageError(
                f"expected the names of the whole model; missing: {missing[:4] or 'none'}, unknown: {unknown[:4] or 'none'}"
            )
        for name, value in self._built.unused.items():
            value.copy_(state[name])
        self._load_stage(state)
        self._stage.reset_versions()

    def _load_stage(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in self._stage.state().items():
            if value.shape != state[name].shape:
                raise UsageError(f"{name} has shape {tuple(value.shape)}; got one of shape {tuple(state[name].shape)}")
            value.copy_(state[name])

    def _check_unsplit(self) -> None:
        """Refuse to show shards of tensors as the whole model's."""
        shapes = self._built.tensors[self._stage.number]
        for name, value in self._stage.state().items():
            if name in shapes and shapes[name][0] != value.shape:
                raise UsageError(
                    f"{name} has shape {tuple(value.shape)} on rank {self._built.rank}, a shard of {tuple(shapes[name][0])}"
                    ": this pipeline is one lane of a strategy; use state_dict() and save() of the DistributedModel"
                )

    # Checkpoints.

    def save(self, directory: Path) -> None:
        """Write all parts, then the manifest that makes them a checkpoint."""
        self._check_unsplit()
        if self._built.replica == 0:
            self._write_current(directory)
        self._built.group.barrier().wait()
        if self._built.is_first:
            facts = {"stages": self._stages, "schedule": self._built.schedule.name, "names": self._built.names}
            write_manifest(directory, self._training.steps, facts)
        self._built.group.barrier().wait()

    def resume(self, directory: Path) -> None:
        """Continue from the newest step of which all parts exist; the first rank finds it."""
        step = torch.zeros(1, dtype=torch.int64)
        if self._built.is_first:  # an error here is raised here, before other ranks can fail at their parts
            step.fill_(newest(directory, self._stages))
            part = self._read(directory, int(step))
        self._built.group.broadcast([step], 0).wait()
        if not self._built.is_first:
            part = self._read(directory, int(step))
        self._load_stage(part["model"])
        if self._stage.optimizer is not None:
            self._stage.optimizer.load_state_dict(part["optimizer"])
        self._training.steps, self._training.base = part["step"], part["numbers"]
        self._stage.reset_versions(part["version"])

    def before_step(self) -> None:
        """Keep what `write_last` needs and a failed step may have changed: the version, and copies of the buffers."""
        self._stage.check_memory()
        self._version_before = self._stage.version
        if self._folder is not None and not self._training.in_flight:
            params = {name for name, _ in self._stage.part.parameters()}
            state = self._stage.state()
            self._buffers_before = {name: value.clone() for name, value in state.items() if name not in params}

    def after_step(self) -> None:
        """A whole step is complete: every `every` steps, write a part."""
        self._version_before, self._buffers_before = self._stage.version, {}
        if self._folder is not None and self._every and self._training.steps % self._every == 0:
            self._write_current(self._folder)

    def after_flush(self) -> None:
        """No minibatch is in flight: write a part."""
        self._version_before, self._buffers_before = self._stage.version, {}
        if self._folder is not None:
            self._write_current(self._folder)

    def write_last(self) -> None:
        """Write this stage's part as of the last step it has completed; nothing in the middle of an update or of a run
        without flushes."""
        training = self._training
        if self._folder is None or training.in_flight or self._stage.updating:
            return
        updates = self._stage.version - self._version_before
        if updates == 0:
            self._write(self._folder, training.steps, training.base, self._stage.state() | self._buffers_before)
        elif updates == sum(action.kind == "U" for action in self._built.actions):
            base = training.base + self._built.microbatches
            self._write(self._folder, training.steps + 1, base, self._stage.state())

    def _write_current(self, directory: Path) -> None:
        self._write(directory, self._training.steps, self._training.base, self._stage.state())
        if directory == self._folder:
            prune(directory, self._stage.number, self._stages)

    def _write(self, directory: Path, step: int, base: int, state: dict[str, torch.Tensor]) -> None:
        optimizer = self._stage.optimizer.state_dict() if self._stage.optimizer is not None else None
        part = {"step": step, "numbers": base, "version": self._stage.version, "model": state, "optimizer": optimizer}
        write_part(directory, step, self._stage.number, self._stages, part)

    def _read(self, directory: Path, step: int) -> dict[str, Any]:
        part = read_part(directory, step, self._stage.number, self._stages)
        if differing := set(part["model"]) ^ set(self._stage.state()):
            raise UsageError(
                f"the checkpoint in {directory} has other stages: stage {self._stage.number} differs in "
                f"{sorted(differing)[:4]}; use the same model and the same stages"
            )
        return part

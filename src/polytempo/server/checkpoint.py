"""A parameter server's checkpoints: one safetensors file a shard and a manifest (`polytempo/checkpoints.py` writes them).

    DIR/step-00000120/  manifest.json  shard-0.safetensors  shard-1.safetensors ...  filters-0-worker-0.safetensors ...
                        state-worker-0.safetensors ...

All shards save at one position of the log, so the files fit together. Each writes its own into `step-00000120.partial`; when
all have, the coordinator publishes the directory with a manifest that holds their digests. Segments are given in the flat
order of the whole model, so any number of servers can read them.

**What scripts have registered.** A worker reports it after each of its pushes, when its next batch is drawn
(`train/script_state.py`), so that there is something to save when the job is interrupted; the coordinator keeps the newest
of each worker. For a checkpoint in the middle of training workers are told, and give what belongs to it. Without rounds a
worker may hear of it a push too late: then its report after the push before counts, if that had all of its objects. A file
holds the objects of one worker:

    state-worker-0.safetensors   "2"    the structure of the manifest's object 2, as bytes
                                 "2.1"  its tensor 1, flat
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

from polytempo.checkpoints import MANIFEST, PARTIAL, digest_of_file, error_text, publish, remove_checkpoint, write_synced
from polytempo.errors import PeerError
from polytempo.protocol.layout import lay_out
from polytempo.protocol.messages import GIVEN, MEAN, OWN, NotSaved, RecallState, Saved, ScriptState, StateRecalled
from polytempo.protocol.values import OptimizerSpec, SavedObject, TensorInfo
from polytempo.server.effects import Checkpoint, Effect, ToWorker, Unsaved
from polytempo.server.job_plan import JobPlan
from polytempo.server.optimizer_state import SegmentState, as_bytes
from polytempo.server.resume_rules import holding_in, holding_of, resumption
from polytempo.server.shard import Shard
from polytempo.transport.channel import Bytes

#: An object, and the content of its tensors.
HeldObject = tuple[SavedObject, list[Bytes]]
#: Of one worker, by name.
WorkerObjects = dict[str, HeldObject]

#: Stored as they are; tensors of other dtypes as bytes.
STORED = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


class ScriptStates:
    """Of all workers of a job."""

    def __init__(self) -> None:
        self.of: dict[int, WorkerObjects] = {}  #: by worker: the newest
        self.whole: dict[int, int] = {}  #: by worker: the push after which the newest report had all of its objects

    def report(self, worker: int, message: ScriptState, buffers: Sequence[Bytes]) -> None:
        """A worker's state after a push. Large objects are in it when they were asked for."""
        rest = iter([np.array(buffer) for buffer in buffers])
        before = self.of.get(worker, {})
        known = [(name, *before[name]) for name in message.same if name in before]
        same = {name: (replace(saved, exchange=message.exchange), held) for name, saved, held in known}
        fresh = {one.name: (one, [next(rest) for _ in one.dtypes]) for one in message.objects}
        self.of[worker] = {**before, **same, **fresh}
        if not message.partial:
            self.whole[worker] = message.exchange


def write_states(directory: Path, states: Mapping[int, WorkerObjects]) -> list[dict[str, Any]]:
    """Write a file for each worker; their entries for the manifest."""
    entries = []
    for worker, objects in sorted(states.items()):
        tensors: dict[str, torch.Tensor] = {}
        for number, (saved, buffers) in enumerate(objects.values()):
            tensors[str(number)] = torch.frombuffer(bytearray(saved.structure), dtype=torch.uint8)
            for index, (dtype, buffer) in enumerate(zip(saved.dtypes, buffers, strict=True)):
                stored = getattr(torch, dtype) if dtype in STORED else torch.uint8
                flat = torch.frombuffer(buffer, dtype=stored) if buffer.nbytes else torch.empty(0, dtype=stored)
                tensors[f"{number}.{index}"] = flat
        file = f"state-worker-{worker}.safetensors"
        write_synced(directory / file, lambda path, tensors=tensors: save_file(tensors, path))  # type: ignore[misc]
        described = [[one.name, list(one.dtypes), one.exchange] for one, _ in objects.values()]
        entries.append({"file": file, "digest": digest_of_file(directory / file), "worker": worker, "objects": described})
    return entries


def read_states(directory: Path) -> dict[int, WorkerObjects]:
    """What a checkpoint holds, by worker."""
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    found: dict[int, WorkerObjects] = {}
    for entry in manifest["files"]:
        if "worker" not in entry:
            continue
        tensors = load_file(directory / entry["file"])
        objects = found[entry["worker"]] = {}
        for number, (name, dtypes, exchange) in enumerate(entry["objects"]):
            structure = tensors[str(number)].numpy().tobytes()
            buffers = [tensors[f"{number}.{index}"].view(torch.uint8).numpy() for index in range(len(dtypes))]
            objects[name] = SavedObject(name, structure, tuple(dtypes), exchange), buffers
    return found


def mean_of_each(states: Mapping[int, WorkerObjects]) -> WorkerObjects:
    """Of each object its newest state, with the mean of all workers' in place of its tensors of floating point. An object
    whose state has not the same form on all workers stays the newest."""
    found = newest_of_each(states)
    for name, (saved, buffers) in found.items():
        all_of = [objects[name] for _, objects in sorted(states.items()) if name in objects]
        sizes = [part.nbytes for part in buffers]
        if any(one.structure != saved.structure or [part.nbytes for part in held] != sizes for one, held in all_of):
            continue
        columns = zip(saved.dtypes, buffers, *(held for _, held in all_of), strict=True)
        found[name] = saved, [_mean_of(getattr(torch, dtype), newest, parts) for dtype, newest, *parts in columns]
    return found


def _mean_of(dtype: torch.dtype, newest: Bytes, parts: Sequence[Bytes]) -> Bytes:
    if not dtype.is_floating_point or not newest.nbytes:
        return newest
    first, *others = (torch.frombuffer(part, dtype=dtype).double() for part in parts)
    mean = first.clone()
    for other in others:
        mean.add_(other - first, alpha=1 / len(parts))  # exact where all are the same
    return np.array(mean.to(dtype).view(torch.uint8).numpy())


def newest_of_each(states: Mapping[int, WorkerObjects]) -> WorkerObjects:
    """Of each object the state after the latest push; of several workers' the lowest rank's."""
    found: WorkerObjects = {}
    for _, objects in sorted(states.items()):
        for name, held in objects.items():
            if name not in found or held[0].exchange > found[name][0].exchange:
                found[name] = held
    return found


KEPT = 3  #: older checkpoints of the same job are removed


@dataclass
class SavedShard:
    """What one file holds of one optimizer: stretches of values, and runs of state."""

    values: list[tuple[str, int, torch.Tensor]]  # dtype, where it starts, the elements
    segments: list[SegmentState]
    rows: dict[str, torch.Tensor]  # of tables, by their number and a name
    clocks: list[dict[str, Any]]  # of tables


def write_shard(
    directory: Path, name: str, shard: int, optimizer_shards: Mapping[str, Shard]
) -> tuple[str, str, dict[str, Any]]:
    """Write one shard's file; its name, digest and table of contents."""
    tensors: dict[str, torch.Tensor] = {}
    contents: dict[str, Any] = {}
    for optimizer_id, optimizer_shard in optimizer_shards.items():
        if optimizer_shard.averages:
            continue
        values = optimizer_shard.saved_values()
        for index, (_, _, tensor) in enumerate(values):
            tensors[f"{optimizer_id}.value.{index}"] = tensor
        segments = []
        for index, segment in enumerate(optimizer_shard.state()):
            plain = {n: v for n, v in segment.state.items() if not isinstance(v, torch.Tensor)}
            held = {n: v for n, v in segment.state.items() if isinstance(v, torch.Tensor)}
            tensors |= {f"{optimizer_id}.state.{index}.{n}": v.contiguous() for n, v in held.items()}
            segments.append(
                {"dtype": segment.dtype, "start": segment.start, "stop": segment.stop, "names": list(held), "plain": plain}
            )
        rows = optimizer_shard.rows.saved()
        tensors |= {f"{optimizer_id}.table.{n}": v for n, v in rows.items()}
        contents[optimizer_id] = {
            "values": [[dtype, start] for dtype, start, _ in values],
            "runs": segments,
            "rows": list(rows),
            "clocks": optimizer_shard.rows.saved_clocks(),
        }
    partial = directory / f"{name}{PARTIAL}"
    partial.mkdir(parents=True, exist_ok=True)
    file = f"shard-{shard}.safetensors"
    for key, tensor in tensors.items():  # each in memory of its own: those that are parts of others are copied
        own = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        tensors[key] = own.cpu().contiguous()
    write_synced(partial / file, lambda path: save_file(tensors, path))
    return file, digest_of_file(partial / file), contents


@dataclass
class PendingCheckpoint:
    """One that is being written."""

    manifest: dict[str, Any]
    parts: list[Saved | NotSaved]
    awaited: set[int]  #: workers that were told of it, and have not given their scripts' state yet
    due: Mapping[int, int]  #: of those that are past it when they hear: their last push in it
    states: dict[int, WorkerObjects] = field(default_factory=dict)  #: what those have given that have


class JobCheckpoints:
    """The coordinator's half: collects what the shards have written, and the state of the workers' scripts, and makes it a
    checkpoint."""

    def __init__(self, directory: Path | None, plan: JobPlan, resume: Path | None = None) -> None:
        """`resume`: the checkpoint that the job goes on from."""
        self.directory = directory
        self._plan, self._resume = plan, resume
        self._script = ScriptStates()
        self._given = ScriptStates()  # what a worker gives to others, outside checkpoints
        self.latest = ""  #: the path of the last that is whole
        self.failure = ""  #: why the last one could not be written
        self.spared: Path | None = None  #: one that is not removed: the last before the training had diverged
        self._pending: dict[str, PendingCheckpoint] = {}  # in the order in which they were begun
        self._manifest: dict[str, Any] = {}  # of the last that is whole

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def begin(self, checkpoint: Checkpoint) -> None:
        """The shards will write this one. Workers whose scripts have registered something have state that belongs to it."""
        awaited = set(checkpoint.told) & self._script.of.keys()
        self._pending[checkpoint.name] = one = PendingCheckpoint(checkpoint.manifest, [], awaited, checkpoint.due)
        for worker in list(awaited):
            self._take_due(one, worker)

    def _take_due(self, one: PendingCheckpoint, worker: int) -> None:
        """Is a worker's newest report all that it has to say after its last push in a checkpoint? Then it counts."""
        if worker in one.awaited and self._script.whole.get(worker, -1) == one.due.get(worker, -2):
            self._take(one, worker)

    def _take(self, one: PendingCheckpoint, worker: int) -> None:
        one.awaited.discard(worker)
        one.states[worker] = self._script.of[worker]

    def add_part(self, part: Saved | NotSaved) -> list[Effect]:
        """A shard has written its part, or could not, or not what a worker's filters hold back. Checkpoints that are
        complete now are published; where that cannot be, it is said."""
        if isinstance(part, NotSaved) and part.worker >= 0:
            return [Unsaved(part.name, f"what worker {part.worker} holds back: {part.reason}")]
        if part.name not in self._pending:
            raise PeerError(f"{type(part).__name__} of server {part.shard} names {part.name[:40]!r}, which no shard writes")
        self._pending[part.name].parts.append(part)
        return self._publish()

    def add_state(self, worker: int, message: ScriptState, buffers: Sequence[Bytes]) -> list[Effect]:
        """A worker reports what its script has registered; as `add_part`."""
        if message.given:
            self._given.report(worker, message, buffers)
            return []
        self._script.report(worker, message, buffers)
        for one in self._pending.values():
            self._take_due(one, worker)
        for name, one in self._pending.items() if message.checkpoint else ():  # of several, it knows the last
            if worker in one.awaited:
                self._take(one, worker)
            if name == message.checkpoint:
                break
        return self._publish()

    def left(self, worker: int) -> list[Effect]:
        """A worker gives no more state; as `add_part`."""
        for one in self._pending.values():
            one.awaited.discard(worker)
        return self._publish()

    def end(self) -> list[Effect]:
        for one in self._pending.values():
            one.awaited.clear()
        return self._publish()

    def _publish(self) -> list[Effect]:
        if self.directory is None:
            return []
        complete = [name for name, one in self._pending.items() if len(one.parts) == self._plan.shards and not one.awaited]
        effects: list[Effect] = []
        for name in complete:
            one, partial = self._pending.pop(name), self.directory / f"{name}{PARTIAL}"
            saved = sorted((part for part in one.parts if isinstance(part, Saved)), key=lambda part: part.shard)
            files = [{"file": part.file, "digest": part.digest, "tensors": part.tensors} for part in saved]
            reason = next((part.reason for part in one.parts if isinstance(part, NotSaved)), "")
            try:
                if not reason:
                    files += write_states(partial, {**self._script.of, **one.states})
                    self.latest = str(publish(self.directory, name, one.manifest, files, KEPT, self.spared))
                    self._manifest = one.manifest
            except (OSError, SafetensorError) as error:
                reason = error_text(error)
            if reason:
                remove_checkpoint(partial)
                effects.append(Unsaved(name, reason))
        return effects

    def recall(self, worker: int, message: RecallState) -> list[Effect]:
        """A worker asks for state of scripts: what another has given, or what the checkpoint holds that the job goes on
        from."""
        plan = self._plan
        states = read_states(self._resume) if self._resume is not None and message.which != GIVEN else {}
        if message.which == OWN:
            found = states.get(worker, {})
        elif message.which == MEAN:
            found = mean_of_each(states)
        else:
            found = newest_of_each(self._given.of if message.which == GIVEN else states)
        objects, parts = tuple(one for one, _ in found.values()), [part for _, held in found.values() for part in held]
        size, due = plan.resumed.get("size", plan.size), plan.resumed.get("clocks", {}).get(str(worker), 0) - 1
        told = StateRecalled(which=message.which, objects=objects, step=plan.saved_push, size=size, due=due)
        return [ToWorker(worker, told, parts)]

    def lacks(self, checkpoint: Checkpoint) -> bool:
        """Is this state of the job neither written nor being written? Clocks are of workers, which may have left since."""
        same = {**self._manifest, "clocks": None} == {**checkpoint.manifest, "clocks": None}
        return checkpoint.name not in self._pending and not same


class SavedOptimizer:
    """All that a checkpoint holds of one optimizer. That a job may go on from it was asked before (`resume_rules.py`)."""

    def __init__(self, directory: Path, optimizer_id: str, spec: OptimizerSpec) -> None:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        self.held = holding_in(manifest, optimizer_id)
        self._spec = spec
        self.resumption = resumption(directory.name, self.held, holding_of(spec))
        files = [file for file in manifest["files"] if "tensors" in file]
        self.shards = [_read_shard(directory / f["file"], optimizer_id, f["tensors"][optimizer_id]) for f in files]

    def values(self, optimizer_shard: Shard) -> list[Bytes]:
        """The values of a shard's stretches, from however they were cut when saved. Of companions that the checkpoint does
        not have they are zero: the first average makes them, whatever they were."""
        flats = _flats(self.held.tensors)
        for shard in self.shards:
            for dtype, start, tensor in shard.values:
                flats[dtype][start : start + tensor.numel()] = tensor
        if self.held.tensors != self._spec.tensors:
            flats = self._rearranged(flats)
        return [as_bytes(tensor) for tensor in optimizer_shard.cut.of_model(flats)]

    def _rearranged(self, flats: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same parameters, with the companions that the job has."""
        parameters = len(self.held.parameters)
        companions = {place.info.name: place for place in lay_out(self.held.tensors, 1).places if place.index >= parameters}
        places = {place.index: place for place in lay_out(self.held.tensors, 1).places}
        result = _flats(self._spec.tensors)
        for place in lay_out(self._spec.tensors, 1).places:
            source = places[place.index] if place.index < parameters else companions.get(place.info.name)
            if source is not None and source.info.shape == place.info.shape and source.info.dtype == place.info.dtype:
                result[place.info.dtype][place.start : place.stop] = flats[source.info.dtype][source.start : source.stop]
        return result

    def state(self) -> list[SegmentState]:
        """The state that servers kept, of the parameters."""
        sizes = lay_out(self.held.parameters, 1).sizes
        segments = [segment for shard in self.shards for segment in shard.segments]
        return [segment for segment in segments if segment.start < sizes.get(segment.dtype, 0)]


def _flats(tensors: Sequence[TensorInfo]) -> dict[str, torch.Tensor]:
    return {dtype: torch.zeros(size, dtype=getattr(torch, dtype)) for dtype, size in lay_out(tensors, 1).sizes.items()}


def _read_shard(path: Path, optimizer_id: str, contents: Mapping[str, Any]) -> SavedShard:
    tensors = load_file(path)
    values = [(dtype, start, tensors[f"{optimizer_id}.value.{i}"]) for i, (dtype, start) in enumerate(contents["values"])]
    segments = []
    for index, segment in enumerate(contents["runs"]):
        held = {name: tensors[f"{optimizer_id}.state.{index}.{name}"] for name in segment["names"]}
        segments.append(SegmentState(segment["dtype"], segment["start"], segment["stop"], {**segment["plain"], **held}))
    rows = {name: tensors[f"{optimizer_id}.table.{name}"] for name in contents.get("rows", ())}
    return SavedShard(values, segments, rows, contents.get("clocks", []))


def write_held(directory: Path, name: str, optimizer_id: str, worker: int, held: Sequence[SegmentState]) -> None:
    """Keep what a worker's filters hold back, beside the shards of a checkpoint that is made or being made."""
    data = save({segment.dtype: segment.state["residual"] for segment in held})
    for place in (directory / f"{name}{PARTIAL}", directory / name):
        file = place / _held_file(optimizer_id, worker)
        try:
            write_synced(file, lambda path: path.write_bytes(data))
            return
        except FileNotFoundError:  # it has just become whole, or is gone already
            continue
        except OSError:
            file.unlink(missing_ok=True)
            raise


def read_held(directory: Path, optimizer_id: str, worker: int) -> list[SegmentState]:
    """What was kept for a worker; nothing where nothing was."""
    path = directory / _held_file(optimizer_id, worker)
    tensors = load_file(path) if path.exists() else {}
    return [SegmentState(dtype, 0, tensor.numel(), {"residual": tensor}) for dtype, tensor in tensors.items()]


def _held_file(optimizer_id: str, worker: int) -> str:
    return f"filters-{optimizer_id.replace('/', '-')}-worker-{worker}.safetensors"

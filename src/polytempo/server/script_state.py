"""What scripts have registered for checkpoints, as the coordinator holds it: of each worker the newest that it has reported.

A worker reports after each of its pushes, when its next batch is drawn (`train/script_state.py`), so that there is something
to save when the job is interrupted. For a checkpoint in the middle of training workers are told, and give what belongs to
it. Without rounds a worker may hear of it a push too late: then its report after the push before counts, if that had all of
its objects. A file of a checkpoint holds the objects of one worker:

    state-worker-0.safetensors   "2"    the structure of the manifest's object 2, as bytes
                                 "2.1"  its tensor 1, flat
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from polytempo.checkpoints import MANIFEST, digest_of_file, write_synced
from polytempo.protocol.messages import ScriptState
from polytempo.protocol.values import SavedObject
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

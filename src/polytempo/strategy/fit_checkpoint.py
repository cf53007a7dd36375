"""The checkpoints of `fit`: the model's own (`DistributedModel.save`), and beside it where the run is.

    FOLDER/step-00000120/          what `DistributedModel.save` writes: portable
    FOLDER/step-00000120/fit.json  step, epoch, what was taken of it, history; written last: it makes it one

All ranks call each function and see the same folder. The last checkpoint and the best are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytempo.checkpoints import manifest_text, remove_checkpoint, step_directories, step_name, write_file
from polytempo.errors import UsageError
from polytempo.session.session import rank
from polytempo.strategy.distributed_model import DistributedModel
from polytempo.train.communication import barrier

FIT_FILE = "fit.json"


def save_run(folder: Path, step: int, model: DistributedModel, state: Mapping[str, Any], best: Path | None) -> Path:
    """Write a checkpoint, then remove all but this one and the best."""
    path = folder / step_name(step)
    if rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        (path / FIT_FILE).unlink(missing_ok=True)  # an earlier run was here
    barrier()
    model.save(path)
    barrier()
    if rank() == 0:
        write_file(path / FIT_FILE, manifest_text({"step": step, **state}))
        for old in step_directories(folder, [FIT_FILE]):
            if old not in (path, best):
                (old / FIT_FILE).unlink()
                remove_checkpoint(old)
    barrier()
    return path


def newest_run(folder: Path | None) -> tuple[Path, dict[str, Any]] | None:
    """The last checkpoint in a folder and its state; None where there is none."""
    if folder is None:
        raise UsageError("resume=True needs checkpoint=, the folder in which the checkpoints are")
    found = step_directories(folder, [FIT_FILE])
    barrier()  # no rank writes before all have looked
    return (found[0], json.loads((found[0] / FIT_FILE).read_text(encoding="utf-8"))) if found else None

"""Traces of made-up jobs: as values, and as files of operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from polytempo.pipeline.schedules import make
from polytempo.traces.job import JobTrace, RecordedStep, SyncSeconds

#: Seconds of a computation: step, replica, micro-batch, stage, backward?
Seconds = Callable[[int, int, int, int, bool], float]

OPS = (
    *("forward-compute", "backward-compute", "forward-send", "forward-recv", "backward-send", "backward-recv"),
    *("params-all-gather", "grads-reduce-scatter", "optimizer"),
)


def even(step: int, replica: int, batch: int, stage: int, backward: bool) -> float:
    return 0.2 if backward else 0.1


def noisy(seconds: Seconds, seed: int = 0) -> Seconds:
    """The same with a spread of 2 %, by place."""

    def changed(*place: int) -> float:
        return seconds(*place) * Random(f"{seed}/{place}").uniform(0.98, 1.02)

    return changed


def job(
    seconds: Seconds = even,
    replicas: int = 4,
    stages: int = 4,
    batches: int = 8,
    steps: int = 8,
    sync: SyncSeconds = SyncSeconds(),  # noqa: B008
) -> JobTrace:
    made = tuple(
        RecordedStep(
            step,
            tuple(
                tuple(
                    tuple(
                        (seconds(step, replica, batch, stage, False), seconds(step, replica, batch, stage, True))
                        for stage in range(stages)
                    )
                    for batch in range(batches)
                )
                for replica in range(replicas)
            ),
            sync,
        )
        for step in range(steps)
    )
    return JobTrace(stages, replicas, made)


def write_operations(
    path: Path,
    seconds: Seconds = even,
    replicas: int = 2,
    stages: int = 3,
    batches: int = 4,
    steps: int = 2,
    spec: str = "1f1b",
    clock: Callable[[int], float] = float,
    leave_out: Callable[[tuple[object, ...]], bool] = lambda row: False,
) -> Path:
    """Every rank's operations. An operation starts at `clock(its number)`: its order is all that is right about it. The
    receiver of a message waits, and so does every rank of a collective but one."""
    rows: list[tuple[object, ...]] = []
    random = Random(0)
    schedule = make(spec, stages, batches)
    for step in range(steps):
        for replica in range(replicas):
            for stage in range(stages):
                here, number = (replica, stage, step), 0
                for action in schedule.actions[stage][0][:-1]:
                    backward, batch = action.kind == "B", action.microbatch
                    took = seconds(step, replica, batch, stage, backward)
                    rows.append((*here, int(backward), batch, batch, clock(number), took))
                    number += 1
                    ends = (
                        ((4, stage > 0), (5, stage < stages - 1)) if backward else ((2, stage < stages - 1), (3, stage > 0))
                    )
                    for op, there in ends:
                        waited = random.random() * (op % 2)  # of the receiver
                        rows += [(*here, op, -1, batch, clock(number), 0.01 + waited)] * there
                for op, least in ((6, 0.05), (7, 0.3), (8, 0.02)):
                    waited = random.random() if replica and op == 7 else 0.0
                    rows.append((*here, op, -1, 0, clock(number), least + waited))
    rows = [row for row in rows if not leave_out(row)]
    names = ("dp_rank", "stage", "step", "op", "microbatch", "seq", "start", "duration")
    columns = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    np.savez(path, ops=np.array(OPS), **columns)
    return path

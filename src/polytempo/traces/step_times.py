"""Reads step times of workers: a table with the columns `worker`, `step`, `seconds` and, where it is known, `work`.

CSV with a line of names, or a JSON object a line with these keys. `seconds` is the worker's own time for the step, without
waiting for others; `work` what the step had to do, in any unit (samples, tokens): slowness is then judged against it.
Workers are numbered from 0; steps that not every worker has are left out.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from typing import Any

from polytempo.errors import UsageError, nearest
from polytempo.traces.job import JobTrace, RecordedStep

COLUMNS = ("worker", "step", "seconds", "work")
#: A step is cut into this number of equal parts, so that shares of it can be moved.
PARTS = 32


def step_times_from(text: str, where: str) -> JobTrace:
    """The job of such a table; `where` names it in errors."""
    rows: dict[tuple[int, int], tuple[float, float | None]] = {}
    for place, row in _rows(text, where):
        worker, step = (_whole(row, name, place) for name in ("worker", "step"))
        if (step, worker) in rows:
            raise UsageError(f"{place}: step {step} of worker {worker} is there twice; leave one of them out")
        work = None if row.get("work") in (None, "") else _positive(row, "work", place)
        rows[step, worker] = (_positive(row, "seconds", place), work)
    if not rows:
        raise UsageError(f"{where}: expected lines with worker, step and seconds, got none")
    workers = 1 + max(worker for _, worker in rows)
    if missing := set(range(workers)) - {worker for _, worker in rows}:
        raise UsageError(f"{where}: workers are numbered from 0; there is worker {workers - 1}, and none is {min(missing)}")
    whole = [step for step in sorted({step for step, _ in rows}) if all((step, worker) in rows for worker in range(workers))]
    if not whole:
        raise UsageError(f"{where}: expected a step that each of the {workers} workers has, got none; number steps from 0")
    has_work = {work is not None for _, work in rows.values()}
    if len(has_work) > 1:
        raise UsageError(f"{where}: some lines have work and some have none; give it in all of them, or leave it out")
    steps = []
    for step in whole:
        times = [rows[step, worker] for worker in range(workers)]
        batches = tuple((((seconds / PARTS, 0.0),),) * PARTS for seconds, _ in times)
        costs = tuple((work / PARTS,) * PARTS for _, work in times if work is not None)
        steps.append(RecordedStep(step, batches, costs=costs))
    return JobTrace(1, workers, tuple(steps), "sequential", divided=True)


def _rows(text: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = text.splitlines()
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("{"):
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{where}, line {number}", _object(line, f"{where}, line {number}")
        return
    reader = csv.DictReader(lines)
    names = [name.strip() for name in reader.fieldnames or ()]
    for name in names:
        if name not in COLUMNS:
            raise UsageError(f"{where}: unknown column {name!r}; known: {', '.join(COLUMNS)}{nearest(name, COLUMNS)}")
    if missing := [name for name in COLUMNS[:3] if name not in names]:
        raise UsageError(
            f"{where}: expected a first line 'worker,step,seconds' (and work), got {first[:60]!r}: no {missing[0]}"
        )
    reader.fieldnames = names
    for row in reader:
        yield f"{where}, line {reader.line_num}", row


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not row.keys() >= set(COLUMNS[:3]):
        raise UsageError(f'{place}: expected {{"worker": 0, "step": 0, "seconds": 0.5}}, got {line[:60]!r}')
    return row


def _number(row: dict[str, Any], name: str, place: str) -> float:
    value = row.get(name)
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{place}: {name} must be a number, not {value!r}")
    return number


def _positive(row: dict[str, Any], name: str, place: str) -> float:
    if (number := _number(row, name, place)) <= 0:
        raise UsageError(f"{place}: {name} must be above 0, not {number:g}")
    return number


def _whole(row: dict[str, Any], name: str, place: str) -> int:
    number = _number(row, name, place)
    if number < 0 or number != int(number):
        raise UsageError(f"{place}: {name} must be a whole number from 0 on, not {number:g}")
    return int(number)

"""What each step took of its worker's own time: the figures that a straggler report judges by.

    computed    seconds between two exchanges, of which
    input       seconds before the first forward pass: the worker waited for data
    exchanged   seconds of the exchange before, beside those for which the mode made the worker wait: network and servers
    work        what the step was made of: the sampler's cost, else the elements that the model was given, else samples

Time for which a mode made a worker wait for others is in none of them. Live records have these figures on their push lines;
in others the time from a release to its push counts as computing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from polytempo.records.lines import MAIN, RecordLine, of_optimizer

#: The figures that a push line may have.
FIGURES = ("work", "computed", "input", "exchanged")
#: Steps that are kept for each worker while a job runs, and for all workers together; at least MIN_KEPT for each.
KEPT, KEPT_IN_ALL, MIN_KEPT = 1024, 65536, 64


class StepFigures(NamedTuple):
    """One push. Seconds are the worker's own, but for `t`, the job's clock at its arrival."""

    worker: int
    step: int
    t: float
    samples: float = 1.0
    steps: int = 1  #: that it was made of: local steps, micro-batches
    work: float = 0.0
    computed: float = 0.0
    input: float = 0.0
    exchanged: float = 0.0
    elapsed: float = 0.0  #: seconds from its release to its arrival, by the job's clock; 0 where the release is not known


def figures_of(lines: Iterable[RecordLine]) -> list[StepFigures]:
    """The figures of a record's first optimizer, in the order of the lines; of a record without them, from its releases."""
    released: dict[tuple[int, int], float] = {}
    found: list[StepFigures] = []
    for line in of_optimizer(lines, MAIN):
        if line["kind"] == "release":
            released[line["worker"], line["step"]] = line["t"]
        elif line["kind"] == "push":
            worker, step, t = line["worker"], line["step"], line["t"]
            own = {name: float(line[name]) for name in FIGURES if name in line}
            own["elapsed"] = t - released.pop((worker, step), t)
            found.append(StepFigures(worker, step, t, line.get("samples", 1), line.get("count", 1), **own))
    if any(one.computed for one in found):
        return found
    return [one._replace(computed=one.elapsed) for one in found if one.elapsed]


def figures_from(rows: Iterable[tuple[float, ...]]) -> list[StepFigures]:
    """The figures that a log gave for a message."""
    return [StepFigures(int(row[0]), int(row[1]), row[2], row[3], int(row[4]), *row[5:]) for row in rows]


class FigureLog:
    """The figures of a running job, a bounded number: where there are too many, every second step is dropped."""

    def __init__(self, workers: int) -> None:
        self._most = max(min(KEPT, KEPT_IN_ALL // max(workers, 1)), MIN_KEPT)
        self._every = 1  # steps that are multiples of this are kept
        self._rows: dict[int, list[tuple[float, ...]]] = {}
        self._released: dict[int, float] = {}

    def released(self, worker: int, now: float) -> None:
        """A worker may start its next step."""
        self._released[worker] = now

    def add(self, worker: int, step: int, t: float, *figures: float) -> None:
        """A push was counted: the fields of `StepFigures`, without the last."""
        if step % self._every:
            return
        rows = self._rows.get(worker)
        if rows is None:
            rows = self._rows[worker] = []
        rows.append((worker, step, t, *figures, t - self._released.get(worker, t)))
        if len(rows) > self._most:
            self._every *= 2
            for kept_of, kept in self._rows.items():
                self._rows[kept_of] = [row for row in kept if row[1] % self._every == 0]

    def as_rows(self) -> tuple[tuple[float, ...], ...]:
        """For a message, in the order of their moments; `figures_from` reads them."""
        return tuple(sorted((row for rows in self._rows.values() for row in rows), key=lambda row: row[2]))

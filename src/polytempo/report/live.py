"""A record of a live run in the shape of a simulated one, so that the same tables and pictures show both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polytempo.records.files import spec_of
from polytempo.records.lines import RecordLine
from polytempo.simulate.outcome import Outcome, WorkerOutcome
from polytempo.summation import in_order

#: What a line of metrics has beside them; `steps`: of a pipeline.
NO_METRIC = ("t", "kind", "worker", "optimizer", "steps")
#: How a record writes a number that is not finite: as a text, which a script may also log.
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
#: The figures of an outcome that meta.json has by the same names.
OF_JOB = (
    *("seconds", "steps", "samples", "discarded", "updates", "samples_per_second", "efficiency", "waiting"),
    *("staleness_mean", "staleness_max"),
)


@dataclass(frozen=True)
class LiveRun:
    """The outcome of a live run."""

    outcome: Outcome
    curve: tuple[tuple[float, float], ...]  #: (seconds since the first step, the metric); empty where none was logged
    logged: Mapping[str, float] = field(default_factory=dict)  #: the last value of each metric
    diverged: Mapping[str, Any] = field(default_factory=dict)  #: as in meta.json; empty where the training has not

    @property
    def accuracy(self) -> float | None:
        """The metric at the end; None where none was logged."""
        return self.curve[-1][1] if self.curve else None

    def time_to(self, target: float) -> float | None:
        """The first second at which the target was seen, or None."""
        return next((seconds for seconds, value in self.curve if value >= target), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        curve = [list(point) for point in self.curve]
        return {**self.outcome.as_dict(), "curve": curve, **({"diverged": dict(self.diverged)} if self.diverged else {})}


@dataclass(frozen=True)
class RepeatedRun(LiveRun):
    """Several runs under one mode; all else is of the one in the middle, which stands for them."""

    runs: tuple[LiveRun, ...] = ()


def repeated(runs: Sequence[LiveRun], target: float) -> RepeatedRun:
    """Runs under one mode, by the time to a target, else by what they reached, else by the time that they took: half of them
    take at most as long as the middle one."""

    def place(run: LiveRun) -> tuple[float, float, float]:
        time = run.time_to(target)
        return math.inf if time is None else time, -(run.accuracy or 0.0), run.outcome.seconds

    middle = sorted(runs, key=place)[(len(runs) - 1) // 2]
    return RepeatedRun(middle.outcome, middle.curve, middle.logged, middle.diverged, tuple(runs))


def live_run(lines: Iterable[RecordLine], meta: dict[str, Any], metric: str = "accuracy") -> LiveRun:
    """Sum up a record."""
    start: float | None = None
    lead = 0
    points: list[tuple[float, float]] = []
    logged: dict[str, float] = {}
    for line in lines:
        if line["kind"] == "release" and "optimizer" not in line:
            start = line["t"] if start is None else start
            lead = max(lead, line["step"] - line["slowest"])
        elif line["kind"] == "metric":
            values = {
                name: value
                for name, value in line.items()
                if name not in NO_METRIC and (isinstance(value, int | float) or value in NOT_FINITE)
            }
            logged |= {name: float(value) for name, value in values.items()}
            if metric in values:
                points.append((line["t"], float(values[metric])))
    begin = start or 0.0
    curve = tuple((t - begin, value) for t, value in points)
    return LiveRun(_outcome(meta, lead), curve, logged, meta.get("diverged", {}))


def _outcome(meta: dict[str, Any], lead: int) -> Outcome:
    job = meta["job"]
    workers = tuple(
        WorkerOutcome(**{name: worker[name] for name in WorkerOutcome.__dataclass_fields__}) for worker in meta["workers"]
    )
    present = in_order(worker.present_s for worker in workers) or 1.0
    return Outcome(
        sync=spec_of(meta).text,
        via=meta.get("options", {}).get("via", "ps"),
        communicating=in_order(worker.communicating_s for worker in workers) / present,
        max_lead=lead,
        workers=workers,
        **{name: job[name] for name in OF_JOB},
    )

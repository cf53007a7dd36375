"""What each step took of its worker's own time, and what a step costs whatever its samples: what stragglers and clusters of
recorded machines are judged by.

    computed    seconds between two exchanges, of which
    input       seconds before the first forward pass: the worker waited for data
    exchanged   seconds of the exchange before, beside those for which the mode made the worker wait: network and servers
    work        what the step was made of: the sampler's cost, else the elements that the model was given, else samples

Time for which a mode made a worker wait for others is in none of them. Live records have these figures on their push lines;
in others the time from a release to its push counts as computing.

The cost of a step is fitted to them (`step_costs`):

    seconds = fixed + per_sample x samples

The fixed part is what launching kernels, Python and the optimizer take. It is paid again for each micro-batch, so it decides
what small micro-batches (`anytime`) and small shares (`bsp+balance`) are worth.

The fit is of medians: steps are put in groups of like samples, and the slope is the weighted median of the slopes between
groups (Theil and Sen), so stalls, stragglers and drifts of a few steps move nothing; the first steps are left out. A worker
whose steps all have the same number of samples cannot tell the two apart. It is then taken to split its time as the others
do, as a slower machine is slower in both; where no worker can tell, there is no fit.

Where shares follow speed (`bsp+balance`), a worker whose speed changes has other samples and another time a sample at once:
its own fit would take one for the other. There all workers split their time as the one in the middle does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, median_low
from typing import NamedTuple

from polytempo.records.lines import MAIN, RecordLine, of_optimizer

#: The figures that a push line may have.
FIGURES = ("work", "computed", "input", "exchanged")
#: Steps that are kept for each worker while a job runs, and for all workers together; at least MIN_KEPT for each.
KEPT, KEPT_IN_ALL, MIN_KEPT = 1024, 65536, 64
#: Steps at the start of each worker that are not judged: the first ones allocate, compile and connect.
WARM_UP = 2
#: The standard deviation of a normal distribution over its median absolute deviation.
MAD = 1.4826
#: Steps in a group, at least; and groups at most, beside those of one number of samples.
GROUP, GROUPS = 3, 16
#: The samples of steps must differ by this share of the largest, or the fixed part is too far from what was seen.
LEAST_SPREAD = 0.1
#: The fixed part must be known to this share of a step, at two standard errors.
SURE = 0.15


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


class StepCost(NamedTuple):
    """Seconds of a worker's (micro-)step, and of each sample in it."""

    fixed: float
    per_sample: float

    def seconds(self, samples: float) -> float:
        """What a (micro-)step of this number of samples takes."""
        return self.fixed + self.per_sample * samples


def step_costs(figures: Iterable[StepFigures], dealt: bool = False) -> dict[int, StepCost]:
    """The costs of all workers; empty where the record cannot tell them. `dealt`: their samples follow their speed."""
    steps: dict[int, list[tuple[float, float]]] = {}
    for one in figures:
        if one.samples > 0 and one.computed > 0:
            count = max(one.steps, 1)  # micro-batches, or local steps: each has the fixed part
            steps.setdefault(one.worker, []).append((one.samples / count, one.computed / count))
    settled = {worker: rows[WARM_UP:] for worker, rows in sorted(steps.items()) if len(rows) > WARM_UP}
    fitted = {worker: cost for worker, rows in settled.items() if (cost := fit(rows)) is not None}
    if not fitted:
        return {}
    own = {} if dealt else fitted
    return {worker: own.get(worker) or _alike(rows, list(fitted.values())) for worker, rows in settled.items()}


def fit(steps: Sequence[tuple[float, float]]) -> StepCost | None:
    """The cost of one worker's steps from their samples and seconds; None where they cannot tell it."""
    groups = _groups(sorted(steps))
    most = groups[-1][0] if groups else 0.0
    if len(groups) < 2 or most - groups[0][0] < LEAST_SPREAD * most:
        return None
    pairs = [(one, other) for place, one in enumerate(groups) for other in groups[:place] if one[0] > other[0]]
    slope = _middle([((y - v) / (x - u), (x - u) * min(n, m)) for (x, y, n), (u, v, m) in pairs])
    fixed = _middle([(y - max(slope, 0.0) * x, n) for x, y, n in groups])
    usual = median(x for x, _ in steps)
    if _error(steps, fixed, slope) > SURE / 2 * (fixed + max(slope, 0.0) * usual):
        return None
    if fixed <= 0:
        return StepCost(0.0, median(y / x for x, y in steps))
    return StepCost(fixed, max(slope, 0.0))


def _groups(steps: Sequence[tuple[float, float]]) -> list[tuple[float, float, int]]:
    """Median samples, median seconds and number of steps of groups of like samples; steps of equal samples stay together."""
    least = max(GROUP, len(steps) // GROUPS)
    found: list[list[tuple[float, float]]] = []
    for step in steps:
        full = not found or (len(found[-1]) >= GROUP and found[-1][0][0] == found[-1][-1][0]) or len(found[-1]) >= least
        if full and (not found or step[0] != found[-1][-1][0]):
            found.append([])
        found[-1].append(step)
    if len(found) > 1 and len(found[-1]) < GROUP:
        found[-2:] = [found[-2] + found[-1]]
    return [(median(x for x, _ in group), median(y for _, y in group), len(group)) for group in found]


def _middle(weighted: Sequence[tuple[float, float]]) -> float:
    half, total = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        total += weight
        if total >= half:
            return value
    return 0.0


def _error(steps: Sequence[tuple[float, float]], fixed: float, slope: float) -> float:
    deviation = MAD * median(abs(y - fixed - slope * x) for x, y in steps)
    mean = fmean(x for x, _ in steps)
    square = sum((x - mean) ** 2 for x, _ in steps)
    return deviation * math.sqrt(1 / len(steps) + mean**2 / square)


def _alike(rows: Sequence[tuple[float, float]], others: Sequence[StepCost]) -> StepCost:
    """The cost of a worker that cannot tell, split as that of the other in the middle for as many samples."""
    samples, seconds = median(x for x, _ in rows), median(y for _, y in rows)
    share = median_low(other.fixed / (other.seconds(samples) or 1.0) for other in others)
    return StepCost(share * seconds, (1 - share) * seconds / samples)

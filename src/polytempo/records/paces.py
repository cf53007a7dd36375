"""How long each worker takes for its work, over time: own seconds split into computing, input and network, and stalls.

    work        time follows work as far as it did in this job (`elasticity`): seconds are given for a step of typical work,
                so that a worker with long sequences, or with a larger share of the joint batch, is not slow for it
    windows     the run is cut into windows of time; a window's figure of a worker is the median (computing, network) or
                the mean (input, which comes in bursts where loaders prefetch) of its steps in it
    stalls      single steps that took much longer than those around them; they are taken out of the windows

Pure: figures in (`step_figures.py`), figures out. What follows from them is said in `stragglers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, median_low

from polytempo.records.step_cost import MAD, WARM_UP, step_costs
from polytempo.records.step_figures import StepFigures

#: Steps of a worker below which nothing is said of it.
LEAST_STEPS = 20
#: Windows of a run: at most this many, with at least this many steps of each worker in a window.
WINDOWS, WINDOW_STEPS = 24, 8
#: A step is stalled when it takes longer than those around it by this share of a typical step, and by this many of their
#: standard deviations.
STALL_SHARE, STALL_DEVIATIONS = 0.75, 6.0
#: Where more than this share of a worker's steps is much longer than the others, long steps are its normal ones.
STALLS_AT_MOST = 0.2
#: The same of steps that waited for data: loaders that prefetch are late with every second or fourth batch.
INPUT_STALLS_AT_MOST = 0.04
#: Where the work of steps varies less than this around its median, its effect on their time cannot be seen.
SAME_WORK = 0.03

#: Parts of a worker's own time.
PARTS = ("computing", "input", "network")


@dataclass(frozen=True, slots=True)
class PacedStep:
    """One push, in seconds for a step of typical work."""

    t: float
    window: int
    computing: float
    input: float
    network: float
    own: float  #: seconds that the step took of its worker, as they were
    raw: float  #: of these, computing
    steps: int  #: that the push was made of

    @property
    def total(self) -> float:
        """All of its worker's own time."""
        return self.computing + self.input + self.network


@dataclass(frozen=True)
class WorkerPace:
    """What a worker's steps took, in the order they came."""

    worker: int
    steps: tuple[PacedStep, ...]
    stalled: tuple[int, ...] = ()  #: which of them
    excess: tuple[float, ...] = ()  #: and by how many seconds each

    def windows(self, part: str, count: int) -> list[float | None]:
        """A part of its own time in each window, without its stalls; None where there is no step."""
        out = set(self.stalled)
        found: list[list[float]] = [[] for _ in range(count)]
        for index, step in enumerate(self.steps):
            if index not in out:
                found[step.window].append(getattr(step, part))
        middle = fmean if part == "input" else median
        return [middle(values) if values else None for values in found]

    def split(self) -> dict[str, float]:
        """Seconds of a typical step: by part, and what stalls add on average."""
        out = set(self.stalled)
        kept = [step for index, step in enumerate(self.steps) if index not in out] or list(self.steps)
        parts = {part: fmean(getattr(step, part) for step in kept) for part in PARTS}
        return parts | {"stalls": sum(self.excess) / len(self.steps)}


@dataclass(frozen=True)
class JobPaces:
    """All workers of a job that took enough steps to be judged."""

    workers: tuple[WorkerPace, ...]
    windows: int
    start: float  #: of the job's clock: when the first judged step came
    end: float
    typical: float  #: seconds of a typical step: of the worker in the middle, or the faster of the two
    elasticity: float  #: by how much the time of computing follows work: 1 in proportion, 0 not at all
    known_work: bool  #: does the work of steps vary, as far as pushes say?
    dealt: bool = False  #: is work dealt out by speed?
    absent: tuple[int, ...] = field(default=())  #: workers that took too few steps
    fixed: Mapping[int, float] = field(default_factory=dict)  #: by worker, seconds of a step whatever its samples, if known

    @property
    def seconds(self) -> float:
        """The part of the run that is judged."""
        return self.end - self.start

    def moment(self, window: int) -> float:
        """When a window begins, in seconds since the start."""
        return window * self.seconds / self.windows


def paces_of(figures: Iterable[StepFigures], dealt: bool = False, deadlines: bool = False) -> JobPaces | None:
    """The paces of a job; None where no worker took enough steps.

    Args:
        figures: In the order of their moments.
        dealt: Work is dealt out by speed: then time is taken to be in proportion to it, but for the fixed time of a step.
        deadlines: Rounds end at a deadline: then a round's time counts, against the work done until then. What was abandoned
            is in no other figure.
    """
    steps: dict[int, list[StepFigures]] = {}
    rows_of_all = list(figures)
    for one in rows_of_all:
        row = one._replace(computed=max(one.elapsed - one.exchanged, one.computed)) if deadlines else one
        steps.setdefault(one.worker, []).append(row)
    judged = {worker: rows for worker, found in sorted(steps.items()) if len(rows := _settled(found)) >= LEAST_STEPS}
    absent = tuple(worker for worker in sorted(steps) if worker not in judged)
    if not judged:
        return None
    start = min(rows[0].t for rows in judged.values())
    end = max(rows[-1].t for rows in judged.values())
    windows = max(1, min(WINDOWS, min(len(rows) for rows in judged.values()) // WINDOW_STEPS))
    effect, known = (1.0, False) if dealt or deadlines else elasticity(list(judged.values()))
    costs = step_costs(rows_of_all, dealt)
    if costs and dealt and not deadlines:
        samples = median(row.samples for rows in judged.values() for row in rows)
        effect = 1 - median(cost.fixed / (cost.seconds(samples) or 1.0) for cost in costs.values())
    usual = median(work_of(row) for rows in judged.values() for row in rows)
    width = (end - start) / windows or 1.0
    paces = []
    for worker, rows in judged.items():
        paced = [_paced(row, usual, effect, min(int((row.t - start) / width), windows - 1)) for row in rows]
        paces.append(WorkerPace(worker, tuple(paced)))
    typical = median_low(median(step.total for step in pace.steps) for pace in paces)
    marked = tuple(mark_stalls(pace, typical, windows) for pace in paces)
    fixed = {worker: cost.fixed for worker, cost in costs.items()}
    return JobPaces(marked, windows, start, end, typical, effect, known, dealt or deadlines, absent, fixed)


def work_of(row: StepFigures) -> float:
    """The work of a push: what it says, else its samples."""
    return row.work or row.samples


def elasticity(workers: Sequence[Sequence[StepFigures]]) -> tuple[float, bool]:
    """How the time of computing follows work within workers: the slope of one in the other, both relative to the worker's
    median, from 0 to 1; and whether work varies at all. Where it does not, time is taken to be in proportion to it."""
    pairs: list[tuple[float, float]] = []
    for rows in workers:
        work = median(work_of(row) for row in rows)
        time = median(row.computed - row.input for row in rows)
        if work > 0 and time > 0:
            pairs += [(work_of(row) / work - 1, min((row.computed - row.input) / time - 1, 4.0)) for row in rows]
    varies = fmean(abs(x) for x, _ in pairs) if pairs else 0.0
    if varies < SAME_WORK:
        return 1.0, False
    x_mean, y_mean = fmean(x for x, _ in pairs), fmean(y for _, y in pairs)
    square = sum((x - x_mean) ** 2 for x, _ in pairs)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in pairs) / square
    return min(max(slope, 0.0), 1.0), True


def mark_stalls(pace: WorkerPace, typical: float, windows: int) -> WorkerPace:
    """Find the steps of a worker that took much longer than those around them."""
    totals: list[list[float]] = [[] for _ in range(windows)]
    for step in pace.steps:
        totals[step.window].append(step.total)
    middles = [median(values) if values else 0.0 for values in totals]
    deviation = MAD * median(abs(step.total - middles[step.window]) for step in pace.steps)
    least = max(STALL_SHARE * typical, STALL_DEVIATIONS * deviation)
    found = [index for index, step in enumerate(pace.steps) if step.total - middles[step.window] > least]
    for_data = [i for i in found if pace.steps[i].input > (pace.steps[i].total - middles[pace.steps[i].window]) / 2]
    if len(for_data) > INPUT_STALLS_AT_MOST * len(pace.steps):
        found = sorted(set(found) - set(for_data))
    if len(found) > STALLS_AT_MOST * len(pace.steps):
        return pace
    excess = tuple(pace.steps[index].total - middles[pace.steps[index].window] for index in found)
    return WorkerPace(pace.worker, pace.steps, tuple(found), excess)


def _settled(rows: list[StepFigures]) -> list[StepFigures]:
    """A worker's pushes without its first ones; what a push without work took belongs to the next one (a deadline came)."""
    merged: list[StepFigures] = []
    carried = (0.0, 0.0, 0.0)
    for row in rows:
        computed, waited, exchanged = (a + b for a, b in zip(carried, (row.computed, row.input, row.exchanged), strict=True))
        if work_of(row) <= 0:
            carried = computed, waited, exchanged
            continue
        carried = (0.0, 0.0, 0.0)
        merged.append(row._replace(computed=computed, input=min(waited, computed), exchanged=exchanged))
    return [row for row in merged[WARM_UP:] if row.computed > 0]


def _paced(row: StepFigures, usual: float, effect: float, window: int) -> PacedStep:
    """A push in seconds for a step of usual work."""
    scale = usual / ((1 - effect) * usual + effect * work_of(row))
    raw = row.computed - row.input
    computing, waiting = raw * scale, row.input * scale
    own = row.computed + row.exchanged
    return PacedStep(row.t, window, computing, waiting, row.exchanged, own, raw, max(row.steps, 1))

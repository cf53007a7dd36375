"""Who is slow, since when and why, from what steps took of their workers' own time.

    computing   a worker takes longer than the others for the same work
    input       a worker waits longer for its data; or all workers wait for data
    network     a worker's exchanges take longer; or those of all workers are most of their time
    stalls      single steps take much longer: of one worker, or of all
    uneven      steps take unequal time because their work is unequal (sequences of different length): no host is slow

A worker is slow where a part of its own time is longer than that of the worker in the middle by a tenth of a typical step,
and by more than chance: several times the deviation of the windows' figures, for a stretch of windows. The stretch is that
of the largest sum of what is above the threshold: it says since when, and until when. Time for which a worker waited for
others is in none of these figures, so the workers that wait are never the slow ones.

Why a tenth: the study that this report answers to (OSDI 2025) calls a job slowed down from a tenth on. Why chance counts: a
window has few steps, and every worker has many windows.

Beside findings there are doubts, a kind of their own: workers that take 1.5 times as long as the others on average, as the
report's table shows, without passing the checks above; with the check that was not passed. A doubt has no cost.

Before that, what steps took becomes the pace of each worker over time (`paces_of`): its own seconds split into computing,
input and network, and stalls.

    work        time follows work as far as it did in this job (`elasticity`): seconds are given for a step of typical work,
                so that a worker with long sequences, or with a larger share of the joint batch, is not slow for it
    windows     the run is cut into windows of time; a window's figure of a worker is the median (computing, network) or
                the mean (input, which comes in bursts where loaders prefetch) of its steps in it
    stalls      single steps that took much longer than those around them; they are taken out of the windows
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median, median_low

from polytempo.records.step_figures import MAD, WARM_UP, StepFigures, step_costs

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

#: A worker is slow from this share of a typical step on, and from this many seconds a step: less is noise of a host.
SLOW, LEAST_SECONDS = 0.10, 0.0005
#: A slowness that passes must make up this share of a typical step, on average over the run.
ON_AVERAGE = 0.05
#: And by this many deviations of the mean of its windows; of a stretch shorter than half the run, of which there are many,
#: by more.
DEVIATIONS, DEVIATIONS_IN_PASSING = 5.0, 8.0
#: Windows that it must be slow for, and their share of the stretch.
LEAST_WINDOWS, MOSTLY = 3, 0.75
#: All workers wait for data, or exchange, for this share of their time.
INPUT_OF_ALL, NETWORK_OF_ALL = 0.25, 0.5
#: Stalls: this many, that take this share of the time of the worker (or of all) that has them.
LEAST_STALLS, STALLED = 3, 0.07
#: A worker has this many times the stalled time of the one in the middle: the stalls are its own.
OWN_STALLS = 4.0
#: Steps are uneven when they differ from the median by this share on average, and work explains that much of it; where work
#: is not known they must differ by more, for most workers.
UNEVEN, EXPLAINED, UNEVEN_UNKNOWN = 0.10, 0.5, 0.2
#: A worker that no finding names is doubtful from this many times the mean of the worker in the middle on.
DOUBTFUL = 1.5


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

    def unstalled(self) -> list[PacedStep]:
        """Its steps without those that stalled."""
        out = set(self.stalled)
        return [step for index, step in enumerate(self.steps) if index not in out]

    def windows(self, part: str, count: int) -> list[float | None]:
        """A part of its own time in each window, without its stalls; None where there is no step."""
        found: list[list[float]] = [[] for _ in range(count)]
        for step in self.unstalled():
            found[step.window].append(getattr(step, part))
        middle = fmean if part == "input" else median
        return [middle(values) if values else None for values in found]

    def split(self) -> dict[str, float]:
        """Seconds of a typical step: by part, and what stalls add on average."""
        kept = self.unstalled() or self.steps
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
    absent: tuple[int, ...] = ()  #: workers that took too few steps
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
    scale = usual / ((1 - effect) * usual + effect * work_of(row))
    raw = row.computed - row.input
    computing, waiting = raw * scale, row.input * scale
    own = row.computed + row.exchanged
    return PacedStep(row.t, window, computing, waiting, row.exchanged, own, raw, max(row.steps, 1))


# What is found in them.


@dataclass(frozen=True)
class Straggler:
    """One finding.

    Args:
        cause: "computing", "input", "network", "stalls" or "uneven".
        worker: Whose; None: of all workers.
        factor: The worker's own time for a step, over that of the worker in the middle; of computing that part alone; of
            uneven steps a long one (the 95th of 100) over a typical one; of stalls a stalled step over a typical one.
        excess: Seconds a step that this adds to a typical step, on average over the stretch.
        share: Of uneven work what work explains; of stalls the share of steps; else the part of the worker's own time.
        since: Seconds from the start of what is judged.
        until: The same, or None: to the end.
    """

    cause: str
    worker: int | None
    factor: float
    excess: float
    share: float
    since: float = 0.0
    until: float | None = None


class Unsure(StrEnum):
    """Why a worker that is slower on average is no finding."""

    SINGLE_STEPS = "single steps"  #: a typical step of it takes no longer than one of the others
    CHANCE = "chance"  #: windows differ as much by themselves, for their number
    CHANGING = "changing"  #: it is slow in some windows and not in others
    PASSING = "passing"  #: for a small part of the run


@dataclass(frozen=True)
class Doubt:
    """A worker that is slower on average, and perhaps by chance.

    Args:
        worker: Whose.
        part: Most of the difference: "computing", "input", "network" or "stalls".
        factor: Its mean over that of the worker in the middle of the others.
        compared: Of what: "own time", or "computing and stalls".
        seconds: Its mean.
        usual: That of the worker in the middle of the others.
        why: The check that it did not pass.
    """

    worker: int
    part: str
    factor: float
    compared: str
    seconds: float
    usual: float
    why: Unsure


def stragglers_in(paces: JobPaces) -> list[Straggler]:
    """All findings, those that cost most of a step first."""
    found = []
    for pace in paces.workers if len(paces.workers) > 1 else ():  # slow for a stretch of the run
        judged = [_slow_in(pace, paces, part) for part in PARTS]
        slow = [one for one in judged if isinstance(one, Straggler)]
        if slow:
            found.append(max(slow, key=lambda one: one.excess))
    accused = {(one.cause, one.worker) for one in found}
    if (uneven := _uneven(paces)) is not None:
        found.append(uneven)
    found += _stalls(paces, uneven)
    for part, least in (("input", INPUT_OF_ALL), ("network", NETWORK_OF_ALL)):
        if not any(cause == part for cause, _ in accused) and (one := _of_all(paces, part, least)) is not None:
            found.append(one)
    return sorted(found, key=lambda one: -one.excess)


# One worker that is slow for a stretch of the run.


def _slow_in(pace: WorkerPace, paces: JobPaces, part: str) -> Straggler | Unsure:
    """A worker that is slower than the others in one part of its time, or why that is not sure."""
    count = paces.windows
    table = {one.worker: one.windows(part, count) for one in paces.workers}
    behind = {worker: _behind(worker, table) for worker in table}
    mine = behind[pace.worker]
    noise = median(_noise(row) for worker, row in behind.items() if worker != pace.worker)
    noise = max(noise, _scatter(mine)) if len(behind) > 2 else _scatter(mine)
    least = max(SLOW * paces.typical, LEAST_SECONDS)
    begin, end = _stretch([None if e is None else e - least / 2 for e in mine])
    inside = [e for e in mine[begin:end] if e is not None]
    if not inside:
        return Unsure.SINGLE_STEPS
    if len(inside) < min(LEAST_WINDOWS, count):
        return Unsure.PASSING
    level = median(inside)
    sure = DEVIATIONS if 2 * len(inside) >= count else DEVIATIONS_IN_PASSING
    if level < least:
        return Unsure.SINGLE_STEPS
    if level < sure * noise / len(inside) ** 0.5:
        return Unsure.CHANCE
    if sum(e > level / 2 for e in inside) < MOSTLY * len(inside):
        return Unsure.CHANGING
    if level * len(inside) / count < ON_AVERAGE * paces.typical:
        return Unsure.PASSING
    compared = "computing" if part == "computing" else "total"
    usual = median_low(fmean(getattr(step, compared) for step in one.unstalled()) for one in paces.workers)
    own = fmean(getattr(step, part) for step in pace.unstalled())
    last = max(index for index, e in enumerate(mine) if e is not None)
    until = None if end >= last else paces.moment(end)
    share = own / (fmean(step.total for step in pace.unstalled()) or 1.0)
    return Straggler(
        part, pace.worker, (usual + level) / usual, level, share, paces.moment(begin) if begin > 1 else 0.0, until
    )


def _behind(worker: int, table: dict[int, list[float | None]]) -> list[float | None]:
    """By how much a worker's figure of each window is above that of the other in the middle; None where it has none. One
    that took no step in a window, or has left, is compared by its figure of the window before."""
    others = [_filled(row) for other, row in table.items() if other != worker]
    return [
        None if own is None else own - median_low(row[index] for row in others) for index, own in enumerate(table[worker])
    ]


def _filled(row: Sequence[float | None]) -> list[float]:
    """Windows without a figure have that of the one before; the first ones that of the first that has one."""
    last = next((value for value in row if value is not None), 0.0)
    found = []
    for value in row:
        last = last if value is None else value
        found.append(last)
    return found


def _scatter(values: Sequence[float | None]) -> float:
    """The standard deviation of windows' figures, robustly: from the differences of neighbours, so that a change of level
    in the middle of the run is no noise."""
    known = [value for value in values if value is not None]
    differences = [abs(one - other) for one, other in itertools.pairwise(known)]
    return MAD * median(differences) / 2**0.5 if differences else 0.0


def _noise(values: Sequence[float | None]) -> float:
    """The same with what drifts: load on a host lasts for several windows."""
    known = [value for value in values if value is not None]
    middle = median(known) if known else 0.0
    return max(_scatter(values), MAD * median([abs(value - middle) for value in known] or [0.0]))


def _stretch(values: Sequence[float | None]) -> tuple[int, int]:
    best, best_sum, begin, total = (0, 0), 0.0, 0, 0.0
    for index, value in enumerate(values):
        total += value or 0.0
        if total <= 0:
            begin, total = index + 1, 0.0
        elif total > best_sum:
            best, best_sum = (begin, index + 1), total
    return best


# Stalls.


def _stalls(paces: JobPaces, uneven: Straggler | None) -> list[Straggler]:
    """Stalls of single workers, or of all alike. Where steps are uneven and work is not known, long ones are no stalls."""
    if uneven is not None and not paces.known_work:
        return []
    lost = {pace.worker: sum(pace.excess) / sum(step.total for step in pace.steps) for pace in paces.workers}
    usual = median_low(lost.values())
    own = [
        pace
        for pace in paces.workers
        if len(pace.stalled) >= LEAST_STALLS
        and lost[pace.worker] >= STALLED
        and (lost[pace.worker] > OWN_STALLS * usual or len(paces.workers) == 1)
    ]
    if own and (len(own) == 1 or len(own) < len(paces.workers) / 3):
        return [_stalled([pace], pace.worker, paces) for pace in own]
    count = sum(len(pace.stalled) for pace in paces.workers)
    if count >= LEAST_STALLS and fmean(lost.values()) >= STALLED:
        return [_stalled(paces.workers, None, paces)]
    return []


def _stalled(workers: Sequence[WorkerPace], worker: int | None, paces: JobPaces) -> Straggler:
    excess = [seconds for pace in workers for seconds in pace.excess]
    steps = sum(len(pace.steps) for pace in workers)
    times = sorted(pace.steps[index].t for pace in workers for index in pace.stalled)
    since = times[0] - paces.start
    factor = (paces.typical + median(excess)) / paces.typical
    return Straggler("stalls", worker, factor, sum(excess) / steps, len(excess) / steps, since)


# All workers alike.


def _of_all(paces: JobPaces, part: str, least: float) -> Straggler | None:
    shares, seconds = [], []
    for pace in paces.workers:
        steps = pace.unstalled()
        seconds.append(fmean(getattr(step, part) for step in steps))
        shares.append(seconds[-1] / (fmean(step.total for step in steps) or 1.0))
    share, excess = median_low(shares), median_low(seconds)
    if share < least or excess < 4 * LEAST_SECONDS:
        return None
    return Straggler(part, None, 1 / (1 - share) if share < 1 else float("inf"), excess, share)


def _uneven(paces: JobPaces) -> Straggler | None:
    """Do steps take unequal time because of unequal work? Where work is dealt out by speed, unequal work is the remedy."""
    if paces.dealt:
        return None
    raw = [_unevenness(pace, paces.windows, lambda step: step.raw) for pace in paces.workers]
    left = [_unevenness(pace, paces.windows, lambda step: step.computing) for pace in paces.workers]
    spread, rest = median_low(raw), median_low(left)
    if spread <= 0:
        return None
    explained = 1 - rest / spread
    known = paces.known_work and spread >= UNEVEN and explained >= EXPLAINED
    unknown = not paces.known_work and spread >= UNEVEN_UNKNOWN and min(raw) >= UNEVEN_UNKNOWN / 2
    if not known and not unknown:
        return None
    times = sorted(step.raw for pace in paces.workers for step in pace.steps)
    usual = median(times)
    return Straggler(
        "uneven", None, times[int(0.95 * (len(times) - 1))] / usual, spread * usual, explained if known else 0.0
    )


def _unevenness(pace: WorkerPace, windows: int, seconds: Callable[[PacedStep], float]) -> float:
    """By how much a worker's steps differ from the median of their window, on average, relative to it; without stalls."""
    found: list[list[float]] = [[] for _ in range(windows)]
    for step in pace.unstalled():
        found[step.window].append(seconds(step))
    differ = [abs(value / middle - 1) for values in found if values and (middle := median(values)) > 0 for value in values]
    return fmean(differ) if differ else 0.0


# What means show, and nothing above is sure of.


def doubts_in(paces: JobPaces, told: Sequence[Straggler]) -> list[Doubt]:
    """Workers that are slower on average by half and more, and that no finding names; the largest factor first."""
    accused = {one.worker for one in told}
    found = [_doubt(pace, paces) for pace in paces.workers if pace.worker not in accused and len(paces.workers) > 1]
    return sorted((one for one in found if one is not None), key=lambda one: -one.factor)


def _doubt(pace: WorkerPace, paces: JobPaces) -> Doubt | None:
    """All of the workers' own time is compared, then computing alone, which others' slow exchanges may hide. Stalls count on
    both sides: those of a worker that has too many of them are in its other parts."""
    mine, others = pace.split(), [one.split() for one in paces.workers if one is not pace]
    beyond = {part: seconds - median_low(other[part] for other in others) for part, seconds in mine.items()}
    least = max(SLOW * paces.typical, LEAST_SECONDS)
    for compared, parts in (("own time", (*PARTS, "stalls")), ("computing and stalls", ("computing", "stalls"))):
        seconds, *theirs = (sum(split[part] for part in parts) for split in (mine, *others))
        usual = median_low(theirs)
        if usual > 0 and seconds >= DOUBTFUL * usual and seconds - usual >= least:
            part = max(parts, key=lambda part: beyond[part])
            # stalls, of which there are too few or as many elsewhere, are single steps
            judged = _slow_in(pace, paces, part) if part in PARTS else Unsure.SINGLE_STEPS
            why = judged if isinstance(judged, Unsure) else Unsure.SINGLE_STEPS
            return Doubt(pace.worker, part, seconds / usual, compared, seconds, usual, why)
    return None

"""Who is slow, since when and why, from what steps took of their workers' own time (`paces.py`).

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
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import fmean, median, median_low
from typing import Any

from polytempo.records.paces import PARTS, JobPaces, PacedStep, WorkerPace
from polytempo.records.step_cost import MAD

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

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


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

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def stragglers_in(paces: JobPaces) -> list[Straggler]:
    """All findings, those that cost most of a step first."""
    found = [one for pace in paces.workers if (one := _lasting(pace, paces)) is not None]
    accused = {(one.cause, one.worker) for one in found}
    if (uneven := _uneven(paces)) is not None:
        found.append(uneven)
    found += _stalls(paces, uneven)
    for part, least in (("input", INPUT_OF_ALL), ("network", NETWORK_OF_ALL)):
        if not any(cause == part for cause, _ in accused) and (one := _of_all(paces, part, least)) is not None:
            found.append(one)
    return sorted(found, key=lambda one: -one.excess)


# One worker that is slow for a stretch of the run.


def _lasting(pace: WorkerPace, paces: JobPaces) -> Straggler | None:
    if len(paces.workers) < 2:
        return None
    candidates = [one for part in PARTS if isinstance(one := _slow_in(pace, paces, part), Straggler)]
    return max(candidates, key=lambda one: one.excess, default=None)


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
    usual = median_low(fmean(getattr(step, compared) for step in _unstalled(one)) for one in paces.workers)
    own = fmean(getattr(step, part) for step in _unstalled(pace))
    last = max(index for index, e in enumerate(mine) if e is not None)
    until = None if end >= last else paces.moment(end)
    share = own / (fmean(step.total for step in _unstalled(pace)) or 1.0)
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
    """The stretch of the largest sum; windows without a figure count for nothing."""
    best, best_sum, begin, total = (0, 0), 0.0, 0, 0.0
    for index, value in enumerate(values):
        total += value or 0.0
        if total <= 0:
            begin, total = index + 1, 0.0
        elif total > best_sum:
            best, best_sum = (begin, index + 1), total
    return best


def _unstalled(pace: WorkerPace) -> list[PacedStep]:
    out = set(pace.stalled)
    return [step for index, step in enumerate(pace.steps) if index not in out]


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
    """Do all workers spend much of their time on this part?"""
    shares, seconds = [], []
    for pace in paces.workers:
        steps = _unstalled(pace)
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


def _unevenness(pace: WorkerPace, windows: int, seconds: Any) -> float:
    """By how much a worker's steps differ from the median of their window, on average, relative to it; without stalls."""
    found: list[list[float]] = [[] for _ in range(windows)]
    for step in _unstalled(pace):
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
            return Doubt(pace.worker, part, seconds / usual, compared, seconds, usual, _unsure(pace, paces, part))
    return None


def _unsure(pace: WorkerPace, paces: JobPaces, part: str) -> Unsure:
    """The check that kept this from being a finding; stalls, of which there are too few or as many elsewhere, are single
    steps."""
    judged = _slow_in(pace, paces, part) if part in PARTS else Unsure.SINGLE_STEPS
    return judged if isinstance(judged, Unsure) else Unsure.SINGLE_STEPS

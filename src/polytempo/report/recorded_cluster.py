"""A recorded run as a cluster: what another mode would have done with the same machines.

A step takes as long as it took of its worker's own time (in records without these figures from its release to the arrival of
its push); steps beyond the recorded ones repeat them. An exchange takes what it took on average, as a latency to and from
the servers. The fixed time of a step is fitted where the steps of the record differ in their samples
(`records/step_figures.py`), and `fixed_times` is empty where they do not. Where samples were dealt out by speed, steps are
those of an even share of the joint batch, at each worker's own pace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, median

from polytempo.errors import RecordError
from polytempo.records.lines import MAIN, RecordLine, of_optimizer
from polytempo.records.step_figures import WARM_UP, StepCost, StepFigures, figures_of, step_costs
from polytempo.records.stragglers import LEAST_STEPS
from polytempo.simulate.cluster import Cluster, Link, Trace

#: The shortest step of a recorded cluster, in seconds: a trace has no step of 0.
SHORTEST = 1e-9


def cluster_from_record(lines: Iterable[RecordLine], workers: int) -> Cluster:
    """The cluster of a recorded run, as far as the record shows it."""
    pushes: dict[int, list[StepFigures]] = {}
    dealt, expected = False, []  # samples of the joint batch, where updates say so
    kept = list(lines)
    for line in of_optimizer(kept, MAIN):
        if line["kind"] == "release":
            dealt = dealt or "weights" in line or "deadline" in line
        elif line["kind"] == "apply" and "divisor" in line:
            expected.append(line["divisor"])
    figures = figures_of(kept)
    for one in figures:
        pushes.setdefault(one.worker, []).append(one)
    # The first steps allocate, compile and connect, once; the trace would repeat them.
    pushes = {worker: of[WARM_UP:] if len(of) >= WARM_UP + LEAST_STEPS else of for worker, of in pushes.items()}
    costs, batches = step_costs(figures, dealt), _batches(pushes, workers, dealt, expected)
    times = {
        worker: times
        for worker, of in pushes.items()
        if (times := _step_times(of, batches[worker], costs.get(worker), dealt))
    }
    missing = [worker for worker in range(workers) if worker not in times]
    if missing:
        raise RecordError(f"the record has no step of workers {missing[:8]}; expected a run in which every worker took some")
    exchanges = {worker: fmean(one.exchanged for one in of) for worker, of in pushes.items()}
    return Cluster(
        workers=workers,
        step_times={worker: Trace(tuple(of)) for worker, of in times.items()},
        batches=batches,
        fixed_times={worker: cost.fixed for worker, cost in costs.items()},
        links={worker: Link(latency=seconds / 2) for worker, seconds in exchanges.items() if seconds},
    )


def _batches(pushes: Mapping[int, list[StepFigures]], workers: int, dealt: bool, expected: list[float]) -> dict[int, int]:
    """The samples of each worker's step; where they were dealt out by speed, an even share of the joint batch."""
    if not dealt:
        return {worker: max(1, round(fmean(one.samples / max(one.steps, 1) for one in of))) for worker, of in pushes.items()}
    joint: dict[int, float] = {}
    for one in (one for of in pushes.values() for one in of):
        joint[one.step] = joint.get(one.step, 0.0) + one.samples
    return dict.fromkeys(pushes, max(1, round(median(expected or joint.values()) / workers)) if joint else 1)


def _step_times(pushes: list[StepFigures], batch: int, cost: StepCost | None, dealt: bool) -> list[float]:
    """Seconds of a worker's steps, each as of a whole batch where the samples of steps differ. Rounds in which it was stuck
    make its next step longer."""
    found: list[float] = []
    stuck = 0.0
    for one in pushes:
        if dealt and not one.samples:
            stuck += one.elapsed
            continue
        count = max(one.steps, 1)  # micro-batches of one step; or local steps in a block, taken to be of one length
        own, size = one.computed or one.elapsed, one.samples / count
        if dealt and one.elapsed:
            own = min(own, one.elapsed)  # one that was finished late began before
        scale = cost.seconds(batch) / cost.seconds(size) if cost and size else batch / size if dealt else 1.0
        found += [max(own / count * scale + stuck, SHORTEST)] * (1 if dealt else count)
        stuck = 0.0
    return found

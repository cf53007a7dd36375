"""Jobs in virtual time with one known trouble, or none, drawn by a seed; and their records with the figures of live ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import Cluster, Link, Trace
from polytempo.simulate.run import simulate_job

TROUBLES = ("none", "computing", "uneven", "stalls", "input", "network")
MODES = ("bsp", "bsp", "bsp", "ssp:3", "asp", "dssp:3..15", "local:4", "bsp+balance", "anytime:auto")


@dataclass(frozen=True)
class Drawn:
    """A job, and the finding that its record must lead to."""

    seed: int
    sync: str
    cause: str
    worker: int | None
    since: float  #: as a share of the steps
    lines: list[RecordLine]
    size: int


def draw_job(seed: int, trouble: str | None = None) -> Drawn:
    """2 to 8 workers, 60 to 240 steps each, any noise from almost none to a step in ten of a tenth; one trouble or none."""
    dice = Random(f"straggling job {seed}")
    trouble = trouble or TROUBLES[seed % len(TROUBLES)]
    workers, steps = dice.randint(2, 8), dice.randint(60, 240)
    sync = dice.choice(MODES)
    if sync.startswith("local") or trouble in ("uneven", "network", "input"):  # engines that tell these apart
        sync = dice.choice(("bsp", "ssp:3", "asp")) if trouble != "none" else sync
    step, noise = math.exp(dice.uniform(math.log(0.01), math.log(2.0))), dice.uniform(0.005, 0.1)
    who, background = dice.randrange(workers), dice.uniform(0.0, 0.015)
    since = dice.choice((0.0, 0.0, 0.0, 0.5))
    sigma = dice.uniform(0.25, 0.7) if trouble == "uneven" else 0.0
    base_input = dice.uniform(0.0, 0.08)
    times: dict[int, list[float]] = {}
    inputs: dict[int, list[float]] = {}
    work: dict[int, list[float]] = {}
    factor = dice.uniform(1.3, 3.5)
    rate, stall, whose = dice.uniform(0.05, 0.12), dice.uniform(3.0, 8.0), dice.random() < 0.5
    wait = dice.uniform(0.3, 1.5)
    for worker in range(workers):
        mine, waits, cost = [], [], []
        for number in range(4 * steps):
            size = math.exp(dice.gauss(0, sigma)) if sigma else 1.0
            late = number >= since * steps
            computing = step * size * math.exp(dice.gauss(0, noise))
            if dice.random() < background:  # what any host does now and then
                computing += dice.uniform(0.5, 1.5) * step
            if trouble == "computing" and worker == who and late:
                computing *= factor
            if trouble == "stalls" and (worker == who or not whose) and dice.random() < rate:
                computing += stall * step
            waiting = base_input * step * dice.uniform(0.5, 1.5)
            if trouble == "input" and worker == who and late:
                waiting += wait * step * (4.0 if number % 4 == 0 else 0.0 if dice.random() < 0.9 else 1.0)
            mine.append(computing + waiting)
            waits.append(waiting)
            cost.append(round(1000 * size))
        times[worker], inputs[worker], work[worker] = mine, waits, cost
    lines: list[RecordLine] = []
    link = {who: Link(0.0, 1.0 / (dice.uniform(0.3, 1.5) * step / 2))} if trouble == "network" else {}
    cluster = Cluster(
        workers=workers,
        step_times={worker: Trace(tuple(mine)) for worker, mine in times.items()},
        batch=32,
        link=Link(0.0, 1.0 / (dice.uniform(0.005, 0.05) * step / 2)),
        links=link,
        model_bytes=1.0,
    )
    known = trouble != "uneven" or dice.random() < 0.7

    def record(line: RecordLine) -> None:
        if line["kind"] == "push" and "computed" in line and "work" not in line:
            line["input"] = inputs[line["worker"]][line["step"] % (4 * steps)]
            if known:
                line["work"] = work[line["worker"]][line["step"] % (4 * steps)]
        lines.append(line)

    simulate_job(cluster, sync, via="ps", record=record, figures=True, steps=steps * workers)
    worker = who if trouble in ("computing", "input", "network") or (trouble == "stalls" and whose) else None
    return Drawn(seed, sync, trouble, worker, since, lines, workers)

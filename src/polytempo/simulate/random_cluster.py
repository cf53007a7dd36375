"""Clusters drawn at random, on which everything that can happen does: for proofs, and to test a mode of one's own."""

from __future__ import annotations

from functools import partial
from random import Random

from polytempo.simulate.cluster import Arrival, Cluster, Crash, Departure, Hiccup, Link, Servers, Stall
from polytempo.simulate.durations import Duration, Exponential, Lognormal


def random_cluster(seed: int) -> Cluster:
    """The same for the same seed: 1 to 9 workers, a join, a leave, a crash and a return, a stall, hiccups, any link."""
    random = Random(seed)
    workers = random.randint(1, 9)
    some = partial(random.randrange, workers)
    crashed = some()
    step_time: Duration = Lognormal(1.0, random.random()) if random.random() < 0.5 else Exponential(1.0)
    return Cluster(
        workers=workers,
        step_time=step_time,
        slow={some(): random.uniform(1, 5)},
        hiccup=Hiccup(random.random() / 10, 5.0),
        stalls=(Stall(some(), random.uniform(0, 30), random.uniform(0, 20)),),
        joins=(Arrival(workers, random.uniform(0, 40)), Arrival(crashed, random.uniform(30, 60))),
        leaves=(Departure(some(), random.uniform(0, 60)),),
        crashes=(Crash(crashed, random.uniform(0, 30), random.uniform(0, 5)),),
        link=random.choice([Link(), Link(random.random(), 10 ** random.uniform(0, 2)), Link(0.0, 5.0, shared=True)]),
        servers=Servers(random.randint(1, 3)),
        model_bytes=1.0,
    )

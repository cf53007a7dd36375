"""Clusters that several tests use."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

from polytempo.simulate.cluster import (
    Arrival,
    Cluster,
    Constant,
    Crash,
    Departure,
    Duration,
    Exponential,
    Hiccup,
    Link,
    Lognormal,
    Servers,
    Stall,
)

#: Every mode that is built, with the options that change its mechanism.
MODES = (
    "bsp",
    "bsp+backup:1",
    "bsp+balance",
    "bsp+balance,micro=4",
    "anytime:auto",
    "anytime:2,late=keep",
    "asp",
    "ssp:0",
    "ssp:3",
    "dssp:1..6",
    "dssp-paper:1..6",
    "every:4",
    "every:4,wait=1",
    "delay:0",
    "delay:3",
    "downpour",
    "downpour:push=2,fetch=3,warm=7",
    "asup",
    "asup,bound=1,drop=2",
    "asp,drop=3,lr=staleness",
    "local:3",
    "local:4,after=4",
    "adacomm:2",
    "diloco:3",
    "diloco:3,quorum=2",
    "easgd:3",
    "easgd:3,rho=0.5,overlap=1",
    "gossip:ring",
    "gossip:exp",
    "gossip:ring,overlap=1",
    "adpsgd:ring",
)

#: Modes that need more than one worker.
NOT_ALONE = ("bsp+backup:1", "diloco:3,quorum=2")

#: One worker is always slower.
STRAGGLER = Cluster(workers=4, slow={3: 3.0})

#: Everything that can happen, happens.
EVENTFUL = Cluster(
    workers=4,
    step_time=Lognormal(1.0, 0.3),
    slow={3: 3.0},
    hiccup=Hiccup(0.1, 3.0),
    stalls=(Stall(1, 5.0, 4.0),),
    joins=(Arrival(4, 12.0), Arrival(2, 30.0)),
    leaves=(Departure(0, 25.0),),
    crashes=(Crash(2, 20.0, noticed_after=1.5),),
    link=Link(latency=0.01, bandwidth=1e6),
    servers=Servers(shards=2),
    model_bytes=1e5,
)

#: The same without a network.
INSTANT = replace(EVENTFUL, link=Link(), model_bytes=0.0, servers=Servers())


def speeds(*seconds: float) -> Cluster:
    """Workers whose steps take these seconds, always."""
    return Cluster(workers=len(seconds), step_times={rank: Constant(s) for rank, s in enumerate(seconds)})


def random_cluster(seed: int) -> Cluster:
    """A cluster by seed: 1 to 9 workers, a join, a leave, a crash, a stall, any link."""
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

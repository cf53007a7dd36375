"""How throughput grows with workers: a job of n = 1, 2, 3, ... workers, over servers and over rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from polytempo.errors import SpecError
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.run import simulate_job
from polytempo.sync.spec import Spec


@dataclass(frozen=True)
class Point:
    """One size of job."""

    workers: int
    samples_per_second: float
    efficiency: float


@dataclass(frozen=True)
class Series:
    """All sizes over one way of moving bytes."""

    name: str
    points: tuple[Point, ...]


def scaling(
    cluster: Cluster,
    spec: Spec,
    *,
    most: int = 64,
    shards: Sequence[int] = (1, 2, 4, 8),
    rings: Sequence[str] = ("ring",),
    steps_each: int = 10,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> list[Series]:
    """Simulate jobs of 1 to `most` workers on machines like this cluster's: servers with these shards, and these rings.

    Only what concerns every worker is kept of the cluster: step time, batch, link, hosts, model; not single slow ranks.
    Sizes that the mode refuses (a torus of 7) are left out.
    """
    even = replace(
        cluster, slow={}, step_times={}, batches={}, links={}, stalls=(), joins=(), leaves=(), crashes=(), workers=1
    )
    ways = [(f"{count} shard{'s' * (count > 1)}", "ps", count) for count in shards]
    ways += [(name, name, 1) for name in rings]
    sizes = []
    for workers in range(1, most + 1):
        with suppress(SpecError):  # the mode does not take a job of this size
            spec.policy(workers)
            sizes.append(workers)
    series = []
    for number, (name, via, count) in enumerate(ways):
        points = []
        for workers in sizes:
            job = replace(even, workers=workers, servers=replace(even.servers, shards=count))
            run = simulate_job(job, spec.text, via=via, steps_each=steps_each, seed=seed)
            points.append(Point(workers, run.samples_per_second, run.efficiency))
            if progress:
                progress((number + workers / most) / len(ways))
        series.append(Series(name, tuple(points)))
    return series

"""A recorded run as a cluster: what would another mode have done with the same machines?

A worker's step, from its release to the arrival of its push, takes as long as it took; steps beyond the recorded ones repeat
them. What the servers and the network cost is inside these times, so the cluster has no links.
"""

from __future__ import annotations

from collections.abc import Iterable

from polytempo.errors import RecordError
from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.durations import Trace


def cluster_from_record(lines: Iterable[RecordLine], workers: int) -> Cluster:
    """The cluster on which a recorded run ran, as far as the record tells."""
    released: dict[tuple[int, int], float] = {}
    seconds: dict[int, list[float]] = {}
    samples: dict[int, list[float]] = {}
    for line in lines:
        if "optimizer" in line:
            continue
        if line["kind"] == "release":
            released[line["worker"], line["step"]] = line["t"]
        elif line["kind"] == "push" and (line["worker"], line["step"]) in released:
            started = released.pop((line["worker"], line["step"]))
            seconds.setdefault(line["worker"], []).append(max(line["t"] - started, 1e-9))
            samples.setdefault(line["worker"], []).append(line.get("samples", 1))
    missing = [worker for worker in range(workers) if worker not in seconds]
    if missing:
        raise RecordError(f"the record has no step of workers {missing[:8]}; expected a run in which everybody took some")
    return Cluster(
        workers=workers,
        step_times={worker: Trace(tuple(times)) for worker, times in seconds.items()},
        batches={worker: max(1, round(sum(sizes) / len(sizes))) for worker, sizes in samples.items()},
    )

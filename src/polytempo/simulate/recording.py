"""The meta.json of a simulated run: nothing in it depends on when or where it was simulated."""

from __future__ import annotations

import platform
from typing import Any

from polytempo.simulate.cluster import Cluster
from polytempo.simulate.outcome import Outcome
from polytempo.version import VERSION


def meta_of(outcome: Outcome, cluster: Cluster, seed: int) -> dict[str, Any]:
    """What the contract asks of meta.json, for a run in virtual time."""
    result = outcome.as_dict()
    workers = result.pop("workers")
    return {
        "spec": outcome.sync,
        "size": cluster.workers,
        "options": {"via": outcome.via, "servers": cluster.servers.shards, "model_bytes": cluster.model_bytes},
        "versions": {"polytempo": VERSION, "python": platform.python_version()},
        "seed": seed,
        "host": "simulated",
        "start": 0.0,
        "end": outcome.seconds,
        "exit_status": 0,
        "throughput": outcome.samples_per_second,
        "efficiency": outcome.efficiency,
        "job": result,
        "workers": workers,
    }

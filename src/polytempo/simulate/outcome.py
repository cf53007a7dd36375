"""The budget of a run, its outcome for each worker and for the job, and its meta.json.

Nothing in the meta.json of a simulated run depends on when or where it was simulated.
"""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from polytempo.errors import UsageError
from polytempo.simulate.cluster import Cluster
from polytempo.sync.spec import Spec, spec_of
from polytempo.version import VERSION


@dataclass(frozen=True)
class Budget:
    """A run ends with the first of these to be used up. `steps` and `samples` are summed over all workers."""

    seconds: float = math.inf
    steps: float = math.inf
    samples: float = math.inf
    steps_each: float = math.inf

    def __post_init__(self) -> None:
        limits = (self.seconds, self.steps, self.samples, self.steps_each)
        if not min(limits) > 0:
            raise UsageError(f"expected a budget above 0, got {min(limits)}")
        if min(limits) == math.inf:
            raise UsageError("a run needs an end: give seconds, steps, samples or steps_each")

    def used(self, now: float, steps: int, samples: float, workers: int) -> float:
        """The share of the budget that is used up."""
        return max(now / self.seconds, steps / self.steps, samples / self.samples, steps / (self.steps_each * workers))


@dataclass(frozen=True)
class WorkerOutcome:
    """One worker's part in a run. Seconds are virtual."""

    worker: int
    steps: int
    samples: int
    discarded: int
    computing_s: float
    waiting_s: float
    communicating_s: float
    present_s: float
    bytes_sent: float
    staleness_mean: float
    staleness_max: int


@dataclass(frozen=True)
class Outcome:
    """The result of a simulated run under one mode. Seconds are virtual.

    Args:
        sync: The mode.
        via: "ps", the all-reduce algorithm, or "peers".
        seconds: The length of the run.
        steps: Steps of all workers.
        samples: Samples of all workers.
        discarded: Pushes that the mode discarded.
        updates: Updates of the weights.
        samples_per_second: Throughput.
        efficiency: Worker-seconds whose result was applied, over all worker-seconds.
        waiting: The share of worker-seconds held by the mode.
        communicating: The share of worker-seconds waiting for bytes.
        staleness_mean: Of the applied gradients.
        staleness_max: Of the applied gradients.
        max_lead: The largest lead of a worker over the slowest, in steps.
        workers: The same for each worker.
        fragments: Parts of the model that have updates of their own.
    """

    sync: str
    via: str
    seconds: float
    steps: int
    samples: int
    discarded: int
    updates: int
    samples_per_second: float
    efficiency: float  #: worker-seconds spent on applied pushes, over all worker-seconds
    waiting: float  #: share of worker-seconds held by the mode
    communicating: float  #: share of worker-seconds waiting for bytes
    staleness_mean: float
    staleness_max: int
    max_lead: int
    workers: tuple[WorkerOutcome, ...]
    fragments: int = 1

    @cached_property
    def spec(self) -> Spec:
        """The mode, parsed."""
        return spec_of(self.sync)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        result = asdict(self)
        del result["fragments"]
        return result


def meta_of(outcome: Outcome, cluster: Cluster, seed: int) -> dict[str, Any]:
    """What the contract asks of meta.json, for a run in virtual time."""
    result = outcome.as_dict()
    workers = result.pop("workers")
    if outcome.fragments > 1:  # each has lines of its own, as in a live job
        result["optimizers"] = {str(fragment): outcome.sync for fragment in range(outcome.fragments)}
    origin = outcome.spec.mode.origin
    return {
        "spec": outcome.sync,
        **({"modes": origin.digests} if origin is not None and origin.digest else {}),
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

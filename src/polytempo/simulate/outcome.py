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
from polytempo.simulate.worker import Worker
from polytempo.summation import in_order
from polytempo.sync.spec import Spec, parse_spec
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


class BudgetUse:
    """How much of the steps and samples of a budget the whole job has used."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._steps = 0
        self.samples = 0.0

    def charge(self, steps: int, samples: float, parts: int = 1) -> bool:
        """Count the steps and samples of an update, of one of the model's parts; true when the budget is used up."""
        self._steps += steps
        self.samples += samples / parts
        return self._steps // parts >= self._budget.steps or self.samples >= self._budget.samples


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

    @cached_property
    def spec(self) -> Spec:
        """The mode, parsed."""
        return parse_spec(self.sync)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def sum_up(
    workers: list[Worker], sync: str, via: str, seconds: float, updates: int, max_lead: int, model_bytes: float
) -> Outcome:
    """Sum up a run that ended at `seconds`; each message had `model_bytes`."""
    parts = tuple(
        WorkerOutcome(
            worker=worker.rank,
            steps=worker.steps,
            samples=worker.steps * worker.batch if worker.samples is None else worker.samples,
            discarded=worker.discarded,
            computing_s=worker.computing,
            waiting_s=worker.waiting,
            communicating_s=worker.communicating,
            present_s=worker.present,
            bytes_sent=worker.messages * model_bytes,
            staleness_mean=worker.staleness_sum / max(worker.steps, 1),
            staleness_max=worker.staleness_max,
        )
        for worker in workers
    )
    present = in_order(part.present_s for part in parts) or 1.0
    steps = sum(part.steps for part in parts)
    samples = sum(part.samples for part in parts)
    useful = in_order(worker.computing - worker.wasted for worker in workers)
    return Outcome(
        sync=sync,
        via=via,
        seconds=seconds,
        steps=steps,
        samples=samples,
        discarded=sum(part.discarded for part in parts),
        updates=updates,
        samples_per_second=samples / seconds if seconds else 0.0,
        efficiency=useful / present,
        waiting=in_order(part.waiting_s for part in parts) / present,
        communicating=in_order(part.communicating_s for part in parts) / present,
        staleness_mean=sum(worker.staleness_sum for worker in workers) / max(steps, 1),
        staleness_max=max(part.staleness_max for part in parts),
        max_lead=max_lead,
        workers=parts,
    )


def meta_of(outcome: Outcome, cluster: Cluster, seed: int) -> dict[str, Any]:
    """What the contract asks of meta.json, for a run in virtual time."""
    result = outcome.as_dict()
    workers = result.pop("workers")
    fragments = outcome.spec.fragments
    if fragments > 1:  # each has lines of its own, as in a live job
        result["optimizers"] = {str(fragment): outcome.sync for fragment in range(fragments)}
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

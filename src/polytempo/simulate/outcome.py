"""What came of a run: for each worker, and for the job."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from polytempo.simulate.worker import Worker
from polytempo.sums import in_order


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
    """What came of one run under one mode."""

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

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def sum_up(
    workers: list[Worker], sync: str, via: str, seconds: float, updates: int, max_lead: int, model_bytes: float
) -> Outcome:
    """Sum up a run that ended at `seconds`."""
    parts = tuple(_part(worker, model_bytes) for worker in workers)
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


def _part(worker: Worker, model_bytes: float) -> WorkerOutcome:
    return WorkerOutcome(
        worker=worker.rank,
        steps=worker.steps,
        samples=worker.steps * worker.batch,
        discarded=worker.discarded,
        computing_s=worker.computing,
        waiting_s=worker.waiting,
        communicating_s=worker.communicating,
        present_s=worker.present,
        bytes_sent=worker.messages * model_bytes,
        staleness_mean=worker.staleness_sum / max(worker.steps, 1),
        staleness_max=worker.staleness_max,
    )

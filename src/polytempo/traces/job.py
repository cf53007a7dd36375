"""A recorded job as data: what each micro-batch cost each stage of each replica, and what synchronising cost.

Only durations are kept, no times of day: when an operation starts follows from the schedule (`resimulate.py`). A job whose
workers are single processes has one stage; a step is then cut into equal parts, so that shares of it can be moved.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds of one micro-batch: (forward, backward) at each stage.
BatchSeconds = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class SyncSeconds:
    """What a step costs beside its micro-batches, without waiting: a collective takes what it took its last rank."""

    before: float = 0.0  #: until the first forward: weights are gathered
    own: tuple[float, ...] = ()  #: of each stage, after its last backward
    tied: float = 0.0  #: the first and the last stage of a replica together: gradients of embeddings
    reduce: tuple[float, ...] = ()  #: of each stage, over all replicas: gradients
    after: float = 0.0  #: all ranks together: the norm of the gradient, and the optimizer


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of the job."""

    number: int
    replicas: tuple[tuple[BatchSeconds, ...], ...]  #: the micro-batches of each replica, in order
    sync: SyncSeconds = SyncSeconds()
    #: What each micro-batch cost, in any unit, where the trace says; else it is derived from the seconds (`causes.py`).
    costs: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class JobTrace:
    """A recorded job of `replicas` workers, each a pipeline of `stages`; `schedule` is a spec of `pipeline/schedules.py`."""

    stages: int
    replicas: int
    steps: tuple[RecordedStep, ...]
    schedule: str = "1f1b"
    transfer: tuple[float, ...] = ()  #: seconds of a message between stages s and s + 1, either way
    divided: bool = False  #: the micro-batches are equal parts of a step, not recorded ones

    @property
    def microbatches(self) -> float:
        """Of the joint batch, on average over the steps."""
        return sum(len(batches) for step in self.steps for batches in step.replicas) / len(self.steps)

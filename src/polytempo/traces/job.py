"""A recorded job as data, and its step time, made again from compute durations and the schedule, not read off time stamps.

    replica     its micro-batches run through its stages by the schedule (`pipeline/timeline.py`); then what follows its last
                backward
    step        every stage reduces its gradients over all replicas, so the last replica of a stage starts it; then the norm
                of the gradient and the optimizer, which all ranks do together

Only durations are kept, no times of day. A job whose workers are single processes has one stage; a step is then cut into
equal parts, so that shares of it can be moved.

As in the what-if analysis of Lin et al. (OSDI 2025): "ideal" gives every forward the mean of all forwards, and every
backward that of all backwards. Where this departs from it: messages and collectives take in both cases what they took the
rank that came last, which is their time without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from polytempo.pipeline.schedules import make
from polytempo.pipeline.timeline import Computation, computations, stage_ends

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


@cache
def _order(spec: str, stages: int, microbatches: int) -> tuple[Computation, ...]:
    return computations(make(spec, stages, microbatches))


def replica_ends(job: JobTrace, batches: Sequence[BatchSeconds], sync: SyncSeconds) -> list[float]:
    """When each stage of a replica is ready to reduce its gradients, if it is given these micro-batches."""
    ends = [sync.before + end for end in _pipeline_ends(job, batches)]
    if sync.own:
        ends = [end + own for end, own in zip(ends, sync.own, strict=True)]
    if sync.tied and len(ends) > 1:
        ends[0] = ends[-1] = max(ends[0], ends[-1]) + sync.tied
    return ends


def _pipeline_ends(job: JobTrace, batches: Sequence[BatchSeconds]) -> list[float]:
    if not batches:
        return [0.0] * job.stages
    if job.stages == 1:
        return [sum(forward + backward for ((forward, backward),) in batches)]
    transfer = job.transfer or (0.0,) * (job.stages - 1)
    return stage_ends(_order(job.schedule, job.stages, len(batches)), batches, transfer)


def replica_seconds(job: JobTrace, batches: Sequence[BatchSeconds], sync: SyncSeconds) -> float:
    """What a replica needs by itself until all its gradients are ready."""
    return max(replica_ends(job, batches, sync))


def joint_seconds(sync: SyncSeconds) -> float:
    """What the replicas do together at the end of a step."""
    return max(sync.reduce, default=0.0) + sync.after


def step_seconds(sync: SyncSeconds, ends: Sequence[Sequence[float]]) -> float:
    """A step in which the replicas wait for each other, from when the stages of each are ready."""
    ready: list[float] = [max(stage) for stage in zip(*ends, strict=True)]
    reduce = sync.reduce or (0.0,) * len(ready)
    return max(end + more for end, more in zip(ready, reduce, strict=True)) + sync.after


def job_seconds(job: JobTrace) -> float:
    """The step time of the job as recorded, on average over its steps."""
    total = 0.0
    for step in job.steps:
        total += step_seconds(step.sync, [replica_ends(job, batches, step.sync) for batches in step.replicas])
    return total / len(job.steps)


def ideal_seconds(job: JobTrace) -> float:
    """The same if every forward took the mean of all forwards, and every backward that of all backwards."""
    times = [stage for step in job.steps for batches in step.replicas for batch in batches for stage in batch]
    even = (sum(forward for forward, _ in times) / len(times), sum(backward for _, backward in times) / len(times))
    batch = (even,) * job.stages
    steps = tuple(
        replace(step, replicas=tuple((batch,) * count for count in {len(batches) for batches in step.replicas}))
        for step in job.steps
    )  # replicas with equally many micro-batches are alike
    return job_seconds(replace(job, steps=steps))

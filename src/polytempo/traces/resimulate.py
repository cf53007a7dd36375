"""The step time of a recorded job, made again from its compute durations and its schedule, not read off time stamps.

    replica     its micro-batches run through its stages by the schedule (`pipeline/timeline.py`); then what follows its last
                backward
    step        every stage reduces its gradients over all replicas, so the last replica of a stage starts it; then the norm
                of the gradient and the optimizer, which all ranks do together

As in the what-if analysis of Lin et al. (OSDI 2025): "ideal" gives every forward the mean of all forwards, and every
backward that of all backwards. Where this departs from it: messages and collectives take in both cases what they took the
rank that came last, which is their time without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from polytempo.pipeline.schedules import make
from polytempo.pipeline.timeline import Computation, computations, stage_ends
from polytempo.traces.job import BatchSeconds, JobTrace, SyncSeconds


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

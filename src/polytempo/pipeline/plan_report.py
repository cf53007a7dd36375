"""A plan as lines of text: the stages, their predicted times, and what limits them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polytempo.errors import UsageError
from polytempo.pipeline.layer_profile import Layer, Profile
from polytempo.pipeline.planner import PlannedStage, StagePlan
from polytempo.units import plain_number, written_bytes

_HEADS = ("stage", "layers", "from", "to", "devices", "ms", "±", "busy", "send ms", "memory")
_SPREAD = _HEADS.index("±")


def explain(profile: Profile, plan: StagePlan, *, microbatches: int = 8) -> list[str]:
    """The plan, its speed, and why it is so; the idle time is that of a flush after `microbatches` microbatches."""
    if microbatches < 1:
        raise UsageError(f"expected at least 1 microbatch between flushes, got {microbatches}")
    return [
        f"{profile.model}: {_count(len(plan.stages), 'stage')} ({plan.config}) on {_count(plan.devices, 'device')}",
        "",
        *_table(profile, plan),
        "",
        f"a minibatch of {_count(profile.batch, 'sample')} every {_milliseconds(plan.seconds)} ms once the pipeline is full",
        f"data parallelism: {_milliseconds(plan.data_parallel_seconds)} ms, {_compared(plan)}",
        f"idle with a flush after {_count(microbatches, 'microbatch', 'es')}: {100 * bubble(plan, microbatches):.1f} % "
        "of the time, were all stages equal",
        f"why: {why(profile, plan)}",
        *_doubts(profile),
    ]


def bubble(plan: StagePlan, microbatches: int) -> float:
    """The share of time that equal stages are idle when the pipeline is flushed after `microbatches` microbatches."""
    return (len(plan.stages) - 1) / (microbatches + len(plan.stages) - 1)


def why(profile: Profile, plan: StagePlan) -> str:
    """One sentence: what limits the plan, and what data parallelism would cost."""
    weights = written_bytes(sum(layer.weight_bytes for layer in profile.layers))
    if plan.devices == 1:
        return "there is only one device"
    if len(plan.stages) == 1:
        return f"exchanging {weights} of weights among all devices is cheaper than any cut"
    if plan.limit is not None and plan.data_parallel_memory > plan.limit:
        needed, there = written_bytes(plan.data_parallel_memory), written_bytes(plan.limit)
        other = f"data parallelism needs {needed} on each device, which has {there}"
    elif plan.data_parallel_seconds > plan.seconds:
        other = f"data parallelism would have all devices exchange {weights} of weights"
    else:
        other = "a single stage was not allowed"
    return f"{other}; this plan is limited by {_limit(profile, plan)}"


def _limit(profile: Profile, plan: StagePlan) -> str:
    number, stage = max(enumerate(plan.stages), key=lambda one: max(one[1].time, one[1].send))
    if stage.send > stage.time:
        passed = written_bytes(profile.layers[stage.last].activation_bytes)
        return f"the {passed} that pass from stage {number} to {number + 1}"
    if stage.exchange > stage.compute:
        weights = sum(layer.weight_bytes for layer in profile.layers[stage.first : stage.last + 1])
        return f"the exchange of {written_bytes(weights)} of weights in stage {number}"
    return f"the work of stage {number}"


def _doubts(profile: Profile) -> list[str]:
    """The spread of the times, where it was measured."""
    if any(layer.spread_s is None for layer in profile.layers):
        return []
    share = _spread(profile.layers) / (sum(layer.seconds for layer in profile.layers) or 1.0)
    advice = "; measure again with --repeats 20, on a machine that does nothing else" if share > 0.1 else ""
    return [f"measured: medians; ± is half of the interquartile range, {100 * share:.0f} % of a pass{advice}"]


def _spread(layers: Sequence[Layer]) -> float:
    """The spread of the sum of some layers' seconds, which vary independently."""
    return math.sqrt(math.fsum((layer.spread_s or 0.0) ** 2 for layer in layers))


def _table(profile: Profile, plan: StagePlan) -> list[str]:
    rows = [_HEADS, *(_row(profile, plan, number, stage) for number, stage in enumerate(plan.stages))]
    if any(layer.spread_s is None for layer in profile.layers):
        rows = [(*row[:_SPREAD], *row[_SPREAD + 1 :]) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:  # names of layers to the left, numbers to the right
        cells = enumerate(zip(row, widths, strict=True))
        aligned = [cell.ljust(width) if column in (2, 3) else cell.rjust(width) for column, (cell, width) in cells]
        lines.append("  ".join(aligned).rstrip())
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _row(profile: Profile, plan: StagePlan, number: int, stage: PlannedStage) -> tuple[str, ...]:
    return (
        f"{number}",
        f"{stage.first}-{stage.last}",
        profile.layers[stage.first].name,
        profile.layers[stage.last].name,
        f"{stage.replicas}",
        _milliseconds(stage.time),
        f"±{plain_number(1e3 * _spread(profile.layers[stage.first : stage.last + 1]) / stage.replicas, 2)}",
        f"{100 * stage.time / plan.seconds if plan.seconds else 0:.0f} %",
        _milliseconds(stage.send) if number + 1 < len(plan.stages) else "",
        written_bytes(stage.memory),
    )


def _compared(plan: StagePlan) -> str:
    if plan.limit is not None and plan.data_parallel_memory > plan.limit:
        return f"but it does not fit: {written_bytes(plan.data_parallel_memory)} on each device"
    if len(plan.stages) == 1:
        return "which is this plan" if plan.data_parallel_seconds <= plan.seconds else "with all devices"
    if not plan.seconds:
        return "as long"
    return f"{plan.data_parallel_seconds / plan.seconds:.2f} times as long"


def _milliseconds(seconds: float) -> str:
    return plain_number(1e3 * seconds) if seconds < 10 else f"{1e3 * seconds:.0f}"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"

"""Which synchronisation modes go together with a model that is split; the reasons stand with each mode (`sync/`).

A step of a replica is a gradient of the unsplit model at the weights that its ranks read, if
- no weight changes between a microbatch's forward and its backward,
- the same replicas are in each update of all stages, and each rank of a replica makes the same of a push,
- copies of one weight are equal on all ranks that compute with it.

The ranks of a replica have a clock each on the data axis, and these do not know of each other. What a clock may decide by
the order in which pushes arrive is therefore refused for a model of several stages, and for tensor groups also every mode
in which two ranks of a group may read different versions of a weight that both hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from polytempo.errors import UsageError
from polytempo.pipeline.schedules import make
from polytempo.sync.compatibility import Feature, check_features, conflict, goes_instead
from polytempo.sync.spec import Spec


class Refusal(NamedTuple):
    """Why a pair is not sound, and what to use in its place."""

    reason: str
    instead: str  #: modes that do go with this number of stages and shards


def refusal(spec: Spec, pipe: int, tensor: int) -> Refusal | None:
    """Why this mode cannot be used between replicas of a model with this number of stages and shards; None where it can."""
    if pipe == 1 and tensor == 1:
        return None
    feature = Feature.TENSOR if tensor > 1 else Feature.PIPELINE
    found = conflict(spec, feature)
    if found is None:
        return None
    *others, last = goes_instead(spec, feature, found)
    instead = f"{', '.join(others)} or {last}" if others else last
    if tensor > 1 and conflict(spec, Feature.PIPELINE) is None:
        instead += ", or pipe= in the place of tensor="
    return Refusal(found.reason, instead)


def check_pair(spec: Spec, pipe: int, tensor: int, schedule: str) -> None:
    """Refuse a mode or a schedule that does not go with this number of stages and shards.

    Raises: UsageError, one line with the reason and what to use."""
    if not make(schedule, 1, 1).flushes:
        raise UsageError(
            f"schedule={schedule} has no flush: what is read from the data axis would change weights under microbatches in "
            "flight; use 1f1b or gpipe, or pt.Pipeline where there is one replica"
        )
    found = refusal(spec, pipe, tensor)
    if found is not None:
        split = " and ".join(f"{name}={count}" for name, count in (("pipe", pipe), ("tensor", tensor)) if count > 1)
        raise UsageError(f"sync={spec.text} does not go with {split}: {found.reason}; use {found.instead}")


def check_tied(spec: Spec, stages: Sequence[int], name: str) -> None:
    """Refuse a parameter that several stages hold, in modes without a barrier: its copies would drift apart.

    Raises: UsageError, with its name and the stages."""
    check_features(spec, Feature.TIED, parameter=f"the same parameter {name}", stages=", ".join(map(str, stages)))

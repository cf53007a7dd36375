"""Which synchronisation modes go together with a model that is split, as a table with reasons.

A step of a replica is a gradient of the unsplit model at the weights that its ranks read, if
- no weight changes between a microbatch's forward and its backward,
- the same replicas are in each update of all stages, and each rank of a replica makes the same of a push,
- copies of one weight are equal on all ranks that compute with it.

The ranks of a replica have a clock each on the data axis, and these do not know of each other. What a clock may decide by
the order in which pushes arrive is therefore refused for a model of several stages, and for tensor groups also every mode
in which two ranks of a group may read different versions of a weight that both hold.
"""

from __future__ import annotations

from typing import NamedTuple

from polytempo.errors import UsageError
from polytempo.pipeline.schedules import make
from polytempo.sync.spec import Spec, parse_spec

#: Modes of one push at a time, whose gate alone depends on other workers.
SINGLE_PUSHES = ("asp", "ssp", "dssp", "dssp-paper", "every", "delay")
#: Modes with a barrier at which the values of all workers are averaged.
BARRIERS = ("bsp", "local", "diloco")


class Refusal(NamedTuple):
    """Why a pair is not sound, and what to use in its place."""

    reason: str
    instead: str  #: modes that do go with this number of stages and shards


class _Unsound(NamedTuple):
    """Why a mode does not go with a model that is split, and the modes that come nearest to it."""

    reason: str
    nearest: tuple[str, ...]


_LEFT_OUT = "stages could leave out different replicas"
#: Modes that do not go with several stages.
_REFUSED = {
    "bsp+backup": _Unsound(f"{_LEFT_OUT} from a round", ("bsp", "ssp:1")),
    "bsp+balance": _Unsound("each stage would measure a speed of its own, and cut the joint batch differently", ("bsp",)),
    "anytime": _Unsound("stages would end a round after different micro-batches", ("bsp",)),
    "adacomm": _Unsound("each stage would choose a period of its own from what it measures", ("local:8",)),
    "asup": _Unsound("each stage would choose momentum and rate by the staleness that it sees itself", ("asp",)),
    "downpour": _Unsound(
        "a stage fetches and pushes on its own, so that stages would compute with different blocks of local steps",
        ("local:8",),
    ),
    "gossip": _Unsound("stages would mix with the models of neighbours at different times", ("local:8",)),
    "adpsgd": _Unsound("stages would choose partners apart, and mix parts of different models", ("local:8",)),
}
#: What goes with every split.
_ALWAYS = ("bsp", "local:8", "diloco:50")


def refusal(spec: Spec, pipe: int, tensor: int) -> Refusal | None:
    """Why this mode cannot be used between replicas of a model with this number of stages and shards; None where it can."""
    found = _unsound(spec, pipe, tensor)
    if found is None:
        return None
    fitting = [mode for mode in found.nearest if _unsound(parse_spec(mode), pipe, tensor) is None] or _ALWAYS
    *others, last = fitting
    instead = f"{', '.join(others)} or {last}" if others else last
    if tensor > 1 and _unsound(spec, tensor, 1) is None:
        instead += ", or pipe= in the place of tensor="
    return Refusal(found.reason, instead)


def _unsound(spec: Spec, pipe: int, tensor: int) -> _Unsound | None:
    mode, options = spec.mode.name, spec.options
    if pipe == 1 and tensor == 1:
        return None
    if mode in _REFUSED:
        return _REFUSED[mode]
    plain = (spec.text.split(",")[0] if spec.arguments else mode,)
    if "quorum" in options:
        return _Unsound(f"{_LEFT_OUT} from a merge (quorum=)", plain)
    if "wait" in options:
        return _Unsound(f"{_LEFT_OUT} from a barrier (wait=)", plain)
    if spec.corrections.any:
        return _Unsound("each stage would correct its part of a step by the staleness that it sees itself", plain)
    if tensor > 1 and mode not in BARRIERS:
        return _Unsound(
            "without a barrier two ranks of a tensor group could read different versions of a weight that both hold", _ALWAYS
        )
    if mode not in (*SINGLE_PUSHES, *BARRIERS):
        return _Unsound("it is not known to be sound for a model that is split", ("bsp", "ssp:1"))
    return None


def check_pair(sync: str, pipe: int, tensor: int, schedule: str) -> None:
    """Refuse a mode or a schedule that does not go with this number of stages and shards.

    Raises: UsageError, one line with the reason and what to use."""
    if not make(schedule, 1, 1).flushes:
        raise UsageError(
            f"schedule={schedule} has no flush: what is read from the data axis would change weights under microbatches in "
            "flight; use 1f1b or gpipe, or pt.Pipeline where there is one replica"
        )
    found = refusal(parse_spec(sync), pipe, tensor)
    if found is not None:
        split = " and ".join(f"{name}={count}" for name, count in (("pipe", pipe), ("tensor", tensor)) if count > 1)
        raise UsageError(f"sync={sync} does not go with {split}: {found.reason}; use {found.instead}")


def check_tied(sync: str, names: tuple[str, ...], stages: tuple[int, ...]) -> None:
    """Refuse parameters that several stages hold, in modes without a barrier: their copies would drift apart.

    Raises: UsageError, with the names and the stages."""
    if names and parse_spec(sync).mode.name not in BARRIERS:
        raise UsageError(
            f"stages {', '.join(map(str, stages))} hold the same parameter {names[0]}, and under sync={sync} its copies "
            "would be updated in different orders and drift apart; use bsp, local or diloco, or stages= that keep it in one"
        )

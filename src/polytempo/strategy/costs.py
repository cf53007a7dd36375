"""What a strategy's predictions are made of: measured layers, measured links, and the machine.

`measure.py` and `links.py` measure; everything that predicts (`step_time.py`, `bytes_moved.py`, `prediction.py`,
`search.py`) is pure and takes these. `as_data` and `from_data` are for JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from polytempo.errors import UsageError
from polytempo.pipeline.layer_profile import Layer


@dataclass(frozen=True)
class TensorCall:
    """A collective of a tensor group that a layer makes for each microbatch."""

    op: str  #: "all_reduce" or "all_gather"
    nbytes: int  #: of the whole tensor: what is reduced, or what is there once it is gathered
    backward: bool  #: in the backward, else in the forward


@dataclass(frozen=True)
class ShardedLayer:
    """One layer as one rank of a tensor group of `ModelProfile.tensor` ranks computes it, for one microbatch."""

    layer: Layer  #: seconds without the collectives; bytes of this rank's shard
    calls: tuple[TensorCall, ...] = ()
    update_s: float = 0.0  #: seconds of the optimizer's step for its parameters
    state_bytes: float = 0.0  #: optimizer state
    core_share: float = 1.0  #: the part of its seconds that occupies a core; the rest (a sleep, a device) slows no rank
    gradient_bytes: float = 0.0  #: of the parameters that are trained: what the data axis reduces
    passing_bytes: float = 0.0  #: of its output that no backward needs: kept only where a stage ends behind this layer


@dataclass(frozen=True)
class TiedWeights:
    """Parameters that several layers hold. Each of these layers counts them; one rank that has several of them holds one."""

    layers: tuple[int, ...]
    weight_bytes: float
    gradient_bytes: float
    state_bytes: float


@dataclass(frozen=True)
class ModelProfile:
    """A model's layers at one number of shards and one microbatch size."""

    model: str
    tensor: int  #: shards of a layer
    microbatch: int  #: samples
    layers: tuple[ShardedLayer, ...]
    tied: tuple[TiedWeights, ...] = ()
    loss: ShardedLayer | None = None  #: the loss function, which the last stage computes behind its layers
    input_bytes: float = 0.0  #: of a microbatch of the model's inputs


@dataclass(frozen=True)
class MeasuredLink:
    """Seconds for a message of any size, and for each byte of it."""

    latency: float
    per_byte: float
    core_s: float = 0.0  #: of the latency, seconds on a core: of the sender and of the receiver each, or of each member

    def seconds(self, nbytes: float) -> float:
        """The time of one message."""
        return self.latency + nbytes * self.per_byte


@dataclass(frozen=True)
class MeasuredReduction:
    """The time of a reduction among the ranks of a group, by bytes of the whole, while groups of that size are at it side by
    side, as they are in a step.

    axis "tensor": an all-reduce of a tensor group. axis "data": what a `DistributedOptimizer` step takes beyond the step of
    the optimizer that it wraps.
    """

    axis: str
    ranks: int  #: in the group
    hosts: int  #: on which they are
    link: MeasuredLink


@dataclass(frozen=True)
class Machine:
    """Where the ranks are and what lies between them, all measured."""

    hosts: tuple[tuple[int, ...], ...]  #: the ranks of each host
    cores: tuple[int, ...]  #: of each host: the number of its ranks that compute at full speed side by side
    inside: MeasuredLink  #: a stage's message between two ranks of a host
    between: MeasuredLink | None = None  #: between hosts; None where there is one host
    reduce_inside: MeasuredLink | None = None  #: an all-reduce of two ranks of a host, by bytes of the whole
    reduce_between: MeasuredLink | None = None
    contention: float = 1.0  #: how much longer a layer takes while all cores of its host compute
    action_s: float = 0.0  #: seconds of a forward or backward of a stage beside its layers and messages
    data_inside: MeasuredLink | None = None  #: a round of the data axis of two ranks of a host; None: as `reduce_inside`
    data_between: MeasuredLink | None = None
    reductions: tuple[MeasuredReduction, ...] = ()  #: of groups of other sizes, too

    def reduction(self, axis: str, ranks: Iterable[int]) -> MeasuredLink | None:
        """The reduction of an axis among these ranks, where it was measured for a group like theirs."""
        group = set(ranks)
        hosts = sum(1 for host in self.hosts if group & set(host))
        for one in self.reductions:
            if (one.axis, one.ranks, one.hosts) == (axis, len(group), hosts):
                return one.link
        return None


def as_data(profiles: Iterable[ModelProfile], machine: Machine) -> dict[str, Any]:
    """Profiles and machine as plain values, for JSON."""
    return {"profiles": [asdict(profile) for profile in profiles], "machine": asdict(machine)}


def from_data(data: Mapping[str, Any]) -> tuple[list[ModelProfile], Machine]:
    """Profiles and machine from what `as_data` gave.

    Raises:
        UsageError: Something is missing, or is not known.
    """
    try:
        return [_profile(one) for one in data["profiles"]], _machine(data["machine"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"expected measured profiles and a machine, got something else ({type(error).__name__}: {error}); measure again"
        ) from None


def _profile(data: Mapping[str, Any]) -> ModelProfile:
    tied = tuple(TiedWeights(**{**one, "layers": tuple(one["layers"])}) for one in data["tied"])
    loss = _layer(data["loss"]) if data["loss"] is not None else None
    return ModelProfile(**{**data, "layers": tuple(map(_layer, data["layers"])), "tied": tied, "loss": loss})


def _layer(data: Mapping[str, Any]) -> ShardedLayer:
    calls = tuple(TensorCall(**call) for call in data["calls"])
    return ShardedLayer(**{**data, "layer": Layer(**data["layer"]), "calls": calls})


def _machine(data: Mapping[str, Any]) -> Machine:
    links = ("inside", "between", "reduce_inside", "reduce_between", "data_inside", "data_between")
    known: dict[str, Any] = {name: _link(data[name]) for name in links}
    known["hosts"] = tuple(tuple(host) for host in data["hosts"])
    known["cores"] = tuple(data["cores"])
    known["reductions"] = tuple(MeasuredReduction(**{**one, "link": _link(one["link"])}) for one in data["reductions"])
    return Machine(**{**data, **known})


def _link(data: Mapping[str, Any] | None) -> MeasuredLink | None:
    return MeasuredLink(**data) if data is not None else None

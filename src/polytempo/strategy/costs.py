"""What a strategy's predictions are made of: measured layers, measured links, and the machine.

`measure.py` and `links.py` measure; everything that predicts (`step_time.py`, `bytes_moved.py`, `memory.py`, `search.py`) is
pure and takes these.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class ModelProfile:
    """A model's layers at one number of shards and one microbatch size."""

    model: str
    tensor: int  #: shards of a layer
    microbatch: int  #: samples
    layers: tuple[ShardedLayer, ...]
    tied: tuple[tuple[int, ...], ...] = ()  #: layers that hold the same parameter
    loss: ShardedLayer | None = None  #: the loss function, which the last stage computes behind its layers
    input_bytes: float = 0.0  #: of a microbatch of the model's inputs


@dataclass(frozen=True)
class MeasuredLink:
    """Seconds for a message of any size, and for each byte of it."""

    latency: float
    per_byte: float

    def seconds(self, nbytes: float) -> float:
        """The time of one message."""
        return self.latency + nbytes * self.per_byte


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

"""What several headers are made of: a model and its optimizer as proposed, the name of a push, a place in the data."""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, kw_only=True):
    """The base of all headers; `tag` names the kind on the wire."""


class TensorInfo(msgspec.Struct, array_like=True, frozen=True):
    """One tensor of a model: its name, shape, dtype (as torch writes it) and parameter group."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int


class TableInfo(msgspec.Struct, array_like=True, frozen=True):
    """One table: rows of numbers under int64 ids, cut over the shards row by row (row `id` is on shard `id % shards`)."""

    name: str
    rows: int  #: ids are below this; 0 where any id from 0 on is one
    dim: int  #: numbers in a row
    dtype: str = "float32"
    start: str = "zeros"  #: what a row holds when it is first touched: "zeros", "uniform", "uniform:0.1", "normal:0.01"
    seed: int = 0
    rule: str = "add"  #: name of the row rule by which pushes change it
    mirrored: bool = False  #: workers hold whole copies, and are told what has changed


class Proposal(msgspec.Struct, frozen=True):
    """What a worker's `DistributedOptimizer` is: all workers must propose the same."""

    sync: str
    apply: str  #: "server", "delta", "peers" (values stay with the workers), or "mean" for a side clock that only averages
    optimizer: str  #: name of a torch.optim class; empty where the server runs none
    tensors: tuple[TensorInfo, ...]
    groups: tuple[dict[str, Any], ...]  #: hyper-parameters at the start
    clip_norm: float | None = None
    tables: tuple[TableInfo, ...] = ()
    push_filter: str = ""  #: how dense pushes are compressed, and dense values in answers
    pull_filter: str = ""


class PushId(msgspec.Struct, array_like=True, frozen=True):
    """Which push: never applied twice."""

    track: str
    worker: int
    incarnation: int
    step: int


class Position(msgspec.Struct, array_like=True, frozen=True):
    """How far a worker is in its data: samples taken in this epoch, by one of its samplers."""

    epoch: int
    taken: int
    sampler: str = ""


class Progress(msgspec.Struct, array_like=True, frozen=True):
    """How far something is that trains without pushes, such as a pipeline."""

    what: str  #: in words
    steps: int
    seconds: float  #: from the start of the first step to the end of the last
    loss: float | None = None  #: the last


class Share(msgspec.Struct, array_like=True, frozen=True):
    """A worker's weight in a mean."""

    worker: int
    weight: float


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """Bytes `start` to `stop` of one of a shard's buffers."""

    buffer: int
    start: int
    stop: int


class StagedBucket(msgspec.Struct, array_like=True, frozen=True):
    """A bucket that was sent ahead of its push, and which sending of it counts."""

    number: int
    serial: int


class Part(msgspec.Struct, array_like=True, frozen=True):
    """One push in an update, and its weight."""

    id: PushId
    samples: float

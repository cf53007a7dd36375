"""What several headers are made of: a model and its optimizer as proposed, the name of a push, a place in the data.

Names of optimizers in a job are the same on all workers that take their steps together, and no two alike:

    "0", "1"         the optimizers that all workers make, in the order in which they make them; "0" is the main one
    "0@1"            of groups that are made side by side, the one whose lowest rank is 1; the main one is "0"
    "0.2", "0.2@1"   part 2 of an optimizer in several parts, in a group
    "0/mean"         averages of an optimizer beside its steps
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from polytempo.sync.spec import Spec, parse_spec


class WireMessage(msgspec.Struct, tag=True, forbid_unknown_fields=True, kw_only=True):
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


class OptimizerSpec(msgspec.Struct, frozen=True):
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
    members: tuple[int, ...] = ()  #: the workers that take its steps together, ascending; empty: all of the job
    refused: tuple[str, ...] = ()  #: of the modes that advice compares, those that this optimizer could not be given
    inner: str = ""  #: the class of the script's optimizer
    companions: int = 0  #: of the tensors, the last that are no parameters but are averaged with them
    fallback: str = ""  #: why servers keep the momentum, where the mode would have each worker keep its own
    device: str = ""  #: "cuda" where the worker's parameters are on a GPU; the first worker's decides where the shard is
    digest: str = ""  #: of the file that the mode was brought from, in this process; empty of one of ours

    @property
    def parsed(self) -> Spec:
        """The synchronisation mode."""
        return parse_spec(self.sync)


class SavedObject(msgspec.Struct, array_like=True, frozen=True):
    """The state of an object of the script, for a checkpoint. Its tensors are in the buffers."""

    name: str
    structure: bytes  #: all but the content of its tensors (`train/safe_serialization.py`)
    dtypes: tuple[str, ...] = ()  #: of its tensors, as torch writes them
    exchange: int = -1  #: the last push of its worker before it


class PushId(msgspec.Struct, array_like=True, frozen=True):
    """Which push: never applied twice."""

    optimizer_id: str
    worker: int
    incarnation: int
    step: int


class VitalSigns(msgspec.Struct, array_like=True, frozen=True):
    """What a worker has seen of a step, for the guard against divergence (`sync/divergence.py`): in samples of its tensors;
    on a device it is the step before."""

    loss: float | None  #: where it is known
    gradient: float  #: norm
    change: float  #: of the values since the step before, as a share of their size
    size: float  #: norm of the values


class Position(msgspec.Struct, array_like=True, frozen=True):
    """How far a worker is in its data: samples taken in this epoch, by one of its samplers."""

    epoch: int
    taken: int
    sampler: str = ""
    part: int = -1  #: of the data, which it takes, where that is not its rank's
    parts: int = 0  #: and of how many
    done: tuple[tuple[int, int], ...] = ()  #: places of the epoch's order in this push, where batches are dealt by speed
    length: int = 0  #: there, the places of the epoch's order


class TrainingProgress(msgspec.Struct, array_like=True, frozen=True):
    """How far something is that trains without pushes, such as a pipeline."""

    what: str  #: in words
    steps: int
    seconds: float  #: from the start of the first step to the end of the last
    loss: float | None = None  #: the last
    counted: bool = False  #: the budget counts its steps, which are reported without gradients
    distributed: bool = False  #: its optimizers take steps together with other replicas


class Share(msgspec.Struct, array_like=True, frozen=True):
    """A worker's weight in a mean."""

    worker: int
    weight: float


class ClosedRound(msgspec.Struct, array_like=True, frozen=True):
    """A round that has ended, in modes with deadlines: for workers that make its update themselves."""

    divisor: float = 0.0  #: of the sum of its gradients; 0: the sum of their weights
    hyper: tuple[dict[str, Any], ...] = ()  #: its hyper-parameters
    group: int = 0  #: the number of the set of workers in it: a set has the same one on all


class BufferRange(msgspec.Struct, array_like=True, frozen=True):
    """Bytes `start` to `stop` of one of a shard's buffers."""

    buffer: int
    start: int
    stop: int


class DeviceRange(msgspec.Struct, array_like=True, frozen=True):
    """Device memory of a worker: the handle by which a server opens it."""

    handle: bytes
    nbytes: int


class SentBucket(msgspec.Struct, array_like=True, frozen=True):
    """A bucket that was sent ahead of its push, and which sending of it counts."""

    number: int
    serial: int


class UpdatePart(msgspec.Struct, array_like=True, frozen=True):
    """One push in an update, and its weight."""

    id: PushId
    samples: float


# Rows of tables in messages: which rows of which table, and what the buffers beside the header are.
#
# A list of ids is a buffer of int64, each shard's own ids only; or a *span*, which needs no buffer; or, where the shard was
# sent the same list before, its digest (`compression/key_cache.py`). Rows are a buffer of the table's dtype.


class Keys(msgspec.Struct, array_like=True, frozen=True):
    """A list of ids by its digest; `known`: the shard should have it, and no buffer comes."""

    digest: int
    known: bool


class RowPart(msgspec.Struct, array_like=True, frozen=True):
    """What a push does to one table. Buffers: ids, unless a span or known keys say them; then the rows."""

    table: int
    span: tuple[int, int] | None = None
    keys: tuple[Keys, ...] = ()  #: one for each shard, where lists are cached
    form: str = ""  #: the dtype in which rows travel, where it is not the table's


class Want(msgspec.Struct, array_like=True, frozen=True):
    """Rows that the answer to a push shall bring. Buffer: ids, unless known keys say them."""

    table: int
    keys: tuple[Keys, ...] = ()


class RowAnswer(msgspec.Struct, array_like=True, frozen=True):
    """Rows in an answer. Buffers: where they are what has `changed`, ids and rows; else the rows that were wanted."""

    table: int
    changed: bool


def name_in_group(number: str, members: Sequence[int], main: bool) -> str:
    """The name of an optimizer with this number whose steps are taken by these ranks alone."""
    return number if main else f"{number}@{min(members)}"


def part_of(name: str, part: int) -> str:
    """The name of a part of an optimizer in a group; the first part has the optimizer's own."""
    number, at, lowest = name.partition("@")
    return f"{number}.{part}{at}{lowest}"


def number_of(name: str) -> int:
    """The number of the optimizer that a name belongs to."""
    return int(beside(name).split("/")[0].split(".")[0])


def number_of_part(name: str) -> int:
    """The number of the part of its optimizer."""
    return int(beside(name).split("/")[0].partition(".")[2] or 0)


def beside(name: str) -> str:
    """What optimizers that are made side by side have in common: the name without the group."""
    start, _, rest = name.partition("@")
    _, slash, side = rest.partition("/")
    return f"{start}{slash}{side}"

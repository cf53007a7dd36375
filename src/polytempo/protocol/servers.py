"""What servers tell the first one, and it them."""

from __future__ import annotations

from typing import Any

from polytempo.protocol.values import Message, PushId


class Arrived(Message):
    """A push is here in full, at this shard."""

    shard: int
    id: PushId


class Norm(Message):
    """The squared norm of this shard's part of an update."""

    shard: int
    track: str
    version: int
    square: float


class NormTotal(Message):
    """The sum over all shards."""

    track: str
    version: int
    square: float


class Saved(Message):
    """This shard's part of a checkpoint is on the disk."""

    shard: int
    name: str
    file: str
    digest: str
    tensors: dict[str, Any]


class NotSaved(Message):
    """This shard's part of a checkpoint could not be written; or, of a worker, what its filters hold back."""

    shard: int
    name: str
    reason: str
    worker: int = -1


class Failed(Message):
    """A server cannot go on."""

    cause: str

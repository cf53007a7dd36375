"""Rows of tables in messages: which rows of which table, and what the buffers beside the header are.

A list of ids is a buffer of int64, each shard's own ids only; or a *span*, which needs no buffer; or, where the shard was
sent the same list before, its digest (`filters/keys.py`). Rows are a buffer of the table's dtype.
"""

from __future__ import annotations

import msgspec

from polytempo.protocol.values import Message


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


class Pull(Message):
    """Send me rows, or say ("clock") which steps have reached a span. Buffer: ids, as for `Want`."""

    track: str
    request: int
    table: int
    span: tuple[int, int] | None = None
    keys: Keys | None = None
    what: str = "rows"


class Rows(Message):
    """The answer to `Pull`; the rows follow in a buffer."""

    track: str
    shard: int
    request: int
    version: int = 0
    clock: dict[int, int] = msgspec.field(
        default_factory=dict
    )  #: of a span: for each worker its latest step that has reached all of it


class UnknownKeys(Message):
    """The shard has not got, or has forgotten, the list of ids that a pull named by its digest: send it in full."""

    shard: int
    request: int

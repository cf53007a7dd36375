"""The tables of an optimizer as its worker sees them: rows into pushes, rows out of answers.

A `WorkerTable` knows what to push and what it will need next; this file cuts both along the shards, and puts what comes back
together. What the next step needs rides on the push and comes with its answer: no further message, and exact in every mode.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from polytempo.client.client import Client
from polytempo.client.client_state import RowsOfShards
from polytempo.client.requests import Answers, Outstanding, RowPull, keys_of
from polytempo.profile_ranges import profiled
from polytempo.protocol.messages import Pull
from polytempo.protocol.push import Content
from polytempo.protocol.values import Keys, RowPart, TableInfo, Want
from polytempo.server.optimizer_state import as_bytes, as_tensor
from polytempo.tables.routing import Routing, cut_range, join_range, route
from polytempo.transport.channel import Bytes
from polytempo.transport.shared_memory import SHARE_FROM

#: Ids and their rows; ids are unique and ascend.
SomeRows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SpanOfRows:
    """All rows from `start` on."""

    start: int
    values: torch.Tensor

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.start + len(self.values)


class WorkerTable(ABC):
    """A worker's side of a table. What it does not need to do, it does not."""

    info: TableInfo
    cached = False  #: do lists of ids come again, so that they should be remembered?
    form = ""  #: the dtype in which pushed rows travel, where it is not the table's

    def hyper(self) -> dict[str, Any]:
        """Of the table's rule, as of now."""
        return {}

    def first_values(self) -> torch.Tensor | None:
        """All rows, where the job starts from a worker's."""
        return None

    def start_copying(self) -> None:
        """What this step pushes may begin its way to the host's memory; `pushed` comes next."""

    def pushed(self) -> SomeRows | SpanOfRows | None:
        """What this step pushes, in the host's memory."""
        return None

    def wanted(self) -> torch.Tensor | None:
        """Ids of the rows that the next step will need, if they are known."""
        return None

    def take_wanted(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """They have come."""

    def take_changed(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """These rows have changed."""


@dataclass(frozen=True)
class Listed:
    """Ids of one table picked apart along the shards, with each shard's rows where they are pushed."""

    table: int
    routing: Routing | None
    cuts: list[torch.Tensor] | None = None
    span: tuple[int, int] | None = None


class RowTraffic:
    """All tables of one optimizer."""

    def __init__(self, client: Client, optimizer_id: str, tables: Sequence[WorkerTable]) -> None:
        self._client, self._track = client, optimizer_id
        self.tables = list(tables)
        self._wanted: dict[int, list[tuple[torch.Tensor, Routing]]] = {}  # by exchange

    # Into pushes.

    def seed(self) -> tuple[tuple[RowPart, ...], list[list[Bytes]]]:
        """The rows that a job starts from, and for each shard their buffers."""
        shards = self._client.shards
        parts: list[RowPart] = []
        buffers: list[list[Bytes]] = [[] for _ in range(shards)]
        for number, table in enumerate(self.tables):
            values = table.first_values()
            if values is not None:
                parts.append(RowPart(number, (0, table.info.rows)))
                for own, cut in zip(buffers, cut_range(values, 0, shards), strict=True):
                    own.append(as_bytes(cut))
        return tuple(parts), buffers

    def fill(self, waiting: Outstanding) -> Outstanding:
        """Add to a push what the tables have to say. A push that changes nothing still says what is wanted."""
        if not self.tables:
            return waiting
        body = waiting.push.body
        assert isinstance(body, Content)
        lists: list[Listed] = []
        if not body.skip:
            for table in self.tables:
                table.start_copying()
            pushed = [(number, table.pushed()) for number, table in enumerate(self.tables)]
            lists = [self._cut(number, some) for number, some in pushed if some is not None]
        wanted = [(number, ids) for number, table in enumerate(self.tables) if (ids := table.wanted()) is not None]
        wants = [Listed(number, route(ids, self._client.shards)) for number, ids in wanted]
        pairs = zip(wanted, wants, strict=True)
        self._wanted[waiting.push.id.step] = [(ids, w.routing) for (_, ids), w in pairs if w.routing is not None]
        ruled = msgspec.structs.replace(body, rules=tuple(table.hyper() for table in self.tables))
        blocks: list[Bytes] = []
        listed, buffers = self._listed(ruled, [*lists, *wants], cached=True, blocks=blocks)
        plain = lambda: self._listed(ruled, [*lists, *wants], cached=False, blocks=blocks)  # noqa: E731
        caches = any(part.keys for part in listed.rows) or any(want.keys for want in listed.wants)
        push = msgspec.structs.replace(waiting.push, body=listed)
        return Outstanding(push, waiting.parts, buffers, plain if caches else None, blocks)

    def _cut(self, number: int, some: SomeRows | SpanOfRows) -> Listed:
        shards, form = self._client.shards, self.tables[number].form
        if isinstance(some, SpanOfRows):
            listed = Listed(number, None, cut_range(some.values, some.start, shards), some.span)
        else:
            routing = route(some[0], shards)
            listed = Listed(number, routing, routing.cut(some[1]))
        if not form or listed.cuts is None:
            return listed
        return replace(listed, cuts=[cut.to(getattr(torch, form)) for cut in listed.cuts])

    def _listed(
        self, body: Content, lists: Sequence[Listed], cached: bool, blocks: list[Bytes]
    ) -> tuple[Content, list[list[Bytes]]]:
        """What names these rows, and for each shard their buffers; the blocks some of them lie in are noted."""
        keys = [self._keys(listed, cached) for listed in lists]
        both = list(zip(lists, keys, strict=True))
        forms = [table.form for table in self.tables]
        parts = tuple(RowPart(one.table, one.span, key, forms[one.table]) for one, key in both if one.cuts is not None)
        wants = tuple(Want(listed.table, key) for listed, key in both if listed.cuts is None)
        buffers = [[self._shared(b, blocks) for b in _buffers(shard, both)] for shard in range(self._client.shards)]
        return msgspec.structs.replace(body, rows=parts, wants=wants), buffers

    def _shared(self, buffer: Bytes, blocks: list[Bytes]) -> Bytes:
        """The same bytes in memory that servers of this host can read."""
        if self._client.pool.registry is None or buffer.nbytes < SHARE_FROM:
            return buffer
        block = self._client.exchanges.arena.take(buffer.nbytes)
        blocks.append(block)
        block[: buffer.nbytes] = buffer
        return block[: buffer.nbytes]

    def _keys(self, listed: Listed, cached: bool) -> tuple[Keys, ...]:
        if not self.tables[listed.table].cached or listed.routing is None:
            return ()
        caches = self._client.requests.caches
        keys = tuple(keys_of(cache, ids) for cache, ids in zip(caches, listed.routing.parts, strict=True))
        return keys if cached else tuple(Keys(key.digest, known=False) for key in keys)

    # Out of answers.

    def take(self, exchange: int, answers: RowsOfShards) -> None:
        wanted = iter(self._wanted.pop(exchange, ()))
        rest = {shard: iter(buffers) for shard, (_, buffers) in answers.items()}
        for part in answers[0][0]:
            table = self.tables[part.table]
            if part.changed:
                for shard in answers:
                    ids = as_tensor(next(rest[shard]), "int64")
                    table.take_changed(ids, self._rows(table, next(rest[shard])))
            else:
                ids, routing = next(wanted)
                table.take_wanted(ids, routing.join([self._rows(table, next(rest[shard])) for shard in sorted(answers)]))

    def _rows(self, table: WorkerTable, buffer: Bytes) -> torch.Tensor:
        return as_tensor(buffer, table.info.dtype).view(-1, table.info.dim)

    # Outside of pushes.

    def ask_span(self, number: int, span: tuple[int, int], what: str = "rows") -> RowPull:
        nothing = {shard: as_bytes(torch.empty(0)) for shard in range(self._client.shards)}
        pull = Pull(optimizer_id=self._track, request=0, table=number, span=span, what=what)
        return self._client.requests.start(RowPull(pull, nothing, self._client.requests.caches))

    def span_pulled(self, number: int, request: RowPull, span: tuple[int, int]) -> torch.Tensor:
        parts = [self._rows(self.tables[number], buffers[0]) for _, buffers in self._answers_to(request).values()]
        return join_range(parts, *span, self._client.shards)

    def read_mirrored(self) -> None:
        """All rows of the tables that this worker mirrors, as they are now."""
        for number, table in enumerate(self.tables):
            if table.info.mirrored:
                span = 0, table.info.rows
                rows = self.span_pulled(number, self.ask_span(number, span), span)
                table.take_changed(torch.arange(table.info.rows), rows)

    def clock_pulled(self, request: RowPull) -> tuple[int, dict[int, int]]:
        """The newest version that has touched a span, and for each worker the step that has reached all of it."""
        answers = [rows for rows, _ in self._answers_to(request).values()]
        common = set.intersection(*(set(rows.clock) for rows in answers))
        clock = {worker: min(rows.clock[worker] for rows in answers) for worker in sorted(common)}
        return max(rows.version for rows in answers), clock

    def ask(self, number: int, ids: torch.Tensor) -> tuple[RowPull, Routing]:
        routing = route(ids, self._client.shards)
        lists = {shard: as_bytes(own) for shard, own in enumerate(routing.parts) if own.numel()}
        pull = Pull(optimizer_id=self._track, request=0, table=number)
        request = RowPull(pull, lists, self._client.requests.caches, self.tables[number].cached)
        return self._client.requests.start(request), routing

    def pulled(self, number: int, request: RowPull, routing: Routing) -> torch.Tensor:
        """The rows that were asked for, in the order of their ids."""
        table = self.tables[number]
        parts = [torch.empty(0, table.info.dim, dtype=getattr(torch, table.info.dtype)) for _ in routing.parts]
        for shard, (_, buffers) in self._answers_to(request).items():
            parts[shard] = self._rows(table, buffers[0])
        return routing.join(parts)

    def _answers_to(self, request: RowPull) -> Answers:
        """In the order of shards."""
        with profiled("pull"):
            self._client.wait(lambda: request.answers is not None, "rows of a table")
        assert request.answers is not None
        return dict(sorted(request.answers.items()))


def _buffers(shard: int, lists: Sequence[tuple[Listed, tuple[Keys, ...]]]) -> list[Bytes]:
    """A shard's buffers: ids where it needs them, and rows."""
    buffers = []
    for listed, keys in lists:
        if listed.routing is not None and (not keys or not keys[shard].known):
            buffers.append(as_bytes(listed.routing.parts[shard]))
        if listed.cuts is not None:
            buffers.append(as_bytes(listed.cuts[shard]))
    return buffers

"""A shard's tables of one optimizer: rows in pushes, rows in answers, rows that are pulled.

The inbox checks a message (`check_rows`) before it is counted, so that an invalid one is refused to its sender; the shard
executor then carries it out with the update it belongs to. Rows that a worker wants with the answer to a push are noted when
the push is carried out and looked up when the answer is given, so that they are of the answer's position in the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polytempo.errors import PeerError
from polytempo.protocol.layout import ITEM_SIZES
from polytempo.protocol.messages import Push
from polytempo.protocol.push import Content
from polytempo.protocol.values import OptimizerSpec, RowAnswer, RowPart, TableInfo
from polytempo.server.optimizer_state import as_bytes, as_tensor
from polytempo.tables.routing import range_ids
from polytempo.tables.row_batches import RowPush
from polytempo.tables.table_shard import TableShard
from polytempo.transport.buffer_pool import Arena
from polytempo.transport.channel import Bytes


@dataclass
class Wishes:
    """What the answer to a worker's push shall bring."""

    exchange: int = -1
    version: int = -1  # the worker has what had changed up to here
    values: bool = True  # and wants the dense values
    wanted: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # table, ids


class ShardTables:
    """The tables of one optimizer, on one shard."""

    def __init__(self, optimizer_spec: OptimizerSpec, shard: int, shards: int, arena: Arena) -> None:
        self.shard, self.shards = shard, shards
        self._arena = arena
        self.tables = [TableShard(info, shard, shards) for info in optimizer_spec.tables]
        self.wishes: dict[int, Wishes] = {}  #: by worker: what the answer to its last push shall bring

    # What came, looked at before it counts.

    def check_rows(self, content: Content, buffers: Sequence[Bytes]) -> None:
        rest = iter(buffers)
        for part in content.rows:
            info = self._info(part.table)
            count = self._span_rows(info, part.span) if part.span else self._ids(info, next(rest)).numel()
            form = part.form or info.dtype
            if form not in ITEM_SIZES:
                raise PeerError(f"rows of {info.name} were refused: {form!r} is none of {', '.join(ITEM_SIZES)}")
            got, expected = next(rest).nbytes, count * info.dim * ITEM_SIZES[form]
            if got != expected:
                raise PeerError(f"rows of {info.name} were refused: {got} bytes came for {count} rows, expected {expected}")
        for want in content.wants:
            self._ids(self._info(want.table), next(rest))

    def check_pull(self, table: int, span: tuple[int, int] | None, ids: Sequence[Bytes]) -> None:
        info = self._info(table)
        if span is not None:
            self._span_rows(info, span)
        else:
            self._ids(info, ids[0])

    def _info(self, table: int) -> TableInfo:
        if not 0 <= table < len(self.tables):
            raise PeerError(f"there is no table {table}; this optimizer has {len(self.tables)}")
        return self.tables[table].info

    def _span_rows(self, info: TableInfo, span: tuple[int, int]) -> int:
        start, stop = span
        if not info.rows or not 0 <= start <= stop <= info.rows:
            raise PeerError(f"rows {start} to {stop} of {info.name} were refused; it has {info.rows}")
        first = start + (self.shard - start) % self.shards
        return len(range(first, stop, self.shards))

    def _ids(self, info: TableInfo, buffer: Bytes) -> torch.Tensor:
        if buffer.nbytes % 8:
            raise PeerError(f"a list of ids of {buffer.nbytes} bytes was refused; each has 8")
        ids = as_tensor(buffer, "int64")
        if ids.numel():
            low, high = (int(end) for end in torch.aminmax(ids))
            if low < 0 or (info.rows and high >= info.rows):
                raise PeerError(f"ids {low} to {high} of {info.name} were refused; it has rows 0 to {info.rows - 1}")
            if self.shards > 1 and bool((ids % self.shards != self.shard).any()):
                raise PeerError(f"ids of {info.name} were refused: some belong to another shard than {self.shard}")
        return ids

    # Carried out with the log.

    def seed(self, rows: Sequence[RowPart], buffers: Sequence[Bytes]) -> None:
        for part, ids, values in self._parts(rows, buffers):
            table = self.tables[part.table]
            table.fill(ids if part.span is None else range_ids(*part.span, self.shard, self.shards), values)

    def update(self, parts: Sequence[tuple[Push, float, Sequence[Bytes]]], rate: float, version: int) -> None:
        """One update of all tables that a worker pushed to; a worker that pushed nothing still counts in a mean."""
        pushes: dict[int, list[RowPush]] = {}
        for push, samples, buffers in parts:
            for part, ids, values in self._parts(_rows(push), buffers):
                row_push = RowPush(ids, values, samples, push.id.worker, push.id.step, part.span)
                pushes.setdefault(part.table, []).append(row_push)
        first = parts[0][0].body
        rules = first.rules if isinstance(first, Content) else ()
        for table, own in pushes.items():
            idle = [
                self._nothing(table, samples) for push, samples, _ in parts if all(p.table != table for p in _rows(push))
            ]
            self.tables[table].update([*own, *idle], rules[table] if table < len(rules) else {}, rate, version)

    def _nothing(self, table: int, samples: float) -> RowPush:
        values = torch.empty(0, self.tables[table].info.dim, dtype=getattr(torch, self.tables[table].info.dtype))
        return RowPush(torch.empty(0, dtype=torch.int64), values, samples)

    def _parts(
        self, rows: Sequence[RowPart], buffers: Sequence[Bytes]
    ) -> Iterator[tuple[RowPart, torch.Tensor | None, torch.Tensor]]:
        rest = iter(buffers)
        for part in rows:
            info = self.tables[part.table].info
            ids = None if part.span else as_tensor(next(rest), "int64")
            values = as_tensor(next(rest), part.form or info.dtype).view(-1, info.dim)
            yield part, ids, values.to(getattr(torch, info.dtype))

    # What answers bring.

    def note(self, push: Push, content: Content, buffers: Sequence[Bytes]) -> None:
        """Remember what the answer to a push shall bring."""
        ids = buffers[len(buffers) - len(content.wants) :]
        wanted = [(want.table, as_tensor(data, "int64").clone()) for want, data in zip(content.wants, ids, strict=True)]
        self.wishes[push.id.worker] = Wishes(push.id.step, push.version, content.values, wanted)

    def wants_values(self, worker: int, exchange: int) -> bool:
        """Does the answer bring the dense values? Of a worker that has wishes."""
        return self.wishes[worker].exchange != exchange or self.wishes[worker].values

    def pull(self, number: int, ids: torch.Tensor) -> tuple[Bytes, list[Bytes]]:
        """Rows as they are, to be sent, and the blocks they lie in: give them back when they were."""
        table = self.tables[number]
        nbytes = ids.numel() * table.info.dim * ITEM_SIZES[table.info.dtype]
        block = self._arena.take(nbytes)
        table.pull(ids, as_tensor(block[:nbytes], table.info.dtype).view(-1, table.info.dim))
        return block[:nbytes], [block]

    def answer(self, worker: int, exchange: int) -> tuple[tuple[RowAnswer, ...], list[Bytes], list[Bytes]]:
        """The rows for an answer, what the worker's mirrors lack and what it wanted; and the blocks some of it lies in."""
        wishes = self.wishes.get(worker, Wishes())
        fits = wishes.exchange == exchange
        answers: list[RowAnswer] = []
        buffers: list[Bytes] = []
        blocks: list[Bytes] = []
        for number, table in enumerate(self.tables):
            if table.info.mirrored:
                ids, values = table.changed_since(wishes.version if fits and exchange >= 0 else -1)
                answers.append(RowAnswer(number, changed=True))
                buffers += [as_bytes(ids), as_bytes(values)]
        for number, ids in wishes.wanted if fits else ():
            answers.append(RowAnswer(number, changed=False))
            rows, taken = self.pull(number, ids)
            buffers.append(rows)
            blocks += taken
        return tuple(answers), buffers, blocks

    def forget(self, worker: int) -> None:
        self.wishes.pop(worker, None)

    # Saved and loaded.

    def saved(self) -> dict[str, torch.Tensor]:
        """All rows and their state, by the number of the table and a name."""
        return {f"{n}.{name}": value for n, table in enumerate(self.tables) for name, value in table.saved().items()}

    def load_state(self, given: Mapping[str, Any]) -> None:
        """Take what rules keep beside rows, as a worker has it: for each table ids, state and the count of updates."""
        for number, table in enumerate(self.tables):
            prefix = f"{number}.state."
            state = {name.removeprefix(prefix): rows for name, rows in given.items() if name.startswith(prefix)}
            if f"{number}.ids" in given:
                table.set_state(given[f"{number}.ids"], state, int(given[f"{number}.steps"]))

    def saved_clocks(self) -> list[dict[str, Any]]:
        """What else each table must know to go on."""
        return [table.saved_clocks() for table in self.tables]

    def saved_state(self) -> dict[str, torch.Tensor]:
        """The same of mirrored tables without the rows, which workers have."""
        mirrored = [f"{number}." for number, table in enumerate(self.tables) if table.info.mirrored]
        return {k: v for k, v in self.saved().items() if k.startswith(tuple(mirrored)) and not k.endswith("values")}

    def load(self, shards: Sequence[Mapping[str, torch.Tensor]], clocks: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows that belong here from what all shards have saved."""
        for number, table in enumerate(self.tables):
            prefix = f"{number}."
            parts = [{k.removeprefix(prefix): v for k, v in s.items() if k.startswith(prefix)} for s in shards]
            table.load(parts, clocks[number])


def _rows(push: Push) -> tuple[RowPart, ...]:
    return push.body.rows if isinstance(push.body, Content) else ()

"""A worker's state with the servers: of each optimizer, of each push that waits for an answer, of a read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from polytempo.protocol.messages import Answer, Held, Push, ReadAnswer
from polytempo.protocol.push import Content, FirstValues
from polytempo.protocol.values import BufferRange, RowAnswer, SentBucket
from polytempo.transport.channel import Bytes

#: What a push of first values says beside them, and for each shard its buffers.
MakeSeed = Callable[[], tuple[FirstValues, list[list[Bytes]]]]
#: For each shard the rows that came with its answer, and their buffers.
RowsOfShards = dict[int, tuple[tuple[RowAnswer, ...], list[Bytes]]]

#: Of a push to one shard: the buckets sent ahead of it, and the ranges that go with it, with their bytes.
PartlySent = tuple[tuple[SentBucket, ...], tuple[BufferRange, ...], list[Bytes]]


@dataclass
class Outstanding:
    """A push that was not answered yet: kept to be sent again."""

    push: Push
    parts: list[list[Bytes]]  # for each shard its dense buffers
    rows: list[list[Bytes]] = field(default_factory=list)  # and those of its tables
    plain: Callable[[], tuple[Content, list[list[Bytes]]]] | None = None  # the body and its rows without cached keys
    blocks: list[Bytes] = field(default_factory=list)  # of the client's arena, in which rows lie
    answers: dict[int, dict[int, tuple[Answer, list[Bytes]]]] = field(default_factory=dict)  # by place of the log and shard

    def buffers(self, shard: int) -> list[Bytes]:
        """All that goes to one shard."""
        return [*self.parts[shard], *self.rows[shard]] if self.rows else self.parts[shard]


NO_ANSWER = Answer(optimizer_id="", shard=0, exchange=-1, place=-1, step=-1, version=0, stop=False)


@dataclass
class ClientState:
    """This worker's state in one optimizer."""

    name: str
    released: int = -1  # the last step it may start
    ahead: int = 0  # pushes that may be under way while the next is computed
    version: int = 0
    waited: float = 0.0  # by the mode, all in all, once the job had started
    staleness: int = 0  # of the last push that was answered
    skipped: bool = False
    outstanding: dict[int, Outstanding] = field(default_factory=dict)  # by exchange
    started: dict[int, tuple[Answer, list[Bytes]]] = field(default_factory=dict)
    joined: bool = False
    seed: MakeSeed | None = None
    deferred: bool = False  # is the last push's answer taken later, by a caller that did not wait for it?
    held: Held | None = None
    checkpoint: str = ""  # one was begun, to which what this worker's filters hold back belongs
    wanted: str = ""  # likewise, for what the script has registered
    pushed: int = -1  # its last push
    answer: Answer = field(default_factory=lambda: NO_ANSWER)  # the last, of the first shard
    take: Callable[[dict[int, list[Bytes]], tuple[int, ...]], None] = lambda parts, absent: None
    take_rows: Callable[[int, RowsOfShards], None] = lambda exchange, rows: None

    def has_room(self, step: int) -> bool:
        """Are all pushes answered but those that may be under way? A later answer may come though an earlier was lost."""
        return not self.ahead or not self.outstanding or step <= min(self.outstanding) + self.ahead

    def waits_for(self, what: str) -> str:
        """The ranks this worker waits for, and why, if the policy holds it."""
        if self.held is None:
            return what
        more = f" and {self.held.waiting_count - len(self.held.waiting_for)} more" if self.held.waiting_count > 8 else ""
        return f"workers {', '.join(map(str, self.held.waiting_for))}{more}: {self.held.reason}"


@dataclass
class Reading:
    """A read under way."""

    optimizer_id: str
    what: str
    request: int = -1
    answers: dict[int, tuple[ReadAnswer, list[Bytes]]] = field(default_factory=dict)


def split_rows(
    answers: dict[int, tuple[Answer, list[Bytes]]],
) -> tuple[RowsOfShards, dict[int, tuple[Answer, list[Bytes]]]]:
    """The rows of tables in these answers, and the answers without them."""
    rows, dense = {}, {}
    for shard, (answer, buffers) in answers.items():
        cut = len(buffers) - sum(2 if part.changed else 1 for part in answer.rows)
        rows[shard], dense[shard] = (answer.rows, buffers[cut:]), (answer, buffers[:cut])
    return rows, dense

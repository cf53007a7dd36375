"""A worker's state with the servers: of each optimizer, of each push that waits for an answer, of a read; its exchanges,
and what it reads outside of its pushes. The caller that waits for it does the receiving (`client.py`).

    Exchanges   each push, and the answers of all shards to it
    Reads       values or optimizer state of all shards, at one position of the log (`state_dict`, `consolidate`)
    Pulls       rows of a table, from the shards that have them, as they are when the request comes

An answer counts when all shards have given it from one position of the log. A push that a shard does not know was lost and
is sent there again; an answer that a shard has given and that did not come is asked for again (`docs/design/0010`).

Answers are received into the memory of the pushes they answer, where that is safe: not beside pushes that overlap
(`delay`), where another's answer might come first, and not after a loss, when answers may come that are not waited for.

A list of row ids that a shard was sent before goes as its digest; if the shard has forgotten it, it says so, and gets the
list. A read or pull of which an answer was lost is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from polytempo.client.connections import ServerConnections
from polytempo.compression.key_cache import KeySender
from polytempo.protocol.messages import (
    Answer,
    AnyMessage,
    Held,
    Pull,
    PulledRows,
    Push,
    PushStatus,
    ReadAnswer,
    ReadRequest,
    Repeat,
    StatusReply,
)
from polytempo.protocol.push import Content, FirstValues
from polytempo.protocol.values import BufferRange, Keys, PushId, RowAnswer, SentBucket
from polytempo.server.optimizer_state import as_bytes, as_tensor
from polytempo.transport.buffer_pool import Arena, Pool
from polytempo.transport.channel import Bytes

#: What a push of first values says beside them, and for each shard its buffers.
MakeSeed = Callable[[], tuple[FirstValues, list[list[Bytes]]]]
#: Of each shard.
Answers = dict[int, tuple[Answer, list[Bytes]]]
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
    answers: dict[int, Answers] = field(default_factory=dict)  # by place of the log

    def buffers(self, shard: int) -> list[Bytes]:
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
    started: Answers = field(default_factory=dict)
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


class Exchanges:
    """All pushes of one worker."""

    def __init__(self, connections: ServerConnections, rank: int, incarnation: int, pool: Pool) -> None:
        self.states: dict[str, ClientState] = {}  #: by optimizer
        self.stop = False  #: as the last answer said: is the job's budget used up?
        self.heeds = ""  #: the optimizer whose answers say so; empty: any
        self.asked = False  #: has the script asked whether to stop?
        self.pool, self.arena = pool, Arena(pool)
        self._connections = connections
        self._rank, self._incarnation = rank, incarnation
        self._overlapping = False
        self._loss_seen = False

    @property
    def _shards(self) -> int:
        return len(self._connections.channels)

    # Pushes.

    def push(self, waiting: Outstanding, sent: Sequence[PartlySent] | None = None) -> None:
        """Send a push to all shards; `sent`: for each shard the buckets that were sent during backward."""
        push = waiting.push
        push.asked = self.asked
        state = self.states[push.id.optimizer_id]
        state.outstanding[push.id.step] = waiting
        state.held, state.pushed = None, max(state.pushed, push.id.step)
        if sent is None:
            self._send(waiting)
            return
        assert isinstance(push.body, Content)
        for shard, (partial, patches, rest) in enumerate(sent):
            if partial:
                rows = waiting.rows[shard] if waiting.rows else []
                body = msgspec.structs.replace(push.body, sent_buckets=partial, patches=patches)
                self._connections.send(shard, msgspec.structs.replace(push, body=body), [*rest, *rows])
            else:
                self._connections.send(shard, push, waiting.buffers(shard))

    def _send(self, waiting: Outstanding) -> None:
        for shard in range(len(waiting.parts)):
            self._connections.send(shard, waiting.push, waiting.buffers(shard))

    def send_seed(self, name: str) -> None:
        """The job starts from this worker's values: push them."""
        state = self.states[name]
        assert state.seed is not None
        identity = PushId(name, self._rank, self._incarnation, -1)
        body, parts = state.seed()
        self._send(Outstanding(Push(id=identity, body=body), parts))

    def undecided(self) -> list[str]:
        """Optimizers whose deferred answer may say `stop`: the answers before were not certain that it will not."""
        return [s.name for s in self.states.values() if s.deferred and len(s.outstanding) > s.answer.certain]

    # Losses.

    def ask_status(self, state: ClientState) -> None:
        for waiting in state.outstanding.values():
            for shard in range(self._shards):
                self._connections.send(shard, PushStatus(what="push", optimizer_id=state.name, number=waiting.push.id.step))

    def status(self, shard: int, told: StatusReply) -> None:
        waiting = self.states[told.optimizer_id].outstanding.get(told.number) if told.optimizer_id in self.states else None
        if waiting is None:
            return
        if told.state == "unknown":
            self._send_again(shard, waiting)
        elif told.state == "answered" and shard not in waiting.answers.get(told.place, ()):
            self.note_loss()
            self._connections.send(0, Repeat(id=waiting.push.id, place=told.place))

    def resend(self, shard: int, identity: PushId) -> None:
        if (waiting := self.states[identity.optimizer_id].outstanding.get(identity.step)) is not None:
            self._send_again(shard, waiting)

    def repeat(self, name: str) -> None:
        """Send all that is not answered again, as after a lost connection."""
        for waiting in list(self.states[name].outstanding.values()):
            for shard in range(self._shards):
                self._send_again(shard, waiting)

    def _send_again(self, shard: int, waiting: Outstanding) -> None:
        self.note_loss()
        if waiting.plain is not None:
            body, waiting.rows = waiting.plain()
            waiting.push, waiting.plain = msgspec.structs.replace(waiting.push, body=body), None
        waiting.push = msgspec.structs.replace(waiting.push, attempt=waiting.push.attempt + 1)
        self._connections.send(shard, waiting.push, waiting.buffers(shard))

    # Answers.

    def answered(self, answer: Answer, buffers: list[Bytes]) -> None:
        """One shard's answer to a push, or to the registration of an optimizer."""
        state = self.states[answer.optimizer_id]
        if not state.joined:
            state.started[answer.shard] = answer, buffers
            if len(state.started) == self._shards:
                state.joined, state.seed = True, None
                started, state.started = state.started, {}
                self._take(state, started, waited=False)
            return
        waiting = state.outstanding.get(answer.exchange)
        if waiting is None:
            return  # it was answered before
        answers = waiting.answers.setdefault(answer.place, {})
        answers[answer.shard] = answer, buffers
        if len(answers) == self._shards:
            del state.outstanding[answer.exchange]
            self.arena.give(waiting.blocks)
            self._take(state, answers)

    def _take(self, state: ClientState, answers: Answers, waited: bool = True) -> None:
        """All shards have answered from one position of the log."""
        first = answers[0][0]
        state.released = max(state.released, first.step)
        state.version, state.skipped, state.staleness = first.version, first.skipped, first.staleness
        state.waited += first.waited if waited else 0.0
        state.held, state.answer = None, first
        if first.checkpoint:
            state.checkpoint = state.wanted = first.checkpoint
        if first.stop and self.heeds in ("", state.name):
            self.stop = True
        if first.rows:
            rows, dense = {}, {}
            for shard, (answer, buffers) in answers.items():
                cut = len(buffers) - sum(2 if part.changed else 1 for part in answer.rows)
                rows[shard], dense[shard] = (answer.rows, buffers[cut:]), (answer, buffers[:cut])
            answers = dense
            state.take_rows(first.exchange, rows)
        parts = {shard: buffers for shard, (_, buffers) in answers.items() if buffers}
        if parts:
            state.take(parts, first.absent)
        for _, buffers in answers.values():
            self.give_back(buffers)

    # Memory.

    def lend(self, parts: Sequence[Sequence[Bytes]]) -> None:
        """Receive answers into the memory of pushes: when an answer comes, every shard has the push it answers."""
        if not self._overlapping:
            for part in parts:
                self.give_back(part)

    def overlap(self) -> None:
        """Pushes will overlap from now on: their memory is theirs alone."""
        self._overlapping = True
        self.pool.clear()

    def give_back(self, buffers: Sequence[Bytes]) -> None:
        """Received buffers that are used up."""
        for buffer in buffers if not self._loss_seen else ():
            self.pool.give(buffer)

    def note_loss(self) -> None:
        """A message was lost: from now on the memory of pushes is theirs alone."""
        self._loss_seen = True
        self.pool.clear()


#: Bytes of lists of ids that a shard is assumed to remember.
REMEMBERED = 32 << 20

SendFn = Callable[[int, AnyMessage, Sequence[Bytes]], None]


class Reads:
    """The reads of one worker."""

    def __init__(self, send: SendFn, rank: int, shards: int) -> None:
        self._send, self._rank, self._shards = send, rank, shards
        self._readings: dict[int, Reading] = {}  # by request
        self._requests = 0

    def start(self, reading: Reading) -> None:
        """Read, once more if an answer was lost: then only the new answers count, which are from one position of the log."""
        self._readings.pop(reading.request, None)
        self._requests += 1
        reading.request = self._requests
        reading.answers.clear()
        self._readings[reading.request] = reading
        self._request(reading)

    def _request(self, reading: Reading) -> None:
        request = ReadRequest(
            optimizer_id=reading.optimizer_id, worker=self._rank, request=reading.request, what=reading.what
        )
        self._send(0, request, ())

    def answered(self, answer: ReadAnswer, buffers: list[Bytes]) -> None:
        if answer.request in self._readings:
            self._readings[answer.request].answers[answer.shard] = answer, buffers

    def is_done(self, reading: Reading) -> bool:
        return len(reading.answers) == self._shards

    def take(self, reading: Reading) -> list[tuple[ReadAnswer, list[Bytes]]]:
        del self._readings[reading.request]
        return [reading.answers[shard] for shard in range(self._shards)]

    def ask_status(self, reading: Reading) -> None:
        for shard in range(self._shards):
            if shard == 0 or shard not in reading.answers:
                self._send(shard, PushStatus(what="read", optimizer_id=reading.optimizer_id, number=reading.request), ())

    def status(self, shard: int, told: StatusReply) -> bool:
        """What a shard knows of a read; True when its answer was lost."""
        reading = self._readings.get(told.number)
        if reading is None:
            return False
        if told.state == "answered" and shard not in reading.answers:
            self.start(reading)
            return True
        if told.state == "unknown" and shard == 0:
            self._request(reading)
        return False


@dataclass
class PendingPull:
    """A pull under way."""

    pull: Pull
    ids: dict[int, Bytes]  # for each shard that was asked
    cached: bool = False  # shards shall remember them
    answers: dict[int, tuple[PulledRows, list[Bytes]]] = field(default_factory=dict)


class Pulls:
    """The pulls of one worker."""

    def __init__(self, send: SendFn, shards: int) -> None:
        self._send_message = send
        self._shards = shards
        self._senders = [KeySender(REMEMBERED) for _ in range(shards)]
        self._waiting: dict[int, PendingPull] = {}
        self._requests = 0

    def ask(self, optimizer_id: str, table: int, ids: Sequence[torch.Tensor], cached: bool = False) -> int:
        """Ask for rows, given each shard's ids; the number under which they will come."""
        lists = {shard: as_bytes(own) for shard, own in enumerate(ids) if own.numel()}
        request = self._begin(Pull(optimizer_id=optimizer_id, request=0, table=table), lists, cached)
        for shard in lists:
            keys = self.keys(shard, ids[shard]) if cached else None
            self._send(request, shard, keys)
        return request

    def ask_span(self, optimizer_id: str, table: int, span: tuple[int, int], what: str = "rows") -> int:
        nothing = {shard: as_bytes(torch.empty(0)) for shard in range(self._shards)}
        request = self._begin(Pull(optimizer_id=optimizer_id, request=0, table=table, span=span, what=what), nothing)
        for shard in range(self._shards):
            self._send(request, shard, None)
        return request

    def keys(self, shard: int, ids: torch.Tensor) -> Keys:
        """A list of ids as it may go to a shard, which then remembers it."""
        digest, known = self._senders[shard].offer(ids)
        return Keys(digest, known)

    def _begin(self, pull: Pull, lists: dict[int, Bytes], cached: bool = False) -> int:
        self._requests += 1
        pull.request = self._requests
        self._waiting[self._requests] = PendingPull(pull, lists, cached)
        return self._requests

    def _send(self, request: int, shard: int, keys: Keys | None) -> None:
        waiting = self._waiting[request]
        pull = msgspec.structs.replace(waiting.pull, keys=keys)
        bare = waiting.pull.span is not None or (keys is not None and keys.known)
        self._send_message(shard, pull, [] if bare else [waiting.ids[shard]])

    def send_keys(self, request: int, shard: int) -> None:
        """A shard does not know a list: here it is, to be remembered from now on."""
        waiting = self._waiting.get(request)
        if waiting is not None:
            keys = self.keys(shard, as_tensor(waiting.ids[shard], "int64")) if waiting.cached else None
            self._send(request, shard, Keys(keys.digest, known=False) if keys else None)

    def ask_status(self, request: int) -> None:
        """Ask the shards that have not answered what became of a pull."""
        waiting = self._waiting[request]
        for shard in waiting.ids:
            if shard not in waiting.answers:
                self._send_message(
                    shard, PushStatus(what="pull", optimizer_id=waiting.pull.optimizer_id, number=request), ()
                )

    def status(self, shard: int, told: StatusReply) -> bool:
        """What a shard knows of a pull; True when the pull or its answer was lost: it is asked for again."""
        waiting = self._waiting.get(told.number)
        lost = waiting is not None and told.state != "received" and shard in waiting.ids and shard not in waiting.answers
        if lost:
            self.send_keys(told.number, shard)
        return lost

    def answered(self, rows: PulledRows, buffers: list[Bytes]) -> None:
        waiting = self._waiting.get(rows.request)
        if waiting is not None:
            waiting.answers[rows.shard] = rows, buffers

    def is_done(self, request: int) -> bool:
        waiting = self._waiting[request]
        return len(waiting.answers) == len(waiting.ids)

    def take(self, request: int) -> list[tuple[int, PulledRows, list[Bytes]]]:
        answers = self._waiting.pop(request).answers
        return [(shard, *answers[shard]) for shard in sorted(answers)]

"""A worker's state in each optimizer, its pushes, and what their answers do.

Answers are received into the memory of the pushes they answer, where that is safe: not beside pushes that overlap
(`delay`), where another's answer might come first, and not after a loss, when answers may come that are not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from polytempo.client.requests import Answers, Joining, Outstanding, Requests
from polytempo.protocol.messages import Answer, Held, Push, Register
from polytempo.protocol.push import Content, FirstValues
from polytempo.protocol.values import BufferRange, OptimizerSpec, PushId, RowAnswer, SentBucket
from polytempo.transport.buffer_pool import Arena, Pool
from polytempo.transport.channel import Bytes

#: What a push of first values says beside them, and for each shard its buffers.
MakeSeed = Callable[[], tuple[FirstValues, list[list[Bytes]]]]
#: For each shard the rows that came with its answer, and their buffers.
RowsOfShards = dict[int, tuple[tuple[RowAnswer, ...], list[Bytes]]]
#: Of a push to one shard: the buckets sent ahead of it, and the ranges that go with it, with their bytes.
PartlySent = tuple[tuple[SentBucket, ...], tuple[BufferRange, ...], list[Bytes]]

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


class AnswerMemory:
    """The memory that answers are received into."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._overlapping = self._loss_seen = False

    def lend(self, parts: Sequence[Sequence[Bytes]]) -> None:
        """Receive answers into the memory of pushes: when an answer comes, every shard has the push it answers."""
        if not self._overlapping:
            for part in parts:
                self.give_back(part)

    def overlap(self) -> None:
        """Pushes will overlap from now on: their memory is theirs alone."""
        self._overlapping = True
        self._pool.clear()

    def give_back(self, buffers: Sequence[Bytes]) -> None:
        """Received buffers that are used up."""
        for buffer in buffers if not self._loss_seen else ():
            self._pool.give(buffer)

    def note_loss(self) -> None:
        """A message was lost: from now on the memory of pushes is theirs alone."""
        self._loss_seen = True
        self._pool.clear()


class Exchanges:
    """All pushes of one worker."""

    def __init__(self, requests: Requests, memory: AnswerMemory, arena: Arena, rank: int, incarnation: int) -> None:
        self.states: dict[str, ClientState] = {}  #: by optimizer
        self.stop = False  #: as the last answer said: is the job's budget used up?
        self.heeds = ""  #: the optimizer whose answers say so; empty: any
        self.asked = False  #: has the script asked whether to stop?
        self.arena = arena  #: memory of rows in pushes, until they are answered
        self._requests, self._memory = requests, memory
        self._rank, self._incarnation = rank, incarnation

    # Pushes.

    def join(self, state: ClientState, spec: OptimizerSpec, seed: MakeSeed) -> None:
        """Take part in an optimizer."""
        self.states[state.name], state.seed = state, seed
        joining = Joining(Register(optimizer_id=state.name, optimizer_spec=spec))
        joining.then = partial(self._joined, state)
        self._requests.start(joining)

    def send_seed(self, name: str) -> None:
        """The job starts from this worker's values: push them."""
        state = self.states[name]
        assert state.seed is not None
        body, parts = state.seed()
        waiting = Outstanding(Push(id=PushId(name, self._rank, self._incarnation, -1), body=body), parts)
        for shard in range(len(parts)):
            waiting.send(shard, self._requests.send)

    def push(self, waiting: Outstanding, sent: Sequence[PartlySent] | None = None) -> None:
        """Send a push to all shards; `sent`: for each shard the buckets that were sent during backward."""
        push, send = waiting.push, self._requests.send
        push.asked = self.asked
        state = self.states[push.id.optimizer_id]
        state.outstanding[push.id.step] = waiting
        state.held, state.pushed = None, max(state.pushed, push.id.step)
        waiting.then = partial(self._answered, state)
        self._requests.keep(waiting)
        for shard in range(len(waiting.parts)):
            partial_buckets, patches, rest = sent[shard] if sent is not None else ((), (), [])
            if not partial_buckets:
                waiting.send(shard, send)
                continue
            assert isinstance(push.body, Content)
            body = msgspec.structs.replace(push.body, sent_buckets=partial_buckets, patches=patches)
            rows = waiting.rows[shard] if waiting.rows else []
            send(shard, msgspec.structs.replace(push, body=body), [*rest, *rows])

    def forget(self, state: ClientState) -> None:
        """No answer to its pushes is looked for any more."""
        for waiting in state.outstanding.values():
            self._requests.forget(waiting)
        state.outstanding.clear()

    def undecided(self) -> list[str]:
        """Optimizers whose deferred answer may say `stop`: the answers before were not certain that it will not."""
        return [s.name for s in self.states.values() if s.deferred and len(s.outstanding) > s.answer.certain]

    # Answers.

    def held(self, message: Held) -> None:
        self.states[message.optimizer_id].held = message

    def _joined(self, state: ClientState, joining: Joining, answers: Answers) -> None:
        state.joined, state.seed = True, None
        self._take(state, answers, waited=False)

    def _answered(self, state: ClientState, waiting: Outstanding, answers: Answers) -> None:
        del state.outstanding[waiting.push.id.step]
        self.arena.give(waiting.blocks)
        self._take(state, answers, waited=True)

    def _take(self, state: ClientState, answers: Answers, waited: bool) -> None:
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
            self._memory.give_back(buffers)

"""Exchanges: each push, and the answers of all shards to it.

An answer counts when all shards have given it from one position of the log. A push that a shard does not know was lost and
is sent there again; an answer that a shard has given and that did not come is asked for again (`docs/design/0010`).

Answers are received into the memory of the pushes they answer, where that is safe: not beside pushes that overlap
(`delay`), where another's answer might come first, and not after a loss, when answers may come that are not waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from polytempo.client.client_state import ClientState, Outstanding, PartlySent, split_rows
from polytempo.client.connections import ServerConnections
from polytempo.protocol.messages import Answer, Push, PushStatus, Repeat, StatusReply
from polytempo.protocol.push import Content
from polytempo.protocol.values import PushId
from polytempo.transport.buffer_pool import Arena, Pool
from polytempo.transport.channel import Bytes

Answers = dict[int, tuple[Answer, list[Bytes]]]


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
        """Ask all shards about the pushes that are not answered."""
        for waiting in state.outstanding.values():
            for shard in range(self._shards):
                self._connections.send(shard, PushStatus(what="push", optimizer_id=state.name, number=waiting.push.id.step))

    def status(self, shard: int, told: StatusReply) -> None:
        """What a shard knows of a push."""
        waiting = self.states[told.optimizer_id].outstanding.get(told.number) if told.optimizer_id in self.states else None
        if waiting is None:
            return
        if told.state == "unknown":
            self._send_again(shard, waiting)
        elif told.state == "answered" and shard not in waiting.answers.get(told.place, ()):
            self.note_loss()
            self._connections.send(0, Repeat(id=waiting.push.id, place=told.place))

    def resend(self, shard: int, identity: PushId) -> None:
        """A shard has not got its part of a push in full."""
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
            rows, answers = split_rows(answers)
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

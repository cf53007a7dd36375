"""A worker's conversation with the servers: pushes, answers, repeats. No thread: whoever calls `wait` does the receiving.

    register   -> the first answer: the values the job starts from
    push       -> an answer from every shard, all from one place of the log
    read       -> the same without a push
    pull       -> rows of a table, from the shards that have them (`pulls.py`)

An answer counts when all shards have given it from one place of the log. When no byte has moved on any connection for
`retry` seconds the shards are asked what they know. A question goes behind what it is about, and what a shard says comes
behind what it has sent: so a push that a shard does not know is lost, and is sent there again; an answer that a shard has
given and that did not come is lost, and is given again from a new place of the log. Nothing is sent twice because it is
slow (`docs/design/0010`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import msgspec
import torch
import zmq

from polytempo.client.client_state import ClientState, MakeSeed, Outstanding, PartlySent, Reading, split_rows
from polytempo.client.process_identity import InheritedChannel
from polytempo.client.row_pulls import Pulls
from polytempo.errors import JobEnded, PeerError, UsageError
from polytempo.protocol.messages import (
    Answer,
    AnyMessage,
    Departed,
    Held,
    Hello,
    Keep,
    Leave,
    MetricReport,
    PartialPush,
    Push,
    PushStatus,
    ReadAnswer,
    ReadRequest,
    Refused,
    Register,
    Repeat,
    Resend,
    SendSeed,
    Stopped,
    StoreGet,
    StoreSet,
    Told,
    Welcome,
    decode,
    encode,
)
from polytempo.protocol.values import OptimizerSpec, PulledRows, PushId, TrainingProgress, UnknownKeys
from polytempo.transport.buffer_pool import Arena, Pool
from polytempo.transport.channel import Bytes, Channel
from polytempo.transport.cpu_affinity import Companion
from polytempo.transport.deadline import Deadline
from polytempo.transport.poller import Poller


class Client:
    """One worker's connections to all servers."""

    def __init__(
        self,
        channels: Sequence[Channel],
        rank: int,
        incarnation: int,
        pool: Pool,
        retry: float = 5.0,
        token: str = "",
    ) -> None:
        self.rank, self.incarnation, self._token = rank, incarnation, token
        self.size = 0
        self.stop = False
        self.asked = False  #: has the script asked whether to stop?
        self.on_departed: Callable[[int], None] = lambda worker: None
        self.companion: Companion | None = None  #: the server's thread, where this worker has it to itself
        self.bytes_sent = self.bytes_received = 0
        self.retry = retry
        self.pool, self.arena = pool, Arena(pool)
        self._channels = list(channels)
        self._lines: dict[str, ClientState] = {}
        self._readings: dict[int, Reading] = {}  # by request
        self._requests = 0
        self._found: dict[str, str] = {}
        self._overlapping = False
        self._disturbed = False  # something was lost
        self._welcomes: set[int] = set()
        self.pulls = Pulls(self._tell, len(self._channels))
        self._poller = Poller()
        for channel in channels:
            self._poller.register(channel.pollable(), zmq.POLLIN)
            channel.send(encode(self._hello()))
        try:
            self._wait(lambda: len(self._welcomes) == len(self._channels), "the servers to welcome it", self._greet_again)
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> int:
        """How many servers there are."""
        return len(self._channels)

    # What a worker does.

    def register(self, name: str, proposal: OptimizerSpec, seed: MakeSeed, line: ClientState) -> None:
        """Take part in a track, and wait for the values it starts from."""
        self._lines[name] = line
        line.seed = seed
        self._tell(0, Register(track=name, proposal=proposal))
        self._wait(lambda: line.joined, "all workers to make their optimizer", None, line)

    def push(self, waiting: Outstanding, sent: Sequence[PartlySent] | None = None) -> None:
        """Send a push to all shards; its answer comes to `wait_for_release` or `settle`.

        Args:
            waiting: The push and its buffers.
            sent: For each shard what was sent during backward: that is not sent again, unless the push must be repeated.
        """
        push = waiting.push
        push.asked = self.asked
        line = self._lines[push.id.track]
        line.outstanding[push.id.step] = waiting
        line.held = None
        if sent is None:
            self._send(waiting)
            return
        for shard, (staged, patches, rest) in enumerate(sent):
            if staged:
                rows = waiting.rows[shard] if waiting.rows else []
                self._tell(shard, msgspec.structs.replace(push, staged=staged, patches=patches), [*rest, *rows])
            else:
                self._tell(shard, push, waiting.buffers(shard))

    def stage(self, shard: int, message: PartialPush | Keep, buffers: list[Bytes]) -> None:
        """Send a bucket ahead of its push, or what a checkpoint shall keep of this worker."""
        self._tell(shard, message, buffers)

    def wait_for_release(self, name: str, step: int) -> None:
        """Wait until this worker may start `step`, and take the values that came with it."""
        line = self._lines[name]
        self._wait(lambda: line.released >= step and line.has_room(step), "an answer", lambda: self._ask(line), line)

    def wait_for_answer(self, name: str, exchange: int) -> None:
        """Wait until one push is answered."""
        line = self._lines[name]
        self._wait(lambda: exchange not in line.outstanding, "an answer", lambda: self._ask(line), line)

    def settle(self, name: str) -> None:
        """Wait until every push of a track is answered."""
        line = self._lines[name]
        self._wait(lambda: not line.outstanding, "its answers", lambda: self._ask(line), line)

    def read(self, name: str, what: str) -> list[tuple[ReadAnswer, list[Bytes]]]:
        """The values or state of all shards, at one place of the log."""
        reading = self.start_read(name, what)
        again = lambda: self.ask_for(reading)  # noqa: E731
        self._wait(lambda: len(reading.answers) == self.shards, "what it reads", again)
        return self.end_read(reading)

    def start_read(self, name: str, what: str) -> Reading:
        """Begin to read; it is there when all shards have answered."""
        reading = Reading(name, what)
        self._read(reading)
        return reading

    def end_read(self, reading: Reading) -> list[tuple[ReadAnswer, list[Bytes]]]:
        """What was read, shard by shard."""
        del self._readings[reading.request]
        return [reading.answers[shard] for shard in range(self.shards)]

    def together(self) -> AbstractContextManager[None]:
        """Around a wait: a server that this worker has to itself comes over to its core."""
        return self.companion if self.companion is not None and torch.get_num_threads() == 1 else nullcontext()

    def pulled(self, request: int) -> list[tuple[int, PulledRows, list[Bytes]]]:
        """Wait for the rows that were asked for: shard, header and buffers of each answer."""
        self._wait(lambda: self.pulls.is_done(request), "rows of a table", lambda: self._ask_for_rows(request))
        return self.pulls.take(request)

    def poll(self) -> None:
        """Take what has come, without waiting."""
        self._receive(0)

    def metric(self, values: dict[str, float | int | str], progress: TrainingProgress | None = None) -> None:
        """A figure for the record."""
        self._tell(0, MetricReport(worker=self.rank, values=values, progress=progress))

    def put(self, key: str, value: str) -> None:
        """Post something for other workers."""
        self._tell(0, StoreSet(key=key, value=value))

    def find(self, key: str, patience: float) -> str | None:
        """What a worker has posted, or will soon; None if it has not by then."""
        deadline = time.monotonic() + patience
        self._tell(0, StoreGet(key=key))
        over = lambda: key in self._found or time.monotonic() > deadline  # noqa: E731
        self._wait(over, f"{key!r}, which another worker is to say", lambda: self._tell(0, StoreGet(key=key)))
        return self._found.get(key)

    def leave(self, reason: str) -> None:
        """Say goodbye and close. Who finishes waits for its last answers first; they may still be under way (`delay`)."""
        with suppress(PeerError):  # the servers may go first
            for name in self._lines if reason == "finished" else ():
                self.settle(name)
            self._channels[0].send(encode(Leave(worker=self.rank, incarnation=self.incarnation, reason=reason)))
        self.close()

    def close(self) -> None:
        """Close all connections."""
        if self.companion is not None:
            self.companion.release()
        for channel in self._channels:
            channel.close()
        self._channels = []

    def let_go(self, parent: str) -> None:
        """In a child after a fork: the connections are its parent's, and so is the server's thread that it called over."""
        self.companion = None
        for index, channel in enumerate(self._channels):
            channel.close()
            self._channels[index] = InheritedChannel(parent)

    def lend(self, parts: Sequence[Sequence[Bytes]]) -> None:
        """Receive answers into the memory of pushes: when an answer comes, every shard has the push it answers.

        Not beside pushes that overlap (`delay`), where another's answer might come first.
        """
        if self._overlapping or self._disturbed:
            return
        for part in parts:
            self.give_back(part)

    def overlap(self) -> None:
        """Pushes will overlap from now on: their memory is theirs alone."""
        self._overlapping = True
        self.pool.clear()

    def give_back(self, buffers: Sequence[Bytes]) -> None:
        """Received buffers that are used up."""
        for buffer in buffers if not self._disturbed else ():
            self.pool.give(buffer)

    def watched(self) -> list[tuple[int, Callable[[], object]]]:
        """What else to wait on while waiting for peers: that the job has ended must be heard at once."""
        return [(channel.pollable(), lambda: self._receive(0)) for channel in self._channels]

    # Sending, and sending again.

    def _hello(self) -> Hello:
        return Hello(role="worker", rank=self.rank, incarnation=self.incarnation, pid=os.getpid(), token=self._token)

    def _greet_again(self) -> None:
        for shard in range(self.shards):
            self._tell(shard, self._hello())

    def _send(self, waiting: Outstanding) -> None:
        for shard in range(len(waiting.parts)):
            self._tell(shard, waiting.push, waiting.buffers(shard))

    def _tell(self, shard: int, message: AnyMessage, buffers: Sequence[Bytes] = ()) -> None:
        try:
            self.bytes_sent += self._channels[shard].send(encode(message), buffers)
        except PeerError:
            with suppress(PeerError):
                self._receive(0)  # a server that is gone may have said why
            raise

    def _ask(self, line: ClientState) -> None:
        for waiting in line.outstanding.values():
            for shard in range(self.shards):
                self._tell(shard, PushStatus(what="push", track=line.name, number=waiting.push.id.step))

    def ask_for(self, reading: Reading) -> None:
        """Ask what became of a read."""
        for shard in range(self.shards):
            if shard == 0 or shard not in reading.answers:
                self._tell(shard, PushStatus(what="read", track=reading.track, number=reading.request))

    def _ask_for_rows(self, request: int) -> None:
        for shard, track in self.pulls.missing(request):
            self._tell(shard, PushStatus(what="pull", track=track, number=request))

    def _was_told(self, shard: int, told: Told) -> None:
        """What a shard knows of what it was asked about: what is lost, and what only takes its time?"""
        if told.what == "push":
            self._told_of_push(shard, told)
        elif told.what == "pull":
            if told.state != "received" and self.pulls.lacks(told.number, shard):
                self._lost_something()
                self.pulls.send_keys(told.number, shard)
        elif (reading := self._readings.get(told.number)) is not None:
            if told.state == "answered" and shard not in reading.answers:
                self._lost_something()
                self._read(reading)
            elif told.state == "unknown" and shard == 0:
                self._tell(0, ReadRequest(track=told.track, worker=self.rank, request=told.number, what=reading.what))

    def _told_of_push(self, shard: int, told: Told) -> None:
        waiting = self._lines[told.track].outstanding.get(told.number) if told.track in self._lines else None
        if waiting is None:
            return
        if told.state == "unknown":
            self._send_again(shard, waiting)
        elif told.state == "answered" and shard not in waiting.answers.get(told.place, ()):
            self._lost_something()
            self._tell(0, Repeat(id=waiting.push.id, place=told.place))

    def _send_again(self, shard: int, waiting: Outstanding) -> None:
        """A shard has not got its part of a push."""
        self._lost_something()
        if waiting.plain is not None:
            waiting.push, waiting.rows = waiting.plain()
            waiting.plain = None
        waiting.push = msgspec.structs.replace(waiting.push, attempt=waiting.push.attempt + 1)
        self._tell(shard, waiting.push, waiting.buffers(shard))

    def _lost_something(self) -> None:
        """From now on answers may come that are not waited for: they must not be received into the memory of pushes."""
        self._disturbed = True
        self.pool.clear()

    def repeat(self, name: str) -> None:
        """Send all that is unanswered again, as after a lost connection."""
        for waiting in list(self._lines[name].outstanding.values()):
            for shard in range(self.shards):
                self._send_again(shard, waiting)

    def reconnect(self, shard: int, channel: Channel) -> None:
        """Go on over another connection to the same server."""
        self._poller.unregister(self._channels[shard].pollable())
        self._channels[shard].close()
        self._channels[shard] = channel
        self._poller.register(channel.pollable(), zmq.POLLIN)
        channel.send(encode(self._hello()))

    def _read(self, reading: Reading) -> None:
        """Read, once more if an answer was lost: then only the new answers count, which are from one place of the log."""
        self._readings.pop(reading.request, None)
        self._requests += 1
        reading.request = self._requests
        reading.answers.clear()
        self._readings[reading.request] = reading
        self._tell(0, ReadRequest(track=reading.track, worker=self.rank, request=self._requests, what=reading.what))

    # Waiting and hearing.

    def _wait(
        self, done: Callable[[], bool], what: str, again: Callable[[], None] | None, line: ClientState | None = None
    ) -> None:
        deadline, heard, moved = Deadline(self.rank), time.monotonic(), self.moved()
        while not done():
            if self._receive(min(self.retry, 1.0)):
                heard = time.monotonic()
                continue
            now, before, moved = time.monotonic(), moved, self.moved()
            if moved != before:
                heard = now
            deadline.report(lambda: f"for {what if line is None else line.waits_for(what)}")
            if again is not None and now - heard >= self.retry:
                heard = now
                again()

    def moved(self) -> int:
        """Bytes that have moved on any connection, either way; those of messages that are only partly through, too."""
        return sum(channel.moved() for channel in self._channels)

    def _receive(self, timeout: float) -> bool:
        """Take every message that is there, waiting at most so long for the first; was there one?"""
        ready = self._poller.poll(int(timeout * 1000))
        got = False
        for shard, channel in enumerate(self._channels):
            more = channel.pollable() in ready
            while more and (received := channel.receive()) is not None:
                got = True
                header, buffers = received
                self.bytes_received += len(header) + sum(buffer.nbytes for buffer in buffers)
                self._hear(shard, decode(header), buffers)
                more = channel.may_have_more()
        return got

    def _hear(self, shard: int, message: AnyMessage, buffers: list[Bytes]) -> None:
        if isinstance(message, Answer):
            self._answered(self._lines[message.track], message, buffers)
        elif isinstance(message, ReadAnswer):
            if message.request in self._readings:
                self._readings[message.request].answers[message.shard] = message, buffers
        elif isinstance(message, PulledRows):
            self.pulls.heard(message, buffers)
        elif isinstance(message, UnknownKeys):
            self.pulls.send_keys(message.request, message.shard)
        elif isinstance(message, Held):
            self._lines[message.track].held = message
        elif isinstance(message, Told):
            self._was_told(shard, message)
        elif isinstance(message, Resend):
            if (waiting := self._lines[message.id.track].outstanding.get(message.id.step)) is not None:
                self._send_again(shard, waiting)
        elif isinstance(message, SendSeed):
            self._send_seed(message.track)
        elif isinstance(message, Welcome):
            self.size = message.size
            self.companion = Companion(message.thread) if message.thread else None
            self._welcomes.add(shard)
        elif isinstance(message, Refused):
            raise UsageError(f"worker {self.rank}: {message.reason}")
        elif isinstance(message, StoreSet):
            self._found[message.key] = message.value
        elif isinstance(message, Departed):
            self.on_departed(message.worker)
        elif isinstance(message, Stopped):
            raise JobEnded(message.cause)

    def _send_seed(self, name: str) -> None:
        line = self._lines[name]
        assert line.seed is not None
        identity = PushId(name, self.rank, self.incarnation, -1)
        about, parts = line.seed()
        self._send(Outstanding(Push(id=identity, kind="seed", **about), parts))

    def _answered(self, line: ClientState, answer: Answer, buffers: list[Bytes]) -> None:
        if not line.joined:
            line.started[answer.shard] = answer, buffers
            if len(line.started) == self.shards:
                line.joined, line.seed = True, None
                started, line.started = line.started, {}
                self._take(line, started, waited=False)
            return
        waiting = line.outstanding.get(answer.exchange)
        if waiting is None:
            return  # it was answered before
        answers = waiting.answers.setdefault(answer.place, {})
        answers[answer.shard] = answer, buffers
        if len(answers) == self.shards:
            del line.outstanding[answer.exchange]
            self.arena.give(waiting.blocks)
            self._take(line, answers)

    def _take(self, line: ClientState, answers: dict[int, tuple[Answer, list[Bytes]]], waited: bool = True) -> None:
        """All shards have answered from one place of the log."""
        first = answers[0][0]
        line.released = max(line.released, first.step)
        line.version, line.skipped, line.staleness = first.version, first.skipped, first.staleness
        line.waited += first.waited if waited else 0.0
        line.held, line.answer, line.checkpoint = None, first, first.checkpoint or line.checkpoint
        if first.stop:
            self.stop = True
        if first.rows:
            rows, answers = split_rows(answers)
            line.take_rows(first.exchange, rows)
        parts = {shard: buffers for shard, (_, buffers) in answers.items() if buffers}
        if parts:
            line.take(parts, first.absent)
        for _, buffers in answers.values():
            self.give_back(buffers)

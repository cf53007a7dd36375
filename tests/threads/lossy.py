"""Connections that lose or double messages, and a job whose workers use them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from polytempo.client.client import Client
from polytempo.protocol.messages import (
    Answer,
    AnyMessage,
    Held,
    PartialPush,
    Push,
    PushStatus,
    ReadAnswer,
    ReadRequest,
    Repeat,
    Resend,
    StatusReply,
    decode,
)
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Channel
from polytempo.transport.shared_memory import SharedMemoryRegistry

#: What a worker sends or is sent again: the beginning and the end of a job are the launcher's care.
REPEATED = (Push, PartialPush, PushStatus, Repeat, ReadRequest, Answer, Held, StatusReply, Resend, ReadAnswer)

#: How often a message arrives: 1 is well, 0 is lost, 2 is doubled. It is asked about each message of `REPEATED`.
Fate = Callable[[AnyMessage, bool], int]


def every(k: int, copies: int) -> Fate:
    """Each k-th message arrives `copies` times, those to the server and those from it counted apart."""
    counts = {True: 0, False: 0}

    def fate(message: AnyMessage, outward: bool) -> int:
        counts[outward] += 1
        return copies if counts[outward] % k == 0 else 1

    return fate


def first_answers(numbers: Collection[int], then: Callable[[], object] = lambda: None) -> Fate:
    """The first answer to each of these exchanges is lost; what is to happen before."""
    left = set(numbers)

    def fate(message: AnyMessage, outward: bool) -> int:
        if isinstance(message, Answer) and message.exchange in left:
            left.discard(message.exchange)
            then()
            return 0
        return 1

    return fate


class UnreliableChannel(Channel):
    """Passes everything on until it is given a fate."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner
        self.fate: Fate | None = None
        self.disturbed = 0
        self._again: deque[tuple[bytes, list[Bytes]]] = deque()

    def _copies(self, header: bytes, outward: bool) -> int:
        message = decode(header)
        if self.fate is None or not isinstance(message, REPEATED):
            return 1
        copies = self.fate(message, outward)
        self.disturbed += copies != 1
        return copies

    def send(self, header: bytes, buffers: Sequence[Bytes] = ()) -> int:
        for _ in range(self._copies(header, True)):
            self.inner.send(header, buffers)
        return len(header) + sum(buffer.nbytes for buffer in buffers)

    def receive(self) -> tuple[bytes, list[Bytes]] | None:
        while not self._again:
            received = self.inner.receive()
            if received is None:
                return None
            header, buffers = received
            for _ in range(self._copies(header, False)):
                self._again.append((header, [buffer.copy() for buffer in buffers]))
        return self._again.popleft()

    def moved(self) -> int:
        return self.inner.moved()

    def pollable(self) -> Any:
        return self.inner.pollable()

    def close(self) -> None:
        self.inner.close()


class LossyJob(ThreadJob):
    """A job over unreliable channels; `disturb` says from when on, and how."""

    def session(self, rank: int) -> Session:
        pool = Pool(SharedMemoryRegistry() if self.wire == "ipc" else None)
        channels = [UnreliableChannel(self.connect(index, pool)) for index in range(self.plan.shards)]
        return Session(Client(channels, rank, self.job.incarnation, pool, self.retry), self.job, rank)


def repeat(client: Client, name: str) -> None:
    """Send all that is not answered again, as after a loss."""
    for waiting in list(client.exchanges.states[name].outstanding.values()):
        for shard in range(client.shards):
            client.requests.send_again(waiting, shard)


def channels_of(session: Session) -> list[UnreliableChannel]:
    assert session.client is not None
    return session.client.connections.channels  # type: ignore[return-value]


def disturb(session: Session, fate: Callable[[int], Fate | None]) -> None:
    """From now on the channel to each shard has this fate."""
    for shard, channel in enumerate(channels_of(session)):
        channel.fate = fate(shard)

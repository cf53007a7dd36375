"""What a worker's client believes, and what a server's desk lets pass: seen from the other end of the connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest
from lossy import repeat

from polytempo.client.client import Client
from polytempo.client.client_state import ClientState
from polytempo.client.requests import Outstanding
from polytempo.errors import PeerError
from polytempo.protocol.messages import (
    Answer,
    AnyMessage,
    Hello,
    Leave,
    MetricReport,
    Push,
    ReadRequest,
    Refused,
    Welcome,
    decode,
    encode,
)
from polytempo.protocol.push import PushedGradient
from polytempo.protocol.values import PushId
from polytempo.testing.threads import ThreadJob
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Channel
from polytempo.transport.memory import MemoryChannel, WakeUp


class Scripted(Channel):
    """A connection whose other end is the test."""

    def __init__(self, shards: int) -> None:
        self.sent: list[AnyMessage] = []
        self.inbox: deque[tuple[bytes, list[Bytes]]] = deque()
        self._wake_up = WakeUp()
        self.on_send: Callable[[AnyMessage], object] = lambda message: None
        self.say(Welcome(size=1, shards=shards))

    def say(self, message: AnyMessage) -> None:
        self.inbox.append((encode(message), []))
        self._wake_up.ring()

    def send(self, header: bytes, buffers: Sequence[Bytes] = ()) -> int:
        self.sent.append(decode(header))
        self.on_send(self.sent[-1])
        return len(header)

    def receive(self) -> tuple[bytes, list[Bytes]] | None:
        return self.inbox.popleft() if self.inbox else None

    def pollable(self) -> int:
        return self._wake_up.fileno

    def close(self) -> None:
        self._wake_up.close()


def answer(shard: int, place: int, version: int) -> Answer:
    return Answer(optimizer_id="0", shard=shard, exchange=0, place=place, step=1, version=version, stop=False)


@pytest.mark.parametrize("late", [1, 2], ids=["first", "repeat"])
def test_answers_from_two_places_of_the_log_are_not_mixed_and_either_counts_when_it_is_whole(late: int) -> None:
    """Shard 0 answered at version 1, shard 1 only the repeat, at version 5: that is no state of the job."""
    channels = [Scripted(2), Scripted(2)]
    client = Client(channels, 0, 0, Pool())
    line = ClientState("0", joined=True)
    client.exchanges.states["0"] = line
    client.push(Outstanding(Push(id=PushId("0", 0, 0, 0), body=PushedGradient()), [[], []]))
    repeat(client, "0")
    assert [m.attempt for m in channels[1].sent if isinstance(m, Push)] == [0, 2], "to each shard again"
    channels[0].say(answer(0, place=1, version=1))
    channels[1].say(answer(1, place=2, version=5))
    client.poll()
    assert (line.released, line.version) == (-1, 0)
    channels[2 - late].say(answer(2 - late, place=late, version={1: 1, 2: 5}[late]))
    client.wait_for_release("0", 1)
    assert (line.released, line.version) == (1, {1: 1, 2: 5}[late])
    client.close()


IMPOSTURES = [
    Push(id=PushId("0", 0, 0, 0), body=PushedGradient()),
    Push(id=PushId("0", 1, 7, 0), body=PushedGradient()),
    MetricReport(worker=0, values={"accuracy": 1.0}),
    ReadRequest(optimizer_id="0", worker=0, request=1, what="params"),
]


def everything_until_turned_away(channel: MemoryChannel) -> list[AnyMessage]:
    heard: list[AnyMessage] = []
    try:
        while True:
            received = channel.receive()
            if received is not None:
                heard.append(decode(received[0]))
    except PeerError:
        return heard


@pytest.mark.parametrize("message", IMPOSTURES, ids=lambda message: type(message).__name__)
def test_a_worker_that_speaks_for_another_is_turned_away(message: AnyMessage) -> None:
    with ThreadJob(2) as job:
        channel = MemoryChannel(job.endpoints[0])
        channel.send(encode(Hello(role="worker", rank=1)))
        channel.send(encode(message))
        assert isinstance(everything_until_turned_away(channel)[-1], Refused)
        channel.close()


def test_a_worker_cannot_make_another_leave() -> None:
    """Who leaves is who says so, whatever the message names."""
    with ThreadJob(2) as job:
        channel = MemoryChannel(job.endpoints[0])
        channel.send(encode(Hello(role="worker", rank=1)))
        channel.send(encode(Leave(worker=0, incarnation=0, reason="finished")))
        while job.sequencer.statistics[1].state != "finished":
            channel.receive()
        assert job.sequencer.statistics[0].state == "absent"
        channel.close()

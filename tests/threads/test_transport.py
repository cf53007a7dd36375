"""Every way to travel keeps the same promises; who may not come in does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from wires import STRANGER_LIMIT, Client, Message, Wire, filled, hear, same

from polytempo.errors import PeerError, UsageError
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Received, scheme_of
from polytempo.transport.connect import connect

MEGABYTES = 5 << 20


@pytest.fixture(params=["memory", "ipc", "tcp"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    made = Wire(request.param)
    yield made
    made.close()


@pytest.fixture(params=["ipc", "tcp"])
def strict(request: pytest.FixtureRequest) -> Iterator[Wire]:
    """Strangers may send a little only."""
    made = Wire(request.param, STRANGER_LIMIT)
    yield made
    made.close()


@pytest.fixture
def ipc() -> Iterator[Wire]:
    made = Wire("ipc", STRANGER_LIMIT)
    yield made
    made.close()


def echo(wire: Wire, done: Counter[int]) -> None:
    """Send everything back to whoever sent it, and count what is done."""

    def answer(received: Received) -> None:
        number = len(wire.received)
        done[number] = 0
        received.peer.send(received.header, received.buffers, lambda: done.update([number]))

    wire.on_message = answer


# What all ways promise.


def test_many_messages_go_both_ways_in_order(wire: Wire) -> None:
    done: Counter[int] = Counter()
    echo(wire, done)
    channel = wire.connect()

    def talk() -> list[Message]:
        for number in range(300):
            channel.send(b"%d" % number, [filled(number * 7, number), filled(3, number)])
        return [hear(channel) for _ in range(300)]

    client = Client(talk)
    assert wire.serve(client.over)
    assert client.error is None
    assert [header for header, _ in client.result] == [b"%d" % number for number in range(300)]
    assert all(same(got, [filled(n * 7, n), filled(3, n)]) for n, (_, got) in enumerate(client.result))
    assert [received.header for received in wire.received] == [b"%d" % number for number in range(300)]
    assert set(done.values()) == {1}
    assert len(done) == 300


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [0, 0, 0], [MEGABYTES], [0, 1, MEGABYTES, 0], [1 << 20], [(1 << 20) + 1, (1 << 20) - 1], [MEGABYTES] * 4],
    ids=str,
)
def test_buffers_of_all_sizes_come_back_as_they_went(wire: Wire, sizes: list[int]) -> None:
    done: Counter[int] = Counter()
    echo(wire, done)
    channel = wire.connect()
    buffers = [filled(size, number) for number, size in enumerate(sizes)]

    def talk() -> Message:
        sent = channel.send(b"header", buffers)
        assert sent >= 6 + sum(sizes)
        return hear(channel)

    client = Client(talk)
    assert wire.serve(lambda: client.over() and done[1])
    assert client.error is None
    assert client.result[0] == b"header"
    assert same(client.result[1], buffers)
    assert done == {1: 1}


def test_an_empty_message_is_a_message(wire: Wire) -> None:
    channel = wire.connect()
    client = Client(lambda: [channel.send(b""), channel.send(b"", [filled(0)]), channel.send(b"last")])
    assert wire.serve(lambda: len(wire.received) == 3)
    client.join()
    assert [(received.header, len(received.buffers)) for received in wire.received] == [(b"", 0), (b"", 1), (b"last", 0)]


def test_several_peers_are_told_apart(wire: Wire) -> None:
    echo(wire, Counter())
    channels = [wire.connect(f"client {number}") for number in range(4)]

    def talk() -> list[bytes]:
        for number, channel in enumerate(channels):
            channel.send(b"I am %d" % number)
        return [hear(channel)[0] for channel in channels]

    client = Client(talk)
    assert wire.serve(client.over)
    assert client.result == [b"I am %d" % number for number in range(4)]
    assert len({id(received.peer) for received in wire.received}) == 4


def test_nobody_shares_memory(wire: Wire) -> None:
    channel = wire.connect()
    buffer = filled(64)
    client = Client(lambda: channel.send(b"", [buffer]))
    assert wire.serve(lambda: wire.received)
    client.join()
    assert not numpy.shares_memory(wire.received[0].buffers[0], buffer)


def test_nothing_there_is_no_message(wire: Wire) -> None:
    assert wire.connect().receive() is None


# Who is gone.


@pytest.mark.parametrize("scheme", ["memory", "ipc"])
def test_a_channel_that_closes_is_noticed(scheme: str) -> None:
    wire = Wire(scheme)
    channel = wire.connect()
    channel.send(b"hello")
    assert wire.serve(lambda: wire.received)
    wire.channels.remove(channel)
    channel.close()
    assert wire.serve(lambda: wire.closed)
    assert [(closed.peer, closed.reason) for closed in wire.closed] == [(wire.received[0].peer, "")]
    wire.close()


@pytest.mark.parametrize("scheme", ["memory", "ipc"])
def test_an_endpoint_that_closes_is_noticed(scheme: str) -> None:
    wire = Wire(scheme)
    channel = wire.connect()
    channel.send(b"hello")
    assert wire.serve(lambda: wire.received)
    wire.endpoint.close()
    with pytest.raises(PeerError, match="is gone"):
        hear(channel)
    with pytest.raises(PeerError, match="is gone"):
        channel.send(b"anybody?", [filled(MEGABYTES)])
    assert not Path(wire.path).exists()
    channel.close()
    wire.directory.rmdir()


def test_a_peer_that_is_turned_out_notices(ipc: Wire) -> None:
    channel = ipc.connect()
    channel.send(b"hello")
    assert ipc.serve(lambda: ipc.received)
    ipc.received[0].peer.close()
    with pytest.raises(PeerError, match="is gone"):
        hear(channel)


def test_what_was_meant_for_one_that_is_gone_is_done_once(ipc: Wire) -> None:
    """The memory must come back, whether or not anybody has read it."""
    channel = ipc.connect()
    channel.send(b"hello")
    assert ipc.serve(lambda: ipc.received)
    done: Counter[str] = Counter()
    peer = ipc.received[0].peer
    for name in ("first", "second"):
        peer.send(b"", [filled(4 * MEGABYTES)], lambda name=name: done.update([name]))
    assert not done, "it does not fit the socket: it is still being sent"
    ipc.channels.remove(channel)
    channel.close()
    assert ipc.serve(lambda: ipc.closed)
    peer.send(b"", [filled(10)], lambda: done.update(["late"]))
    assert done == {"first": 1, "second": 1, "late": 1}


def test_nobody_listens_there(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"cannot reach the job at ipc://.*has it ended"):
        connect(f"ipc://{tmp_path}/nothing", "me", None, Pool())


@pytest.mark.parametrize("address", ["", "ipc", "ipc://", "http://a:1", "tcp:/a", "127.0.0.1:80"])
def test_an_address_of_no_kind_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="expected an address such as"):
        scheme_of(address)


# Strangers.


@pytest.mark.parametrize(("header", "size"), [(STRANGER_LIMIT + 1, 0), (1, STRANGER_LIMIT + 1), (1, MEGABYTES)])
def test_a_strangers_large_message_is_refused(strict: Wire, header: int, size: int) -> None:
    channel = strict.connect()
    client = Client(lambda: channel.send(b"x" * header, [filled(size)]))
    assert strict.serve(lambda: strict.closed)
    assert "was refused" in strict.closed[0].reason
    assert strict.received == []
    strict.serve(client.over)


def test_somebody_known_may_send_more(strict: Wire) -> None:
    channel = strict.connect()
    client = Client(lambda: [channel.send(b"who I am"), channel.send(b"", [filled(MEGABYTES)])])

    def greet(received: Received) -> None:
        received.peer.who, received.peer.limit = "somebody", 1 << 40

    strict.on_message = greet
    assert strict.serve(lambda: len(strict.received) == 2)
    client.join()
    assert strict.closed == []
    assert same(strict.received[1].buffers, [filled(MEGABYTES)])

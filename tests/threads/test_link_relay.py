"""The relay of `--link`: bytes arrive intact and never before they are due, by a clock that the test moves."""

from __future__ import annotations

import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy
import pytest
import torch
from worlds import PATIENCE, Shelf

from polytempo.collectives.world import World, open_by_store, open_in_threads
from polytempo.errors import UsageError
from polytempo.launcher.job_facts import JobFacts, read_job
from polytempo.session.session import Session, as_current
from polytempo.train.communication import all_reduce
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Poller
from polytempo.transport.connect import connect
from polytempo.transport.keys import make_keys
from polytempo.transport.link_emulation import EmulatedNetwork
from polytempo.transport.link_relay import EmulatedHost, LinkRelay, server_name, worker_name
from polytempo.transport.zeromq import ZmqEndpoint

RATE = 12.5e6
SUCCEEDED = bytes((5, 0))
REFUSED = bytes((5, 5))


class Bench:
    """A relay that this thread drives, with a clock of its own, and two servers' sockets, of which the second is missing."""

    def __init__(self, folder: Path, latency: float = 0.0, workers: int = 2) -> None:
        self.now, self.folder = 0.0, folder
        self.network = EmulatedNetwork(RATE, latency)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(folder / "s"))
        self.listener.listen()
        self.port = socket.create_server(("127.0.0.1", 0))
        self.relay = LinkRelay(self.network, workers, [str(folder / "s"), str(folder / "no")], lambda: self.now)
        self.sockets: list[socket.socket] = []

    def turn(self) -> None:
        """Do what is due, and let the time of what comes next come."""
        self.relay.turn(0.0)
        self.relay.turn(0.0)  # what the first has written may be ready only now
        due = self.relay.due()
        if due is not None:
            self.now = max(self.now, due)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < deadline
            self.turn()

    def ask(self, rank: int, request: bytes) -> tuple[socket.socket, bytes]:
        """Connect as a worker, and say this; the answer."""
        sock = self.start(rank, request)
        return sock, self.hear(sock, 10)

    def start(self, rank: int, request: bytes) -> socket.socket:
        """The same, without waiting for the answer."""
        host, _, port = self.relay.proxies[rank].partition(":")
        sock = socket.create_connection((host, int(port)))
        sock.setblocking(False)
        self.sockets.append(sock)
        sock.send(bytes((5, 1, 0)))
        assert self.hear(sock, 2) == bytes((5, 0))
        sock.send(request)
        return sock

    def hear(self, sock: socket.socket, count: int) -> bytes:
        got = bytearray()

        def heard() -> bool:
            try:
                data = sock.recv(count - len(got))
            except BlockingIOError:
                return False
            got.extend(data)
            return not data or len(got) == count

        self.until(heard)
        return bytes(got)

    def connected(self, rank: int, name: str, port: int = 1) -> tuple[socket.socket, socket.socket]:
        """A worker's end of a connection, and the other."""
        sock, reply = self.ask(rank, named(name, port))
        assert reply[:2] == SUCCEEDED
        other, _ = (self.listener if name.startswith("server") else self.port).accept()
        other.setblocking(False)
        self.sockets.append(other)
        return sock, other

    def carry(self, ways: list[tuple[socket.socket, bytes, socket.socket]]) -> None:
        """Send these bytes on these sockets, and check what arrives on those."""
        left, got = [memoryview(data) for _, data, _ in ways], [bytearray() for _ in ways]

        def arrived() -> bool:
            for index, (sender, _, receiver) in enumerate(ways):
                try:
                    if left[index]:
                        left[index] = left[index][sender.send(left[index]) :]
                except BlockingIOError:
                    pass
                with suppress(BlockingIOError):
                    got[index] += receiver.recv(1 << 20)
            return all(len(have) == len(data) for have, (_, data, _) in zip(got, ways, strict=True))

        self.until(arrived)
        assert all(have == data for have, (_, data, _) in zip(got, ways, strict=True))

    def close(self) -> None:
        self.relay.close()
        for sock in (*self.sockets, self.listener, self.port):
            sock.close()


def named(name: str, port: int) -> bytes:
    return bytes((5, 1, 0, 3, len(name))) + name.encode() + struct.pack(">H", port)


@contextmanager
def benched(latency: float = 0.0) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as folder:
        made = Bench(Path(folder), latency)
        try:
            yield made
        finally:
            made.close()


def some(count: int, seed: int) -> bytes:
    return numpy.random.default_rng(seed).bytes(count)


@pytest.mark.parametrize("latency", [0.0, 0.25])
@pytest.mark.parametrize("name", [server_name(0), worker_name(1)])
def test_bytes_arrive_intact_and_not_before_they_are_due(name: str, latency: float) -> None:
    with benched(latency) as bench:
        one, two = bench.connected(0, name, bench.port.getsockname()[1])
        began = bench.now
        there, back = some(3_000_000, 1), some(2_000_000, 2)
        bench.carry([(one, there, two), (two, back, one)])
        assert bench.now - began >= (len(there) - bench.network._burst) / RATE + latency


def test_a_long_way_does_not_make_a_link_slower() -> None:
    """Chunks follow each other without waiting for the first to arrive: 3 MB take 0.24 s and one latency, not twelve."""
    with benched(0.25) as bench:
        one, two = bench.connected(0, server_name(0))
        began = bench.now
        bench.carry([(two, some(3_000_000, 6), one)])
        assert bench.now - began < 1.0


def test_all_connections_of_a_worker_share_its_rate() -> None:
    with benched() as bench:
        port = bench.port.getsockname()[1]
        pairs = [
            bench.connected(0, server_name(0)),
            bench.connected(0, server_name(0)),
            bench.connected(0, "worker-1", port),
        ]
        began = bench.now
        bench.carry([(one, some(1_000_000, 3), two) for one, two in pairs])
        assert bench.now - began >= (3_000_000 - bench.network._burst) / RATE


def test_the_end_of_one_side_is_told_after_its_last_byte() -> None:
    with benched(0.1) as bench:
        one, two = bench.connected(0, server_name(0))
        one.send(b"last words")
        one.close()
        assert bench.hear(two, 100) == b"last words"  # and then the end: there are no 100 bytes
        two.close()
        bench.until(lambda: not bench.relay._ends)


def test_a_side_that_is_gone_ends_the_other() -> None:
    """It closes with bytes that it has not read, so that the kernel resets the connection."""
    with benched() as bench:
        one, two = bench.connected(0, server_name(0))
        two.send(some(100_000, 4))
        bench.until(lambda: bench.network.due() is None)
        one.close()
        assert bench.hear(two, 1) == b""
        for _ in range(30):  # it does not listen, and goes on: that is read by no process, and kept by none
            with suppress(BlockingIOError, BrokenPipeError):
                two.send(some(100_000, 7))
            bench.turn()
        two.close()
        bench.until(lambda: not bench.relay._ends)


def test_a_receiver_that_takes_nothing_holds_up_its_sender() -> None:
    """The relay keeps no more than its window, however much is sent."""
    with benched() as bench:
        one, _two = bench.connected(0, server_name(0))
        flow = next(flow for flow in bench.relay._ends if flow.source == 0)
        sent, most = 0, 0
        for _ in range(400):
            with suppress(BlockingIOError):
                sent += one.send(bytes(1 << 20))
            bench.turn()
            most = max(most, flow.inside)
        assert most <= bench.network._window + bench.network.chunk
        with pytest.raises(BlockingIOError):
            one.send(b"more")


@pytest.mark.parametrize(
    "request_",
    [named("server-2", 1), named("server-x", 1), named("worker-2", 1), named("example.org", 80)],
)
def test_what_is_not_of_the_job_is_refused(request_: bytes) -> None:
    with benched() as bench:
        sock, reply = bench.ask(0, request_)
        assert reply[:2] == REFUSED
        assert bench.hear(sock, 1) == b""


def test_a_server_that_does_not_listen_yet_is_waited_for() -> None:
    """And a worker that gives up is forgotten."""
    with benched() as bench, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late:
        one, two = (bench.start(0, named("server-1", 1)) for _ in range(2))
        bench.until(lambda: bench.now > 1.0)  # by its own clock: it has tried for a while
        two.close()
        bench.until(lambda: len(bench.relay._wanted) == 1)
        late.bind(f"{bench.folder}/no")
        late.listen()
        assert bench.hear(one, 10)[:2] == SUCCEEDED
        with late.accept()[0] as other:
            other.setblocking(False)
            bench.carry([(one, b"at last", other)])


def test_a_stranger_that_says_more_while_it_waits_is_forgotten() -> None:
    with benched() as bench:
        sock = bench.start(0, named("server-1", 1))
        bench.until(lambda: len(bench.relay._wanted) == 1)
        sock.send(b"more")
        assert bench.hear(sock, 1) != b""  # a refusal
        assert not bench.relay._wanted
        assert bench.connected(0, server_name(0))


def test_an_address_instead_of_a_name_is_refused() -> None:
    with benched() as bench:
        _, reply = bench.ask(0, bytes((5, 1, 0, 1, 127, 0, 0, 1, 0, 80)))
        assert reply[:2] == bytes((5, 8))


# With ZeroMQ, in a thread and by the real clock: what is asserted does not depend on time.


@contextmanager
def running(bandwidth: float, workers: int, servers: list[str]) -> Iterator[LinkRelay]:
    relay, over = LinkRelay(EmulatedNetwork(bandwidth, 0.0), workers, servers, time.monotonic), threading.Event()

    def relaying() -> None:
        while not over.is_set():
            relay.turn(0.01)

    thread = threading.Thread(target=relaying)
    thread.start()
    try:
        yield relay
    finally:
        over.set()
        thread.join()
        relay.close()


def test_a_channel_to_a_server_by_way_of_the_relay(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as folder, running(1e9, 1, [f"{folder}/s"]) as relay:
        keys, pool = make_keys(), Pool()
        endpoint, poller = ZmqEndpoint(f"ipc://{folder}/s", keys, pool, 1 << 40), Poller()
        endpoint.attach(poller)
        channel = connect(f"tcp://{server_name(0)}:1", "worker", keys.workers, pool, proxy=relay.proxies[0])
        try:
            sent = numpy.frombuffer(some(3_000_000, 5), dtype=numpy.uint8)
            channel.send(b"header", [sent])
            received = None
            while received is None:
                received = next(iter(endpoint.handle(poller.poll(1000))), None)
            assert (received.header, bytes(received.buffers[0])) == (b"header", bytes(sent))
            received.peer.send(b"back", [received.buffers[0]])
            answer: tuple[bytes, list[Bytes]] | None = None
            while answer is None:
                channel.pollable().poll(1000)
                answer = channel.receive()
            assert (answer[0], bytes(answer[1][0])) == (b"back", bytes(sent))
            assert channel.moved() >= 6_000_000
        finally:
            channel.close()
            endpoint.close()


def test_ranks_of_an_emulated_network_are_hosts_of_their_own() -> None:
    """No memory is shared; their all-reduce gives the sum."""
    with running(1e9, 3, []) as relay:
        store, keys = Shelf(), make_keys().workers
        worlds: dict[int, World] = {}
        sums: dict[int, torch.Tensor] = {}

        def work(rank: int) -> None:
            world = worlds[rank] = open_by_store(
                store, rank, 3, "", keys, emulated=EmulatedHost(worker_name(rank), relay.proxies[rank])
            )
            tensor = torch.arange(100_000.0) * (rank + 1)
            world.all_ranks.all_reduce([tensor]).wait()
            sums[rank] = tensor

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        try:
            assert [world.hosts for world in worlds.values()] == [((0,), (1,), (2,))] * 3
            assert all(torch.equal(sums[rank], torch.arange(100_000.0) * 6) for rank in range(3))
            sent = [sum(link.payload_sent for link in world.engine.messages.links.values()) for world in worlds.values()]
            assert min(sent) >= 400_000 * 4 / 3 - 4  # of a ring: what would go through shared memory is not sent
        finally:
            for world in worlds.values():
                world.close()


def test_torch_collectives_of_other_back_ends_are_refused() -> None:
    session = Session(None, JobFacts(2, (), link=(1e6, 0.0)), 0)
    session.use(open_in_threads(1)[0])
    with as_current(session), pytest.raises(UsageError, match="--link does not slow; use 'auto'"):
        all_reduce(torch.ones(1), algorithm="native")


def test_the_job_file_has_the_emulated_network(tmp_path: Path) -> None:
    facts = JobFacts(2, ("tcp://server-0:1",), link=(12.5e6, 0.005), proxies={0: "127.0.0.1:1", 1: "127.0.0.1:2"})
    facts.write(tmp_path / "job")
    read = read_job(tmp_path / "job")
    assert read == facts
    assert (read.emulated_host(1), read.emulated_host(2)) == (EmulatedHost("worker-1", "127.0.0.1:2"), None)

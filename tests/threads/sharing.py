"""Two ends that share memory, and a look afterwards whether any of it is left."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wires import Client, Wire, filled

from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Peer
from polytempo.transport.connect import LIMIT
from polytempo.transport.local_peers import LocalPeers
from polytempo.transport.shared_memory import SHARE_FROM, SharedMemoryRegistry
from polytempo.transport.stream import StreamChannel

PATIENCE = 20.0
SIZE = 5 * SHARE_FROM + 8


def mapped() -> int:
    """So many mappings of shared memory this process has."""
    return Path("/proc/self/maps").read_text().count("/memfd:")


def descriptors() -> int:
    return sum(link_of(name).startswith("/memfd:") for name in os.listdir("/proc/self/fd"))


def link_of(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # the one with which the directory was read
        return ""


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    before = mapped(), descriptors()
    yield
    if mapped() > before[0] or descriptors() > before[1]:
        gc.collect()
    assert mapped() <= before[0]
    assert descriptors() <= before[1]


class Pair(Wire):
    """An endpoint and channels that all have something to share."""

    def __init__(self, limit: int = 1 << 40) -> None:
        super().__init__("ipc", limit)
        self.registry = self.pool.registry = SharedMemoryRegistry()

    def join(self) -> tuple[StreamChannel, Peer]:
        """A new channel, and the endpoint's side of it."""
        channel = StreamChannel(self.path, Pool(SharedMemoryRegistry()), LIMIT)
        self.channels.append(channel)
        channel.send(b"hello")
        count = len(self.received)
        assert self.serve(lambda: len(self.received) > count), "nobody came"
        return channel, self.received.pop().peer

    def close(self) -> None:
        """End everything, and hold nothing: pytest keeps what a fixture gave for longer."""
        super().close()
        vars(self).clear()

    def lent(self, peer: Peer, *buffers: Bytes) -> list[int]:
        """Send on loan; the list has one entry once it is back."""
        back: list[int] = []
        peer.send(b"values", buffers, lambda: back.append(1))
        return back


@pytest.fixture
def pair(nothing_is_left: None) -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def shared(registry: SharedMemoryRegistry | None, size: int = SIZE, seed: int = 0) -> Bytes:
    assert registry is not None
    memory = registry.allocate(size)
    memory[:] = filled(size, seed)
    return memory


# Peers.


class Place:
    """A directory, and everybody who listens there."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(dir="/tmp", prefix="pt-")
        self.all_peers: dict[int, LocalPeers] = {}

    def open(self, *ranks: int) -> list[LocalPeers]:
        self.all_peers.update({rank: LocalPeers(self.directory, rank) for rank in ranks})
        return [self.all_peers[rank] for rank in ranks]

    def met(self, count: int) -> list[LocalPeers]:
        """So many, all connected."""
        all_peers = self.open(*range(count))
        together([lambda m=m: m.meet(range(count)) for m in all_peers])
        return all_peers

    def close(self) -> None:
        for peers in self.all_peers.values():
            peers.close()
        left = os.listdir(self.directory)
        shutil.rmtree(self.directory)
        self.all_peers.clear()
        assert left == []


def together(works: list[Callable[[], object]]) -> list[object]:
    """All at once, each in a thread of its own."""
    clients = [Client(work) for work in works]
    for client in clients:
        client.join(PATIENCE)
        assert client.over(), "somebody still waits"
        if client.error is not None:
            raise client.error
    return [client.result for client in clients]


@pytest.fixture
def place(nothing_is_left: None) -> Iterator[Place]:
    made = Place()
    yield made
    made.close()

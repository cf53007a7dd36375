"""One endpoint and its channels, over each way to travel: what is written once is tested three times."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import zmq

from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Channel, Closed, Endpoint, Received
from polytempo.transport.connect import connect
from polytempo.transport.keys import JobKeys, WorkerKeys, make_keys
from polytempo.transport.memory import MemoryChannel, MemoryEndpoint
from polytempo.transport.stream import StreamEndpoint
from polytempo.transport.zeromq import ZmqEndpoint

PATIENCE = 10.0
STRANGER_LIMIT = 1000

Message = tuple[bytes, list[Bytes]]


class Wire:
    """An endpoint that this thread drives."""

    def __init__(self, scheme: str, limit: int = 1 << 40) -> None:
        self.scheme = scheme
        self.pool = Pool()
        self.keys: JobKeys | None = make_keys() if scheme == "tcp" else None
        self.directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="pt-"))  # a socket's path has at most 107 characters
        self.path = str(self.directory / "s")
        self.endpoint = self._endpoint(limit)
        self.poller = zmq.Poller()
        self.endpoint.attach(self.poller)
        self.received: list[Received] = []
        self.closed: list[Closed] = []
        self.channels: list[Channel] = []
        self.on_message: Callable[[Received], None] = lambda received: None

    def _endpoint(self, limit: int) -> Endpoint:
        if self.scheme == "memory":
            return MemoryEndpoint("here")
        if self.scheme == "ipc":
            return StreamEndpoint(self.path, self.pool, limit)
        return ZmqEndpoint("tcp://127.0.0.1:*", self.keys, self.pool, limit)

    def connect(self, name: str = "client") -> Channel:
        return self.connect_with(self.keys.workers if self.keys else None, name)

    def connect_with(self, keys: WorkerKeys | None, name: str = "client") -> Channel:
        if isinstance(self.endpoint, MemoryEndpoint):
            channel: Channel = MemoryChannel(self.endpoint)
        else:
            channel = connect(self.endpoint.address, name, keys, Pool())
        self.channels.append(channel)
        return channel

    def serve(self, until: Callable[[], Any], seconds: float = PATIENCE) -> bool:
        """Drive the endpoint until something is so; False when it is not so in time."""
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                return False
            for event in self.endpoint.handle(dict(self.poller.poll(20))):
                if isinstance(event, Received):
                    self.received.append(event)
                    self.on_message(event)
                else:
                    self.closed.append(event)
        return True

    def close(self) -> None:
        closers = [threading.Thread(target=channel.close) for channel in self.channels]  # each may linger
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        self.endpoint.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class Client(threading.Thread):
    """Works on a channel in a thread of its own: sending may wait until the endpoint is driven."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001  it is looked at by the test
            self.error = error

    def over(self) -> bool:
        return not self.is_alive()


def hear(channel: Channel, seconds: float = PATIENCE) -> Message:
    """The next message."""
    poller = zmq.Poller()
    poller.register(channel.pollable(), zmq.POLLIN)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        received = channel.receive()
        if received is not None:
            return received
        poller.poll(50)
    raise TimeoutError("no message came")


def filled(size: int, seed: int = 0) -> Bytes:
    return numpy.random.default_rng(seed).integers(0, 256, size, dtype=numpy.uint8)


def same(ours: Sequence[Bytes], theirs: Sequence[Bytes]) -> bool:
    return len(ours) == len(theirs) and all(numpy.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))

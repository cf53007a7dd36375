"""A cable that carries so many bytes a second each way, and counts them; a job whose workers are behind it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from polytempo.client.client import Client
from polytempo.protocol.messages import STRANGER_LIMIT
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Endpoint
from polytempo.transport.connect import connect
from polytempo.transport.stream import StreamEndpoint
from polytempo.transport.zeromq import ZmqEndpoint

CHUNK = 8 << 10
#: What may lie in the kernel between two ends of the cable, so that who sends feels how slow it is.
BUFFER = 16 << 10


class Cable:
    """Passes on what comes to `address`, at `rate` bytes a second, to where `inner` listens."""

    def __init__(self, inner: str, rate: float, directory: Path) -> None:
        self.rate = rate
        self.up = self.down = 0
        self._scheme, _, self._target = inner.partition("://")
        family = socket.AF_UNIX if self._scheme == "ipc" else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self._listener.bind(str(directory / "cable") if self._scheme == "ipc" else ("127.0.0.1", 0))
        self._listener.listen()
        name = self._listener.getsockname()
        self.address = f"ipc://{name}" if self._scheme == "ipc" else f"tcp://127.0.0.1:{name[1]}"
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(self._listener.family, socket.SOCK_STREAM)
            for end in (near, far):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            host, _, port = self._target.rpartition(":")
            far.connect(self._target if self._scheme == "ipc" else (host, int(port)))
            self._ends += [near, far]
            self._start(self._carry, near, far, "up")
            self._start(self._carry, far, near, "down")

    def _carry(self, source: socket.socket, target: socket.socket, way: str) -> None:
        try:
            while data := source.recv(CHUNK):
                setattr(self, way, getattr(self, way) + len(data))
                time.sleep(len(data) / self.rate)  # the cable itself: what it carries takes so long
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        """Cut it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in self._ends:
            end.close()


class SlowJob(ThreadJob):
    """A job whose workers reach the servers over slow cables. Servers and launcher are near each other."""

    def __init__(self, scheme: str, rate: float, *arguments: Any, **options: Any) -> None:
        self.scheme = scheme
        self._doors: list[Endpoint] = []
        super().__init__(*arguments, **options)
        self.cables = [Cable(door.address, rate, self._place(f"cable-{i}")) for i, door in enumerate(self._doors)]

    def _place(self, name: str) -> Path:
        path = self._directory / name
        path.mkdir()
        return path

    def _more_endpoints(self, index: int, pool: Pool) -> list[Endpoint]:
        if self.scheme == "ipc":
            self._doors.append(StreamEndpoint(str(self._directory / f"door-{index}"), pool, STRANGER_LIMIT))
        else:
            self._doors.append(ZmqEndpoint("tcp://127.0.0.1:*", None, pool, STRANGER_LIMIT))
        return self._doors[-1:]

    def session(self, rank: int) -> Session:
        pool = Pool()
        channels = [connect(cable.address, f"worker-{rank}", None, pool, 10.0) for cable in self.cables]
        return Session(Client(channels, rank, self.job.incarnation, pool, self.retry), self.job, rank)

    def close(self, exit_status: int = 0) -> None:
        try:
            super().close(exit_status)
        finally:
            for cable in self.cables:
                cable.close()

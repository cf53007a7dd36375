"""Queues inside one process, for jobs in threads (tests, notebooks, a job of one): `memory://` to a server, and links.

Buffers are copied on the way, as on every other transport, so that no memory is shared by accident.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes, Channel, Closed, Endpoint, OnSent, Peer, Poller, Received
from polytempo.transport.peer_link import CLOSED, LinkMessage, OnLinkSent, PeerLink, Receiver

QueuedMessage = tuple[bytes, list[Bytes]]


class WakeUp:
    """Wakes a poller: a number in the kernel that any thread may raise."""

    def __init__(self) -> None:
        self.fileno = os.eventfd(0, os.EFD_NONBLOCK)
        self._open = True
        self._lock = threading.Lock()  # once closed, the number may be another file's

    def ring(self) -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self.fileno, 1)

    def silence(self) -> None:
        """Reset it. Once closed it reads nothing: its descriptor may be another's by now, whose wake-up would be lost."""
        with self._lock, suppress(BlockingIOError):
            if self._open:
                os.eventfd_read(self.fileno)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fileno)


class MemoryPeer(Peer):
    """The endpoint's side of a connection."""

    def __init__(self, channel: MemoryChannel) -> None:
        super().__init__(f"thread {id(channel):x}", 1 << 62)
        self._channel = channel

    def send(self, header: bytes, buffers: Sequence[Bytes] = (), done: OnSent | None = None) -> None:
        self._channel.inbox.append((header, [buffer.copy() for buffer in buffers]))
        self._channel.wake_up.ring()
        if done:
            done()

    def close(self) -> None:
        self._channel.turned_away = True
        self._channel.wake_up.ring()


class MemoryEndpoint(Endpoint):
    """Takes connections from threads of this process: hand it to `MemoryChannel`."""

    def __init__(self, name: str) -> None:
        self.address = f"memory://{name}"
        self.wake_up = WakeUp()
        self.inbox: deque[Received | Closed] = deque()
        self.channels: list[MemoryChannel] = []
        self.closed = False

    def attach(self, poller: Poller) -> None:
        poller.register(self.wake_up.fileno, zmq.POLLIN)

    def handle(self, ready: dict[Any, int]) -> list[Received | Closed]:
        if self.wake_up.fileno in ready:
            self.wake_up.silence()
        return [self.inbox.popleft() for _ in range(len(self.inbox))]

    def close(self) -> None:
        self.closed = True
        for channel in self.channels.copy():  # a poll there returns, as at the end of a socket
            channel.wake_up.ring()
        self.wake_up.close()


class MemoryChannel(Channel):
    """A connection to an endpoint of this process."""

    def __init__(self, endpoint: MemoryEndpoint) -> None:
        self._endpoint = endpoint
        self.inbox: deque[QueuedMessage] = deque()
        self.wake_up = WakeUp()
        self.turned_away = False
        self._peer = MemoryPeer(self)
        endpoint.channels.append(self)

    def send(self, header: bytes, buffers: Sequence[Bytes] = ()) -> int:
        if self._endpoint.closed or self.turned_away:
            raise PeerError(f"the server at {self._endpoint.address} is gone")
        self._endpoint.inbox.append(Received(self._peer, header, [buffer.copy() for buffer in buffers]))
        self._endpoint.wake_up.ring()
        return len(header) + sum(buffer.nbytes for buffer in buffers)

    def receive(self) -> QueuedMessage | None:
        if self.inbox:
            return self.inbox.popleft()
        self.wake_up.silence()
        if self.inbox:
            return self.inbox.popleft()
        if self._endpoint.closed or self.turned_away:
            raise PeerError(f"the server at {self._endpoint.address} is gone")
        return None

    def pollable(self) -> int:
        return self.wake_up.fileno

    def close(self) -> None:
        if not self._endpoint.closed:
            self._endpoint.inbox.append(Closed(self._peer))
            self._endpoint.wake_up.ring()
        with suppress(ValueError):  # it was closed before
            self._endpoint.channels.remove(self)
        self.wake_up.close()


class MemoryLink(PeerLink):
    """One end; `pair` makes both."""

    def __init__(self, rank: int, receiver: Receiver) -> None:
        super().__init__(rank, receiver)
        self._wake_up = WakeUp()
        self._inbox: deque[tuple[LinkMessage, Bytes | None] | None] = deque()  # None: the other end is closed
        self._other: MemoryLink = self
        self._poller: Poller | None = None

    @staticmethod
    def pair(low: tuple[int, Receiver], high: tuple[int, Receiver]) -> tuple[MemoryLink, MemoryLink]:
        """Two ends: (rank, receiver) of each process's side."""
        one, two = MemoryLink(high[0], low[1]), MemoryLink(low[0], high[1])
        one._other, two._other = two, one
        return one, two

    def _send(self, message: LinkMessage, head: bytes, payload: Bytes | None, sent: OnLinkSent | None) -> None:
        if self._other.open:
            self._give((message, payload.copy() if payload is not None else None))
        else:
            self._take_all()  # what it said before it closed counts
        if sent:
            sent()

    def _give(self, item: tuple[LinkMessage, Bytes | None] | None) -> None:
        self._other._inbox.append(item)
        self._other._wake_up.ring()

    def attach(self, poller: Poller) -> None:
        self._poller = poller
        poller.register(self._wake_up.fileno, zmq.POLLIN)

    def handle(self, ready: dict[Any, int]) -> None:
        if not self.open or self._wake_up.fileno not in ready:
            return
        self._wake_up.silence()
        self._take_all()

    def _take_all(self) -> None:
        while self._inbox and self.open:
            item = self._inbox.popleft()
            if item is None:
                self._lost(CLOSED)
                return
            message, payload = item
            if payload is not None and payload.nbytes:
                room = self.receiver.room(self.rank, message, payload.nbytes)
                room[:] = payload
                payload = room
            self.receiver.arrived(self.rank, message, payload if payload is not None and payload.nbytes else None)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._give(None)
            if self._poller is not None:
                self._poller.unregister(self._wake_up.fileno)
            self._wake_up.close()

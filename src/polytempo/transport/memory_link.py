"""A link between two threads of a process: queues, and a wake-up for the other end's poller. Payloads are copied."""

from __future__ import annotations

from collections import deque
from typing import Any

import zmq

from polytempo.transport.channel import Bytes
from polytempo.transport.framing import HEAD
from polytempo.transport.memory import WakeUp
from polytempo.transport.peer_link import LinkMessage, OnLinkSent, PeerLink, Receiver
from polytempo.transport.poller import Poller
from polytempo.transport.shared_memory import Segment

Item = tuple[bytes, Segment | None, Bytes | None]


class MemoryLink(PeerLink):
    """One end; `pair` makes both."""

    def __init__(self, rank: int, receiver: Receiver) -> None:
        super().__init__(rank, receiver)
        self._wake_up = WakeUp()
        self._inbox: deque[Item | None] = deque()  # None: the other end is closed
        self._other: MemoryLink = self
        self._poller: Poller | None = None

    @staticmethod
    def pair(low: tuple[int, Receiver], high: tuple[int, Receiver]) -> tuple[MemoryLink, MemoryLink]:
        """Two ends: (rank, receiver) of each process's side."""
        one, two = MemoryLink(high[0], low[1]), MemoryLink(low[0], high[1])
        one._other, two._other = two, one
        return one, two

    def _send(self, head: bytes, segment: Segment | None, payload: Bytes | None, sent: OnLinkSent | None) -> None:
        if self._other.open:
            self._give((head, segment, payload.copy() if payload is not None else None))
        else:
            self._take_all()  # what it said before it closed counts
        if sent:
            sent()

    def _give(self, item: Item | None) -> None:
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
                self._lost("its connection has closed")
            else:
                self._deliver(*item)

    def _deliver(self, head: bytes, segment: Segment | None, payload: Bytes | None) -> None:
        _, kind, _, _, _, context, tag, length = HEAD.unpack_from(head)
        message = LinkMessage(kind, context, tag, head[HEAD.size :], segment)
        if payload is not None and length:
            room = self.receiver.room(self.rank, message, length)
            room[:] = payload
            payload = room
        self.receiver.arrived(self.rank, message, payload if length else None)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._give(None)
            if self._poller is not None:
                self._poller.unregister(self._wake_up.fileno)
            self._wake_up.close()

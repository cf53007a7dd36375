"""The interface of all transports to a server, and the addresses that select one.

    ipc:///path      Unix stream sockets on one host        `stream.py`
    tcp://host:port  ZeroMQ with CURVE keys                 `zeromq.py`
    memory://name    queues inside one process              `memory.py`

An *endpoint* receives from many peers and is driven by one thread, which asks a poller what is ready. A *channel* is the
other end: one connection to one endpoint. A message is a header and any number of buffers.

Where only descriptors are watched, the `Poller` asks the kernel directly: that is half the price, and on one host the rule.
"""

from __future__ import annotations

import select
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import zmq

from polytempo.errors import UsageError

#: What a poller is asked for and says, as plain numbers: they are looked at often.
IN, OUT = int(zmq.POLLIN | zmq.POLLERR), int(zmq.POLLOUT)


class Poller:
    """One way to wait for descriptors and ZeroMQ sockets, with `zmq.Poller`'s interface and flags."""

    def __init__(self) -> None:
        self._plain = select.poll()
        self._zmq = zmq.Poller()
        self._sockets: set[Any] = set()

    def register(self, what: Any, events: int) -> None:
        self._zmq.register(what, events)
        if isinstance(what, int):
            wanted = (select.POLLIN if events & zmq.POLLIN else 0) | (select.POLLOUT if events & zmq.POLLOUT else 0)
            self._plain.register(what, wanted)
        else:
            self._sockets.add(what)

    def unregister(self, what: Any) -> None:
        self._zmq.unregister(what)
        if isinstance(what, int):
            self._plain.unregister(what)
        else:
            self._sockets.discard(what)

    def poll(self, milliseconds: int | None = None) -> dict[Any, int]:
        """What is ready, and for what, waiting at most this long for the first."""
        if self._sockets:
            return dict(self._zmq.poll(milliseconds))
        return {descriptor: _flags(state) for descriptor, state in self._plain.poll(milliseconds)}


def _flags(state: int) -> int:
    if state == select.POLLIN:
        return 1  # zmq.POLLIN, without asking its enum
    known = (zmq.POLLIN if state & select.POLLIN else 0) | (zmq.POLLOUT if state & select.POLLOUT else 0)
    return int(known | (zmq.POLLERR if state & ~(select.POLLIN | select.POLLOUT) else 0))


Bytes = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]
OnSent = Callable[[], None]

#: More buffers than this in one message are refused: one for each dtype, or a few for each run of an optimizer's state.
BUFFER_COUNT_LIMIT = 1 << 20


class Peer(ABC):
    """A connection to an endpoint. `who` is what the endpoint's owner knows about it; `limit`: the bytes of a message."""

    here = True  #: a process of this user on this host, as the kernel says, or a thread of this process

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.who: Any = None

    @abstractmethod
    def send(self, header: bytes, buffers: Sequence[Bytes] = (), done: OnSent | None = None) -> None:
        """Send without waiting. The buffers must not change until `done` is called."""

    @abstractmethod
    def close(self) -> None:
        """End the connection."""


@dataclass
class Received:
    """A whole message."""

    peer: Peer
    header: bytes
    buffers: list[Bytes] = field(default_factory=list)


@dataclass
class Closed:
    """A peer is gone; `reason` is empty when it closed the connection itself."""

    peer: Peer
    reason: str = ""


class Endpoint(ABC):
    """Receives from many peers. Everything but `wake` is called by one thread."""

    address: str

    @abstractmethod
    def attach(self, poller: Poller) -> None:
        """Tell the poller what to watch, from now on."""

    @abstractmethod
    def handle(self, ready: dict[Any, int]) -> list[Received | Closed]:
        """Take what is ready."""

    @abstractmethod
    def close(self) -> None:
        """End all connections and leave nothing behind."""


class Channel(ABC):
    """A connection to an endpoint."""

    @abstractmethod
    def send(self, header: bytes, buffers: Sequence[Bytes] = ()) -> int:
        """Send, and return the bytes it took. The buffers must not change until they are answered."""

    @abstractmethod
    def receive(self) -> tuple[bytes, list[Bytes]] | None:
        """The next message if one is there."""

    def may_have_more(self) -> bool:
        """After a message: whether another may be there that no poller reports."""
        return True

    def moved(self) -> int:
        """A number that changes when bytes move, either way, also those of messages that are only partly through. Where
        messages come and go whole it need not change."""
        return 0

    @abstractmethod
    def pollable(self) -> Any:
        """What a poller watches to know that a message is there."""

    @abstractmethod
    def close(self) -> None:
        """End the connection."""


def scheme_of(address: str) -> str:
    """The transport of an address; refused when unknown."""
    scheme, separator, rest = address.partition("://")
    if not separator or not rest or scheme not in ("ipc", "tcp", "memory"):
        raise UsageError(f"expected an address such as ipc:///path or tcp://host:port, got {address!r}")
    return scheme

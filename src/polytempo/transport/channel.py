"""The interface of all transports to a server, and the addresses that select one.

    ipc:///path      Unix stream sockets on one host        `stream.py`
    tcp://host:port  ZeroMQ with CURVE keys                 `zeromq.py`
    memory://name    queues inside one process              `memory.py`

An *endpoint* receives from many peers and is driven by one thread, which asks a poller what is ready. A *channel* is the
other end: one connection to one endpoint. A message is a header and any number of buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from polytempo.errors import UsageError
from polytempo.transport.poller import Poller

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

"""A link: ordered messages between two ranks, which never block the sender. All kinds of links carry one message format.

    head with kind, context, tag and lengths (`framing.py`) | meta | payload

What arrives is handed to a *receiver*, which is asked for the memory of a payload as soon as its head is there: what is
expected goes straight to where it belongs. The owner of the receiver drives the link: it polls what the link registers.

    `stream.py`   Unix sockets, between processes of one host; segments of shared memory are handed over here
    `zeromq.py`   ZeroMQ with CURVE keys, between hosts
    `memory.py`   queues, between threads
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes, Poller
from polytempo.transport.framing import HEAD, MAGIC, FrameHead
from polytempo.transport.shared_memory import Segment

#: DATA is matched by context and tag; NOTE says "so far"; CALL says what is called; SEGMENT hands memory over; FAILED ends a
#: context with a text; BYE comes before an orderly end. HANDLE says how to map device memory, DEVICE_NOTE is a NOTE
#: about what lies there, and ON_HOST says of a call that it goes by host memory. GIVEN_UP: the sender goes on without you.
#: WAITS says in which calls a rank waits for long.
DATA, NOTE, CALL, SEGMENT, FAILED, BYE, HANDLE, DEVICE_NOTE, ON_HOST, GIVEN_UP, WAITS, KINDS = range(12)
#: The largest meta and payload of a message, in bytes.
META_LIMIT = (1 << 16) - 1
PAYLOAD_LIMIT = 1 << 46

NO_MESSAGE = "it sent something that is no message"
CLOSED = "its connection has closed"

OnLinkSent = Callable[[], object]


@dataclass(slots=True)
class LinkMessage:
    """One message, without its payload."""

    kind: int
    context: int
    tag: int
    meta: bytes = b""
    segment: Segment | None = None

    def head(self, length: int) -> bytes:
        """What goes in front of the payload."""
        new = self.segment is not None
        return HEAD.pack(MAGIC, self.kind, new, len(self.meta), length > 0, self.context, self.tag, length) + self.meta


def check_link_head(head: FrameHead) -> None:
    """Refuse a head that no rank sends."""
    known = head.magic == MAGIC and head.kind < KINDS and head.segments <= 1
    if not known or head.meta_length > META_LIMIT or head.length > PAYLOAD_LIMIT:
        raise PeerError(NO_MESSAGE)


class Receiver(Protocol):
    """What gets the messages that arrive."""

    def room(self, source: int, message: LinkMessage, length: int) -> Bytes:
        """Memory for a payload that is about to arrive."""
        ...

    def arrived(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        """A whole message is there."""
        ...

    def gone(self, source: int, reason: str) -> None:
        """Nothing more will come from there."""
        ...


class PeerLink(ABC):
    """This end of a link."""

    def __init__(self, rank: int, receiver: Receiver) -> None:
        self.rank = rank  #: of the other end
        self.receiver = receiver
        self.payload_sent = self.overhead_sent = 0
        self.open = True
        self.silent = False  #: it has ended because nothing was heard of the other end, which may be alive

    def send(self, message: LinkMessage, payload: Bytes | None = None, sent: OnLinkSent | None = None) -> None:
        """Send without waiting. The payload must not change until `sent` is called."""
        if not self.open:
            if sent:
                sent()
            return
        length = payload.nbytes if payload is not None else 0
        head = message.head(length)
        self.payload_sent += length
        self.overhead_sent += len(head)
        self._send(message, head, payload, sent)

    @abstractmethod
    def _send(self, message: LinkMessage, head: bytes, payload: Bytes | None, sent: OnLinkSent | None) -> None: ...

    @abstractmethod
    def attach(self, poller: Poller) -> None:
        """Tell the poller what to watch from now on."""

    @abstractmethod
    def handle(self, ready: dict[Any, int]) -> None:
        """Take and send what can be taken and sent now."""

    @abstractmethod
    def close(self) -> None:
        """End it, after what is left was sent if that takes no more than a moment."""

    def abandon(self) -> None:
        """In a child after a fork: let go of what belongs to the parent."""

    def _lost(self, reason: str) -> None:
        if self.open:
            self.close()
            self.receiver.gone(self.rank, reason)

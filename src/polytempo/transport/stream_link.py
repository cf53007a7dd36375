"""A link over a Unix stream socket. The kernel says when the other end is gone, however its process ended."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes, Poller
from polytempo.transport.framing import FrameDecoder, FrameOutbox
from polytempo.transport.peer_link import KINDS, META_LIMIT, PAYLOAD_LIMIT, LinkMessage, OnLinkSent, PeerLink, Receiver
from polytempo.transport.shared_memory import Segment
from polytempo.transport.stream import IN, OUT, widen

#: Payloads as small as this are copied behind their head and sent with it.
JOIN_UP_TO = 16 << 10
#: How long a closing link waits for the other end to take what is left.
LAST_WORDS = 1.0
CLOSED = "its connection has closed"


class LinkDecoder(FrameDecoder[tuple[LinkMessage, Bytes | None]]):
    """Takes link messages apart; the receiver has the memory of their payloads."""

    gulp = 4096  # a little, because what belongs to a payload is copied once more
    ancillary = socket.CMSG_SPACE(16 * 4)
    not_a_frame = "it sent something that is no message"

    def __init__(self, rank: int, receiver: Receiver) -> None:
        super().__init__()
        self.ahead = True
        self._rank, self._receiver = rank, receiver

    def check(self, kind: int, segments: int, meta_length: int, buffers: int, length: int) -> None:
        if kind >= KINDS or segments > 1 or meta_length > META_LIMIT or length > PAYLOAD_LIMIT:
            raise PeerError(self.not_a_frame)

    def begin(
        self, kind: int, segments: int, context: int, tag: int, meta: bytes, buffers: int, length: int
    ) -> tuple[tuple[LinkMessage, Bytes | None], list[memoryview]]:
        if kind >= KINDS or segments or length:
            self.check(kind, segments, len(meta), buffers, length)
        message = LinkMessage(kind, context, tag, meta, self.open_segments(1)[0] if segments else None)
        if not length:
            return (message, None), []
        payload = self._receiver.room(self._rank, message, length)
        return (message, payload), [payload.data]


class StreamLink(PeerLink):
    """One end of a connected socket."""

    def __init__(self, rank: int, receiver: Receiver, sock: socket.socket) -> None:
        super().__init__(rank, receiver)
        sock.setblocking(False)
        widen(sock)
        self._sock = sock
        self.fileno = sock.fileno()
        self._poller: Poller | None = None
        self._outbox = FrameOutbox()
        self._decoder = LinkDecoder(rank, receiver)
        self._writing = False

    # Sending.

    def _send(self, head: bytes, segment: Segment | None, payload: Bytes | None, sent: OnLinkSent | None) -> None:
        if payload is None or payload.nbytes <= JOIN_UP_TO:
            whole = head if payload is None else head + payload.tobytes()
            count = 0
            if segment is None and not self._outbox:
                try:  # noqa: SIM105  suppress() costs more than all the rest
                    count = self._sock.send(whole)
                except OSError:  # the queue meets it again
                    pass
                if count == len(whole):
                    if sent:
                        sent()
                    return
            self._outbox.append((memoryview(whole)[count:], (segment,) if segment is not None else ()), sent)
        else:
            self._outbox.append((memoryview(head), (segment,) if segment is not None else ()))
            self._outbox.append((payload.data.cast("B"), ()), sent)
        if not self._writing:
            self._flush()

    def _flush(self) -> None:
        try:
            self._outbox.flush(self._sock)
        except OSError as error:  # the other end takes nothing more; what it sent before it went still counts
            self.drain()
            return self._lost(f"it takes nothing more: {error.strerror or error}")
        return self._watch(bool(self._outbox))

    def _watch(self, writing: bool) -> None:
        if writing != self._writing and self._poller is not None and self.open:
            self._writing = writing
            self._poller.register(self.fileno, IN | OUT if writing else IN)

    # Receiving.

    def attach(self, poller: Poller) -> None:
        self._poller = poller
        poller.register(self.fileno, IN)
        self._watch(bool(self._outbox))

    def handle(self, ready: dict[Any, int]) -> None:
        state = ready.get(self.fileno, 0)
        if state & OUT:
            self._flush()
        if state & ~OUT and self.open:
            self.read()

    def drain(self) -> None:
        while self.read():
            pass

    def read(self) -> bool:
        """Take what is there; whether there may be more."""
        decoder = self._decoder
        try:
            while self.open:
                message, payload = decoder.read(self._sock)
                self.receiver.arrived(self.rank, message, payload)
                if not decoder.is_ahead():
                    return self.open
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            self._lost(CLOSED)
        except PeerError as error:
            self._lost(str(error))
        return False

    # The end.

    def close(self) -> None:
        if not self.open:
            return
        if self._outbox:
            self._sock.settimeout(LAST_WORDS)
            with suppress(OSError):  # the other end is gone
                self._outbox.flush(self._sock)
        self.open = False
        if self._poller is not None:
            self._poller.unregister(self.fileno)
        self.abandon()
        self._outbox.drop()

    def abandon(self) -> None:
        self._sock.close()
        self._decoder.close()

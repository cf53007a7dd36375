"""A link over a Unix stream socket. The kernel says when the other end is gone, however its process ended."""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import Any

from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes
from polytempo.transport.peer_link import HEAD, KINDS, PAYLOAD_LIMIT, SEGMENT, LinkMessage, OnLinkSent, PeerLink, Receiver
from polytempo.transport.poller import Poller
from polytempo.transport.shared_memory import Segment, open_segment
from polytempo.transport.stream import IN, OUT
from polytempo.transport.unix_socket import widen

#: Read at once where a head is expected: a little, because what belongs to a payload is copied once more.
GULP = 4096
ANCILLARY = socket.CMSG_SPACE(16 * 4)
#: Payloads as small as this are copied behind their head and sent with it.
JOIN_UP_TO = 16 << 10
#: How long a closing link waits for the other end to take what is left.
LAST_WORDS = 1.0
CLOSED = "its connection has closed"


class StreamLink(PeerLink):
    """One end of a connected socket."""

    def __init__(self, rank: int, receiver: Receiver, sock: socket.socket) -> None:
        super().__init__(rank, receiver)
        sock.setblocking(False)
        widen(sock)
        self._sock = sock
        self.fileno = sock.fileno()
        self._poller: Poller | None = None
        self._outbox: deque[tuple[memoryview, Segment | None, OnLinkSent | None]] = deque()
        self._writing = False
        self._rest = b""
        self._descriptors: list[int] = []
        self._filling: tuple[LinkMessage, Bytes, int] | None = (
            None  # a payload that is not whole, and how much of it is there
        )

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
            self._outbox.append((memoryview(whole)[count:], segment, sent))
        else:
            self._outbox.append((memoryview(head), segment, None))
            self._outbox.append((payload.data.cast("B"), None, sent))
        if not self._writing:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                data, segment, sent = self._outbox[0]
                if segment is not None:
                    count = socket.send_fds(self._sock, [data], [segment.descriptor])
                else:
                    count = self._sock.send(data)
                if count < len(data):
                    self._outbox[0] = data[count:], None, sent
                    continue
                self._outbox.popleft()
                if sent:
                    sent()
        except BlockingIOError:
            pass
        except OSError as error:
            return self._broken(error)
        return self._watch(bool(self._outbox))

    def _broken(self, error: OSError) -> None:
        """The other end takes nothing more. What it sent before it went still counts."""
        self.drain()
        self._lost(f"it takes nothing more: {error.strerror or error}")

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
        """Take everything that the other end has sent so far."""
        while self.read():
            pass

    def read(self) -> bool:
        """Take what is there; whether there may be more."""
        try:
            if self._filling is not None:
                self._fill()
            else:
                self._take()
            return self.open
        except BlockingIOError:
            pass
        except (OSError, PeerError) as error:
            self._lost(str(error) if isinstance(error, PeerError) else CLOSED)
        return False

    def _fill(self) -> None:
        assert self._filling is not None
        message, payload, filled = self._filling
        while filled < payload.nbytes:
            self._filling = message, payload, filled
            count = self._sock.recv_into(payload.data[filled:])
            if not count:
                raise PeerError(CLOSED)
            filled += count
        self._filling = None
        self.receiver.arrived(self.rank, message, payload)

    def _take(self) -> None:
        data, ancillary, _, _ = self._sock.recvmsg(GULP, ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        for _level, _kind, value in ancillary:
            self._descriptors += memoryview(value).cast("i").tolist()
        if not data:
            raise PeerError(CLOSED)
        if self._rest:
            data = self._rest + data
        while self.open and len(data) >= HEAD.size:
            used = self._message(data)
            if not used:
                break
            data = data[used:]
        self._rest = data

    def _message(self, data: bytes) -> int:
        """Take a message from the front; how many bytes that used, 0 when its head is not whole."""
        kind, meta_length, context, tag, length = HEAD.unpack_from(data)
        start: int = HEAD.size + meta_length
        if kind >= KINDS or length > PAYLOAD_LIMIT:
            raise PeerError("it sent something that is no message")
        if len(data) < start:
            return 0
        segment = open_segment(self._descriptors.pop(0)) if kind == SEGMENT and self._descriptors else None
        message = LinkMessage(kind, context, tag, data[HEAD.size : start], segment)
        if not length:
            self.receiver.arrived(self.rank, message, None)
            return start
        payload = self.receiver.room(self.rank, message, length)
        part = data[start : start + length]
        payload[: len(part)] = memoryview(part)
        if len(part) == length:
            self.receiver.arrived(self.rank, message, payload)
        else:
            self._filling = message, payload, len(part)
        return start + len(part)

    # The end.

    def close(self) -> None:
        if not self.open:
            return
        if self._outbox:
            self._last_words()
        self.open = False
        if self._poller is not None:
            self._poller.unregister(self.fileno)
        self.abandon()
        while self._outbox:
            sent = self._outbox.popleft()[2]
            if sent:
                sent()

    def _last_words(self) -> None:
        self._sock.settimeout(LAST_WORDS)
        try:
            while self._outbox:
                self._sock.sendall(self._outbox[0][0])
                sent = self._outbox.popleft()[2]
                if sent:
                    sent()
        except OSError:  # the other end is gone
            pass

    def abandon(self) -> None:
        self._sock.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

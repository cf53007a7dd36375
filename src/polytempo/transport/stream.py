"""Unix stream sockets: `ipc://` in a private directory, to a server, and links between the ranks of a host.

Only this user can reach the directory, and the kernel says which user connects (SO_PEERCRED): another user's process is
turned away before a byte is read, so no cipher is needed. It also says at once when a peer is gone, however it died.
Messages are framed by `framing.py`. There is one connect loop, and one way to accept. A rank that connects to another first
sends its hello.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from polytempo.errors import PeerError
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import IN, OUT, Bytes, Channel, Closed, Endpoint, OnSent, Peer, Poller, Received
from polytempo.transport.deadline import Deadline
from polytempo.transport.framing import FrameDecoder, FrameHead, FramePiece, FrameReader, FrameWriter, Outbox, send_piece
from polytempo.transport.peer_link import (
    CLOSED,
    NO_MESSAGE,
    LinkMessage,
    OnLinkSent,
    PeerLink,
    Receiver,
    check_link_head,
)

#: The first bytes that a rank sends to another: its rank, and the number of ranks (0 where that is not fixed).
HELLO = struct.Struct("<II")
HELLO_TIMEOUT = 5.0
RETRY_EVERY = 0.01
SOCKET_BUFFER = 4 << 20
#: How long an end that closes waits for the other to take what is left.
LAST_WORDS = 1.0
#: Payloads of links that are as small as this are copied behind their head and sent with it.
JOIN_UP_TO = 16 << 10


def connect_to(address: str, retry: Callable[[OSError], bool]) -> socket.socket | None:
    """Connect to a listener that may still be starting.

    Args:
        address: A path, or an abstract address.
        retry: Called after each failure; returns whether to try again, or raises.

    Returns:
        The connection; None when `retry` gave up.
    """
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(address)
            return sock
        except OSError as error:  # there is nothing to wait on before it listens
            sock.close()
            if not retry(error):
                return None
        time.sleep(RETRY_EVERY)


def accept_own(listener: socket.socket) -> socket.socket | None:
    """Accept a connection; None where it comes from another user. `OSError` where there is none."""
    sock, _ = listener.accept()
    if process_and_user(sock)[1] == os.getuid():
        return sock
    sock.close()
    return None


def accept_rank(listener: socket.socket) -> tuple[int, int, socket.socket] | None:
    """Accept a rank: its rank, the number of ranks it expects, and the connection; None for what sends no hello."""
    sock = accept_own(listener)
    if sock is None:
        return None
    sock.settimeout(HELLO_TIMEOUT)
    try:
        hello = sock.recv(HELLO.size, socket.MSG_WAITALL)
    except OSError:
        hello = b""
    if len(hello) < HELLO.size:
        sock.close()
        return None
    return (*HELLO.unpack(hello), sock)


def process_and_user(sock: socket.socket) -> tuple[int, int]:
    """Who is at the other end, as the kernel knows it."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(uid)


def widen(sock: socket.socket) -> None:
    """Enlarge the kernel's buffers of a connection."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)


# To a server.


class StreamPeer(Peer):
    """The endpoint's side of a connection."""

    def __init__(self, endpoint: StreamEndpoint, sock: socket.socket, limit: int, pool: Pool) -> None:
        super().__init__(f"connection {sock.fileno()}", limit)
        self.sock, self.fileno = sock, sock.fileno()
        self.reader = FrameReader(pool, limit)
        self.writer = FrameWriter(pool)
        self.outbox: Outbox[FramePiece] = Outbox(self.fileno, partial(send_piece, sock))
        self._endpoint = endpoint

    def send(self, header: bytes, buffers: Sequence[Bytes] = (), done: OnSent | None = None) -> None:
        pieces, done = self.writer.write(header, buffers, done)
        for piece in pieces[:-1]:
            self.outbox.append(piece)
        self.outbox.append(pieces[-1], done)
        self.flush()

    def flush(self) -> None:
        try:
            self.outbox.flush()
        except OSError:
            self.drop()

    def drop(self) -> None:
        """The peer is gone: drop what was meant for it; its leases expire."""
        self.writer.close()
        self.outbox.drop()

    def close(self) -> None:
        self._endpoint.forget(self)


class StreamEndpoint(Endpoint):
    """Listens at a path."""

    def __init__(self, path: str, pool: Pool, stranger_limit: int) -> None:
        self.address = f"ipc://{path}"
        self._path, self._pool, self._limit = path, pool, stranger_limit
        self._peers: dict[int, StreamPeer] = {}
        self._poller = Poller()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(128)
        self._listener.setblocking(False)

    def attach(self, poller: Poller) -> None:
        self._poller = poller
        poller.register(self._listener.fileno(), IN)

    def handle(self, ready: dict[Any, int]) -> list[Received | Closed]:
        events: list[Received | Closed] = []
        if self._listener.fileno() in ready:
            self._accept()
        for fileno, peer in list(self._peers.items()):
            state = ready.get(fileno, 0)
            if state & OUT:
                peer.flush()
            if state & IN:
                events += self._read(peer)
        return events

    def _accept(self) -> None:
        while True:
            try:
                sock = accept_own(self._listener)
            except OSError:
                return
            if sock is None:
                continue
            sock.setblocking(False)
            widen(sock)
            peer = StreamPeer(self, sock, self._limit, self._pool)
            self._peers[peer.fileno] = peer
            peer.outbox.attach(self._poller)

    def _read(self, peer: StreamPeer) -> list[Received | Closed]:
        events: list[Received | Closed] = []
        reason = ""
        peer.reader.limit = peer.limit
        try:
            while True:
                peer.reader.ahead = peer.who is not None  # what it may send depends on its role
                events.append(Received(peer, *peer.reader.read(peer.sock)))
                if not peer.reader.is_ahead():
                    return events  # if there is more, the poller will say so
        except BlockingIOError:
            return events
        except (EOFError, OSError):
            pass
        except PeerError as error:
            reason = str(error)
        self.forget(peer)
        return [*events, Closed(peer, reason)]

    def forget(self, peer: StreamPeer) -> None:
        self._peers.pop(peer.fileno, None)
        peer.outbox.detach()
        peer.drop()
        peer.reader.close()
        peer.sock.close()

    def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.sock.settimeout(LAST_WORDS)
            peer.flush()
            self.forget(peer)
        with suppress(KeyError):  # it was never attached
            self._poller.unregister(self._listener.fileno())
        self._listener.close()
        if os.path.exists(self._path):
            os.unlink(self._path)


class StreamChannel(Channel):
    """A connection to a path."""

    def __init__(self, path: str, pool: Pool, limit: int, timeout: float = 0.0) -> None:
        deadline = Deadline(-1, timeout, firm=True)

        def retry(error: OSError) -> bool:  # the server may still be starting
            if deadline.over or not os.path.isdir(os.path.dirname(path)):
                raise PeerError(f"cannot reach the job at ipc://{path}: {error.strerror}; has it ended?") from None
            return True

        sock = connect_to(path, retry)
        assert sock is not None
        widen(sock)
        self._sock = sock
        self._reader = FrameReader(pool, limit)
        self._reader.ahead = True
        self._writer = FrameWriter(pool)
        self._path = path
        self._sent = 0

    def send(self, header: bytes, buffers: Sequence[Bytes] = ()) -> int:
        pieces, _ = self._writer.write(header, buffers, None)
        try:
            for piece in pieces:
                left: FramePiece | None = piece
                self._sent += len(piece[0])
                while left is not None:
                    left = send_piece(self._sock, left)
        except OSError:
            raise PeerError(f"the server at ipc://{self._path} is gone") from None
        return len(header) + sum(buffer.nbytes for buffer in buffers)

    def receive(self) -> tuple[bytes, list[Bytes]] | None:
        try:
            return self._reader.read(self._sock)
        except BlockingIOError:
            return None
        except (EOFError, OSError):
            raise PeerError(f"the server at ipc://{self._path} is gone") from None

    def may_have_more(self) -> bool:
        return self._reader.is_ahead()

    def moved(self) -> int:
        unread = fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4))  # the other end has it still to take out of the kernel
        return self._reader.count + self._sent - int.from_bytes(unread, sys.byteorder)

    def pollable(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._reader.close()
        self._sock.close()


# Between ranks.


class LinkDecoder(FrameDecoder[tuple[LinkMessage, Bytes | None]]):
    """Takes link messages apart; the receiver has the memory of their payloads."""

    gulp = 4096  # a little, because what belongs to a payload is copied once more
    ancillary = socket.CMSG_SPACE(16 * 4)
    not_a_frame = NO_MESSAGE

    def __init__(self, rank: int, receiver: Receiver) -> None:
        super().__init__()
        self.ahead = True
        self._rank, self._receiver = rank, receiver

    def check(self, head: FrameHead) -> None:
        check_link_head(head)

    def begin(self, head: FrameHead, meta: bytes) -> tuple[tuple[LinkMessage, Bytes | None], list[memoryview]]:
        segment = self.open_segments(1)[0] if head.segments else None
        message = LinkMessage(head.kind, head.context, head.tag, meta, segment)
        if not head.length:
            return (message, None), []
        payload = self._receiver.room(self._rank, message, head.length)
        return (message, payload), [payload.data]


class StreamLink(PeerLink):
    """One end of a connected socket. The kernel says when the other end is gone, however its process ended."""

    def __init__(self, rank: int, receiver: Receiver, sock: socket.socket) -> None:
        super().__init__(rank, receiver)
        sock.setblocking(False)
        widen(sock)
        self._sock, self.fileno = sock, sock.fileno()
        self._outbox: Outbox[FramePiece] = Outbox(self.fileno, partial(send_piece, sock))
        self._decoder = LinkDecoder(rank, receiver)

    # Sending.

    def _send(self, message: LinkMessage, head: bytes, payload: Bytes | None, sent: OnLinkSent | None) -> None:
        new = (message.segment,) if message.segment is not None else ()
        if payload is None or payload.nbytes <= JOIN_UP_TO:
            whole = head if payload is None else head + payload.tobytes()
            count = 0
            if not new and not self._outbox:
                try:  # noqa: SIM105  suppress() costs more than all the rest
                    count = self._sock.send(whole)
                except OSError:  # the queue meets it again
                    pass
                if count == len(whole):
                    if sent:
                        sent()
                    return
            self._outbox.append((memoryview(whole)[count:], new), sent)
        else:
            self._outbox.append((memoryview(head), new))
            self._outbox.append((payload.data.cast("B"), ()), sent)
        if not self._outbox.writing:
            self._flush()

    def _flush(self) -> None:
        try:
            self._outbox.flush()
        except OSError as error:  # the other end takes nothing more; what it sent before it went still counts
            self.drain()
            self._lost(f"it takes nothing more: {error.strerror or error}")

    # Receiving.

    def attach(self, poller: Poller) -> None:
        self._outbox.attach(poller)

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
                self._outbox.flush()
        self.open = False
        self._outbox.detach()
        self.abandon()
        self._outbox.drop()

    def abandon(self) -> None:
        self._sock.close()
        self._decoder.close()

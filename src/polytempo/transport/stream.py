"""`ipc://`: Unix stream sockets in a private directory.

Only this user can reach the directory, and the kernel says which user connects (SO_PEERCRED): another user's process is
turned away before a byte is read, so no cipher is needed. It also says at once when a peer is gone, however it died.
Messages are framed by `framing.py`.

What all Unix stream sockets need is here, too: one connect loop, one way to accept. A rank that connects to another first
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
from typing import Any

import zmq

from polytempo.errors import PeerError
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Channel, Closed, Endpoint, OnSent, Peer, Poller, Received
from polytempo.transport.deadline import Deadline
from polytempo.transport.framing import FrameOutbox, FramePiece, FrameReader, FrameWriter, send_piece

#: The first bytes that a rank sends to another: its rank, and the number of ranks (0 where that is not fixed).
HELLO = struct.Struct("<II")
HELLO_TIMEOUT = 5.0
RETRY_EVERY = 0.01
SOCKET_BUFFER = 4 << 20


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


IN, OUT = int(zmq.POLLIN | zmq.POLLERR), int(zmq.POLLOUT)  # as plain numbers: they are looked at often


class StreamPeer(Peer):
    """The endpoint's side of a connection."""

    def __init__(self, endpoint: StreamEndpoint, sock: socket.socket, limit: int, pool: Pool) -> None:
        super().__init__(f"connection {sock.fileno()}", limit)
        self.sock = sock
        self.fileno = sock.fileno()
        self.reader = FrameReader(pool, limit)
        self.writer = FrameWriter(pool)
        self._endpoint = endpoint
        self._outbox = FrameOutbox()
        self._writing = False

    def send(self, header: bytes, buffers: Sequence[Bytes] = (), done: OnSent | None = None) -> None:
        pieces, done = self.writer.write(header, buffers, done)
        for piece in pieces[:-1]:
            self._outbox.append(piece)
        self._outbox.append(pieces[-1], done)
        self.flush()

    def flush(self) -> None:
        try:
            self._outbox.flush(self.sock)
        except OSError:
            return self.drop()
        if self._writing != bool(self._outbox):
            self._writing = bool(self._outbox)
            self._endpoint.watch(self, self._writing)
        return None

    def drop(self) -> None:
        """The peer is gone: drop what was meant for it; its leases expire."""
        self.writer.close()
        self._outbox.drop()

    def close(self) -> None:
        self._endpoint.forget(self)


class StreamEndpoint(Endpoint):
    """Listens at a path."""

    def __init__(self, path: str, pool: Pool, stranger_limit: int) -> None:
        self.address = f"ipc://{path}"
        self._path = path
        self._pool = pool
        self._limit = stranger_limit
        self._peers: dict[int, StreamPeer] = {}
        self._poller: Poller | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(128)
        self._listener.setblocking(False)

    def attach(self, poller: Poller) -> None:
        self._poller = poller
        poller.register(self._listener.fileno(), zmq.POLLIN)

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
            self.watch(peer, False)

    def _read(self, peer: StreamPeer) -> list[Received | Closed]:
        events: list[Received | Closed] = []
        reason = ""
        peer.reader.limit = peer.limit
        try:
            while True:
                peer.reader.ahead = peer.who is not None  # what it may send depends on its role
                events.append(Received(peer, *peer.reader.read(peer.sock)))
                if not peer.reader.is_ahead():
                    break  # if there is more, the poller will say so
        except BlockingIOError:
            return events
        except (EOFError, OSError):
            pass
        except PeerError as error:
            reason = str(error)
        else:
            return events
        self.forget(peer)
        return [*events, Closed(peer, reason)]

    def watch(self, peer: StreamPeer, writing: bool) -> None:
        """Be told when this peer has sent something, and, if wanted, when it can take more."""
        if self._poller is not None and peer.fileno in self._peers:
            self._poller.register(peer.fileno, zmq.POLLIN | (zmq.POLLOUT if writing else 0))

    def forget(self, peer: StreamPeer) -> None:
        if self._peers.pop(peer.fileno, None) is not None and self._poller is not None:
            self._poller.unregister(peer.fileno)
        peer.drop()
        peer.reader.close()
        peer.sock.close()

    def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.sock.setblocking(True)
            peer.sock.settimeout(1.0)
            peer.flush()
            self.forget(peer)
        if self._poller is not None:
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

"""`ipc://`: Unix stream sockets in a private directory.

Nobody but this user can reach the directory, and the kernel says who connects (SO_PEERCRED): another user is turned away
before a byte is read. No cipher is needed. The kernel also says at once when a peer is gone, however it died.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from polytempo.errors import PeerError
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Channel, Closed, Endpoint, OnSent, Peer, Received
from polytempo.transport.framing import FramePiece, FrameReader, FrameWriter, send_piece
from polytempo.transport.poller import Poller

SOCKET_BUFFER = 4 << 20
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
        self._outbox: deque[tuple[FramePiece, OnSent | None]] = deque()
        self._writing = False

    def send(self, header: bytes, buffers: Sequence[Bytes] = (), done: OnSent | None = None) -> None:
        pieces, done = self.writer.write(header, buffers, done)
        self._outbox.extend((piece, None) for piece in pieces[:-1])
        self._outbox.append((pieces[-1], done))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._outbox:
            piece, done = self._outbox[0]
            try:
                rest = send_piece(self.sock, piece)
            except BlockingIOError:
                break
            except OSError:
                return self.drop()
            if rest is not None:
                self._outbox[0] = rest, done
                continue
            self._outbox.popleft()
            if done:
                done()
        if self._writing != bool(self._outbox):
            self._writing = bool(self._outbox)
            self._endpoint.watch(self, self._writing)
        return None

    def drop(self) -> None:
        """The peer is gone: nobody reads what was meant for it, and what it has borrowed is back."""
        self.writer.close()
        while self._outbox:
            done = self._outbox.popleft()[1]
            if done:
                done()

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
                sock, _ = self._listener.accept()
            except OSError:
                return
            if peer_uid(sock) != os.getuid():
                sock.close()
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
                peer.reader.ahead = peer.who is not None  # what it may send depends on who it is
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
        """End a connection."""
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

    def __init__(self, path: str, pool: Pool, limit: int, patience: float = 0.0) -> None:
        self._sock = _connected(path, patience)
        widen(self._sock)
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
        return self._reader.count + self._sent - _unread(self._sock)

    def pollable(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._reader.close()
        self._sock.close()


def _connected(path: str, patience: float) -> socket.socket:
    """A connection; who listens there may still be starting, and is given so many seconds."""
    deadline = time.monotonic() + patience
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
            return sock
        except OSError as error:
            sock.close()
            directory = os.path.dirname(path)
            if time.monotonic() >= deadline or not os.path.isdir(directory):
                raise PeerError(f"cannot reach the job at ipc://{path}: {error.strerror}; has it ended?") from None
        time.sleep(0.01)


def _unread(sock: socket.socket) -> int:
    """What the other end has not taken out of the kernel yet."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel knows it."""
    return _credentials(sock)[1]


def peer_pid(sock: socket.socket) -> int:
    """The process there."""
    return _credentials(sock)[0]


def _credentials(sock: socket.socket) -> tuple[int, int]:
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(uid)


def widen(sock: socket.socket) -> None:
    """Room for much that is under way."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)

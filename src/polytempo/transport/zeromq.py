"""`tcp://`: ZeroMQ between hosts, with CURVE keys; without them only with `--insecure`.

Frames of a message: header | buffer lengths | pieces of at most 1 MB. Pieces, because a frame of many megabytes is allocated
anew each time, and its page faults cost more than its bytes.

The kernel says whether the other end is there: it probes an idle connection (keep-alive), and waits for acknowledgements on
a busy one, so that a slow connection is never taken for a broken one. ZeroMQ's own heartbeats would queue behind the data.

ZeroMQ reports whole messages only; the kernel counts each byte. A `Meter` asks it: ZeroMQ's monitor says which descriptor a
connection has, and TCP_INFO how many bytes the other host has acknowledged and how many have come. Keep-alive does not
count: where nothing is sent, nothing moves.
"""

from __future__ import annotations

import fcntl
import socket as sockets
import struct
import sys
import termios
import time
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import zmq
import zmq.utils.garbage
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from polytempo.errors import PeerError
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import BUFFER_COUNT_LIMIT, Bytes, Channel, Closed, Endpoint, OnSent, Peer, Poller, Received
from polytempo.transport.keys import JobKeys, WorkerKeys

PIECE = 1 << 20
#: No single frame may be larger: pieces are smaller, headers never reach it.
FRAME_LIMIT = 64 << 20
#: A connection over which the other host acknowledges nothing for so long is made anew.
SILENCE_S = 20
#: A channel that closes waits so long for the other host to take what is left, counted from the last byte that moved.
LAST_WORDS_S = 2


class ZmqContext:
    """A ZeroMQ context. With a key, its listening sockets accept only peers that prove to have the workers' secret."""

    def __init__(self, worker_public: str | None) -> None:
        self.context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        if worker_public is not None:
            self._authenticator = ThreadAuthenticator(self.context)
            self._authenticator.start()
            # It is called with the key that a peer has proved to have, as text.
            wanted = worker_public.encode()
            only_workers = SimpleNamespace(callback=lambda domain, key: key == wanted)
            self._authenticator.configure_curve_callback(domain="*", credentials_provider=only_workers)

    def close(self) -> None:
        """After all its sockets."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self.context.term()


class ZmqPeer(Peer):
    """The endpoint's side of a connection."""

    here = False

    def __init__(self, socket: zmq.Socket[bytes], identity: bytes, limit: int) -> None:
        super().__init__(identity.hex(), limit)
        self._socket = socket
        self._identity = identity
        self.closed = False

    def send(self, header: bytes, buffers: Sequence[Bytes] = (), done: OnSent | None = None) -> None:
        try:
            if not self.closed:
                self._socket.send_multipart([self._identity, *frames_of(header, buffers)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        if done:
            done()

    def close(self) -> None:
        """ZeroMQ keeps the connection; nothing more is heard or said on it."""
        self.closed = True


class ZmqEndpoint(Endpoint):
    """Listens on a TCP address."""

    def __init__(self, address: str, keys: JobKeys | None, pool: Pool, stranger_limit: int) -> None:
        self._pool = pool
        self._limit = stranger_limit
        self._context = ZmqContext(keys.workers.worker_public if keys is not None else None)
        self._socket = self._context.context.socket(zmq.ROUTER)
        set_options(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            self._socket.curve_server = True
            self._socket.curve_secretkey = keys.server_secret.encode()
            self._socket.curve_publickey = keys.workers.server_public.encode()
        try:
            take_family(self._socket, address)
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise PeerError(f"cannot listen on {address}: {error.strerror}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peers: dict[bytes, ZmqPeer] = {}

    def attach(self, poller: Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)

    def handle(self, ready: dict[Any, int]) -> list[Received | Closed]:
        events: list[Received | Closed] = []
        while self._socket in ready:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer = self._peers.setdefault(identity.bytes, ZmqPeer(self._socket, identity.bytes, self._limit))
            if peer.closed:
                continue
            try:
                events.append(Received(peer, *message_of(frames, peer.limit, self._pool)))
            except PeerError as error:
                events.append(Closed(peer, str(error)))
        return events

    def close(self) -> None:
        self._socket.close(linger=1000)
        self._context.close()


class ZmqChannel(Channel):
    """A connection to a TCP address; `identity` stays the same when it is made again."""

    def __init__(
        self, address: str, identity: bytes, keys: WorkerKeys | None, pool: Pool, limit: int, proxy: str = ""
    ) -> None:
        self._address, self._identity, self._keys, self._proxy = address, identity, keys, proxy
        self._pool, self._limit = pool, limit
        self._context = zmq.Context()
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        set_options(socket)
        if self._proxy:
            go_through(socket, self._proxy)
        socket.setsockopt(zmq.IDENTITY, self._identity)
        if self._keys is not None:
            socket.curve_serverkey = self._keys.server_public.encode()
            socket.curve_publickey = self._keys.worker_public.encode()
            socket.curve_secretkey = self._keys.worker_secret.encode()
        self._meter = Meter(socket)
        take_family(socket, self._address)
        socket.connect(self._address)
        return socket

    def send(self, header: bytes, buffers: Sequence[Bytes] = ()) -> int:
        try:  # without a limit on waiting messages a send waits for one thing only, and for ever: a connection given up
            self._socket.send_multipart(frames_of(header, buffers), zmq.NOBLOCK, copy=False)  # unchanged until the answer
        except zmq.Again:
            told = "it takes the key file of its own job, and the same version, only"
            raise PeerError(f"the server at {self._address} has refused this connection: {told}") from None
        return len(header) + sum(buffer.nbytes for buffer in buffers)

    def receive(self) -> tuple[bytes, list[Bytes]] | None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return message_of(frames, self._limit, self._pool)

    def moved(self) -> int:
        return self._meter.read()

    def pollable(self) -> zmq.Socket[bytes]:
        return self._socket

    def renew(self) -> None:
        """Make the connection anew, at once. What was sent and has not arrived is lost."""
        self._meter.close()
        self._socket.close(linger=0)
        self._socket = self._connect()

    def close(self) -> None:
        self._meter.close(idle_timeout=LAST_WORDS_S)
        self._socket.close(linger=1000 * LAST_WORDS_S)
        self._context.term()


def take_family(socket: zmq.Socket[bytes], address: str) -> None:
    """ZeroMQ knows IPv6 where it is told to; a number in brackets is of IPv6."""
    socket.setsockopt(zmq.IPV6, int("[" in address))


def set_options(socket: zmq.Socket[bytes], silence: int = SILENCE_S) -> None:
    """Alike on both sides: no limit on waiting messages (the protocol bounds them), one on frames. A host that acknowledges
    nothing for `silence` seconds is gone."""
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, silence)
    socket.setsockopt(zmq.TCP_MAXRT, silence * 1000)
    socket.setsockopt(zmq.LINGER, 1000)


def go_through(socket: zmq.Socket[bytes], proxy: str = "") -> None:
    """On an emulated network: connect by way of this proxy (`link_relay.py`), if it is given. The relay is on this host, and
    reads no faster than the link carries: that it takes nothing for a while does not mean that it is gone."""
    socket.setsockopt(zmq.TCP_MAXRT, 0)
    if proxy:
        socket.setsockopt_string(zmq.SOCKS_PROXY, proxy)


def frames_of(header: bytes, buffers: Sequence[Bytes]) -> list[bytes | memoryview]:
    """A message as frames."""
    lengths = struct.pack(f"<{len(buffers)}Q", *(buffer.nbytes for buffer in buffers))
    frames: list[bytes | memoryview] = [header, lengths]
    for buffer in buffers:
        view = buffer.data.cast("B")
        frames += [view[start : start + PIECE] for start in range(0, len(view), PIECE)]
    return frames


def message_of(frames: Sequence[zmq.Frame], limit: int, pool: Pool) -> tuple[bytes, list[Bytes]]:
    """The message in these frames; `PeerError` when they make none."""
    if len(frames) < 2 or len(frames[1]) % 8 or len(frames[1]) > 8 * BUFFER_COUNT_LIMIT:
        raise PeerError("a message was refused: expected a header and the lengths of its buffers")
    lengths = struct.unpack(f"<{len(frames[1]) // 8}Q", frames[1].bytes)
    total = sum(lengths)
    if len(frames[0]) + total > limit or total != sum(len(frame) for frame in frames[2:]):
        raise PeerError(f"a message of {total} bytes was refused; at most {limit} are taken, and lengths must be true")
    buffers, pieces = [], iter(frames[2:])
    for length in lengths:
        buffer = pool.take(length)
        for start in range(0, length, PIECE):
            piece = next(pieces).buffer
            if len(piece) != min(PIECE, length - start):
                raise PeerError("a message was refused: its pieces do not fit its buffers")
            buffer.data[start : start + len(piece)] = piece
        buffers.append(buffer)
    return frames[0].bytes, buffers


#: In Linux's struct tcp_info: bytes_acked and bytes_received.
COUNTS = struct.Struct("120xQQ")
#: And the milliseconds since the last data and the last acknowledgement came.
HEARD = struct.Struct("52xII")
WATCHED = int(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
#: Seconds between two looks at what is still to be sent.
LOOK = 0.01


class Meter:
    """The meter of a socket that makes one connection, anew when it breaks. To be made before it connects."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(WATCHED)
        self._descriptor: int | None = None
        self._earlier = self._now = 0  # over connections that have ended, and over this one

    def read(self) -> int:
        """Bytes that have moved so far, either way."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            self._earlier, self._now = self._earlier + self._now, 0
            self._descriptor = int(event["value"]) if event["event"] == zmq.EVENT_CONNECTED else None
        if self._descriptor is not None:
            self._now = _counted(self._descriptor, self._now)
        return self._earlier + self._now

    def close(self, idle_timeout: float = 0.0) -> None:
        """Before the socket is closed: wait for what was sent to be gone, as long as it moves (`drain`)."""
        self.read()
        if idle_timeout and self._descriptor is not None:
            drain([self._descriptor], idle_timeout)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)


def drain(descriptors: Collection[int], idle_timeout: float) -> None:
    """Wait until the other host has all that ZeroMQ was given for these connections, or nothing has moved for `idle_timeout`
    seconds. (ZeroMQ's linger is a fixed time, however slow the link is.)"""
    quiet_since, before, empty = time.monotonic(), -1, 0
    while empty < 2 and time.monotonic() - quiet_since < idle_timeout:  # what is empty twice is not about to be filled again
        moved = sum(_counted(descriptor, 0) for descriptor in descriptors)
        empty = empty + 1 if not any(_unacknowledged(descriptor) for descriptor in descriptors) else 0
        if moved != before:
            quiet_since, before = time.monotonic(), moved
        time.sleep(LOOK)


def unheard_for(connection: sockets.socket) -> float:
    """Seconds since anything has come from the other host, a probe or an acknowledgement included; also of a connection that
    has just ended. Zero where it is not TCP."""
    try:
        info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, HEARD.size)
        data, acknowledgement = HEARD.unpack(info)
        return float(min(data, acknowledgement)) / 1000
    except OSError:
        return 0.0


def _unacknowledged(descriptor: int) -> int:
    """Bytes in the kernel that the other host has not got yet; none when the connection has ended."""
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def _counted(descriptor: int, before: int) -> int:
    """What TCP has moved over a descriptor; what it was before, if the connection has just ended."""
    try:
        connection = sockets.socket(fileno=descriptor)
    except OSError:
        return before
    try:
        info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, COUNTS.size)
        return sum(COUNTS.unpack(info)) if len(info) == COUNTS.size else before
    except OSError:
        return before
    finally:
        connection.detach()  # it is ZeroMQ's

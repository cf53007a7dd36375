"""ZeroMQ between hosts: `tcp://` to a server, and links between ranks; with CURVE keys, without them only if that is said.

Frames of a message (`framing.py`): head and meta | pieces of at most 1 MB. Pieces, because a frame of many megabytes is
allocated anew each time, and its page faults cost more than its bytes.

The kernel says whether the other end is there: it probes an idle connection (keep-alive), and waits for acknowledgements on
a busy one, so that a slow connection is never taken for a broken one. ZeroMQ's own heartbeats would queue behind the data.

ZeroMQ reports whole messages only; the kernel counts each byte. A `Meter` asks it: ZeroMQ's monitor says which descriptor a
connection has, and TCP_INFO how many bytes the other host has acknowledged and how many have come. Keep-alive does not
count: where nothing is sent, nothing moves.

**Links.** All ranks of a job prove to each other that they have the workers' secret of the key file. Whether the other host
is there is the kernels' business (`set_options`), which no busy interpreter starves and no large message holds up; ZeroMQ's
monitor says when the connection has ended. A kernel that acknowledges nothing tries again after twice the time each time:
after a pause of t seconds data may take as long again to move. So a link that is to outlive a pause of the host time-out is
given up after twice that (`patience_for`). Whether a link that has ended was silent, or closed by a host that was there, the
time says when it was last heard of.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket as sockets
import struct
import sys
import termios
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import zmq
import zmq.utils.garbage
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from polytempo.errors import PeerError
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import OUT, Bytes, Channel, Closed, Endpoint, OnSent, Peer, Poller, Received
from polytempo.transport.framing import ENTRY, HEAD, MAGIC, MESSAGE, NONE, FrameHead, Outbox, check_message, read_table
from polytempo.transport.keys import JobKeys, WorkerKeys
from polytempo.transport.peer_link import (
    BYE,
    CLOSED,
    NO_MESSAGE,
    LinkMessage,
    OnLinkSent,
    PeerLink,
    Receiver,
    check_link_head,
)

NOT_WHOLE = "a message was refused: expected a header and the lengths of its buffers"
PIECE = 1 << 20
#: Between ranks a payload goes in pieces of this size: the first travels while the next is enciphered.
LINK_PIECE = 256 << 10
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
    """A message to or from a server as frames."""
    table = b"".join(ENTRY.pack(buffer.nbytes, 0, NONE) for buffer in buffers)
    length = sum(buffer.nbytes for buffer in buffers)
    head = HEAD.pack(MAGIC, MESSAGE, 0, len(table) + len(header), len(buffers), NONE, 0, length)
    return [b"".join((head, table, header)), *(piece for buffer in buffers for piece in pieces_of(buffer, PIECE))]


def message_of(frames: Sequence[zmq.Frame], limit: int, pool: Pool) -> tuple[bytes, list[Bytes]]:
    """The message to or from a server in these frames; `PeerError` when they make none."""
    head, meta = head_of(frames, NOT_WHOLE)
    if head.kind != MESSAGE:
        raise PeerError(NOT_WHOLE)
    check_message(head, limit)
    entries, header = read_table(head, meta, limit)
    if any(segment != NONE for _, _, segment in entries):
        raise PeerError("a message was refused: memory is shared on one host only")
    buffers = [pool.take(length) for length, _, _ in entries]
    fill(buffers, frames[1:])
    return header, buffers


def pieces_of(buffer: Bytes, size: int) -> list[memoryview]:
    """A buffer, cut into frames of at most this many bytes."""
    view = buffer.data.cast("B")
    return [view[start : start + size] for start in range(0, len(view), size)]


def head_of(frames: Sequence[zmq.Frame], refusal: str) -> tuple[FrameHead, bytes]:
    """Head and meta of a message; refused unless all is there that the head says."""
    if len(frames[0]) < HEAD.size:
        raise PeerError(refusal)
    head = FrameHead._make(HEAD.unpack_from(frames[0].buffer))
    whole = len(frames[0]) == HEAD.size + head.meta_length and sum(map(len, frames[1:])) == head.length
    if head.magic != MAGIC or not whole:
        raise PeerError(refusal)
    return head, frames[0].bytes[HEAD.size :]


def fill(buffers: Sequence[Bytes], frames: Sequence[zmq.Frame]) -> None:
    """Copy what has come into buffers, each of which begins with a piece of its own."""
    pieces = iter(frames)
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            piece = next(pieces).buffer  # there are as many bytes as the buffers have
            if start + len(piece) > buffer.nbytes:
                raise PeerError("a message was refused: its pieces do not fit its buffers")
            buffer.data[start : start + len(piece)] = piece
            start += len(piece)


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


# Between ranks.

#: A link comes back within these seconds, or may be given up (`--host-timeout`). (The end of a process its kernel says
#: at once.)
HOST_TIMEOUT = 5.0
#: As `LAST_WORDS_S`, of a link.
LINK_LAST_WORDS_S = 1.0
#: Seconds in which ZeroMQ lets go of a connection that has ended.
DOUBT = 0.03
LINK_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED
LINK_WATCHED |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class ZmqWires(ZmqContext):
    """What the ZeroMQ links of one process share."""

    def __init__(self, keys: WorkerKeys | None, proxy: str = "", host_timeout: float = HOST_TIMEOUT) -> None:
        super().__init__(keys.worker_public if keys is not None else None)
        self.keys, self._proxy, self.host_timeout = keys, proxy, host_timeout

    def socket(self, serves: bool) -> zmq.Socket[bytes]:
        """One end, not connected yet."""
        socket = self.context.socket(zmq.PAIR)
        set_options(socket, math.ceil(patience_for(self.host_timeout)))
        if self._proxy:
            go_through(socket, "" if serves else self._proxy)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        if self.keys is not None:
            socket.curve_server = serves
            if not serves:
                socket.curve_serverkey = self.keys.worker_public.encode()
            socket.curve_publickey = self.keys.worker_public.encode()
            socket.curve_secretkey = self.keys.worker_secret.encode()
        return socket


def patience_for(host_timeout: float) -> float:
    """Seconds without a sign of the other host after which a link is given up, so that no shorter pause ends one."""
    return 2 * host_timeout + 2


class ZmqLink(PeerLink):
    """One end."""

    def __init__(self, rank: int, receiver: Receiver, wires: ZmqWires, serves: bool) -> None:
        super().__init__(rank, receiver)
        self._socket = wires.socket(serves)
        self._serves, self._host_timeout = serves, wires.host_timeout
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(int(LINK_WATCHED))
        self.established = False  #: both ends have proved that they have the key
        self.problem = ""  #: why it cannot be
        self._poller: Poller | None = None
        self._outbox: Outbox[list[bytes | memoryview]] = Outbox(self._socket, self._give)
        self._ended = False
        self._polite = False  # its goodbye is sent
        #: By descriptor, of its connection and of strangers that try: a second handle, to ask how it has ended.
        self._connections: dict[int, sockets.socket] = {}

    def bind(self, host: str) -> str:
        """Listen on any port; the address."""
        take_family(self._socket, host)
        self._socket.bind(f"tcp://{host}:*")
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str) -> None:
        """Reach the other end, which listens already."""
        take_family(self._socket, address)
        self._socket.connect(address)

    def _send(self, message: LinkMessage, head: bytes, payload: Bytes | None, sent: OnLinkSent | None) -> None:
        assert message.segment is None, "memory is shared on one host only"
        self._polite = message.kind == BYE
        self._outbox.append([head, *(pieces_of(payload, LINK_PIECE) if payload is not None else ())], sent)
        if not self._outbox.writing:
            self._outbox.flush()

    def _give(self, frames: list[bytes | memoryview]) -> None:
        """ZeroMQ takes nothing before the other end is there, or once it is gone."""
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)

    def attach(self, poller: Poller) -> None:
        self._poller = poller
        self._outbox.attach(poller)
        self._outbox.flush()
        poller.register(self._monitor, zmq.POLLIN)

    def handle(self, ready: dict[Any, int]) -> None:
        state = ready.get(self._socket, 0)
        if state & OUT:
            self._outbox.flush()
        if state & ~OUT:
            self._take_all()
        if self.open and self._monitor in ready and self._has_ended():
            self._take_all()  # what it said before counts
            self._lost("nothing was heard of its host for too long" if self.silent else CLOSED)

    def _take_all(self) -> None:
        try:
            while self.open:
                self._take(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            pass
        except PeerError as error:
            self._lost(str(error))

    def hear(self) -> None:
        """Read the monitor. A listening end also sees strangers that fail to connect: those events mean nothing."""
        while self._monitor.poll(0):
            said = parse_monitor_message(self._monitor.recv_multipart())
            event = said["event"]
            if event in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
                with suppress(OSError):  # of a stranger that is gone again
                    self._connections[said["value"]] = sockets.socket(fileno=os.dup(said["value"]))
                continue
            silent = event == zmq.EVENT_DISCONNECTED and self._was_silent(said["value"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.established = True
            elif event == zmq.EVENT_DISCONNECTED and self.established:  # before they have met it is tried again
                self._ended = self._is_alone()
                self.silent = self._ended and silent
            elif not self._serves:
                self.problem = "it does not have the same key file"

    def _was_silent(self, descriptor: int) -> bool:
        """A connection has ended: was nothing heard of the other host for so long that it may have given this one up?"""
        connection = self._connections.pop(descriptor, None)
        if connection is None:
            return False
        with connection:
            return unheard_for(connection) >= self._host_timeout

    def _is_alone(self) -> bool:
        """Whether it is the other end that has gone. A listening end may have lost a stranger only: then ZeroMQ still takes
        messages. (Unbinding would not do: with the listener ZeroMQ drops the connection it has accepted.)"""
        deadline = time.monotonic() + DOUBT
        while self._serves and self._socket.poll(0, zmq.POLLOUT):
            if time.monotonic() > deadline:
                return False
            time.sleep(DOUBT / 50)
        return True

    def _has_ended(self) -> bool:
        self.hear()
        return self._ended

    def _take(self, frames: list[zmq.Frame]) -> None:
        head, meta = head_of(frames, NO_MESSAGE)
        check_link_head(head)
        message = LinkMessage(head.kind, head.context, head.tag, meta)
        payload = self.receiver.room(self.rank, message, head.length) if head.length else None
        if payload is not None:
            fill([payload], frames[1:])
        self.receiver.arrived(self.rank, message, payload)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._outbox.detach()
            if self._poller is not None:
                self._poller.unregister(self._monitor)
            gone = self._has_ended()
            if self._polite and not gone:
                drain(self._connections, LINK_LAST_WORDS_S)
            for connection in self._connections.values():  # else it stays open until this process ends
                connection.close()
            self._connections.clear()
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0 if gone else int(1000 * LINK_LAST_WORDS_S))
            self._outbox.drop()

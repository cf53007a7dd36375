"""A link between two hosts: a pair of ZeroMQ sockets with CURVE keys.

All ranks of a job prove to each other that they have the workers' secret of the key file. Whether the other host is there is
the kernels' business (`set_options`), which no busy interpreter starves and no large message holds up; ZeroMQ's monitor says
when the connection has ended.

A kernel that acknowledges nothing tries again after twice the time each time: after a pause of t seconds data may take as
long again to move. So a link that is to outlive a pause of the host time-out is given up after twice that (`patience_for`).
Whether a link that has ended was silent, or closed by a host that was there, the time says when it was last heard of.
"""

from __future__ import annotations

import math
import os
import socket as sockets
import time
from collections import deque
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes, Poller
from polytempo.transport.framing import HEAD, MAGIC
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.peer_link import BYE, KINDS, PAYLOAD_LIMIT, LinkMessage, OnLinkSent, PeerLink, Receiver
from polytempo.transport.shared_memory import Segment
from polytempo.transport.zeromq import ZmqContext, drain, go_through, set_options, take_family, unheard_for

#: Where in a head the kind is.
KIND = 2
#: A link comes back within these seconds, or may be given up (`--host-timeout`). (The end of a process its kernel says
#: at once.)
HOST_TIMEOUT = 5.0
#: A payload goes in frames of this size: the first travels while the next is enciphered.
FRAME = 256 << 10
#: How long a closing link waits for the other end to take what is left, counted from the last byte that moved.
LAST_WORDS_MS = 1000
#: Seconds in which ZeroMQ lets go of a connection that has ended.
DOUBT = 0.03
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED
WATCHED |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


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
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(int(WATCHED))
        self.established = False  #: both ends have proved that they have the key
        self.problem = ""  #: why it cannot be
        self._poller: Poller | None = None
        self._outbox: deque[tuple[list[bytes | memoryview], OnLinkSent | None]] = deque()
        self._writing = False
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

    def _send(self, head: bytes, segment: Segment | None, payload: Bytes | None, sent: OnLinkSent | None) -> None:
        assert segment is None, "memory is shared on one host only"
        view = memoryview(payload.data).cast("B") if payload is not None else memoryview(b"")
        self._polite = head[KIND] == BYE
        frames: list[bytes | memoryview] = [head]
        frames += [view[start : start + FRAME] for start in range(0, len(view), FRAME)]
        self._outbox.append((frames, sent))
        if not self._writing:
            self._flush()

    def _flush(self) -> None:
        """Send what ZeroMQ takes: nothing before the other end is there, or once it is gone."""
        try:
            while self._outbox:
                frames, sent = self._outbox[0]
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
                self._outbox.popleft()
                if sent:
                    sent()
        except zmq.Again:
            pass
        if self._writing != bool(self._outbox) and self._poller is not None:
            self._writing = bool(self._outbox)
            self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._writing else 0))

    def attach(self, poller: Poller) -> None:
        self._poller = poller
        poller.register(self._socket, zmq.POLLIN)
        self._flush()
        poller.register(self._monitor, zmq.POLLIN)

    def handle(self, ready: dict[Any, int]) -> None:
        state = ready.get(self._socket, 0)
        if state & zmq.POLLOUT:
            self._flush()
        if state & zmq.POLLIN:
            self._take_all()
        if self.open and self._monitor in ready and self._has_ended():
            self._take_all()  # what it said before counts
            self._lost("nothing was heard of its host for too long" if self.silent else "its connection has closed")

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
        if len(frames[0]) < HEAD.size:
            raise PeerError("it sent something that is no message")
        magic, kind, _, meta_length, _, context, tag, length = HEAD.unpack_from(frames[0].buffer)
        fits = len(frames[0]) == HEAD.size + meta_length and length == sum(map(len, frames[1:]))
        if magic != MAGIC or kind >= KINDS or length > PAYLOAD_LIMIT or not fits:
            raise PeerError("it sent something that is no message")
        message = LinkMessage(kind, context, tag, frames[0].bytes[HEAD.size :])
        payload = self.receiver.room(self.rank, message, length) if length else None
        start = 0
        for frame in frames[1:]:
            assert payload is not None
            payload[start : start + len(frame)] = memoryview(frame.buffer)
            start += len(frame)
        self.receiver.arrived(self.rank, message, payload)

    def close(self) -> None:
        if self.open:
            self.open = False
            if self._poller is not None:
                self._poller.unregister(self._socket)
                self._poller.unregister(self._monitor)
            gone = self._has_ended()
            if self._polite and not gone:
                drain(self._connections, LAST_WORDS_MS / 1000)
            for connection in self._connections.values():  # else it stays open until this process ends
                connection.close()
            self._connections.clear()
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0 if gone else LAST_WORDS_MS)
            while self._outbox:
                sent = self._outbox.popleft()[1]
                if sent:
                    sent()

"""Bytes that a ZeroMQ socket has moved. ZeroMQ reports whole messages only; the kernel counts each byte.

ZeroMQ's monitor says which descriptor a connection has, and TCP_INFO how many bytes the other host has acknowledged and how
many have come. Keep-alive does not count: where nothing is sent, nothing moves.
"""

from __future__ import annotations

import fcntl
import socket as sockets
import struct
import sys
import termios
import time
from collections.abc import Collection

import zmq
from zmq.utils.monitor import parse_monitor_message

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

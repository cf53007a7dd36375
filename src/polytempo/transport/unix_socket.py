"""Unix stream sockets: one connect loop, one way to accept, and the credentials of the other end.

The kernel says which user's process is at the other end (SO_PEERCRED): another user's is turned away before a byte is read,
so no cipher is needed. A rank that connects to another first sends its hello.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable

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

"""The relay of an emulated network: all connections of workers go through it, and bytes leave it when they are due.

When they are due is decided by `link_emulation.py`. A worker's ZeroMQ sockets connect by way of a SOCKS5 proxy (RFC 1928),
which ZeroMQ can do by itself: the code of a job on several hosts runs unchanged, with its keys and its encryption. The relay
has one proxy address for each worker, so it knows which worker connects, and the name that is asked for says to what:

    server-K:PORT   a server's Unix socket (the port means nothing)
    worker-K:PORT   a port of 127.0.0.1 on which worker K listens

What does not listen yet, or no longer, is tried again and again, and the worker is answered only then: after a refusal
libzmq 4.3.5 aborts its process when the socket is closed ("Bad file descriptor", epoll.cpp).

A worker that writes faster than its link fills the kernel's buffers and then waits in ZeroMQ's own thread, as on a slow
network. The relay itself sleeps until a chunk is due or a socket is ready. It can reach only what is named above.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from polytempo.transport.link_emulation import EmulatedNetwork, Flow, LinkPlace

RELAY_HOST = "127.0.0.1"
#: SOCKS5: version, methods and replies.
VERSION, NO_PASSWORD, CONNECT, NAME = 5, 0, 1, 3
SUCCEEDED, REFUSED, UNKNOWN = 0, 5, 8
#: Seconds before the second try to connect, and between later ones: twice as long each time, up to the longest.
FIRST_RETRY, LONGEST_RETRY = 0.02, 0.5
#: The longest request: head, a name with its length, a port.
REQUEST_LIMIT = 4 + 256 + 2
CONNECT_TIMEOUT = 2.0
#: On links slower than this (bytes a second) the kernel's buffers are kept this small (bytes): what a worker has sent shall
#: move now and then, as on a real network, and not all at once into a buffer that then takes a minute to empty.
SLOW_LINK, SMALL_BUFFER = 2.5e6, 128 << 10
READ, WRITE = select.EPOLLIN, select.EPOLLOUT


def server_name(index: int) -> str:
    """The name of a server on the emulated network."""
    return f"server-{index}"


def worker_name(rank: int) -> str:
    """The name of a worker on the emulated network."""
    return f"worker-{rank}"


@dataclass(frozen=True)
class EmulatedHost:
    """A worker's place on an emulated network."""

    name: str  #: by which other workers reach it
    proxy: str  #: its way to all others


class RelayEnd:
    """One socket of a connection, the flow of what is read from it, and what waits to be written to it."""

    def __init__(self, sock: socket.socket, flow: Flow) -> None:
        self.sock, self.flow = sock, flow
        self.other: RelayEnd = self
        self.under_way: deque[bytes] = deque()  #: read here and not delivered yet
        self.delivered: deque[memoryview] = deque()  #: to be written here
        self.ended = False  #: nothing more is read here
        self.deaf = False  #: nothing more can be written here
        self.told = False  #: that nothing more comes


@dataclass
class Wanted:
    """A connection that a worker wants to what does not listen."""

    sock: socket.socket
    rank: int
    target: int | None
    place: str | tuple[str, int]
    pause: float = FIRST_RETRY
    again_at: float = 0.0


class LinkRelay:
    """Carries the bytes of all workers' connections.

    Args:
        network: What decides when.
        workers: The number of workers; each gets a proxy address.
        servers: The paths of the servers' sockets.
        clock: The time in seconds, which never goes back.
    """

    def __init__(self, network: EmulatedNetwork, workers: int, servers: Sequence[str], clock: Callable[[], float]) -> None:
        self._network, self._servers, self._clock = network, list(servers), clock
        self._listeners = [socket.create_server((RELAY_HOST, 0), backlog=256) for _ in range(workers)]
        self.proxies = [f"{RELAY_HOST}:{listener.getsockname()[1]}" for listener in self._listeners]  #: by rank
        self._epoll = select.epoll()
        self._actions: dict[int, Callable[[int], None]] = {}
        self._masks: dict[int, int] = {}
        self._ends: dict[Flow, RelayEnd] = {}
        self._wanted: list[Wanted] = []
        self.moved_at = clock()  #: the time at which bytes were read or written last
        self._buffer = SMALL_BUFFER if network.bandwidth < SLOW_LINK else 0
        for rank, listener in enumerate(self._listeners):
            listener.setblocking(False)
            _shrink(listener, self._buffer)
            self._on(listener, READ, lambda _, rank=rank: self._accept(rank))  # type: ignore[misc]

    # The loop.

    def turn(self, longest: float = 1.0) -> None:
        """Wait for what is due or ready, at most this number of seconds, and do it."""
        due = self.due()
        wait = longest if due is None else min(longest, max(0.0, due - self._clock()))
        select.select([self._epoll], [], [], wait)  # epoll itself counts in milliseconds
        for descriptor, state in self._epoll.poll(0):
            action = self._actions.get(descriptor)  # None: ended by an action before it
            if action is not None:
                action(state)
        for wanted in [wanted for wanted in self._wanted if wanted.again_at <= self._clock()]:
            self._wanted.remove(wanted)
            self._connect(wanted)
        for place, flow in self._network.advance(self._clock()):
            end = self._ends.get(flow)
            if end is None:
                continue
            if place is LinkPlace.LEFT:
                self._read(end)
            elif end.under_way:  # else its receiver takes nothing more
                end.other.delivered.append(memoryview(end.under_way.popleft()))
                self._write(end.other)

    def due(self) -> float | None:
        """When there is something to do next, unless a socket is ready before; None when nothing is."""
        due = self._network.due()
        return min([wanted.again_at for wanted in self._wanted] + ([due] if due is not None else []), default=None)

    def close(self) -> None:
        for sock in [
            *(end.sock for end in self._ends.values()),
            *(wanted.sock for wanted in self._wanted),
            *self._listeners,
        ]:
            self._off(sock)
        self._epoll.close()

    def carries(self) -> bool:
        """Whether a connection is open, or bytes of one that has ended are under way."""
        return bool(self._ends)

    def watch_end(self, descriptor: int, ended: Callable[[], None]) -> None:
        """Call this once the other end of a pipe is closed."""

        def look(_: int) -> None:
            if not os.read(descriptor, 4096):
                self._actions.pop(descriptor)
                self._epoll.unregister(descriptor)
                ended()

        self._actions[descriptor] = look
        self._epoll.register(descriptor, READ)

    # Connections.

    def _accept(self, rank: int) -> None:
        try:
            sock, _ = self._listeners[rank].accept()
        except OSError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        said = bytearray()
        self._on(sock, READ, lambda _: self._hear(sock, rank, said))

    def _hear(self, sock: socket.socket, rank: int, said: bytearray) -> None:
        """The proxy's protocol: a greeting, then the name to connect to."""
        try:
            data = sock.recv(REQUEST_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        if not data or said[0] != VERSION or len(said) > 2 * REQUEST_LIMIT:
            return self._off(sock)
        greeting = 2 + (said[1] if len(said) > 1 else 0)
        if len(said) < greeting:
            return None
        request = said[greeting:]
        if not request:
            return self._reply(sock, bytes((VERSION, NO_PASSWORD)))
        if len(request) < 5 or (request[3] == NAME and len(request) < 7 + request[4]):
            return None
        if tuple(request[1:4]) != (CONNECT, 0, NAME) or len(request) != 7 + request[4]:
            self._reply(sock, _reply(UNKNOWN))
            return self._off(sock)
        name, port = request[5:-2].decode("ascii", "replace"), struct.unpack(">H", request[-2:])[0]
        kind, _, number = name.partition("-")
        index = int(number) if number.isdigit() else -1
        if kind == "server" and 0 <= index < len(self._servers):
            return self._connect(Wanted(sock, rank, None, self._servers[index]))
        if kind == "worker" and 0 <= index < len(self._listeners):
            return self._connect(Wanted(sock, rank, index, (RELAY_HOST, port)))
        self._reply(sock, _reply(REFUSED))
        return self._off(sock)

    def _connect(self, wanted: Wanted) -> None:
        other = _connected(wanted.place, self._buffer)
        if other is None:
            wanted.again_at = self._clock() + wanted.pause
            wanted.pause = min(2 * wanted.pause, LONGEST_RETRY)
            self._wanted.append(wanted)
            return
        sock, rank, target = wanted.sock, wanted.rank, wanted.target
        self._off(sock, close=False)
        one, two = RelayEnd(sock, Flow(rank, target)), RelayEnd(other, Flow(target, rank))
        one.other, two.other = two, one
        for end in (one, two):
            self._ends[end.flow] = end
            self._on(end.sock, READ, lambda state, end=end: self._ready(end, state))  # type: ignore[misc]
        self._reply(sock, _reply(SUCCEEDED))

    def _reply(self, sock: socket.socket, data: bytes) -> None:
        with suppress(OSError):  # a few bytes always fit, unless the worker is gone, which its next read tells
            sock.send(data)

    # Bytes.

    def _ready(self, end: RelayEnd, state: int) -> None:
        if state & WRITE:
            self._write(end)
        if end.flow in self._ends and state & ~WRITE:
            self._read(end)

    def _read(self, end: RelayEnd) -> None:
        while not end.ended and self._network.has_room(end.flow):
            try:
                data = end.sock.recv(self._network.chunk)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if data:
                self.moved_at = self._clock()
                end.under_way.append(data)
                self._network.send(end.flow, len(data), self._clock())
            else:
                end.ended = True
        self._settle(end)

    def _write(self, end: RelayEnd) -> None:
        """Write what the socket takes of what was delivered; the flow that brought it may go on."""
        try:
            while end.delivered and not end.deaf:
                count = end.sock.send(end.delivered[0])
                self.moved_at = self._clock()
                self._network.taken(end.other.flow, count)
                if count < len(end.delivered[0]):
                    end.delivered[0] = end.delivered[0][count:]
                else:
                    end.delivered.popleft()
        except BlockingIOError:
            pass
        except OSError:  # it takes nothing more; what it said before still counts
            end.deaf = end.other.ended = True
            end.delivered.clear()
            end.other.under_way.clear()
        self._settle(end.other)

    def _settle(self, end: RelayEnd) -> None:
        """After bytes of this end were read or written: what to wait for now, and whether all is over."""
        other = end.other
        if end.ended and not (end.under_way or other.delivered or end.told):
            end.told = True
            with suppress(OSError):
                other.sock.shutdown(socket.SHUT_WR)
        if end.told and other.told:
            for one in (end, other):
                del self._ends[one.flow]
                self._off(one.sock)
            return
        for one in (end, other):
            reads = not one.ended and self._network.has_room(one.flow)
            self._mask(one.sock.fileno(), (READ if reads else 0) | (WRITE if one.delivered else 0))

    # What is waited for.

    def _on(self, sock: socket.socket, mask: int, action: Callable[[int], None]) -> None:
        self._actions[sock.fileno()] = action
        self._masks[sock.fileno()] = mask
        self._epoll.register(sock.fileno(), mask)

    def _mask(self, descriptor: int, mask: int) -> None:
        """Epoll reports the end of a connection whatever it is asked for: what is not waited for is not registered."""
        before, self._masks[descriptor] = self._masks[descriptor], mask
        if before and mask and before != mask:
            self._epoll.modify(descriptor, mask)
        elif mask and not before:
            self._epoll.register(descriptor, mask)
        elif before and not mask:
            self._epoll.unregister(descriptor)

    def _off(self, sock: socket.socket, close: bool = True) -> None:
        descriptor = sock.fileno()
        self._wanted = [wanted for wanted in self._wanted if wanted.sock is not sock]
        if self._actions.pop(descriptor, None) is not None:
            self._mask(descriptor, 0)
            del self._masks[descriptor]
        if close:
            sock.close()


def _shrink(sock: socket.socket, size: int) -> None:
    if size:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def _connected(place: str | tuple[str, int], buffer: int) -> socket.socket | None:
    """A connection to a path or port of this host; None where nothing listens."""
    sock = socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_TIMEOUT)
        _shrink(sock, buffer)
        sock.connect(place)
        sock.setblocking(False)
        if sock.getsockname() == sock.getpeername():  # a port of the kernel's choice, on which nothing listens: its own
            raise ConnectionRefusedError
        if not isinstance(place, str):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        sock.close()
        return None
    return sock


def _reply(code: int) -> bytes:
    return bytes((VERSION, code, 0, 1, 0, 0, 0, 0, 0, 0))

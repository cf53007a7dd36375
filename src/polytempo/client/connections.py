"""A worker's connections to all servers: one channel a shard, without a thread. The caller that waits does the receiving.

A rank is one process, and what that process starts has no part in the job:

    forked    (a data loader's workers, os.fork)         the connections it inherits are let go, its exit says nothing
    spawned   (spawn, forkserver: the script is imported anew, and `init` with it)
    started   (subprocess, with this worker's variables)

In each `rank()` and `size()` are the worker's, a wrapped optimizer runs alone, and what would talk is refused.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import zmq

from polytempo.errors import PeerError, UsageError
from polytempo.launcher.job_facts import claimed_by
from polytempo.protocol.messages import AnyMessage, Departed, Hello, PushStatus, Stopped, Whereabouts, decode, encode
from polytempo.transport.channel import Bytes, Channel, Poller


def started_by(place: str) -> str:
    """Which worker started this process, in words, if its place in the job is that worker's; else nothing."""
    worker = claimed_by(place)
    if worker not in (0, os.getpid()):
        return f"a worker of this rank, process {worker},"
    return "a worker of this rank" if is_importing_the_script() else ""


def is_importing_the_script() -> bool:
    """Is this a process of multiprocessing's that imports the script of the process that started it?"""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def refusal(parent: str) -> str:
    """What a process that `parent` started is told when it would take part."""
    return f"process {os.getpid()} was started by {parent} and takes no part in the job; only the worker itself can do this"


class InheritedChannel(Channel):
    """What a forked child has instead of its parent's connection."""

    def __init__(self, parent: str) -> None:
        self._parent = parent

    def _refuse(self) -> NoReturn:
        raise UsageError(refusal(self._parent))

    def send(self, header: bytes, buffers: Sequence[Bytes] = ()) -> int:
        self._refuse()

    def receive(self) -> tuple[bytes, list[Bytes]] | None:
        self._refuse()

    def pollable(self) -> Any:
        self._refuse()

    def close(self) -> None:
        """There is nothing to close."""


#: Takes the shard, the message and its buffers.
Handler = Callable[[int, Any, list[Bytes]], None]
#: Taken in by `listen`: who is gone, where workers are, and that the job has ended.
URGENT = (Departed, Whereabouts, Stopped)


class ServerConnections:
    """The channels to all shards.

    Args:
        channels: One for each shard, in order.
        handlers: Called with each message of a type that is received.
    """

    def __init__(self, channels: Sequence[Channel], handlers: Mapping[type, Handler]) -> None:
        self.channels = list(channels)
        self.bytes_sent = self.bytes_received = 0
        self.heard = time.monotonic()  #: the time at which bytes moved last, or were missed
        self._moved = 0
        self._handlers = handlers
        self._listening = False
        self._postponed: list[tuple[int, AnyMessage, list[Bytes]]] = []
        self._silent: set[int] = set()  # shards that were asked what became of a message, and have sent nothing since
        self._poller = Poller()
        for channel in channels:
            self._poller.register(channel.pollable(), zmq.POLLIN)

    def send(self, shard: int, message: AnyMessage, buffers: Sequence[Bytes] = ()) -> None:
        """Send a message to one shard. Where its server is gone, the reason it gave, if any, is raised."""
        try:
            self.bytes_sent += self.channels[shard].send(encode(message), buffers)
            self.heard = time.monotonic()
            if isinstance(message, PushStatus):
                self._silent.add(shard)
        except PeerError:
            with suppress(PeerError):
                self.receive(0)
            raise

    # Receiving.

    def receive(self, timeout: float) -> bool:
        """Handle every message that is there, after waiting at most `timeout` seconds for the first; was there one?"""
        ready = self._poller.poll(int(timeout * 1000))
        got = False
        for shard, channel in enumerate(self.channels):
            more = channel.pollable() in ready
            while more and (received := channel.receive()) is not None:
                got = True
                self._silent.discard(shard)
                header, buffers = received
                self.bytes_received += len(header) + sum(buffer.nbytes for buffer in buffers)
                self._handle(shard, decode(header), buffers)
                more = channel.may_have_more()
        if got:
            self.heard = time.monotonic()
        return got

    def listen(self, patience: float = 0.0) -> None:
        """Take in what is `URGENT`; the rest stays until it is waited for."""
        self._listening = True
        try:
            self.receive(patience)
        finally:
            self._listening = False

    def take_postponed(self) -> None:
        while self._postponed:
            self._dispatch(*self._postponed.pop(0))

    def _handle(self, shard: int, message: AnyMessage, buffers: list[Bytes]) -> None:
        if not self._listening:
            self.take_postponed()
        elif not isinstance(message, URGENT):
            self._postponed.append((shard, message, buffers))
            return
        self._dispatch(shard, message, buffers)

    def _dispatch(self, shard: int, message: AnyMessage, buffers: list[Bytes]) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(shard, message, buffers)

    # What moves.

    def count(self, nbytes: int) -> None:
        """Count what is exchanged with peers instead of servers, both ways."""
        self.bytes_sent += nbytes
        self.bytes_received += nbytes

    def moves(self) -> bool:
        """Has a byte moved on any connection since the last look, either way? Those of messages that are only partly through
        count, too."""
        before, self._moved = self._moved, sum(channel.moved() for channel in self.channels)
        if self._moved == before:
            return False
        self.heard = time.monotonic()
        return True

    def silence(self) -> str:
        """Which servers do not answer a question that each answers at once, however busy it is; for the end of a line."""
        return "".join(f"; server {shard} does not answer, is it stopped?" for shard in sorted(self._silent))

    # The end.

    def reconnect(self, shard: int, channel: Channel, hello: Hello) -> None:
        """Go on over another connection to the same server."""
        self._poller.unregister(self.channels[shard].pollable())
        self.channels[shard].close()
        self.channels[shard] = channel
        self._poller.register(channel.pollable(), zmq.POLLIN)
        self.send(shard, hello)

    def let_go(self, parent: str) -> None:
        for index, channel in enumerate(self.channels):
            channel.close()
            self.channels[index] = InheritedChannel(parent)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.channels = []

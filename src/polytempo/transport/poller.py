"""One way to wait for descriptors and ZeroMQ sockets.

Where only descriptors are watched the kernel is asked directly: that is half the price, and on one host it is the rule.
"""

from __future__ import annotations

import select
from typing import Any

import zmq


class Poller:
    """`zmq.Poller`'s interface and flags."""

    def __init__(self) -> None:
        self._plain = select.poll()
        self._zmq = zmq.Poller()
        self._sockets: set[Any] = set()

    def register(self, what: Any, events: int) -> None:
        """Watch a descriptor or socket from now on."""
        self._zmq.register(what, events)
        if isinstance(what, int):
            wanted = (select.POLLIN if events & zmq.POLLIN else 0) | (select.POLLOUT if events & zmq.POLLOUT else 0)
            self._plain.register(what, wanted)
        else:
            self._sockets.add(what)

    def unregister(self, what: Any) -> None:
        """Watch it no longer."""
        self._zmq.unregister(what)
        if isinstance(what, int):
            self._plain.unregister(what)
        else:
            self._sockets.discard(what)

    def poll(self, milliseconds: int | None = None) -> dict[Any, int]:
        """What is ready, and for what, waiting at most this long for the first."""
        if self._sockets:
            return dict(self._zmq.poll(milliseconds))
        return {descriptor: _flags(state) for descriptor, state in self._plain.poll(milliseconds)}


def _flags(state: int) -> int:
    if state == select.POLLIN:
        return 1  # zmq.POLLIN, without asking its enum
    known = (zmq.POLLIN if state & select.POLLIN else 0) | (zmq.POLLOUT if state & select.POLLOUT else 0)
    return int(known | (zmq.POLLERR if state & ~(select.POLLIN | select.POLLOUT) else 0))

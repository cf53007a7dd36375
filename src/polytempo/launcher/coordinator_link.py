"""The launcher's connection to the coordinator (server 0): requests for its status, and its messages."""

from __future__ import annotations

import time
from collections.abc import Iterator

from polytempo.errors import PeerError
from polytempo.launcher.process_monitor import ProcessMonitor
from polytempo.protocol.messages import AnyMessage, Hello, Status, StatusRequest, decode, encode
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.stream import StreamChannel

STATUS_EVERY = 0.5
LARGEST = 1 << 40
#: Requests that may be unanswered: more of them would fill the socket of a coordinator that is stopped, and block a sender.
UNANSWERED = 8


class CoordinatorLink:
    """Closed until the coordinator listens, and again when it is gone: then messages are dropped, as its pidfd tells."""

    def __init__(self, monitor: ProcessMonitor) -> None:
        self._monitor = monitor
        self._channel: StreamChannel | None = None
        self._requested_at = 0.0
        self.requested = self.answered = 0  #: requests for a status, and answers; they come in order

    @property
    def is_open(self) -> bool:
        """Whether the coordinator can be reached."""
        return self._channel is not None

    def open(self, address: str) -> bool:
        """Connect; false when the coordinator has ended since it was ready."""
        try:
            self._channel = StreamChannel(address.removeprefix("ipc://"), Pool(), LARGEST)
        except PeerError:
            return False
        self._monitor.watch(self._channel.pollable(), "coordinator")
        self.send(Hello(role="launcher"))
        return True

    def send(self, message: AnyMessage) -> None:
        """Send, if the coordinator is there."""
        if self._channel is not None:
            try:
                self._channel.send(encode(message))
            except PeerError:
                self.close()

    def request_status(self) -> int:
        """Ask for the status; the number of this request."""
        self._requested_at = time.monotonic()
        self.requested += 1
        self.send(StatusRequest())
        return self.requested

    def request_status_when_due(self) -> None:
        """Twice a second, while they are answered."""
        is_due = time.monotonic() - self._requested_at >= STATUS_EVERY
        if self.is_open and is_due and self.requested - self.answered < UNANSWERED:
            self.request_status()

    def received(self) -> Iterator[AnyMessage]:
        """All messages that have come."""
        try:
            while self._channel is not None and (received := self._channel.receive()) is not None:
                message = decode(received[0])
                self.answered += isinstance(message, Status)
                yield message
        except PeerError:
            self.close()

    def close(self) -> None:
        """Give the connection back."""
        if self._channel is not None:
            self._monitor.unwatch(self._channel.pollable())
            self._channel.close()
            self._channel = None

"""`--link`: the emulated network of a job on one host, as pure accounting: bytes and `now` in, times and deliveries out.

Each worker has one token bucket for what it sends and one for what it receives, shared by all its connections, like a
full-duplex network card. A chunk of a connection waits for the sender's bucket, travels for the latency, waits for the
receiver's bucket, and is delivered. Servers have no buckets: what they send waits for the receiver alone.

    bytes -> [sender's bucket] -> latency -> [receiver's bucket] -> delivered

A bucket serves chunks in the order in which they come. A connection has at most `AHEAD` chunks at its sender's bucket and a
bounded number under way, so that a large message of one connection does not hold up a small one of another for long.

What acts on this is `link_relay.py`. It differs from a real network in that nothing is lost and no packet has a header.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

#: A chunk takes this time on the line, within these limits of its bytes.
CHUNK_SECONDS = 0.005
SMALLEST_CHUNK, LARGEST_CHUNK = 4 << 10, 256 << 10
#: A bucket holds what the line carries in this time, and two chunks at least: a sender that wakes up late catches up.
BURST_SECONDS = 0.01
#: Chunks that a connection may have at its sender's bucket, and under way beside those that the latency keeps there.
AHEAD, SPARE = 2, 4


class TokenBucket:
    """Passes `rate` bytes a second, and up to `burst` bytes at once after a pause."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self._full_at = self._last = float("-inf")

    def ready_at(self, now: float, nbytes: int) -> float:
        """Take bytes that come at `now` into account; the time at which they may pass: never before earlier ones.

        Over any window of w seconds, no more than `rate * w + burst` bytes pass.

        Raises:
            ValueError: More bytes than the bucket ever holds.
        """
        if nbytes > self.burst:
            raise ValueError(f"expected at most {self.burst:g} bytes at once, got {nbytes}")
        self._last = max(now, self._last, self._full_at + (nbytes - self.burst) / self.rate)
        self._full_at = max(self._full_at, self._last) + nbytes / self.rate
        return self._last


class LinkPlace(Enum):
    """What a chunk has just done."""

    LEFT = auto()  #: the sender's bucket let it pass
    CAME = auto()  #: the latency is over
    DELIVERED = auto()  #: the receiver's bucket let it pass


@dataclass(eq=False)
class Flow:
    """One direction of a connection. An end without a worker is a server."""

    source: int | None
    target: int | None
    waiting: int = 0  #: chunks at the sender's bucket
    inside: int = 0  #: bytes that were sent and not taken by the receiver yet


@dataclass(order=True)
class LinkEvent:
    """A chunk and what happens to it next; events of one time happen in the order in which they were made."""

    at: float
    number: int
    place: LinkPlace = field(compare=False)
    flow: Flow = field(compare=False)
    nbytes: int = field(compare=False)


class EmulatedNetwork:
    """The buckets of all workers, and the chunks under way between them.

    Args:
        bandwidth: Bytes a second that each worker can send, and receive.
        latency: Seconds of each chunk's way.
        own: Rank to bytes a second of workers that have another link.
    """

    def __init__(self, bandwidth: float, latency: float, own: Mapping[int, float] | None = None) -> None:
        self.bandwidth, self.latency, self._own = bandwidth, latency, own or {}
        slowest = min([bandwidth, *self._own.values()])
        self.chunk = min(max(int(slowest * CHUNK_SECONDS), SMALLEST_CHUNK), LARGEST_CHUNK)  #: the most bytes sent at once
        self._burst = max(bandwidth * BURST_SECONDS, 2 * self.chunk)
        self._window = SPARE * self.chunk + bandwidth * latency
        self._sending: dict[int, TokenBucket] = {}
        self._receiving: dict[int, TokenBucket] = {}
        self._events: list[LinkEvent] = []
        self._number = 0

    def has_room(self, flow: Flow) -> bool:
        """Whether a connection may send another chunk now."""
        return flow.waiting < AHEAD and flow.inside < self._window

    def send(self, flow: Flow, nbytes: int, now: float) -> None:
        flow.waiting += 1
        flow.inside += nbytes
        self._then(LinkPlace.LEFT, self._pass(self._sending, flow.source, now, nbytes), flow, nbytes)

    def due(self) -> float | None:
        """When something happens next; None when nothing is under way."""
        return self._events[0].at if self._events else None

    def advance(self, now: float) -> Iterator[tuple[LinkPlace, Flow]]:
        """Let happen what is due, and tell of each chunk that has left its sender's bucket or is delivered, in order. What
        happens late is accounted for at its own time."""
        while self._events and self._events[0].at <= now:
            event = heapq.heappop(self._events)
            flow, nbytes = event.flow, event.nbytes
            if event.place is LinkPlace.LEFT:
                flow.waiting -= 1
                self._then(LinkPlace.CAME, event.at + self.latency, flow, nbytes)
            elif event.place is LinkPlace.CAME:
                self._then(LinkPlace.DELIVERED, self._pass(self._receiving, flow.target, event.at, nbytes), flow, nbytes)
            if event.place is not LinkPlace.CAME:
                yield event.place, flow

    def taken(self, flow: Flow, nbytes: int) -> None:
        """The receiver has taken delivered bytes: as many may be sent."""
        flow.inside -= nbytes

    def _then(self, place: LinkPlace, at: float, flow: Flow, nbytes: int) -> None:
        self._number += 1
        heapq.heappush(self._events, LinkEvent(at, self._number, place, flow, nbytes))

    def _pass(self, buckets: dict[int, TokenBucket], worker: int | None, now: float, nbytes: int) -> float:
        if worker is None:
            return now
        bucket = buckets.get(worker)
        if bucket is None:
            rate = self._own.get(worker, self.bandwidth)
            burst = max(rate * BURST_SECONDS, 2 * self.chunk) if worker in self._own else self._burst
            bucket = buckets[worker] = TokenBucket(rate, burst)
        return bucket.ready_at(now, nbytes)

"""A rank's messages: sending, matching receives, notifications, segments handed over, and which ranks are lost.

`Messaging` is the receiver of all links of a process. It has no thread and never waits: what a task waits for is a `Wait`,
which the progress engine asks again whenever a link was read.

    DATA     goes to the receive that was posted for its context, tag and sender (`mailbox.py`)
    NOTE     "so far": numbers of a context only grow, so the highest one counts
    SEGMENT  shared memory, kept until a task takes it
    HANDLE   of device memory, kept likewise; a DEVICE_NOTE is a NOTE that says so: what it tells of lies there
    ON_HOST  the sender's part of a call goes by host memory
    WAITS    the calls in which the sender waits for long; empty: none any more
    BYE      an orderly end: a link that closes without it belongs to a rank that has crashed, or is silent
    GIVEN_UP the sender goes on without this rank, and why: this rank can only end

The calls that messages announce, and failures of calls, go to the call queues (`call_queues.py`).
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from polytempo.collectives.mailbox import Mailbox, Receipt
from polytempo.collectives.tasks import Wait
from polytempo.errors import PeerError, RankLost
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Poller
from polytempo.transport.peer_link import (
    BYE,
    CALL,
    DATA,
    DEVICE_NOTE,
    FAILED,
    GIVEN_UP,
    HANDLE,
    NOTE,
    ON_HOST,
    SEGMENT,
    WAITS,
    LinkMessage,
    PeerLink,
)
from polytempo.transport.shared_memory import Segment

#: Seconds in which a call that was under way when a member crashed may still end well, if it needs that member no more.
GRACE = 0.5


class Links(dict[int, PeerLink]):
    """By rank. (A plain dict cannot be referred to weakly.)"""


class Messaging:
    """The links of one process, and what has arrived on them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.links = Links()
        self.payload_received = 0
        self.handed: Counter[int] = Counter()  #: context -> bytes for other ranks: sent to them, or put into shared memory
        self.left: dict[int, str] = {}  #: ranks that are gone, and why
        self.crashed: dict[int, float] = {}  #: those that did not say goodbye, and since when
        self.silent: set[int] = set()  #: those of them that may be alive: no kernel has said that they have ended
        self.given_up = ""  #: why other ranks go on without this one
        self.pool = Pool()
        self.mailbox = Mailbox(self.pool)
        self.notified: dict[tuple[int, int], int] = {}  #: (source, context) -> the highest number
        self.segments: dict[tuple[int, int, int], Segment] = {}  #: (source, context, tag)
        self.handles: dict[tuple[int, int, int], bytes] = {}  #: (source, context, tag)
        self.on_device: dict[tuple[int, int], int] = {}  #: (source, context) -> the last number that a DEVICE_NOTE had
        self.on_host: dict[tuple[int, int], int] = {}  #: (source, context) -> the last call of which ON_HOST was said
        self.calls: dict[int, str] = {}  #: of other ranks: what they wait in for long
        self.on_call: Callable[[int, LinkMessage], None] = lambda source, message: None
        self._goodbyes: set[int] = set()
        self._arrivals: dict[int, Callable[[int, LinkMessage, Bytes | None], None]] = {
            DATA: self._data,
            NOTE: self._note,
            CALL: lambda source, message, payload: None,  # its meta says all
            SEGMENT: self._segment,
            HANDLE: self._handle,
            DEVICE_NOTE: self._device_note,
            ON_HOST: self._on_host,
            WAITS: self._waits,
            BYE: lambda source, message, payload: self._goodbyes.add(source),
            GIVEN_UP: self._left_behind,
        }
        let_go_after_fork(self.links)

    def attach(self, links: Iterable[PeerLink], poller: Poller) -> None:
        """Use these links from now on."""
        for link in links:
            self.links[link.rank] = link
            link.attach(poller)

    def on_failure(self, handle: Callable[[LinkMessage], None]) -> None:
        """Hand over what says that a call has failed elsewhere."""
        self._arrivals[FAILED] = lambda source, message, payload: handle(message)

    def never_came(self, absent: Mapping[int, str]) -> None:
        """These ranks had ended before they were linked."""
        self.left |= absent
        self.crashed |= dict.fromkeys(absent, -math.inf)  # long ago: they have done no part of anything

    # What tasks use.

    def send(
        self, to: int, message: LinkMessage, payload: Bytes | None = None, sent: Callable[[], object] | None = None
    ) -> None:
        """Send to a rank without waiting.

        Raises:
            RankLost: The rank is gone.
        """
        if to in self.left:
            raise self.loss([to])
        if payload is not None:
            self.handed[message.context] += payload.nbytes
        self.links[to].send(message, payload, sent)

    def expect(self, context: int, tag: int, sender: int | None, length: int, buffer: Bytes | None = None) -> Receipt:
        """Post a receive; wait for it with `until`."""
        return self.mailbox.expect(context, tag, sender, length, buffer)

    def until(self, receipt: Receipt, among: Iterable[int] = ()) -> Wait:
        """Until a receive is done; `among`: the ranks it may come from, where that is not one."""
        return Wait(lambda: receipt.done, lambda: [receipt.sender] if receipt.sender is not None else list(among))

    def notify(self, ranks: Iterable[int], context: int, number: int, meta: bytes = b"", kind: int = NOTE) -> None:
        """Notify ranks that this one has reached a number of a context."""
        for rank in ranks:
            self.send(rank, LinkMessage(kind, context, number, meta))

    def until_notified(self, ranks: Iterable[int], context: int, number: int) -> Wait:
        """Until all of these ranks have reached a number of a context."""
        others, notified = [(rank, context) for rank in ranks], self.notified

        def ready() -> bool:
            return all([notified.get(key, -1) >= number for key in others])  # noqa: C419  a list is faster, and they are few

        return Wait(ready, lambda: [key[0] for key in others if notified.get(key, -1) < number])

    def any_on_device(self, ranks: Iterable[int], context: int, number: int) -> bool:
        """Whether one of these ranks has reached a number of a context with tensors in device memory."""
        return any(self.on_device.get((rank, context)) == number for rank in ranks)

    def loss(self, ranks: list[int], name: str = "") -> RankLost:
        """The error of a task, if it has a name, that needs ranks that are gone."""
        reasons = "; ".join(f"rank {rank} {self.left[rank]}" for rank in ranks)
        return RankLost(f"{reasons}: rank {self.rank} needs it{f' in {name}' if name else ''}", tuple(ranks))

    def crashed_for_long(self, ranks: Iterable[int], now: float) -> list[int]:
        """Which of these ranks have crashed longer ago than calls are given to end."""
        return [rank for rank in ranks if now - self.crashed.get(rank, now) > GRACE]

    # What links call.

    def room(self, source: int, message: LinkMessage, length: int) -> Bytes:
        """Memory for a payload that is about to arrive."""
        try:
            if message.kind != DATA:
                return self.pool.take(length)
            return self.mailbox.room(source, message.context, message.tag, length)
        except (MemoryError, ValueError):
            raise PeerError(f"it has announced {length} bytes, and there is no memory for them") from None

    def arrived(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        """A whole message is there."""
        if message.meta and message.kind not in (FAILED, WAITS, GIVEN_UP):
            self.on_call(source, message)
        self._arrivals[message.kind](source, message, payload)

    def gone(self, source: int, reason: str) -> None:
        """A link has ended."""
        if source in self.left:  # it was given up before
            return
        if source in self._goodbyes:
            self.left[source] = "has left the job"
        else:
            self._lose(source, f"is gone ({reason})", source in self.links and self.links[source].silent)

    def _lose(self, rank: int, how: str, silent: bool) -> None:
        self.left[rank], self.crashed[rank] = how, time.monotonic()
        if silent:
            self.silent.add(rank)

    def give_up(self, rank: int, reason: str) -> None:
        """Go on without a rank that is still connected, and tell it so. Its link stays open: closed, it would look to that
        rank as if this one had ended. For tasks only."""
        if rank not in self.left:
            self.links[rank].send(LinkMessage(GIVEN_UP, 0, 0, reason.encode()))
            self._lose(rank, f"was given up ({reason})", True)

    def _left_behind(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        self.given_up = self.given_up or message.meta.decode(errors="replace")
        if source not in self.left:
            self._lose(source, f"goes on without rank {self.rank} ({self.given_up})", True)

    def _data(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        self.payload_received += payload.nbytes if payload is not None else 0
        self.mailbox.arrived(source, message.context, message.tag, payload)

    def _note(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        key = source, message.context
        self.notified[key] = max(message.tag, self.notified.get(key, -1))

    def _device_note(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        self.on_device[source, message.context] = message.tag
        self._note(source, message, payload)

    def _on_host(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        self.on_host[source, message.context] = message.tag

    def _waits(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        self.calls[source] = message.meta.decode(errors="replace")
        if not message.meta:
            del self.calls[source]

    def _handle(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        if payload is not None:
            self.handles[source, message.context, message.tag] = payload.tobytes()
            self.pool.give(payload)

    def _segment(self, source: int, message: LinkMessage, payload: Bytes | None) -> None:
        if message.segment is not None:
            self.segments[source, message.context, message.tag] = message.segment


def let_go_after_fork(links: Links) -> None:
    """A forked child, such as a data loader's, must not keep its parent's links open: they would outlive the parent."""
    reference = weakref.ref(links)

    def let_go() -> None:
        inherited = reference()
        if inherited is not None:
            for link in inherited.values():
                link.abandon()
            inherited.clear()

    os.register_at_fork(after_in_child=let_go)


def close_with_goodbye(link: PeerLink) -> None:
    """Close a link, after telling the other end that this is no crash."""
    link.send(LinkMessage(BYE, 0, 0))
    link.close()


def close_as_crashed(link: PeerLink) -> None:
    """Close a link as a crash would."""
    link.close()

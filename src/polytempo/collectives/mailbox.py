"""Which message belongs to which receive: by context, tag and sender, in the order of posting and of sending.

A message without a receive waits here. A receive may be from any rank. Pure but for the memory it hands out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes

MailboxKey = tuple[int, int]  # context, tag


@dataclass(slots=True, eq=False)
class Receipt:
    """A receive that was posted. Without `buffer` it takes whatever comes, in memory of the pool."""

    sender: int | None
    length: int
    buffer: Bytes | None = None
    source: int = -1  #: the rank it came from
    taken: bool = False  #: a message belongs to it
    done: bool = False
    problem: str = ""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A message that was there before its receive."""

    source: int
    payload: Bytes | None = None
    receipt: Receipt | None = None  # it was posted while the payload was under way


@dataclass
class Mailbox:
    """All receives and messages of a process."""

    pool: Pool
    _posted: dict[MailboxKey, deque[Receipt]] = field(default_factory=dict)
    _waiting: dict[MailboxKey, deque[_Waiting]] = field(default_factory=dict)
    _arriving: dict[int, Receipt | _Waiting] = field(default_factory=dict)  # by source: one payload at a time

    # Asking.

    def expect(self, context: int, tag: int, sender: int | None, length: int, buffer: Bytes | None) -> Receipt:
        """Post a receive."""
        receipt = Receipt(sender, length, buffer)
        for waiting in self._waiting.get((context, tag), ()):
            if waiting.receipt is None and sender in (None, waiting.source):
                receipt.source, receipt.taken, waiting.receipt = waiting.source, True, receipt
                if waiting.payload is not None:
                    self._settle(waiting, (context, tag))
                return receipt
        self._posted.setdefault((context, tag), deque()).append(receipt)
        return receipt

    def withdraw(self, receipt: Receipt, context: int, tag: int) -> None:
        """Cancel a receive: what would have been its message is the next one's."""
        posted = self._posted.get((context, tag))
        if posted and receipt in posted:
            posted.remove(receipt)
            if not posted:
                del self._posted[context, tag]
        for waiting in self._waiting.get((context, tag), ()):
            if waiting.receipt is receipt:
                waiting.receipt = None

    def _settle(self, waiting: _Waiting, key: MailboxKey) -> None:
        receipt, payload = waiting.receipt, waiting.payload
        assert receipt is not None
        assert payload is not None
        messages = self._waiting.get(key, deque())  # none, if the context was dropped meanwhile
        if waiting in messages:
            messages.remove(waiting)
        if not messages:
            self._waiting.pop(key, None)
        if payload.nbytes != receipt.length:
            receipt.problem = f"expected {receipt.length} bytes from rank {waiting.source}, got {payload.nbytes}"
        elif receipt.buffer is None:
            receipt.buffer = payload
        else:
            receipt.buffer[:] = payload
            self.pool.give(payload)
        receipt.done = True

    # Arriving.

    def room(self, source: int, context: int, tag: int, length: int) -> Bytes:
        """Where the payload of a message goes that is about to arrive."""
        receipt = self._claim(source, (context, tag))
        if receipt is None:
            waiting = _Waiting(source)
            self._waiting.setdefault((context, tag), deque()).append(waiting)
            self._arriving[source] = waiting
            return self.pool.take(length)
        self._arriving[source] = receipt
        if length != receipt.length:
            receipt.problem = f"expected {receipt.length} bytes from rank {source}, got {length}"
            return self.pool.take(length)
        if receipt.buffer is None:
            receipt.buffer = self.pool.take(length)
        return receipt.buffer

    def _claim(self, source: int, key: MailboxKey) -> Receipt | None:
        posted = self._posted.get(key)
        for receipt in posted or ():
            if receipt.sender in (None, source):
                assert posted is not None
                posted.remove(receipt)
                if not posted:
                    del self._posted[key]
                receipt.source, receipt.taken = source, True
                return receipt
        return None

    def arrived(self, source: int, context: int, tag: int, payload: Bytes | None) -> None:
        """A message is whole."""
        if payload is None:
            payload = self.room(source, context, tag, 0)
        where = self._arriving.pop(source)
        if isinstance(where, Receipt):
            where.done = True
            return
        where.payload = payload
        if where.receipt is not None:
            self._settle(where, (context, tag))

    def drop(self, context: int, largest: int) -> None:
        """Nothing of this context will be asked for under tags up to this size. (What is just arriving is dropped when it
        is there.)"""
        for table in (self._posted, self._waiting):
            for key in [key for key in table if key[0] == context and abs(key[1]) <= largest]:
                del table[key]

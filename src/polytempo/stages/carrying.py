"""Parcels (`parcels.py`) between ranks.

What a message is like (shapes, dtypes, which tensors want a gradient) is announced before the first of its kind between two
ranks, and again when it changes; after that only bytes travel, in one piece. Sending never waits: a copy is made, and the
engine's thread sends it, and receives whatever comes, while this rank computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from polytempo.collectives.group import Group
from polytempo.collectives.post import Receipt
from polytempo.collectives.tasks import Lane, Steps, Task, Wait
from polytempo.errors import PeerError, RankLost, UsageError
from polytempo.stages.parcels import Form, Parcel, described, packed, unpacked
from polytempo.transport.channel import Bytes
from polytempo.transport.links import DATA, FAILED, Message
from polytempo.transport.pool import Pool

#: Kinds of messages: activations, gradients, losses.
FORWARD, BACKWARD, LOSS = 0, 1, 2
KINDS = 8
#: An announcement has this many bytes.
ANNOUNCEMENT = 8 << 10


@dataclass
class _Incoming:
    """Messages of one kind from one rank, in the order in which they were sent."""

    form: Form | None = None
    count: int = 0  # of announcements
    announced: Receipt | None = None  # the next announcement; it may be there before the messages that come first are read
    parcels: dict[int, Parcel] = field(default_factory=dict)


class Carrier:
    """This rank's post."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._engine, self.device = group, group.engine, device
        self._context = group.context + 1
        self._outgoing: dict[tuple[int, int], tuple[int, Form]] = {}
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        self._sending: deque[Task] = deque()
        self._pool = Pool()

    # Sending.

    def send(self, to: int, kind: int, parcel: Parcel) -> None:
        """Send to a rank, without waiting."""
        count, form = self._outgoing.get((to, kind), (0, None))
        text = described(parcel)
        announcement = b""
        if form is None or form.text != text:
            count, form = count + 1, Form(text)
            self._outgoing[to, kind] = count, form
            announcement = _padded(text)
        data = packed(parcel, form, self._pool)
        while self._sending and self._sending[0].done:
            self._sending.popleft()
        steps = self._send(to, kind, count, data, announcement)
        self._sending.append(self._start(f"send to rank {to}", steps))

    def _send(self, to: int, kind: int, count: int, data: Bytes, announcement: bytes) -> Steps:
        if announcement:
            note = self._pool.take(ANNOUNCEMENT)
            note[:] = memoryview(announcement)
            self._engine.send(to, Message(DATA, self._context, kind), note)
        left = [1]
        self._engine.send(to, Message(DATA, self._context, count * KINDS + kind), data, left.clear)
        if left:
            yield Wait(lambda: not left, lambda: [to])
        self._pool.give(data)

    def settle(self) -> None:
        """Until all is sent: who ends after this owes nobody anything."""
        while self._sending:
            self._sending.popleft().wait()

    # Receiving.

    def take(self, source: int, kind: int, number: int) -> Parcel:
        """The message with this number, of this kind, from this rank; waits for it."""
        incoming = self._incoming.setdefault((source, kind), _Incoming())
        while number not in incoming.parcels:
            parcel = self._start(f"message {number} from rank {source}", self._receive(source, kind, incoming)).wait()
            incoming.parcels[parcel.number] = parcel
        return incoming.parcels.pop(number)

    def _receive(self, source: int, kind: int, incoming: _Incoming) -> Steps:
        """The next message; announcements that come before it are read."""
        while True:
            if incoming.announced is None:
                incoming.announced = self._engine.expect(self._context, kind, source, ANNOUNCEMENT)
            form, note = incoming.form, incoming.announced
            tag = incoming.count * KINDS + kind
            data = self._engine.expect(self._context, tag, source, form.size) if form else note
            try:
                yield from self._until(source, data, note)
            finally:
                if data is not note:
                    self._engine.post.withdraw(data, self._context, tag)
            if form is not None and data.done:  # what was sent first is there first: it is not of the newer form
                return unpacked(_bytes(data), form, self._engine.pool, self.device)
            incoming.form = Form(_bytes(note).tobytes().decode().rstrip())
            incoming.count, incoming.announced = incoming.count + 1, None

    def _until(self, source: int, *receipts: Receipt) -> Steps:
        lane = self._group.lane

        def ready() -> bool:
            return lane.failed is not None or any(receipt.done for receipt in receipts)

        if not ready():
            yield Wait(ready, lambda: [source])
        if lane.failed is not None and not any(receipt.done for receipt in receipts):
            raise lane.failed

    # Failing.

    @property
    def failed(self) -> Exception | None:
        """Why others cannot go on, as they have said."""
        return self._group.lane.failed

    def fail(self, error: Exception, groups: Sequence[Group]) -> None:
        """Tell all others in these groups that nothing goes on, and why: also what others have told. So everybody
        who waits for this rank hears the cause before it hears that this rank is gone, too."""

        def steps() -> Steps:
            text, lost = str(error).encode()[:60_000], error.ranks[0] + 1 if isinstance(error, RankLost) else 0
            for group in groups:
                for rank in group.ranks:
                    if rank != self._engine.rank and rank not in self._engine.left:
                        self._engine.links[rank].send(Message(FAILED, group.lane.context, lost, text))
                self._engine.fail(group.lane, error, tell=False)
            return
            yield  # a generator

        with suppress(PeerError):  # what is to be said is more than that it could not be said
            self._start("telling others of a failure", steps()).wait(5.0)

    def loss_of(self, rank: int) -> str:
        """What is known of a rank that is gone."""
        return self._engine.left.get(rank, "is gone")

    def _start(self, name: str, steps: Steps) -> Task:
        return self._engine.start(Lane(-1, self._group.ranks), name, steps, True, self._group.timeout)


def _padded(text: str) -> bytes:
    data = text.encode()
    if len(data) > ANNOUNCEMENT:
        raise UsageError(
            f"what passes between two stages takes {len(data)} bytes to describe, more than {ANNOUNCEMENT}; "
            "cut where fewer tensors pass"
        )
    return data.ljust(ANNOUNCEMENT)


def _bytes(receipt: Receipt) -> Bytes:
    if receipt.problem or receipt.buffer is None:
        raise PeerError(f"a message between stages does not fit its announcement: {receipt.problem}")
    return receipt.buffer

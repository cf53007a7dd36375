"""What passes between stages: values with a microbatch's number, the version of its weights, and a figure.

What a message is like (shapes, dtypes, which tensors want a gradient) is announced before the first of its kind between two
ranks, and again when it changes; after that only bytes travel, in one piece. Sending never waits: a copy is made, and the
engine's thread sends it, and receives whatever comes, while this rank computes. Tensors that arrive lie in the memory the
message came in; it is used again when nobody holds them any more.
"""

from __future__ import annotations

import json
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polytempo.collectives.group import Group
from polytempo.collectives.post import Receipt
from polytempo.collectives.tasks import Lane, Steps, Task, Wait
from polytempo.errors import PeerError, RankLost, UsageError
from polytempo.transport.channel import Bytes
from polytempo.transport.links import DATA, FAILED, Message
from polytempo.transport.pool import Pool

#: Kinds of messages: activations, gradients, losses.
FORWARD, BACKWARD, LOSS = 0, 1, 2
KINDS = 8
#: An announcement has this many bytes.
ANNOUNCEMENT = 8 << 10
#: Number of the microbatch, version of the weights, figure.
HEAD = struct.Struct("<qqd")
ALIGNED = 64


@dataclass
class Parcel:
    """What one message brings. `single`: the one value was not in a tuple."""

    values: list[Any]
    single: bool = False
    number: int = 0
    version: int = 0
    figure: float = 0.0


@dataclass
class Form:
    """What all messages are like that follow an announcement: for each value its place, dtype and shape, or itself."""

    text: str
    entries: list[Any] = field(default_factory=list)
    single: bool = False
    size: int = ALIGNED
    places: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.single, self.entries = json.loads(self.text)
        for entry in self.entries:
            self.places.append(self.size)
            if "shape" in entry:
                length = torch.Size(entry["shape"]).numel() * dtype_of(entry).itemsize
                self.size += -(-length // ALIGNED) * ALIGNED


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    """The dtype of an announced tensor."""
    found = getattr(torch, entry["dtype"])
    assert isinstance(found, torch.dtype)
    return found


def described(parcel: Parcel) -> str:
    """The form of a parcel, as text."""
    return json.dumps([parcel.single, [_entry(value) for value in parcel.values]], separators=(",", ":"))


def _entry(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise UsageError(f"expected dense tensors between stages, got one with layout {value.layout}; use .to_dense()")
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "dtype": dtype, "grad": value.requires_grad}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise UsageError(f"expected tensors between stages (or numbers, or None), got {type(value).__name__}; cut elsewhere")


def packed(parcel: Parcel, form: Form, pool: Pool) -> Bytes:
    """A copy as bytes."""
    data = pool.take(form.size)
    HEAD.pack_into(data.data, 0, parcel.number, parcel.version, parcel.figure)
    whole = torch.from_numpy(data)
    for value, place in zip(parcel.values, form.places, strict=True):
        if isinstance(value, torch.Tensor) and value.numel():
            length = value.numel() * value.element_size()
            whole[place : place + length].view(value.dtype).view(value.shape).copy_(value.detach())
    return data


def unpacked(data: Bytes, form: Form, pool: Pool, device: torch.device) -> Parcel:
    """Tensors in the same memory, which goes back to the pool when they are gone."""
    number, version, figure = HEAD.unpack_from(data.data, 0)
    view = data[:]
    whole = torch.from_numpy(view)  # holds the view, not what the view is of
    weakref.finalize(view, pool.give, data).atexit = False
    values = [_value(whole, entry, place, device) for entry, place in zip(form.entries, form.places, strict=True)]
    return Parcel(values, form.single, number, version, figure)


def _value(whole: torch.Tensor, entry: dict[str, Any], place: int, device: torch.device) -> Any:
    if "shape" not in entry:
        return torch.Size(entry["size"]) if "size" in entry else entry["value"]
    dtype, shape = dtype_of(entry), torch.Size(entry["shape"])
    if not shape.numel():
        tensor = torch.empty(shape, dtype=dtype, device=device)
    else:
        tensor = whole[place : place + shape.numel() * dtype.itemsize].view(dtype).view(shape).to(device)
    return tensor.requires_grad_() if entry["grad"] else tensor


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

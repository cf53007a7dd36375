"""Point-to-point messages (`stage_message.py`) between the stages of a pipeline.

The form of a message (shapes, dtypes, which tensors want a gradient) is announced before the first of its kind between two
ranks, and again when it changes; after that only bytes travel, in one piece. On one host they lie in leased blocks of shared
memory (`transport/shared_memory.py`), and a small message refers to the block. Between stages whose GPUs reach each other
they lie in device memory (`device_messages.py`); what a GPU sends otherwise goes through pinned host memory.

Sending never waits: a copy is made, and what the socket does not take at once is sent by the engine's thread. Otherwise no
thread is involved: the sender sends by itself, and the receiver reads by itself while it waits. Handing messages to another
thread and waking it would cost more than the rest of a hop.
"""

from __future__ import annotations

import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from polytempo.collectives.call_queues import CallQueue, failure
from polytempo.collectives.group import RankGroup
from polytempo.collectives.mailbox import Receipt
from polytempo.collectives.tasks import Steps, Task, Wait
from polytempo.device.device import Device
from polytempo.errors import PeerError, UsageError
from polytempo.pipeline.device_messages import FENCE_SEGMENT, HEADER, DeviceMessages
from polytempo.pipeline.stage_message import (
    MessageForm,
    StageMessage,
    described,
    on_gpu,
    outline,
    pack,
    pinned,
    unpacked,
)
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes
from polytempo.transport.cpu_affinity import CoreSlot
from polytempo.transport.peer_link import DATA, SEGMENT, LinkMessage
from polytempo.transport.shared_memory import SHARE_FROM, LeasedBlocks, Segment, read_block, warn_unshared

#: Kinds of messages: activations, gradients, losses; activations and losses of a batch that is only evaluated.
FORWARD, BACKWARD, LOSS, EVALUATION, EVALUATED = 0, 1, 2, 3, 4
KINDS = 8
#: Seconds in which what a lost rank has said may still come.
LAST_WORDS = 1.0
#: An announcement has this many bytes.
ANNOUNCEMENT = 8 << 10
#: What an announcement begins with: messages refer to blocks of shared memory or of device memory, or are the bytes.
SHARED, DEVICE, BYTES = "shared ", "device ", "bytes "
#: A reference: the number of a segment, and the offset of a block in it.
REFERENCE = struct.Struct("<qq")
#: Bytes that travel where the message itself does not.
SIZES = {SHARED: REFERENCE.size, DEVICE: HEADER.size}


@dataclass
class _Outgoing:
    """Messages of one kind to one rank."""

    outline: tuple[Any, ...] = ()
    form: MessageForm | None = None
    count: int = 0  # of announcements
    how: str = BYTES


@dataclass
class _Incoming:
    """Messages of one kind from one rank, in the order in which they were sent."""

    form: MessageForm | None = None
    how: str = BYTES
    count: int = 0  # of announcements
    announced: Receipt | None = None  # the next announcement; it may be there before the messages that come first are read
    messages: dict[int, StageMessage] = field(default_factory=dict)


class PointToPoint:
    """This rank's messages to and from other stages.

    Args:
        group: The ranks of the pipeline.
        device: Where received tensors are wanted.
        shared: The device itself, and the ranks with which this one shares its memory; None: with none.
    """

    def __init__(self, group: RankGroup, device: torch.device, shared: tuple[Device, frozenset[int]] | None = None) -> None:
        self._on_device = DeviceMessages(group, *shared) if shared is not None and shared[1] else None
        self._group, self._engine, self.device = group, group.engine, device
        self._context = group.context + 1
        self._outgoing: dict[tuple[int, int], _Outgoing] = {}
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        self._sending: deque[Task] = deque()
        self._pool = Pool()
        here = next(host for host in group.place.hosts if group.rank in host)
        self._blocks = {group.ranks[index]: LeasedBlocks() for index in here}  # for the ranks of this host
        self._core = CoreSlot(len(here))
        self._segments: dict[tuple[int, int], Segment] = {}  # of others: rank, number

    # Sending.

    def send(self, to: int, kind: int, message: StageMessage) -> None:
        """Send to a rank, without waiting."""
        outgoing = self._outgoing.setdefault((to, kind), _Outgoing())
        way = SHARED if to in self._blocks else BYTES  # how this message may travel
        if self._on_device is not None and self._on_device.carries(to, message):
            way = DEVICE
        form, announcement = self._form(outgoing, message, way)
        while self._sending and self._sending[0].done:
            self._sending.popleft()
        try:
            data, segment = self._written(to, outgoing, form, message)
        except (OSError, MemoryError) as error:
            del self._blocks[to]  # from now on without
            warn_unshared(f"rank {self._engine.rank} cannot share {form.size} bytes of memory with rank {to}", error)
            outgoing.form = None  # to be announced again
            outgoing.count -= bool(announcement)  # it was not sent
            return self.send(to, kind, message)
        steps = self._send(to, kind, outgoing.count, data, announcement, segment)
        task = self._engine.begin(CallQueue(-1, self._group.ranks), f"send to rank {to}", steps, self._group.timeout)
        self._sending.append(task)

    def _form(self, outgoing: _Outgoing, message: StageMessage, way: str) -> tuple[MessageForm, bytes]:
        """What the message is like, and what must be announced before it."""
        outlined = way, *outline(message)
        if outgoing.form is not None and outgoing.outline == outlined:
            return outgoing.form, b""
        form = MessageForm(described(message))
        outgoing.outline, outgoing.form = outlined, form
        outgoing.how = BYTES if way == SHARED and form.size < SHARE_FROM else way
        outgoing.count += 1
        text = (outgoing.how + form.text).encode()
        if len(text) > ANNOUNCEMENT:
            raise UsageError(
                f"what passes between two stages takes {len(text)} bytes to describe, more than {ANNOUNCEMENT}; "
                "cut where fewer tensors pass"
            )
        return form, text.ljust(ANNOUNCEMENT)

    def _written(
        self, to: int, outgoing: _Outgoing, form: MessageForm, message: StageMessage
    ) -> tuple[Bytes, tuple[int, Segment] | None]:
        """What travels; and memory to hand over before it."""
        if outgoing.how == DEVICE:
            assert self._on_device is not None
            header, words = self._on_device.write(to, form, message)
            return self._counted(form.size, header), (FENCE_SEGMENT, words) if words is not None else None
        if outgoing.how == BYTES:
            data = self._pool.take(form.size) if not on_gpu(message) else pinned(form.size)
            pack(message, form, data)
            return data, None
        block, made = self._blocks[to].take(form.size)
        pack(message, form, block.room)
        reference = self._counted(form.size, REFERENCE.pack(block.number, block.offset))
        return reference, (block.number, made) if made is not None else None

    def _counted(self, size: int, reference: bytes) -> Bytes:
        """What travels in place of this many bytes, which count as if they themselves were sent."""
        self._engine.messages.handed[self._context] += size - len(reference)
        data = self._pool.take(len(reference))
        data[:] = memoryview(reference)
        return data

    def _send(
        self, to: int, kind: int, count: int, data: Bytes, announcement: bytes, segment: tuple[int, Segment] | None
    ) -> Steps:
        if announcement:
            note = self._pool.take(ANNOUNCEMENT)
            note[:] = memoryview(announcement)
            self._engine.messages.send(to, LinkMessage(DATA, self._context, kind), note)
        if segment is not None:
            self._engine.messages.send(to, LinkMessage(SEGMENT, self._context, segment[0], segment=segment[1]))
        left = [1]
        self._engine.messages.send(to, LinkMessage(DATA, self._context, count * KINDS + kind), data, left.clear)
        if left:
            yield Wait(lambda: not left, lambda: [to])
        self._pool.give(data)

    def settle(self) -> None:
        """Wait until all is sent: after this the rank may end."""
        while self._sending:
            self._sending.popleft().wait()
        if self._on_device is not None:
            self._on_device.settle()

    def confirm(self) -> None:
        """Wait until the contents of all messages that were taken are there: where a device's stream waits for them, they
        may still be lost with their sender.

        Raises:
            RankLost: A message is lost.
        """
        if self._on_device is not None:
            self._on_device.confirm()

    # Receiving.

    def take(self, source: int, kind: int, number: int, meanwhile: Callable[[], bool] = lambda: False) -> StageMessage:
        """The message with this number, of this kind, from this rank; waits for it. As long as it is not there,
        `meanwhile` may do a piece of other work, until it has none."""
        incoming = self._incoming.setdefault((source, kind), _Incoming())
        while number not in incoming.messages:
            task = self._start(f"message {number} from rank {source}", self._receive(source, kind, incoming))
            while not task.is_completed() and meanwhile():
                pass
            with self._core if not task.done else nullcontext():
                data, form = task.wait()
            message = self._unpacked(source, data, incoming.how, form)
            incoming.messages[message.number] = message
        return incoming.messages.pop(number)

    def _receive(self, source: int, kind: int, incoming: _Incoming) -> Steps:
        """The next message; announcements that come before it are read."""
        while True:
            if incoming.announced is None:
                incoming.announced = self._engine.messages.expect(self._context, kind, source, ANNOUNCEMENT)
            form, note = incoming.form, incoming.announced
            tag = incoming.count * KINDS + kind
            size = SIZES.get(incoming.how, form.size if form else 0)
            data = self._engine.messages.expect(self._context, tag, source, size) if form else note
            try:
                yield from self._until(source, data, note)
            finally:
                if data is not note:
                    self._engine.messages.mailbox.withdraw(data, self._context, tag)
            if form is not None and data.done:  # what was sent first is there first: it is not of the newer form
                return _bytes(data), form
            how, _, text = _bytes(note).tobytes().decode().rstrip().partition(" ")
            incoming.form, incoming.how = MessageForm(text), f"{how} "
            incoming.count, incoming.announced = incoming.count + 1, None

    def _unpacked(self, source: int, data: Bytes, how: str, form: MessageForm) -> StageMessage:
        """The message of what has come. For the thread that computes: its streams order what a device is given."""
        if how != DEVICE:
            return unpacked(self._held(source, data, how, form.size), form, self.device)
        if self._on_device is None:
            raise PeerError(f"rank {source} sends device memory, and rank {self._engine.rank} shares none with it")
        header = data.tobytes()
        self._engine.messages.pool.give(data)
        return self._on_device.read(source, header, form, lambda: self._segment(source, FENCE_SEGMENT))

    def _segment(self, source: int, number: int) -> Segment:
        """Memory that a rank has handed over, before the first message that refers to it."""
        if (key := (source, number)) not in self._segments:
            self._segments[key] = self._engine.messages.segments.pop((source, self._context, number))
        return self._segments[key]

    def _held(self, source: int, data: Bytes, how: str, size: int) -> Bytes:
        """The bytes of a message; their memory is free again when the last view is gone."""
        if how != SHARED:
            view = data[:]
            weakref.finalize(view, self._engine.messages.pool.give, data).atexit = False
            return view
        number, offset = REFERENCE.unpack(data.tobytes())
        try:
            return read_block(self._segment(source, number), offset, size)
        except (KeyError, ValueError):
            raise PeerError(
                f"invalid shared-memory reference from rank {source} (segment {number}, offset {offset})"
            ) from None

    def _until(self, source: int, *receipts: Receipt) -> Steps:
        queue = self._group.queue

        def ready() -> bool:
            return queue.failed is not None or any(receipt.done for receipt in receipts)

        if not ready():
            yield Wait(ready, lambda: [source])
        if queue.failed is not None and not any(receipt.done for receipt in receipts):
            self._engine.read_all()  # what was sent before counts, and may be in a socket that was not looked at since
            if not any(receipt.done for receipt in receipts):
                raise queue.failed

    # Failing.

    @property
    def failed(self) -> Exception | None:
        """Why others cannot go on, as they have said."""
        return self._group.queue.failed

    def fail(self, error: Exception, groups: Sequence[RankGroup]) -> None:
        """Tell all other ranks of these groups that nothing goes on, and why: also what other ranks have told. So a rank
        that waits for this one learns the cause before it learns that this one is gone, too."""

        def steps() -> Steps:
            for group in groups:
                self._engine.queues.spread(group.queue, failure(group.queue, error, final=True, number=0))
                self._engine.queues.fail(group.queue, error, tell=False, final=True)
            return
            yield  # a generator

        with suppress(PeerError):  # what is to be said is more than that it could not be said
            self._start("telling other ranks of a failure", steps()).wait(5.0)

    def told(self, rank: int, groups: Sequence[RankGroup]) -> Exception | None:
        """Why a lost rank could not go on, if it has said so in one of these groups before it left."""

        def heard() -> Exception | None:
            return next((group.queue.failed for group in groups if group.queue.failed is not None), None)

        def steps() -> Steps:
            if heard() is None:
                yield Wait(lambda: heard() is not None or rank in self._engine.messages.left, list)
                self._engine.read_all()

        with suppress(PeerError):
            self._start(f"the last words of rank {rank}", steps()).wait(LAST_WORDS)
        return heard()

    def loss_of(self, rank: int) -> str:
        """What is known of a rank that is gone."""
        return self._engine.messages.left.get(rank, "is gone")

    def _start(self, name: str, steps: Steps) -> Task:
        return self._engine.start(CallQueue(-1, self._group.ranks), name, steps, False, self._group.timeout)


def _bytes(receipt: Receipt) -> Bytes:
    if receipt.problem or receipt.buffer is None:
        raise PeerError(f"a message between stages does not fit its announcement: {receipt.problem}")
    return receipt.buffer

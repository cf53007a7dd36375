"""The executor of plans: what a rank's steps (`steps.py`) do to a list of tensors.

All receives are posted at the start, so that data goes straight into the tensors. That is safe for these plans: what is
stored in a chunk was made from what this rank has sent of it before. What is to be combined waits in memory of the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from polytempo.collectives.device_buffer import DeviceSlotBuffer, DeviceSlotBuffers
from polytempo.collectives.device_call import DeviceCall, NotOnDevice, until
from polytempo.collectives.flattening import StagedCopy
from polytempo.collectives.mailbox import Receipt
from polytempo.collectives.messaging import Messaging
from polytempo.collectives.reduce_ops import COMBINE, total, total_on_device
from polytempo.collectives.shared_buffer import SlotBuffer
from polytempo.collectives.steps import Combine, Copy, Fetch, Meet, Put, Receive, Send, Step, Total
from polytempo.collectives.tasks import Steps, Wait
from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes
from polytempo.transport.peer_link import DATA, DEVICE_NOTE, NOTE, LinkMessage

#: A tensor that this rank's steps never touch.
NOTHING = torch.empty(0)


@dataclass
class ExecutionStage:
    """What a plan is carried out on. Plans number ranks from 0; `ranks` are their ranks in the job."""

    messages: Messaging
    context: int
    tag: int
    ranks: Sequence[int]
    meta: bytes = b""  #: the description of the call, sent with its first message to a rank
    op: str = "sum"
    buffer: SlotBuffer | DeviceSlotBuffer | None = None
    offsets: Sequence[int] = ()  #: where in a slot each chunk lies
    barriers: Iterator[int] = field(default_factory=count)  #: numbers of the barriers of this context
    announced: bool = False  #: the call was described in a notification
    on: DeviceCall | None = None  #: where slots are in device memory
    slots: DeviceSlotBuffers | None = None  #: those
    arriving: StagedCopy | None = None  #: where chunks are parts of it: they are used when they are here

    def do(self, work: Callable[[], object] | None) -> None:
        """Work on tensors, if there is any: here and now, or in the order of a device's stream."""
        if work is None:
            return
        if self.on is None:
            work()
        else:
            self.on.stream.give(work)


def perform(stage: ExecutionStage, steps: Sequence[Step], chunks: Sequence[torch.Tensor]) -> Steps:
    """Carry out the steps of this rank."""
    execution = _Execution(stage, chunks)
    if stage.arriving is not None:
        execution.await_unread(steps)
    execution.post(steps)
    for step in steps:
        if stage.arriving is not None and isinstance(step, READS):
            stage.arriving.need(chunks[step.chunk])
        waits = ACTIONS[type(step)](execution, step)
        if waits is not None:
            yield from waits
    yield from execution.all_sent()


class _Execution:
    def __init__(self, stage: ExecutionStage, chunks: Sequence[torch.Tensor]) -> None:
        self.stage, self.chunks = stage, chunks
        self.messages = stage.messages
        self._receipts: list[Receipt] = []
        self._next = 0
        self._unsent: Counter[int] = Counter()
        self._told: set[int] = set()

    def await_unread(self, steps: Sequence[Step]) -> None:
        """Chunks into which data may come before this rank has used them must be here first."""
        assert self.stage.arriving is not None
        used: set[int] = set()
        for step in steps:
            if isinstance(step, Meet):
                continue
            if isinstance(step, Copy) or (step.chunk not in used and not isinstance(step, READS)):
                self.stage.arriving.all()
                return
            used.add(step.chunk)

    def post(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Receive | Combine):
                chunk, sender = self.chunks[step.chunk], self.stage.ranks[step.peer]
                buffer = bytes_of(chunk) if isinstance(step, Receive) else None
                self._receipts.append(
                    self.messages.expect(self.stage.context, self.stage.tag, sender, nbytes(chunk), buffer)
                )

    # Messages.

    def send(self, step: Send) -> None:
        peer, chunk = self.stage.ranks[step.peer], step.chunk
        meta = b"" if peer in self._told else self.stage.meta
        self._told.add(peer)
        self._unsent[chunk] += 1
        message = LinkMessage(DATA, self.stage.context, self.stage.tag, meta)
        self.messages.send(peer, message, bytes_of(self.chunks[chunk]), lambda: self._sent(chunk))

    def _sent(self, chunk: int) -> None:
        self._unsent[chunk] -= 1
        if not self._unsent[chunk]:
            del self._unsent[chunk]

    def receive(self, step: Receive) -> Steps:
        return self._arrival()

    def _arrival(self) -> Steps:
        receipt = self._receipts[self._next]
        self._next += 1
        if not receipt.done:
            yield self.messages.until(receipt)
        if receipt.problem:
            raise PeerError(receipt.problem)
        return receipt

    def combine(self, step: Combine) -> Steps:
        receipt = yield from self._arrival()
        chunk = self.chunks[step.chunk]
        if step.chunk in self._unsent:
            yield Wait(lambda: step.chunk not in self._unsent, list)
        if chunk.numel():
            COMBINE[self.stage.op](chunk, torch.from_numpy(receipt.buffer).view(chunk.dtype), out=chunk)
            self.messages.pool.give(receipt.buffer)

    def all_sent(self) -> Steps:
        if self._unsent:
            yield Wait(lambda: not self._unsent, list)

    def copy(self, step: Copy) -> None:
        self.stage.do(lambda: self.chunks[step.chunk].copy_(self.chunks[step.source]))

    # Shared memory.

    def meet(self, step: Meet) -> Steps:
        stage, others = self.stage, [self.stage.ranks[m] for m in step.members if self.stage.ranks[m] != self.messages.rank]
        number = next(stage.barriers)
        if stage.on is not None:  # what was put is whole, and what was read before is read
            yield from until(stage.on.stream.mark())
        kind = NOTE if stage.on is None else DEVICE_NOTE
        self.messages.notify(others, stage.context, number, b"" if stage.announced else stage.meta, kind)
        stage.announced = True
        wait = self.messages.until_notified(others, stage.context, number)
        if stage.slots is not None and isinstance(stage.buffer, DeviceSlotBuffer):
            everywhere, slots = wait.ready, stage.slots
            wait.ready = lambda: everywhere() or slots.declined(stage.tag)
            if not wait.ready():
                yield wait
            if not slots.agreed(stage.tag, number):
                stage.buffer.take_back()
                raise NotOnDevice
            return
        if not wait.ready():
            yield wait
        if self.messages.on_device and self.messages.any_on_device(others, stage.context, number):
            yield from self.meet(step)  # a rank came from its device, and has put its tensors here by the next barrier

    def put(self, step: Put) -> None:
        chunk = self.chunks[step.chunk]
        self.messages.handed[self.stage.context] += nbytes(chunk)
        slot = self._slot(self.messages.rank, step.chunk, chunk)
        self.stage.do(lambda: slot.copy_(chunk))

    def fetch(self, step: Fetch) -> None:
        chunk = self.chunks[step.chunk]
        slot = self._slot(self.stage.ranks[step.member], step.source, chunk)
        self.stage.do(lambda: chunk.copy_(slot))

    def total(self, step: Total) -> None:
        chunk, rank = self.chunks[step.chunk], self.messages.rank
        members = [self.stage.ranks[member] for member in step.members]
        terms = [chunk if member == rank else self._slot(member, step.chunk, chunk) for member in members]
        on = self.stage.on
        if on is None:
            total(self.stage.op, terms, chunk)
        else:
            on.stream.give(lambda: total_on_device(on.device, self.stage.op, terms, chunk))

    def _slot(self, rank: int, chunk: int, like: torch.Tensor) -> torch.Tensor:
        assert self.stage.buffer is not None
        return self.stage.buffer.part(rank, like, self.stage.offsets[chunk])


#: Steps that begin by reading their chunk.
READS = (Send, Combine, Put, Total)
#: What each step does; those that wait return what they yield.
ACTIONS: dict[type[Step], Callable[[_Execution, Any], Steps | None]] = {
    Send: _Execution.send,
    Receive: _Execution.receive,
    Combine: _Execution.combine,
    Copy: _Execution.copy,
    Put: _Execution.put,
    Meet: _Execution.meet,
    Fetch: _Execution.fetch,
    Total: _Execution.total,
}


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor."""
    return int(tensor.numel() * tensor.element_size())


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A flat tensor's own memory."""
    result: Bytes = tensor.view(torch.uint8).numpy()
    return result

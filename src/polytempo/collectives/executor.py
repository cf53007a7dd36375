"""The executor of plans: what a rank's steps (`steps.py`) do to a list of tensors.

All receives are posted at the start, so that data goes straight into the tensors. That is safe for these plans: what is
stored in a chunk was made from what this rank has sent of it before. What is to be combined waits in memory of the pool.

A rank that waits at a barrier in shared memory adds up what has come. Terms are always added in the order of ranks, so that
results do not depend on arrival; what can be made before all are there is the sum of the first ranks, up to a missing one:

    own totals     the sum of all ranks before the first missing one; when that one has come, it is carried on
    a late rank's  where one rank alone is missing, the rank before it makes the sum with which the late one would begin

A late rank never waits for that: it takes the blocks that are made, and makes the others itself. Ranks that are nearly even
do nothing of this: a total made in one pass leaves the cache once, one that was begun goes out and comes back.
"""

from __future__ import annotations

import math
import time
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
from polytempo.collectives.reduce_ops import BLOCK, COMBINE, total, total_on_device
from polytempo.collectives.shared_buffer import SlotBuffer
from polytempo.collectives.steps import Combine, Copy, Fetch, Meet, Put, Receive, Send, Step, Total
from polytempo.collectives.tasks import Steps, Wait
from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes
from polytempo.transport.peer_link import DATA, DEVICE_NOTE, NOTE, LinkMessage

#: A tensor that this rank's steps never touch.
NOTHING = torch.empty(0)
#: Seconds for which ranks wait for others that are nearly even, before they begin to add up.
NEARLY_EVEN = 5e-3


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
    plan_of: Callable[[int], Sequence[Step]] | None = None  #: the steps of any rank, where slots are in shared memory
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
    execution = _Execution(stage, chunks, steps)
    if stage.arriving is not None:
        execution.await_unread()
    execution.post()
    for step in steps:
        if stage.arriving is not None and isinstance(step, READS):
            stage.arriving.need(chunks[step.chunk])
        waits = ACTIONS[type(step)](execution, step)
        if waits is not None:
            yield from waits
    yield from execution.all_sent()


@dataclass(slots=True)
class _Begun:
    """A total that was begun: before the border the sum of the first `ahead` terms, from it on that of `behind`."""

    sofar: torch.Tensor
    border: int = 0
    ahead: int = 0
    behind: int = 0


class _Execution:
    def __init__(self, stage: ExecutionStage, chunks: Sequence[torch.Tensor], steps: Sequence[Step]) -> None:
        self.stage, self.chunks, self.steps = stage, chunks, steps
        self.messages = stage.messages
        self._barriers = 0  # of this plan so far
        self._barrier = -1  # the number of the last one
        self._blocks = 0  # of the totals made since
        self._begun: dict[int, _Begun] = {}  # totals, by chunk
        self._receipts: list[Receipt] = []
        self._next = 0
        self._unsent: Counter[int] = Counter()
        self._told: set[int] = set()

    def await_unread(self) -> None:
        """Chunks into which data may come before this rank has used them must be here first."""
        assert self.stage.arriving is not None
        used: set[int] = set()
        for step in self.steps:
            if isinstance(step, Meet):
                continue
            if isinstance(step, Copy) or (step.chunk not in used and not isinstance(step, READS)):
                self.stage.arriving.all()
                return
            used.add(step.chunk)

    def post(self) -> None:
        for step in self.steps:
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
        self._barriers, self._barrier, self._blocks = self._barriers + 1, number, 0
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
            if stage.plan_of is not None and len(step.members) > 2:  # of two, there is nothing to add without the other
                wait.meanwhile = self._add_up(step.members, number, wait.missing)
            yield wait
        if self.messages.on_device and self.messages.any_on_device(others, stage.context, number):
            # A rank came from its device, and has put its tensors here by the next barrier: what was begun is void.
            self._barriers -= 1
            self._begun.clear()
            yield from self.meet(step)

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
        chunk, terms, on = self.chunks[step.chunk], self._terms(step), self.stage.on
        if on is not None:
            on.stream.give(lambda: total_on_device(on.device, self.stage.op, terms, chunk))
            return
        begun = self._begun.pop(step.chunk, None) or self._made_by_another(step)
        self._blocks += -(-chunk.numel() // BLOCK)
        if begun is None:
            total(self.stage.op, terms, chunk)
            return
        for part, made in ((slice(begun.border), begun.ahead), (slice(begun.border, None), begun.behind)):
            self._combine(begun.sofar[part], made, [term[part] for term in terms], chunk[part])

    def _terms(self, step: Total) -> list[torch.Tensor]:
        chunk, rank = self.chunks[step.chunk], self.messages.rank
        members = [self.stage.ranks[member] for member in step.members]
        return [chunk if member == rank else self._slot(member, step.chunk, chunk) for member in members]

    def _slot(self, rank: int, chunk: int, like: torch.Tensor) -> torch.Tensor:
        assert self.stage.buffer is not None
        return self.stage.buffer.part(rank, like, self.stage.offsets[chunk])

    # While others are late.

    def _add_up(self, members: Sequence[int], number: int, missing: Callable[[], list[int]]) -> Iterator[float]:
        """Pieces of work, for as long as some members have not come to the barrier of this number."""
        even_until = time.monotonic() + NEARLY_EVEN
        while time.monotonic() < even_until:
            yield NEARLY_EVEN
        own, helped = _totals_after(self.steps, self._barriers)[0], False
        if self.stage.arriving is not None:
            for step in own:
                self.stage.arriving.need(self.chunks[step.chunk])
        while absent := missing():
            late = [member for member in members if self.stage.ranks[member] in absent]
            for step in own:
                yield from self._begin(step, step.members.index(late[0]))
            if len(late) == 1 and not helped:
                helped = True
                yield from self._help(late[0], members, number)
            yield math.inf

    def _begin(self, step: Total, count: int) -> Iterator[float]:
        """The first terms of an own total, where it will be put."""
        chunk = self.chunks[step.chunk]
        begun = self._begun.get(step.chunk) or _Begun(self._slot(self.messages.rank, step.chunk, chunk))
        if count < max(2, begun.behind + 1):
            return
        self._begun[step.chunk] = begun
        terms, begun.ahead, begun.border = self._terms(step), count, 0
        for start in range(0, chunk.numel(), BLOCK):
            part = slice(start, start + BLOCK)
            self._combine(begun.sofar[part], begun.behind, [term[part] for term in terms[:count]], begun.sofar[part])
            begun.border = start + BLOCK
            yield 0.0
        begun.behind = count

    def _help(self, late: int, members: Sequence[int], number: int) -> Iterator[float]:
        """The first terms of the totals of the one rank that is late, in its spare slot."""
        index, buffer, plan_of = members.index(late), self.stage.buffer, self.stage.plan_of
        if index < 2 or self.stage.ranks[members[index - 1]] != self.messages.rank:
            return  # there is no sum before it; or another rank makes it
        assert plan_of is not None
        assert isinstance(buffer, SlotBuffer)
        totals, another = _totals_after(plan_of(late), self._barriers)
        if not another:  # it would wait for this rank no more, and might use that slot while a block is still written
            return
        blocks = count(1)
        for step in totals:
            terms, room = self._terms(step)[:index], self._spare(late, step.chunk)
            for start in range(0, room.numel(), BLOCK):
                part = slice(start, start + BLOCK)
                total(self.stage.op, [term[part] for term in terms], room[part])
                buffer.set_ahead(self.stage.ranks[late], number, next(blocks))  # last: the late rank goes by this
                yield 0.0

    def _made_by_another(self, step: Total) -> _Begun | None:
        """What the rank before has made of a total of this one, while this one was late."""
        buffer = self.stage.buffer
        if len(step.members) < 3 or not isinstance(buffer, SlotBuffer):
            return None
        made = buffer.ahead(self.messages.rank, self._barrier) - self._blocks
        if made <= 0:
            return None
        mine = self.stage.ranks.index(self.messages.rank)
        return _Begun(self._spare(mine, step.chunk), made * BLOCK, step.members.index(mine))

    def _spare(self, member: int, chunk: int) -> torch.Tensor:
        assert isinstance(self.stage.buffer, SlotBuffer)
        return self.stage.buffer.spare(self.stage.ranks[member], self.chunks[chunk], self.stage.offsets[chunk])

    def _combine(self, sofar: torch.Tensor, made: int, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """All terms, of which the first are added up already."""
        total(self.stage.op, [sofar, *terms[made:]] if made else terms, out)


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


def _totals_after(steps: Sequence[Step], barriers: int) -> tuple[list[Total], bool]:
    """The totals between this number of barriers of a plan and the next one, and whether there is a next one."""
    meets = [index for index, step in enumerate(steps) if isinstance(step, Meet)]
    stop = meets[barriers] if barriers < len(meets) else len(steps)
    return [step for step in steps[meets[barriers - 1] : stop] if isinstance(step, Total)], barriers < len(meets)


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor."""
    return int(tensor.numel() * tensor.element_size())


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A flat tensor's own memory."""
    result: Bytes = tensor.view(torch.uint8).numpy()
    return result

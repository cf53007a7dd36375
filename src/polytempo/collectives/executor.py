"""Carries out one plan: what every rank's steps (`steps.py`) do to a list of tensors.

All stores that will arrive are posted at the start, so that they go straight to their tensors. That is safe for these plans:
what is stored in a chunk was made from what this rank has sent of it before. What is combined waits in memory of the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from polytempo.collectives.mailbox import Receipt
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.reduce_ops import COMBINE, total
from polytempo.collectives.shared_buffer import SlotBuffer
from polytempo.collectives.steps import Combine, Copy, Fetch, Meet, Put, Receive, Send, Step, Total
from polytempo.collectives.tasks import Steps, Wait
from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes
from polytempo.transport.peer_link import DATA, LinkMessage

#: A tensor that this rank's steps never touch.
NOTHING = torch.empty(0)


@dataclass
class ExecutionStage:
    """What a plan is carried out on. Plans number ranks from 0; `ranks` says who they are."""

    engine: ProgressEngine
    context: int
    tag: int
    ranks: Sequence[int]
    meta: bytes = b""  #: the call, for those who get the first message of it
    op: str = "sum"
    buffer: SlotBuffer | None = None
    offsets: Sequence[int] = ()  #: where in a slot each chunk lies
    meetings: Iterator[int] = field(default_factory=count)  #: numbers of the notes in this context
    met: bool = False  #: the call was told with a note


def perform(stage: ExecutionStage, steps: Sequence[Step], chunks: Sequence[torch.Tensor]) -> Steps:
    """Carry out the steps of this rank."""
    performance = _Performance(stage, chunks)
    performance.post(steps)
    for step in steps:
        if isinstance(step, Send):
            performance.send(step)
        elif isinstance(step, Receive):
            yield from performance.arrival()
        elif isinstance(step, Combine):
            yield from performance.combine(step)
        elif isinstance(step, Meet):
            yield from performance.meet(step)
        elif isinstance(step, Copy):
            chunks[step.chunk].copy_(chunks[step.source])
        else:
            performance.share(step)
    yield from performance.all_sent()


class _Performance:
    def __init__(self, stage: ExecutionStage, chunks: Sequence[torch.Tensor]) -> None:
        self.stage, self.chunks = stage, chunks
        self.engine = stage.engine
        self._receipts: list[Receipt] = []
        self._next = 0
        self._unsent: Counter[int] = Counter()
        self._told: set[int] = set()

    def post(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Receive | Combine):
                chunk, sender = self.chunks[step.chunk], self.stage.ranks[step.peer]
                buffer = bytes_of(chunk) if isinstance(step, Receive) else None
                self._receipts.append(self.engine.expect(self.stage.context, self.stage.tag, sender, nbytes(chunk), buffer))

    # Messages.

    def send(self, step: Send) -> None:
        peer, chunk = self.stage.ranks[step.peer], step.chunk
        meta = b"" if peer in self._told else self.stage.meta
        self._told.add(peer)
        self._unsent[chunk] += 1
        message = LinkMessage(DATA, self.stage.context, self.stage.tag, meta)
        self.engine.send(peer, message, bytes_of(self.chunks[chunk]), lambda: self._sent(chunk))

    def _sent(self, chunk: int) -> None:
        self._unsent[chunk] -= 1
        if not self._unsent[chunk]:
            del self._unsent[chunk]

    def arrival(self) -> Steps:
        receipt = self._receipts[self._next]
        self._next += 1
        if not receipt.done:
            yield self.engine.until(receipt)
        if receipt.problem:
            raise PeerError(receipt.problem)
        return receipt

    def combine(self, step: Combine) -> Steps:
        receipt = yield from self.arrival()
        chunk = self.chunks[step.chunk]
        if step.chunk in self._unsent:
            yield Wait(lambda: step.chunk not in self._unsent, list)
        if chunk.numel():
            COMBINE[self.stage.op](chunk, torch.from_numpy(receipt.buffer).view(chunk.dtype), out=chunk)
            self.engine.pool.give(receipt.buffer)

    def all_sent(self) -> Steps:
        if self._unsent:
            yield Wait(lambda: not self._unsent, list)

    # Shared memory.

    def meet(self, step: Meet) -> Steps:
        stage, others = self.stage, [self.stage.ranks[m] for m in step.members if self.stage.ranks[m] != self.engine.rank]
        number = next(stage.meetings)
        self.engine.tell(others, stage.context, number, b"" if stage.met else stage.meta)
        stage.met = True
        wait = self.engine.until_heard(others, stage.context, number)
        if not wait.ready():
            yield wait

    def share(self, step: Step) -> None:
        me = self.engine.rank
        if isinstance(step, Put):
            self._slot(me, step.chunk, self.chunks[step.chunk]).copy_(self.chunks[step.chunk])
        elif isinstance(step, Fetch):
            chunk = self.chunks[step.chunk]
            chunk.copy_(self._slot(self.stage.ranks[step.member], step.source, chunk))
        elif isinstance(step, Total):
            chunk, ranks = self.chunks[step.chunk], [self.stage.ranks[member] for member in step.members]
            terms = [chunk if rank == me else self._slot(rank, step.chunk, chunk) for rank in ranks]
            total(self.stage.op, terms, chunk)

    def _slot(self, rank: int, chunk: int, like: torch.Tensor) -> torch.Tensor:
        assert self.stage.buffer is not None
        return self.stage.buffer.part(rank, like, self.stage.offsets[chunk])


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor."""
    return int(tensor.numel() * tensor.element_size())


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A flat tensor's own memory."""
    result: Bytes = tensor.view(torch.uint8).numpy()
    return result

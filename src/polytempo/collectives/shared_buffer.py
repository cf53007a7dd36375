"""Shared-memory buffers in which the ranks of one host reduce: one segment with slots for each rank.

    | state words | slots of the first rank | slots of the second | ... | result |

The lowest rank makes the segment and hands it to the others. Every rank reads all slots and writes its own. A slot has no
lease byte (`transport/shared_memory.py`): it may be written again when the number of the round says that all have read it.

`SlotBuffer` serves collectives. Each rank has two slots, used in turns by successive plans. Every plan has a barrier, and a
rank reaches the barrier of plan k + 1 only after it has read what it wants of plan k: so plan k + 2 may write the slots of
plan k, and no plan needs a barrier at its end.

A rank that waits in a plan makes sums of what has come (`executor.py`): its own in its own slot, where it will put them;
those of a late rank in the late rank's slot of the other turn. That one is free: all others have come to this plan, so they
have read what was there in the plan before, and its owner never reads that. How many blocks are made is in the late rank's
state word, beside the number of the barrier: a word of an earlier plan counts for nothing.

`SharedMeanBuffer` serves gradients that are reduced where they lie. Each rank has one slot, and there is one result. A rank
sums its part of the elements, in the order of ranks. A rank that dies leaves its slot readable. Whether its part of the
result was finished is in its state word, which it sets before it notifies the others; so all survivors agree, each sums an
unfinished part in memory of its own and writes the sum once (all write the same bytes), and a further barrier keeps slots
unchanged until all have done so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy
import torch

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.messaging import Messaging
from polytempo.collectives.reduce_ops import weighted_mean
from polytempo.collectives.steps import cuts
from polytempo.collectives.tasks import Steps, Wait
from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes
from polytempo.transport.local_peers import HANDED_OVER, Also, LocalPeers
from polytempo.transport.peer_link import ON_HOST, SEGMENT, LinkMessage
from polytempo.transport.shared_memory import Segment, make_segment

PAGE = 4096
#: Bytes for the state words of a `SharedMeanBuffer`: half for finished rounds, half for digests.
STATE = PAGE
#: Bytes of a slot of a `SlotBuffer`. The largest is larger than a cache: where ranks compute meanwhile, or take turns on the
#: cores, few barriers count for more.
SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)
#: Bytes of a state word of a `SlotBuffer`, and its bits for the number of blocks; above them is the number of the barrier.
WORD, BLOCK_BITS = 8, 20
#: What a rank notifies the others of, in a `SharedMeanBuffer`.
KINDS = {"put": 1, "reduced": 2, "recovered": 3, "taken": 4, "compared": 5, "device": 6}


class SharedBuffer:
    """The layout of a segment with slots, and its place in this process.

    Args:
        members: The ranks that share it; the first makes it.
        capacity: Bytes of a slot.
        turns: Slots of each rank.
        state: Bytes before the slots.
        result: Whether a slot for the result follows.
    """

    def __init__(self, members: Sequence[int], capacity: int, turns: int = 1, state: int = 0, result: bool = False) -> None:
        self.members, self.capacity = tuple(members), capacity
        self._turns, self._state = turns, state
        self._index = {rank: index for index, rank in enumerate(self.members)}
        self.size = state + capacity * (turns * len(self.members) + result)
        self.segment: Segment | None = None

    def make(self, instead: str) -> Segment:
        """The first rank makes the segment; an error advises what to use instead."""
        try:
            self.segment = make_segment(self.size)
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise PeerError(
                f"{len(self.members)} ranks need {self.size} bytes of shared memory for a collective, and there is no room "
                f"({why}); use {instead}, or fewer ranks on this host"
            ) from None
        return self.segment

    def slot_at(self, rank: int, turn: int = 0) -> int:
        """Where a slot of a rank begins."""
        return self._state + (self._turns * self._index[rank] + turn) * self.capacity

    def result_at(self) -> int:
        """Where the result begins."""
        return self._state + self._turns * len(self.members) * self.capacity

    def tensor(self, start: int, dtype: torch.dtype, length: int) -> torch.Tensor:
        """Elements from this byte on."""
        assert self.segment is not None
        if not length:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.segment.map, dtype=dtype, count=length, offset=start)


# Collectives.


class SlotBuffer:
    """A buffer of one size, of one group, on one rank."""

    def __init__(self, messages: Messaging, queue: CallQueue, members: Sequence[int], capacity: int) -> None:
        self._messages, self._queue = messages, queue
        self._memory = SharedBuffer(members, capacity, turns=2, state=-(-len(members) * WORD // PAGE) * PAGE)
        self.capacity = capacity
        self.turn = 0  #: which slot of each rank is used
        self._words: Bytes | None = None

    def open(self, call: int) -> Steps:
        """Make the segment or wait for it, once; and use the other slots from now on. `call`: the number of the call."""
        self.turn ^= 1
        memory = self._memory
        if memory.segment is not None:
            return
        first, *others = memory.members
        if self._messages.rank == first:
            segment = memory.make("algorithm='ring'")
            for rank in others:
                self._messages.send(rank, LinkMessage(SEGMENT, self._queue.context, self.capacity, segment=segment))
        else:
            key = first, self._queue.context, self.capacity
            if key not in self._messages.segments:  # the first rank may look for this one in device memory
                self._messages.notify((r for r in memory.members if r != self._messages.rank), key[1], call, kind=ON_HOST)
            yield Wait(lambda: key in self._messages.segments, lambda: [first])
            memory.segment = self._messages.segments.pop(key)

    def part(self, member: int, like: torch.Tensor, offset: int) -> torch.Tensor:
        """As many elements of a rank's slot as a tensor has, from this byte on."""
        return self._memory.tensor(self._memory.slot_at(member, self.turn) + offset, like.dtype, like.numel())

    # Sums for a late rank.

    def spare(self, member: int, like: torch.Tensor, offset: int) -> torch.Tensor:
        """The same of its slot that is not used now."""
        return self._memory.tensor(self._memory.slot_at(member, self.turn ^ 1) + offset, like.dtype, like.numel())

    def set_ahead(self, member: int, number: int, blocks: int) -> None:
        """The first blocks for a rank that is late at this barrier are in its spare slot."""
        # One store of eight bytes: a reader sees the old word or the new one.
        self._state()[self._memory.members.index(member)] = number << BLOCK_BITS | blocks

    def ahead(self, member: int, number: int) -> int:
        """How many blocks were made for a rank at this barrier."""
        of, blocks = divmod(int(self._state()[self._memory.members.index(member)]), 1 << BLOCK_BITS)
        return blocks if of == number else 0

    def _state(self) -> Bytes:
        if self._words is None:
            assert self._memory.segment is not None
            self._words = self._memory.segment.view(0, len(self._memory.members) * WORD).view(numpy.uint64)
        return self._words


class SlotBuffers:
    """The buffers of a group on this host, one of each size that was needed."""

    def __init__(self, messages: Messaging, queue: CallQueue, members: Sequence[int]) -> None:
        self._messages, self._queue, self._members = messages, queue, members
        self._buffers: dict[int, SlotBuffer] = {}

    def of(self, nbytes: int) -> SlotBuffer:
        """The smallest buffer with room for these bytes in a slot, or the largest there is."""
        capacity = next((size for size in SIZES if size >= nbytes), SIZES[-1])
        if capacity not in self._buffers:
            self._buffers[capacity] = SlotBuffer(self._messages, self._queue, self._members, capacity)
        return self._buffers[capacity]

    def start_over(self) -> None:
        """After a failure all ranks begin with the same slots again; none still reads what was there."""
        for buffer in self._buffers.values():
            buffer.turn = 0


# Means of gradients, in place.


class SharedMeanBuffer:
    """The slots, the result and the state words of the ranks of a job, on one rank."""

    def __init__(self, peers: LocalPeers, members: Sequence[int], number: int, size: int, also: Iterable[Also] = ()) -> None:
        self.peers, self.members, self.number = peers, tuple(sorted(members)), number
        self.size = -(-size // PAGE) * PAGE
        self.also = tuple(also)
        self.round = 0
        self._memory = SharedBuffer(self.members, self.size, state=STATE, result=True)
        segment = self._memory.segment = self._share()
        half = STATE // 2
        self._done, self._digests = (segment.view(start, half).view(numpy.uint64) for start in (0, half))

    def _share(self) -> Segment:
        first, *others = self.members
        if self.peers.rank == first:
            segment = self._memory.make("--via ps")
            self.peers.hand_over(others, self.number, segment)
            return segment
        self.peers.wait([first], HANDED_OVER, self.number, 0, self.also)
        if self.peers.heard(first, HANDED_OVER, self.number) < 0:
            raise PeerError(f"rank {first} is gone, and with it the memory that was to be shared")
        return self.peers.segment(first, self.number)

    # Memory.

    def slot(self, rank: int, dtype: torch.dtype, length: int, offset: int = 0) -> torch.Tensor:
        """Elements in the slot of a rank, from this byte on."""
        return self._memory.tensor(self._memory.slot_at(rank) + offset, dtype, length)

    def slot_bytes(self, rank: int) -> Bytes:
        """All of a rank's slot."""
        return self._bytes(self._memory.slot_at(rank))

    def result_bytes(self) -> Bytes:
        """All of the result."""
        return self._bytes(self._memory.result_at())

    def _bytes(self, start: int) -> Bytes:
        assert self._memory.segment is not None
        return self._memory.segment.view(start, self.size)

    def result(self, dtype: torch.dtype, length: int, offset: int = 0) -> torch.Tensor:
        """Elements of the result, from this byte on."""
        return self._memory.tensor(self._memory.result_at() + offset, dtype, length)

    # Rounds.

    def finish(self) -> None:
        """This rank's part of the round is done. Called before the other ranks are notified."""
        self._done[self.members.index(self.peers.rank)] = self.round

    def has_finished(self, rank: int) -> bool:
        """Whether a rank's part of the round is done, even if it died before it could notify the others."""
        return bool(self._done[self.members.index(rank)] >= self.round)

    def compare(self, digest: bytes, members: Sequence[int]) -> dict[int, bytes]:
        """Exchange eight bytes with these ranks: those of each rank that is still there."""
        self.round += 1
        self._digests[self.members.index(self.peers.rank)] = int.from_bytes(digest, "little")
        lost = self.meet("compared", members)
        there = [member for member in members if member not in lost]
        return {member: int(self._digests[self.members.index(member)]).to_bytes(8, "little") for member in there}

    def meet(self, name: str, members: Iterable[int]) -> list[int]:
        """A barrier of these ranks at a point of the round; the ranks that ended before they reached it."""
        others = [member for member in members if member != self.peers.rank]
        kind = KINDS[name]
        self.peers.tell(others, kind, self.number, self.round)
        self.peers.wait(others, kind, self.number, self.round, self.also)
        return [member for member in others if self.peers.heard(member, kind, self.number) < self.round]


def all_on_device(peers: LocalPeers, members: Sequence[int], number: int, mine: bool, also: Iterable[Also] = ()) -> bool:
    """Whether all ranks have their gradients on devices, as each says of itself before the buffer of this number is made."""
    others = [member for member in members if member != peers.rank]
    peers.tell(others, KINDS["device"], number, int(mine))
    peers.wait(others, KINDS["device"], number, 0, also)
    return mine and all(peers.heard(member, KINDS["device"], number) != 0 for member in others)


def own_part(members: Sequence[int], rank: int, length: int) -> slice:
    """The elements that a rank sums."""
    return cuts(length, len(members))[list(members).index(rank)]


def mean_in_place(
    buffer: SharedMeanBuffer, members: Sequence[int], weights: Sequence[float], dtype: torch.dtype, length: int, offset: int
) -> None:
    """Make the result the weighted mean of the slots of these ranks, which have all said that their values are there."""
    slots = [buffer.slot(member, dtype, length, offset) for member in members]
    result = buffer.result(dtype, length, offset)
    own = own_part(members, buffer.peers.rank, length)
    weighted_mean([slot[own] for slot in slots], weights, result[own])
    buffer.finish()
    lost = buffer.meet("reduced", members)
    unfinished = [member for member in lost if not buffer.has_finished(member)]
    for member in unfinished:
        part = own_part(members, member, length)
        alone = torch.empty_like(result[part])
        weighted_mean([slot[part] for slot in slots], weights, alone)
        result[part] = alone
    if unfinished:
        buffer.meet("recovered", [member for member in members if member not in lost])

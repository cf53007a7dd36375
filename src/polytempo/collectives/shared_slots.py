"""Memory in which the ranks of a host hand things to each other: two slots for each, used in turns.

A slot may be written again two plans later: whoever gets there has met all others in the plan between, and they came to
that meeting after they had read. So a plan needs no meeting at its end.

Boards come in a few sizes, made when they are first needed, by the first of the ranks, and handed over to the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.tasks import CallQueue, Steps, Wait
from polytempo.errors import PeerError
from polytempo.transport.peer_link import SEGMENT, LinkMessage
from polytempo.transport.shared_memory import Segment, make_segment

#: Bytes of a slot. The largest is larger than a cache: where ranks compute meanwhile, or take turns on the cores, meeting
#: seldom counts for more.
SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)


class SharedSlotBuffer:
    """One size of board of one group, as a rank sees it."""

    def __init__(self, engine: ProgressEngine, lane: CallQueue, members: Sequence[int], capacity: int) -> None:
        self._engine, self._lane, self.members, self.capacity = engine, lane, tuple(members), capacity
        self._segment: Segment | None = None
        self.turn = 0  #: which half is used

    def open(self) -> Steps:
        """Make it or wait for it, once; and use the other half from now on."""
        self.turn ^= 1
        if self._segment is not None:
            return
        first, key = self.members[0], (self.members[0], self._lane.context, self.capacity)
        if self._engine.rank == first:
            self._segment = self._make()
            for rank in self.members[1:]:
                self._engine.send(rank, LinkMessage(SEGMENT, self._lane.context, self.capacity, segment=self._segment))
        else:
            yield Wait(lambda: key in self._engine.segments, lambda: [first])
            self._segment = self._engine.segments.pop(key)

    def _make(self) -> Segment:
        size = 2 * len(self.members) * self.capacity
        try:
            return make_segment(size)
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise PeerError(
                f"{len(self.members)} ranks need {size} bytes of shared memory, and there is no room ({why}); "
                "use algorithm='ring', or fewer ranks on this host"
            ) from None

    def part(self, member: int, like: torch.Tensor, offset: int) -> torch.Tensor:
        """As much of a member's slot as a tensor has, from so many bytes on."""
        assert self._segment is not None
        start = (2 * self.members.index(member) + self.turn) * self.capacity + offset
        if not like.numel():
            return torch.empty_like(like)
        return torch.frombuffer(self._segment.map, dtype=like.dtype, count=like.numel(), offset=start)


class SharedSlots:
    """All boards of a group on this host."""

    def __init__(self, engine: ProgressEngine, lane: CallQueue, members: Sequence[int]) -> None:
        self._engine, self._lane, self._members = engine, lane, members
        self._boards: dict[int, SharedSlotBuffer] = {}

    def of(self, nbytes: int) -> SharedSlotBuffer:
        """The smallest board on which so many bytes have room in a slot, or the largest there is."""
        capacity = next((size for size in SIZES if size >= nbytes), SIZES[-1])
        if capacity not in self._boards:
            self._boards[capacity] = SharedSlotBuffer(self._engine, self._lane, self._members, capacity)
        return self._boards[capacity]

    def start_over(self) -> None:
        """After a failure all ranks begin with the same half again; none still reads what was there."""
        for board in self._boards.values():
            board.turn = 0

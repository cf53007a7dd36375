"""Memory that processes of one host reduce in: a slot for each, one result, and a number that says how far each is.

One segment holds all of it. The lowest rank makes it and hands it to the others.

    | a "done" number for each | a digest for each | slot of the first | slot of the second | ... | result |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy
import torch

from polytempo.collectives.chunking import cuts
from polytempo.collectives.reduce_ops import weighted_mean
from polytempo.errors import PeerError
from polytempo.transport.channel import Bytes
from polytempo.transport.local_peers import HANDED_OVER, Also, LocalPeers
from polytempo.transport.shared_memory import Segment, make_segment

#: The kinds of notes on a board.
KINDS = {"put": 1, "reduced": 2, "recovered": 3, "taken": 4, "compared": 5}
PAGE = 4096
#: Room for the numbers, and so for members.
HEAD = PAGE


class SharedMeanBuffer:
    """One process's view of a board."""

    def __init__(self, mesh: LocalPeers, members: Sequence[int], number: int, size: int, also: Iterable[Also] = ()) -> None:
        self.mesh, self.members, self.number = mesh, tuple(sorted(members)), number
        self.size = -(-size // PAGE) * PAGE
        self.also = tuple(also)
        self.round = 0
        self._segment = self._share()
        half = HEAD // 2
        self._done, self._digests = (self._segment.view(start, half).view(numpy.uint64) for start in (0, half))
        self._slots = {rank: self._segment.view(self._start(index), self.size) for index, rank in enumerate(self.members)}
        self._result = self._segment.view(self._start(len(self.members)), self.size)

    def _start(self, index: int) -> int:
        return HEAD + self.size * index

    def _share(self) -> Segment:
        first, *others = self.members
        if self.mesh.rank == first:
            segment = self._make()
            self.mesh.hand_over(others, self.number, segment)
            return segment
        self.mesh.wait([first], HANDED_OVER, self.number, 0, self.also)
        if self.mesh.heard(first, HANDED_OVER, self.number) < 0:
            raise PeerError(f"worker {first} is gone, and with it the memory that was to be shared")
        return self.mesh.segment(first, self.number)

    def _make(self) -> Segment:
        size = self._start(len(self.members) + 1)
        try:
            return make_segment(size)
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise PeerError(
                f"{len(self.members)} workers need {size} bytes of shared memory for an all-reduce, and there is no room "
                f"({why}); use --via ps, or fewer workers on this host"
            ) from None

    # Where everything lies.

    def slot(self, rank: int, dtype: torch.dtype, length: int, offset: int = 0) -> torch.Tensor:
        """Elements in the slot of a member, from so many bytes on."""
        return _tensor(self._slots[rank], dtype, length, offset)

    def slot_bytes(self, rank: int) -> Bytes:
        """All of a member's slot."""
        return self._slots[rank]

    def result_bytes(self) -> Bytes:
        """All of the result."""
        return self._result

    def result(self, dtype: torch.dtype, length: int, offset: int = 0) -> torch.Tensor:
        """Elements of the result, from so many bytes on."""
        return _tensor(self._result, dtype, length, offset)

    # How far everybody is.

    def finish(self) -> None:
        """My part of this round is done. Set before anybody is told."""
        self._done[self.members.index(self.mesh.rank)] = self.round

    def has_finished(self, rank: int) -> bool:
        """Is this member's part of the round done, whether or not it has lived to say so?"""
        return bool(self._done[self.members.index(rank)] >= self.round)

    def compare(self, digest: bytes, members: Sequence[int]) -> dict[int, bytes]:
        """Show these members eight bytes: what each of them that is still there shows."""
        self.round += 1
        self._digests[self.members.index(self.mesh.rank)] = int.from_bytes(digest, "little")
        lost = self.meet("compared", members)
        there = [member for member in members if member not in lost]
        return {member: int(self._digests[self.members.index(member)]).to_bytes(8, "little") for member in there}

    def meet(self, name: str, members: Iterable[int]) -> list[int]:
        """Tell these members that I am so far, and wait until they are; those who ended before they were."""
        others = [member for member in members if member != self.mesh.rank]
        kind = KINDS[name]
        self.mesh.tell(others, kind, self.number, self.round)
        self.mesh.wait(others, kind, self.number, self.round, self.also)
        return [member for member in others if self.mesh.heard(member, kind, self.number) < self.round]


def _tensor(data: Bytes, dtype: torch.dtype, length: int, offset: int) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype, count=length, offset=offset) if length else torch.empty(0, dtype=dtype)


# The mean of what lies in the slots of a board, made where it lies; what a process that died has left undone is finished.
#
# Each element is added up by one process, in the order of ranks. A process that dies leaves its slot readable. Where its
# part of the result was not finished (its "done" number, which is set before anybody is told, says so to all survivors
# alike), each survivor adds that part up itself, in memory of its own, and writes the sum once: they write the same
# bytes. (Adding up in the result itself would add to what another is adding to.) They then meet once more, so that nobody
# writes to its slot while another still reads it.


def own_part(members: Sequence[int], rank: int, length: int) -> slice:
    """What a member adds up."""
    return cuts(length, len(members))[list(members).index(rank)]


def mean_in_place(
    board: SharedMeanBuffer, members: Sequence[int], weights: Sequence[float], dtype: torch.dtype, length: int, offset: int
) -> None:
    """Make the result the weighted mean of what lies in the slots of these members, who have all said that it is there."""
    slots = [board.slot(member, dtype, length, offset) for member in members]
    result = board.result(dtype, length, offset)
    own = own_part(members, board.mesh.rank, length)
    weighted_mean([slot[own] for slot in slots], weights, result[own])
    board.finish()
    lost = board.meet("reduced", members)
    unfinished = [member for member in lost if not board.has_finished(member)]
    for member in unfinished:
        part = own_part(members, member, length)
        alone = torch.empty_like(result[part])
        weighted_mean([slot[part] for slot in slots], weights, alone)
        result[part] = alone
    if unfinished:
        board.meet("recovered", [member for member in members if member not in lost])

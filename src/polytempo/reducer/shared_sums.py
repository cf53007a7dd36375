"""Sums of the workers of one host, in shared memory: no worker waits for another that is stopped or dead.

Every worker has a slot with room for two rounds, used in turn. It puts its sum there before it reports the round. So when
the sequencer has closed the round, all sums of its workers are there, whatever has become of them since; each worker reads
them in the order of ranks, and no worker waits for another's part.

A place is used again two rounds later. A worker writes there once the round between is closed, and workers in that round had
read what was there. One that had not is not in that round: it was stopped. It sees by the number beside a sum, after it has
read that, that the place is another round's, and catches up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from polytempo.collectives.reduce_ops import reduce_into
from polytempo.collectives.shared_buffer import SharedMeanBuffer
from polytempo.protocol.layout import ITEM_SIZES, Layout
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.round_sums import EndedRound, RoundSums
from polytempo.reducer.shared_memory_reducer import ALIGNMENT, SlotAllocator, aligned
from polytempo.transport.local_peers import Also, LocalPeers

#: Rounds that a slot has room for.
PLACES = 2
#: In place of the number of a round, while a sum is written.
WRITING = 0


class SharedSums(RoundSums):
    """The slots of all workers, on one.

    Args:
        peers: The other workers of the host.
        members: The ranks of all.
        number: Of the shared buffer, the same on all.
        layout: Where parameters lie in flat buffers.
        also: What else to watch while waiting for the memory.
    """

    def __init__(
        self, peers: LocalPeers, members: Sequence[int], number: int, layout: Layout, also: Sequence[Also] = ()
    ) -> None:
        self._rank, self._layout, self._handed = peers.rank, layout, 0
        size = ALIGNMENT + sum(aligned(length * ITEM_SIZES[dtype]) for dtype, length in layout.sizes.items())
        self._shared = SharedMeanBuffer(peers, members, number, PLACES * size, also)
        self._places = {rank: [self._place(rank, index * size, size) for index in range(PLACES)] for rank in members}

    def _place(self, rank: int, start: int, size: int) -> tuple[numpy.ndarray, FlatBuffer]:
        memory = self._shared.slot_bytes(rank)[start : start + size]
        return memory[:8].view(numpy.uint64), FlatBuffer(self._layout, SlotAllocator(memory[ALIGNMENT:]))

    def put(self, total: FlatBuffer | None, step: int) -> None:
        if total is None:  # it weighs nothing, so no worker reads it
            return
        number, place = self._places[self._rank][step % PLACES]
        number[0] = WRITING
        for dtype, flat in total.tensors.items():
            place.tensors[dtype].copy_(flat)
            self._handed += flat.nbytes
        number[0] = step + 1

    def make(self, result: FlatBuffer, closed: EndedRound) -> bool:
        places = [self._places[share.worker][(closed.step - 1) % PLACES] for share in closed.shares if share.weight > 0]
        for dtype, flat in result.tensors.items():
            terms = [place.tensors[dtype] for _, place in places]
            if dtype != "float16":
                reduce_into(terms, flat, 1 / closed.divisor)
                continue
            torch.div(terms[0], closed.divisor, out=flat)  # sums may be larger than float16 can be
            for term in terms[1:]:
                flat.add_(term, alpha=1 / closed.divisor)
        return all(number[0] == closed.step for number, _ in places)

    def handed(self) -> int:
        return self._handed

"""One worker's exchange with its neighbours in a step of `gossip` (`sync/gossip.py`): send, receive, mix, and leave.

send      (x, w) of now to the out-neighbours of the step, in the background; before the push, which says that it was sent
mix       after the release of the next step: x = P_ii x + sum of P_ij x_j. A neighbour that is lost, or whose process
          died before its values were through, brings nothing, and the share meant for it stays here
leave     a worker that finishes gives its own (x, w) to the out-neighbours of the step that it does not make, in
          proportion to its column: so the sums of x and w over all workers are kept. Its neighbours learn from their
          release that it left; what it sent for that step counts only if a note followed, which a crash does not send
"""

from __future__ import annotations

import torch

from polytempo.protocol.values import MixingRow
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.mixing import MixingSum
from polytempo.reducer.model_message import MessageAllocator
from polytempo.reducer.neighbour_links import Sending
from polytempo.reducer.neighbour_reducer import FIRST_VALUES, NeighbourReducer
from polytempo.transport.buffer_pool import Pool

#: Seconds to wait for the values of a worker that has left: they were sent before the sequencer heard of it.
PATIENCE = 5.0


class GossipExchange:
    """The exchange of one optimizer, step by step."""

    def __init__(self, reducer: NeighbourReducer) -> None:
        self._reducer, self._links = reducer, reducer.links
        self._out, self._in = reducer.new_message(), reducer.new_message()
        self._note = torch.zeros(1, dtype=torch.float64)
        memory = Pool() if reducer.cast else MessageAllocator(self._out.flats)
        self._own = FlatBuffer(reducer.layout, memory, pinned=False)  # x, as it was when it was sent
        self._sum = MixingSum(reducer.copier.next_buffer())
        self._row: MixingRow | None = reducer.answer.mixing
        self._sent = False  # the values of this step
        self._sending: Sending = []
        reducer.session.flushing.append(self.leave)

    @property
    def alone(self) -> bool:
        """Has this worker no neighbour in the step?"""
        return self._row is None

    def send(self) -> None:
        """Send the parameters as they are now."""
        if self._row is None:
            return
        reducer, weight = self._reducer, self._reducer.weight
        self._links.settle(self._sending)
        reducer.copier.gather(self._own, lambda param: param.detach())
        if weight != 1.0:
            for flat in self._own.tensors.values():
                flat.mul_(weight)
        self._out.fill(self._own.tensors, weight)
        self._sending = self._links.send(self._out.data, [rank for rank, _ in self._row.send], reducer.step)
        self._sent = True

    def mix(self, step: int, change: FlatBuffer | None = None) -> None:
        """Mix what was exchanged in `step`, which was pushed; the release of the next one is there.

        Args:
            step: The step.
            change: What the optimizer has changed since the values were sent; None where it was sent with them.
        """
        reducer, row = self._reducer, self._row
        self._row, self._sent = reducer.answer.mixing, False
        if row is None:
            return
        lost, shares, own = set(reducer.answer.lost), dict(row.receive), reducer.session.rank
        self._sum.start()
        for rank in sorted({own, *shares}):
            if rank == own:
                self._keep(row, lost)
            elif rank in lost:
                self._take_legacy(rank, step, shares[rank])
            elif self._receive(rank, step):
                self._sum.add(self._in.flats, self._in.weight, shares[rank])
            else:  # it died after its push, and its values did not come through
                self._take_back(dict(row.send).get(rank, 0.0))
        reducer.weight = self._sum.finish()
        self._load(change)

    def _keep(self, row: MixingRow, lost: set[int]) -> None:
        """Add this worker's own part, with the shares that were meant for lost neighbours."""
        if not self._reducer.cast:
            kept = row.keep + sum(share for rank, share in row.send if rank in lost)
            self._sum.add(self._own.tensors, self._reducer.weight, kept)
            return
        self._sum.add(self._own.tensors, self._reducer.weight, 1.0)
        self._take_back(-sum(share for rank, share in row.send if rank not in lost))

    def _take_back(self, share: float) -> None:
        """A share of what was sent stays here after all; a negative one was sent."""
        if share:
            self._sum.add(self._out.flats, self._reducer.weight, share)

    def _take_legacy(self, rank: int, step: int, share: float) -> None:
        """A neighbour left before it pushed: if it finished, it has given its values away."""
        note = torch.zeros(1, dtype=torch.float64)
        if self._links.receive(note, rank, _note_tag(step), PATIENCE) and self._receive(rank, step):
            self._sum.add(self._in.flats, self._in.weight, share * float(note))

    def _receive(self, rank: int, step: int) -> bool:
        if self._links.receive(self._in.data, rank, step):
            return True
        self._in = self._reducer.new_message()  # should its message come after all, it must not be written over another
        return False

    def _load(self, change: FlatBuffer | None) -> None:
        """Make the parameters the model that was mixed."""
        copier = self._reducer.copier
        mixed = copier.next_buffer()
        if change is not None:
            for dtype, flat in mixed.tensors.items():
                flat.add_(change.tensors[dtype])
        copier.scatter({0: mixed.parts[0]})

    def leave(self) -> None:
        """Give this worker's values to the out-neighbours of the step that it does not make: it has finished."""
        if self._row is None:
            return
        there = [(rank, share) for rank, share in self._row.send if not self._links.is_gone(rank)]
        if not there:
            return
        if not self._sent:
            self.send()
        self._note[0] = 1.0 / sum(share for _, share in there)
        note = self._links.send(self._note, [rank for rank, _ in there], _note_tag(self._reducer.step))
        self._links.settle(self._sending)
        self._links.settle(note)


def _note_tag(step: int) -> int:
    """Of the note that follows the values of a worker that leaves: by how much its shares grow, since it keeps none."""
    return FIRST_VALUES - 1 - step

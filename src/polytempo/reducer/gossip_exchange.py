"""One worker's exchange with its neighbours in a step of `gossip` (`sync/gossip.py`): send, receive, mix, and leave.

    send      (x, w) of now to the out-neighbours of the step, in the background, and before the push that vouches for it
    mix       after the release of the next step: x = P_ii x + sum of P_ij x_j. A neighbour that is lost, or whose process
              died before its values were through, brings nothing, and the share meant for it stays here
    leave     a worker that finishes hands its (x, w) over to another (`model_mean.py`), which adds them at its next mixing.
              What it sent for the step that it does not make counts for nothing: its neighbours learn that it left

Others that ask for this worker's values are told those of its last finished step. Where all have made the same steps, the
sum of these is exact; a worker that is a step further tells what it has then.
"""

from __future__ import annotations

from collections.abc import Sequence

from polytempo.collectives.tasks import Task
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.model_mean import MixingSum, ModelMessage
from polytempo.reducer.neighbour_links import Sending
from polytempo.reducer.neighbour_reducer import NeighbourReducer
from polytempo.reducer.shared_memory_reducer import SlotAllocator
from polytempo.server.optimizer_state import as_bytes
from polytempo.sync.directives import Mixing
from polytempo.transport.buffer_pool import Pool


class GossipExchange:
    """The exchange of one optimizer, step by step."""

    def __init__(self, reducer: NeighbourReducer) -> None:
        self._reducer, self._links = reducer, reducer.links
        self._out = reducer.new_message()
        self._in: dict[int, ModelMessage] = {}  # memory for what comes from each neighbour
        self._coming: dict[int, Task] = {}  # receives of this step, posted before the values come
        memory = Pool() if reducer.cast else SlotAllocator(as_bytes(self._out.data))  # x lies in the message itself
        self._own = FlatBuffer(reducer.layout, memory, pinned=False)  # x, as it was when it was sent
        self._weight = 1.0  # w, likewise
        self._told = ModelMessage(reducer.layout)  # x and w after the last finished step, for others that ask
        self._sum = MixingSum(reducer.copier.next_buffer())
        self._sending: Sending = []
        self._models = reducer.share(lambda message: message.fill(self._told.flats, self._told.weight))
        self._gather()
        self._tell()
        if reducer.session.size > 1:
            self._models.service.start()

    def send(self, row: Mixing, step: int) -> None:
        """Send the parameters as they are now, to be mixed by this row of the step."""
        if not row.send and not row.receive:
            return
        self._gather()
        self._out.fill(self._own.tensors, self._weight)
        for rank, _ in row.receive:
            if rank not in self._in:
                self._in[rank] = self._reducer.new_message()
            self._coming[rank] = self._links.start_receive(self._in[rank].data, rank, step, due=False)
        self._sending = self._links.send(self._out.data, [rank for rank, _ in row.send], step)

    def _gather(self) -> None:
        """Take x and w as they are now."""
        self._links.settle(self._sending)
        self._reducer.copier.gather(self._own, lambda param: param.detach())
        self._weight = self._reducer.weight
        if self._weight != 1.0:
            for flat in self._own.tensors.values():
                flat.mul_(self._weight)

    def _tell(self, model: FlatBuffer | None = None) -> None:
        """Tell others that ask this model from now on, or what was gathered last."""
        with self._models.lock:
            self._told.fill((model or self._own).tensors, self._reducer.weight)
            if model is not None and self._reducer.weight != 1.0:
                for flat in self._told.flats.values():
                    flat.mul_(self._reducer.weight)
        self._models.finish_step(self._reducer.step)

    def mix(self, row: Mixing, step: int, gone: Sequence[int], change: FlatBuffer | None = None) -> None:
        """Mix what was exchanged in a step, which was pushed; the release of the next one is there.

        Args:
            row: With whom, and how much.
            step: The step.
            gone: Neighbours that left without pushing it.
            change: What the optimizer has changed since the values were sent; None where it was sent with them.
        """
        if not row.send and not row.receive:
            return  # there is no other worker
        reducer, lost, shares, own = self._reducer, set(gone), dict(row.receive), self._reducer.session.rank
        self._sum.start()
        for rank in sorted({own, *shares}):
            if rank == own:
                self._keep(row, lost)
            elif rank in lost:
                self._forget(rank)
            elif self._links.finish(self._coming.pop(rank), rank):
                self._sum.add(self._in[rank].flats, self._in[rank].weight, shares[rank])
            else:  # it died after its push, and its values did not come through
                self._forget(rank)
                self._take_back(dict(row.send).get(rank, 0.0))
        with self._models.lock:
            inherited = self._models.inherit(step)
        if inherited is not None:  # until the end of this step others may be told too little
            self._sum.add(inherited.flats, inherited.weight, 1.0)
        reducer.weight = self._sum.finish()
        self._load(change)

    def _keep(self, row: Mixing, lost: set[int]) -> None:
        """Add this worker's own part, with the shares that were meant for lost neighbours."""
        if not self._reducer.cast:
            kept = row.keep + sum(share for rank, share in row.send if rank in lost)
            self._sum.add(self._own.tensors, self._weight, kept)
            return
        self._sum.add(self._own.tensors, self._weight, 1.0)
        self._take_back(-sum(share for rank, share in row.send if rank not in lost))

    def _take_back(self, share: float) -> None:
        """A share of what was sent stays here after all; a negative one was sent."""
        if share:
            self._sum.add(self._out.flats, self._weight, share)

    def _forget(self, rank: int) -> None:
        """Should its message come after all, it must not be written over another."""
        self._coming.pop(rank, None)
        self._in.pop(rank, None)

    def _load(self, change: FlatBuffer | None) -> None:
        """Make the parameters the model that was mixed."""
        copier = self._reducer.copier
        mixed = copier.next_buffer()
        if change is not None:
            for dtype, flat in mixed.tensors.items():
                flat.add_(change.tensors[dtype])
        copier.scatter({0: mixed.parts[0]})
        self._tell(mixed)

    def leave(self) -> None:
        """Hand this worker's values over: it has finished."""
        if self._reducer.session.size > 1:
            self._gather()
            self._tell()
            self._models.leave(list(self._reducer.answer.members), self._reducer.step)
            self._models.service.stop()

"""BSP without parameters on a server: workers of one host average their gradients in shared memory.

Every worker's bucket lies in its slot of a shared buffer (`collectives/shared_buffer.py`). A step is an empty push,
which decides as always who is in the round; its answer means that all their gradients are there. Then everybody adds up its
part, and each runs the wrapped optimizer on the result, where it lies. All make the same change, so all
replicas stay the same.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from polytempo.client.client import Client
from polytempo.client.client_state import ClientState, Outstanding
from polytempo.collectives.shared_buffer import SharedMeanBuffer, mean_in_place
from polytempo.errors import PeerError
from polytempo.protocol.layout import ITEM_SIZES, Layout, lay_out
from polytempo.protocol.messages import Push
from polytempo.protocol.values import OptimizerSpec, PushId
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.gradient_hooks import GradientHooks
from polytempo.reducer.mean_reducer import MeanReducer
from polytempo.session.session import Session
from polytempo.transport.channel import Bytes

#: Flat buffers of different dtypes start at multiples of this in a slot.
ALIGNED = 64


class Area:
    """Hands out parts of a slot, one after another."""

    pins = False

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._used = 0

    def allocate(self, size: int) -> Bytes:
        """The next part."""
        start = self._used
        self._used = aligned(start + size)
        return self._data[start : start + size]


def aligned(size: int) -> int:
    """The next place where a flat buffer may start."""
    return -(-size // ALIGNED) * ALIGNED


class SharedMemoryReducer(MeanReducer):
    """The workers of one host, with a sequencer."""

    def __init__(
        self,
        session: Session,
        name: str,
        proposal: OptimizerSpec,
        params: Sequence[torch.Tensor],
        main: SharedMemoryReducer | None = None,
    ) -> None:
        super().__init__()
        assert session.client is not None
        self.name, self.session, self.proposal = name, session, proposal
        self.client: Client = session.client
        self.layout: Layout = lay_out(proposal.tensors, 1)
        self.line = ClientState(name)
        self.waited = 0.0
        session.local_peers()  # it listens before anybody is told of this worker
        with session.lock:
            self.client.register(name, proposal, lambda: ({}, self._nothing()), self.line)
        self.step = self.first_step = self.line.released
        self.board: SharedMeanBuffer = main.board if main else self._open_board()
        area = Area(self.board.slot_bytes(session.rank))
        self.copier: Copier = main.copier if main else Copier(params, self.layout, area)
        self._mean = FlatBuffer(self.layout, Area(self.board.result_bytes()), pinned=False)
        if main is None:
            self._start_from(self.line.answer.shares[0].worker)
        self._staging = None if main else GradientHooks(params, self.copier.next_flat())

    def _nothing(self) -> list[list[Bytes]]:
        """What the servers get of a push."""
        return [[] for _ in range(self.client.shards)]

    def _open_board(self) -> SharedMeanBuffer:
        members, peers = self.line.answer.members, self.session.local_peers()
        peers.meet(members)
        size = sum(aligned(length * ITEM_SIZES[dtype]) for dtype, length in self.layout.sizes.items())
        return SharedMeanBuffer(peers, members, self.session.next_buffer(), max(size, 1), self.client.watched())

    def _start_from(self, seeder: int) -> None:
        """Everybody takes the values of one worker."""
        rank, members = self.board.peers.rank, self.board.members
        self.board.round += 1
        if rank == seeder:
            self.copier.gather(self.copier.next_flat(), lambda param: param.detach())
        if seeder in self.board.meet("put", members):
            raise PeerError(f"worker {seeder} ended before its parameters, from which all were to start, were there")
        if rank != seeder:
            self.copier.scatter({0: self._flat_bytes(seeder)})
        self.board.meet("taken", members)

    def _flat_bytes(self, rank: int) -> list[Bytes]:
        area = Area(self.board.slot_bytes(rank))
        data = {dtype: area.allocate(length * ITEM_SIZES[dtype]) for dtype, length in self.layout.sizes.items()}
        return [data[stretch.dtype] for stretch in self.layout.shards[0]]

    # A step.

    def push(self, flat: FlatBuffer | None, hyper: tuple[dict[str, Any], ...], average: bool = True, **about: Any) -> None:
        began = time.perf_counter()
        push = Push(
            id=PushId(self.name, self.client.rank, self.client.incarnation, self.step),
            kind="peers",
            version=self.line.version,
            hyper=hyper,
            skip=flat is None,
            sent=self.client.bytes_sent,
            received=self.client.bytes_received,
            exchanged=self.waited,
            touched=self.copier.watch.touched,
            **about,
        )
        with self.session.lock:
            self.client.push(Outstanding(push, self._nothing()))
            self.client.wait_for_release(self.name, self.step + 1)
            self._compare()
            if average and not self.line.skipped:
                self._average()
        self.step = self.line.released
        self.waited = time.perf_counter() - began

    def _compare(self) -> None:
        """A script has written to parameters on some worker: refuse them if they are not the same on all."""
        answer, self.copier.watch.touched = self.line.answer, ""
        if answer.touched:
            digest = hashlib.blake2b(self.copier.watch.digests(), digest_size=8).digest()
            self.check_alike(self.board.compare(digest, [share.worker for share in answer.shares]), answer.touched)

    def _average(self) -> None:
        shares = self.line.answer.shares
        members, weights = [share.worker for share in shares], [share.weight for share in shares]
        offset = 0
        for dtype, length in self.layout.sizes.items():
            self.board.round += 1
            mean_in_place(self.board, members, weights, getattr(torch, dtype), length, offset)
            nbytes = length * ITEM_SIZES[dtype]
            self.client.bytes_sent += nbytes
            self.client.bytes_received += nbytes
            offset += aligned(nbytes)

    @property
    def absent(self) -> tuple[int, ...]:  # type: ignore[override]
        """Parameters for which nobody had a gradient in the last round."""
        return self.line.answer.absent

    def traffic(self) -> tuple[int, int]:
        return self.client.bytes_sent, self.client.bytes_received

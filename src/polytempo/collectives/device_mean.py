"""Means of gradients on a device: the form of `SharedMeanBuffer` for workers of one host whose parameters are on GPUs.

Each rank has a flat range of device memory for each dtype, its slot, which the others map, and makes the mean of all slots
in memory of its own, in one pass: every rank the same pass in the same order, so all have the same bits. A slot counts as
filled when its rank's device is done with it, which the rank waits for on the host before it says so; so the slot of a rank
that dies later is whole. A slot is filled again when all ranks that were in the round have read it: behind its pass the
stream of each writes the number of the round to a fence, which the host of the writer looks at before the next copy.

In host memory that the ranks share are cards, which say how to map slots, and the fences.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import numpy
import torch

from polytempo.collectives.device_choice import DeviceFacts
from polytempo.collectives.reduce_ops import weighted_mean
from polytempo.collectives.shared_buffer import SharedMeanBuffer
from polytempo.device.device import FENCE_BYTES, SPACING, Device, DeviceMemory, Fences, StreamPoint
from polytempo.transport.deadline import Deadline
from polytempo.transport.local_peers import check_peers

#: Seconds between two looks at a device, or at the fence of another rank.
POLL = 50e-6
#: As many ranks have a fence.
RANKS = FENCE_BYTES // SPACING


class DeviceMeanBuffer:
    """The slots of all ranks, on one rank.

    Args:
        shared: Shared host memory of `FENCE_BYTES` for each rank, and for the fences.
        device: Where this rank's slot is.
        slot: This rank's slot: a range for each dtype.
        form: Must be the same on all ranks, as the order of elements in a slot.
    """

    def __init__(self, shared: SharedMeanBuffer, device: Device, slot: Mapping[str, DeviceMemory], form: str = "") -> None:
        self._shared, self._device = shared, device
        self._rank, self._members = shared.peers.rank, shared.members
        self._slots: dict[int, dict[str, torch.Tensor]] = {}
        self._sizes = {dtype: memory.nbytes for dtype, memory in slot.items()}
        self._fill(self._rank, slot)
        self._fences: Fences | None = None
        self._round, self._readers = 0, list[int]()
        self.usable = self._exchange_cards(slot, form)  #: whether all ranks reach each other's slots; the same on all

    def _fill(self, rank: int, slot: Mapping[str, DeviceMemory]) -> None:
        self._slots[rank] = {dtype: memory.tensor(getattr(torch, dtype)) for dtype, memory in slot.items()}

    def _exchange_cards(self, slot: Mapping[str, DeviceMemory], form: str) -> bool:
        shared, device = self._shared, self._device
        handles = {dtype: memory.handle.hex() for dtype, memory in slot.items()}
        card = json.dumps([device.identity, sorted(device.reachable()), form, handles]).encode()
        if len(card) > FENCE_BYTES or len(self._members) > RANKS:
            card = b""
        own = shared.slot_bytes(self._rank)
        own[: len(card)] = numpy.frombuffer(card, dtype=numpy.uint8)
        shared.round += 1
        lost = shared.meet("put", self._members)
        others = [rank for rank in self._members if rank not in lost]
        cards = {rank: shared.slot_bytes(rank).tobytes().rstrip(b"\0") for rank in others}
        if not all(cards.values()):
            return False
        read = {rank: json.loads(text) for rank, text in cards.items()}
        facts = [DeviceFacts(rank, 0, said[0], frozenset(said[1])) for rank, said in read.items()]
        reached = all(one.device in other.reachable for one in facts for other in facts)
        if not reached or len({said[2] for said in read.values()}) > 1:
            return False
        self._fences = device.fences(shared.result_bytes())
        for rank, (_, _, _, theirs) in read.items():
            if rank != self._rank:
                self._fill(rank, {dtype: device.open(bytes.fromhex(theirs[dtype]), self._sizes[dtype]) for dtype in theirs})
        return True

    # Slots.

    def slot(self, rank: int) -> dict[str, torch.Tensor]:
        """The slot of a rank, by dtype."""
        return self._slots[rank]

    def wait_until_read(self) -> None:
        """Wait on the host until this rank's slot may be filled again; a rank that ended does not read it any more."""
        deadline = Deadline(self._rank, self._shared.peers.timeout)
        while missing := [rank for rank in self._readers if not self._has_read(rank)]:
            time.sleep(POLL)
            self._shared.peers.read(missing)
            check_peers(deadline, missing, "to read its gradients")
        self._readers = []

    def _has_read(self, rank: int) -> bool:
        assert self._fences is not None
        return rank in self._shared.peers.lost or self._fences.reached(self._members.index(rank), self._round)

    def wait_until_filled(self) -> None:
        """Wait on the host until this rank's device has filled its slot: only then may it be announced."""
        wait_for(self._device.here())

    def mean(self, members: Sequence[int], weights: Sequence[float], into: Mapping[str, torch.Tensor]) -> None:
        """The weighted mean of the slots of these ranks, which have all announced them, on the current stream.

        Args:
            members: The ranks.
            weights: Of each; a slot of weight 0 is not looked at.
            into: Takes it, by dtype.
        """
        assert self._fences is not None
        for dtype, out in into.items():
            weighted_mean([self._slots[rank][dtype][: out.numel()] for rank in members], weights, out, self._device)
        self._round += 1
        self._fences.signal(self._members.index(self._rank), self._round)
        self._readers = [rank for rank in members if rank != self._rank]


def wait_for(point: StreamPoint) -> None:
    """Wait on the host for a point of this rank's own stream, with short sleeps: other threads go on meanwhile."""
    while not point.reached():
        time.sleep(POLL)

"""Device memory in which the ranks of one host exchange tensors: the form of `shared_buffer.py` on GPUs.

Each rank has memory of its own with two slots, used in turns by successive plans, and sends its handle to the others before
it first says that something lies there. It says so (at a plan's barrier) only when its stream is done: then all that it has
put is whole, and all that it has read before is read. So the rules for shared memory hold as they are, also where a rank
dies: its memory stays mapped in those that have mapped it.

What each rank of a group says of its GPU, once, inside the group's first call with tensors that are on one:

    facts = yield from gather_facts(inside, facts_of(rank, place, device))    the same list on every rank, in their order
    way = choose_way(facts, group.network)
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy
import torch
import torch.distributed

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.device_choice import DeviceFacts
from polytempo.collectives.messaging import Messaging
from polytempo.collectives.steps import Place
from polytempo.collectives.tasks import Steps
from polytempo.device.device import Device, DeviceMemory
from polytempo.errors import PeerError
from polytempo.transport.peer_link import HANDLE, LinkMessage

#: Bytes of a slot. A barrier takes as long as a pass over some hundred megabytes, so few are better; but all of it is memory
#: that the script cannot have.
SIZES = (1 << 20, 8 << 20, 64 << 20)
#: Bytes of a process's number in what a rank tells of its memory.
PROCESS = 8
#: Bytes of what a rank says of its GPU: the identities of some 60 devices fit.
RECORD = 4096


def facts_of(rank: int, place: Place, device: Device | None) -> DeviceFacts:
    """Those of this rank.

    Args:
        rank: Its rank in the job.
        place: Its place in the group.
        device: Where its tensors are; None for the CPU.
    """
    host = next(number for number, members in enumerate(place.hosts) if place.rank in members)
    if device is None:
        return DeviceFacts(rank, host, "")
    nccl = device.place.type == "cuda" and torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return DeviceFacts(rank, host, device.identity, device.reachable(), nccl)


def gather_facts(inside: Any, own: DeviceFacts) -> Steps:
    """Steps of a call in which all ranks take part; their result is the list of all ranks' facts.

    Args:
        inside: The group within its call (`Nested`).
        own: Those of this rank.
    """
    record = pack(own)
    rows = [torch.empty_like(record) for _ in range(inside.size)]
    yield from inside.all_gather(rows, record)
    return [unpack(row) for row in rows]


def pack(facts: DeviceFacts) -> torch.Tensor:
    """As bytes, of one size on all ranks. Devices that do not fit count as not reachable."""
    reachable = sorted(facts.reachable, key=lambda identity: (identity != facts.device, identity))
    while len(text := json.dumps([facts.rank, facts.host, facts.device, reachable, facts.nccl]).encode()) > RECORD:
        reachable.pop()
    return torch.frombuffer(bytearray(text.ljust(RECORD, b" ")), dtype=torch.uint8)


def unpack(record: torch.Tensor) -> DeviceFacts:
    """From bytes."""
    try:
        rank, host, device, reachable, nccl = json.loads(bytes(record.numpy()))
        return DeviceFacts(int(rank), int(host), str(device), frozenset(map(str, reachable)), bool(nccl))
    except (ValueError, TypeError) as error:
        raise PeerError(f"a rank sent something that are no facts of a device: {error}") from None


class DeviceSlotBuffer:
    """A buffer of one size, of one group, on one rank."""

    def __init__(self, of: DeviceSlotBuffers, capacity: int) -> None:
        self._of, self.capacity = of, capacity
        self.turn = 0  #: which slot of each rank is used
        self._memory: dict[int, DeviceMemory] = {}

    def open(self, call: int) -> Steps:
        """Use the other slots from now on; the first time, make this rank's, and tell the others where they are."""
        self.turn ^= 1
        group = self._of
        if group.rank not in self._memory:
            mine = self._memory[group.rank] = group.device.allocate(2 * self.capacity)
            process = os.getpid().to_bytes(PROCESS, "little")
            card = numpy.concatenate([pack(group.facts).numpy(), numpy.frombuffer(process + mine.handle, dtype=numpy.uint8)])
            for rank in group.others:
                group.messages.send(rank, LinkMessage(HANDLE, group.queue.context, self.capacity), card)
        yield from ()  # it never waits: the others need this rank's handle only when they have heard of its contents

    def take_back(self) -> None:
        """Not all ranks have used their slots: none of this turn was read."""
        self.turn ^= 1

    def facts(self) -> list[DeviceFacts]:
        """Those of all ranks, once all have sent their handles: before they say that something lies in their memory."""
        group = self._of
        keys = [(rank, group.queue.context, self.capacity) for rank in group.others]
        if not all(key in group.messages.handles for key in keys):
            return []
        cards = [group.messages.handles[key] for key in keys]
        return [group.facts, *(unpack(torch.frombuffer(bytearray(card[:RECORD]), dtype=torch.uint8)) for card in cards)]

    def part(self, member: int, like: torch.Tensor, offset: int) -> torch.Tensor:
        """As many elements of a rank's slot as a tensor has, from this byte on."""
        group = self._of
        if member not in self._memory:
            card = group.messages.handles[member, group.queue.context, self.capacity]
            self._memory[member] = group.device.open(card[RECORD + PROCESS :], 2 * self.capacity)
        return self._memory[member].tensor(like.dtype, self.turn * self.capacity + offset, like.numel())


class DeviceSlotBuffers:
    """The buffers of a group on one device, one of each size that was needed.

    Args:
        messages: Of this rank.
        queue: The group's calls.
        members: Its ranks in the job.
        facts: Of this rank and its device.
        device: Where its tensors are.
    """

    def __init__(
        self, messages: Messaging, queue: CallQueue, members: Sequence[int], facts: DeviceFacts, device: Device
    ) -> None:
        self.messages, self.queue, self.facts, self.device = messages, queue, facts, device
        self.rank, self.others = messages.rank, [rank for rank in members if rank != messages.rank]
        self._buffers: dict[int, DeviceSlotBuffer] = {}
        self._reached: bool | None = None
        self.settled: list[DeviceFacts] = []  #: those of all ranks, once all have agreed on a call

    def of(self, nbytes: int) -> DeviceSlotBuffer:
        """The smallest buffer with room for these bytes in a slot, or the largest there is."""
        capacity = next((size for size in SIZES if size >= nbytes), SIZES[-1])
        if capacity not in self._buffers:
            self._buffers[capacity] = DeviceSlotBuffer(self, capacity)
        return self._buffers[capacity]

    def declined(self, call: int) -> bool:
        """Whether a rank has said that its part of this call goes by host memory. It may wait there for this one."""
        return any(self.messages.on_host.get((rank, self.queue.context)) == call for rank in self.others)

    def agreed(self, call: int, number: int) -> bool:
        """Whether all ranks have come to this barrier with tensors on devices that reach each other: the same on all.

        A rank that has found so may be at the next barrier already. One that came to this barrier otherwise is not at the
        next with tensors on a device, since this rank has not passed the one in between.
        """
        context = self.queue.context
        if self.declined(call) or any(self.messages.on_device.get((rank, context), -1) < number for rank in self.others):
            return False
        if not self.settled and not self.refused:
            self.settled = sorted(self._facts(), key=lambda facts: facts.rank)
        return not self.refused

    def _facts(self) -> list[DeviceFacts]:
        return next((facts for buffer in self._buffers.values() if (facts := buffer.facts())), [])

    @property
    def refused(self) -> bool:
        """Whether devices are known not to reach each other."""
        if self._reached is None and (facts := self._facts()):
            self._reached = all(other.device in fact.reachable for fact in facts for other in facts)
            self._reached &= self.device.place.type != "cuda" or not self._in_one_process()
        return self._reached is False

    def _in_one_process(self) -> bool:
        """Whether ranks are threads of one process: a handle of CUDA IPC cannot be opened where it was made."""
        cards = [card for (_, context, _), card in self.messages.handles.items() if context == self.queue.context]
        own, told = os.getpid().to_bytes(PROCESS, "little"), [card[RECORD : RECORD + PROCESS] for card in cards]
        return len({own, *told}) <= len(self.others)

    def start_over(self) -> None:
        """After a failure all ranks begin with the same slots again; none still reads what was there."""
        self.settled = []
        for buffer in self._buffers.values():
            buffer.turn = 0

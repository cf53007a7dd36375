"""Device memory in which the ranks of one host exchange tensors: the form of `shared_buffer.py` on GPUs.

Each rank has memory of its own with two slots, used in turns by successive plans, and sends its handle to the others before
it first says that something lies there. It says so (at a plan's barrier) only when its stream is done: then all that it has
put is whole, and all that it has read before is read. So the rules for shared memory hold as they are, also where a rank
dies: its memory stays mapped in those that have mapped it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy
import torch

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.device_choice import DeviceFacts
from polytempo.collectives.device_facts import RECORD, pack, unpack
from polytempo.collectives.messaging import Messaging
from polytempo.collectives.tasks import Steps
from polytempo.device.device import Device, DeviceMemory
from polytempo.transport.peer_link import HANDLE, LinkMessage

#: Bytes of a slot. A barrier takes as long as a pass over some hundred megabytes, so few are better; but all of it is memory
#: that the script cannot have.
SIZES = (1 << 20, 8 << 20, 64 << 20)
#: Bytes of a process's number in what a rank tells of its memory.
PROCESS = 8


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

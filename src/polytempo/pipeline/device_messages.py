"""Tensors between stages whose devices share memory (CUDA IPC): blocks of device memory, fences, and a header in the link.

For each rank that it sends to, a rank has blocks of its device's memory, the device form of `LeasedBlocks`
(`transport/shared_memory.py`). The numbers of messages count for each pair of ranks:

    sender     its stream copies the tensors into a block and sets fence WRITTEN to the number; the header is sent at once
    receiver   its copying stream waits for WRITTEN, copies the block into tensors of its own, and sets the block's fence to
               the number; its computing stream waits for that copy

The block is free when its fence has reached the number of the last message in it, which the sender reads in host memory. The
receiver copies: a kernel that reads the memory of a peer pays for it each time, and a stage keeps its inputs until their
backward. The sender copies on the stream that computes: within a device that costs less than ordering two streams, and what
was sent may be changed at once.

No host waits for a GPU on the way, so what was received may never be written, if its sender is killed: a thread that looks
after the fences releases them then, and `confirm`, which comes before anything lasting is made of messages (an update, a
result), raises. Before a rank ends, `settle` waits until its messages are written and their blocks are mapped.
"""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from polytempo.collectives.group import RankGroup
from polytempo.device.device import SPACING, Device, DeviceMemory, Fences
from polytempo.device.side_stream import SideStream
from polytempo.errors import PeerError, UsageError
from polytempo.pipeline.stage_message import MessageForm, StageMessage, copied_in, copied_out
from polytempo.transport.deadline import Deadline, limit_of
from polytempo.transport.shared_memory import Segment, make_segment, rounded

#: The fences of a pair: WRITTEN, then one for each block.
WRITTEN, BLOCKS = 0, 1
#: Blocks that a rank can have for one other.
MOST_BLOCKS = 1023
WORDS = (BLOCKS + MOST_BLOCKS) * SPACING
#: A header: block, number for this pair, bytes and handle of the block; number, version and figure of the message.
HEADER = struct.Struct("<qqqH96sqqd")
#: The number of the segment of fences among those that a rank hands over.
FENCE_SEGMENT = 1 << 40
#: Seconds between two looks at fences: by a host that waits for them, and by the thread that looks for lost senders.
POLL, LOOK = 50e-6, 0.1
#: Seconds after which that thread asks whether the sender of a message is lost.
SUSPICIOUS = 0.5
#: Bytes of a device's identity.
IDENTITY = 64


@dataclass(slots=True, eq=False)
class DeviceBlock:
    """Room for one message, as its owner sees it. `last`: the number of the newest message in it."""

    index: int
    memory: DeviceMemory
    last: int = 0
    mapped: bool = False


class DeviceBlocks:
    """The blocks in which one rank writes for one other.

    Args:
        device: On which they are.
        words: Shared memory for the fences (`WORDS` bytes), which the other rank gets, too.
    """

    def __init__(self, device: Device, words: Segment) -> None:
        self.device, self.words = device, words
        self.fences: Fences = device.fences(words.view(0, WORDS))
        self.blocks: list[DeviceBlock] = []
        self.count = 0  #: messages so far

    def take(self, size: int) -> DeviceBlock:
        """A block that the other rank does not read; the number of the next message is noted in it."""
        least = rounded(size)
        fitting = (one for one in self.blocks if least <= one.memory.nbytes <= 2 * least and self.is_free(one))
        block = min(fitting, key=lambda one: one.memory.nbytes, default=None)
        if block is None:
            if len(self.blocks) == MOST_BLOCKS:
                raise UsageError(f"more than {MOST_BLOCKS} messages to one stage are under way; use fewer microbatches")
            block = DeviceBlock(len(self.blocks), self.device.allocate(least))
            self.blocks.append(block)
        self.count += 1
        block.last = self.count
        return block

    def is_free(self, block: DeviceBlock) -> bool:
        """Has the other rank read what was last in it?"""
        return self.fences.reached(BLOCKS + block.index, block.last)

    def write(self, form: MessageForm, message: StageMessage) -> bytes:
        """Copy a message into a block, on the current stream; its header."""
        block = self.take(form.size)
        memory = block.memory
        copied_in(message, form, memory.tensor)
        self.fences.signal(WRITTEN, self.count)
        handle = memory.handle
        about = message.number, message.version, message.figure
        return HEADER.pack(block.index, self.count, memory.nbytes, len(handle), handle, *about)

    @property
    def settled(self) -> bool:
        """Is all that was sent written, and each block known to the other rank?"""
        for block in self.blocks:
            block.mapped = block.mapped or self.is_free(block)
        return self.fences.reached(WRITTEN, self.count) and all(block.mapped for block in self.blocks)


@dataclass
class _Source:
    """A rank that sends: its fences and blocks here, and the newest message from it."""

    fences: Fences
    blocks: dict[int, DeviceMemory] = field(default_factory=dict)
    last: int = 0
    since: float = 0.0  #: when that came
    lost: Exception | None = None  #: why it will not write what it has sent

    @property
    def missing(self) -> bool:
        """Was the newest message not written yet?"""
        return not self.fences.reached(WRITTEN, self.last)


class DeviceMessages:
    """One rank's messages by device memory.

    Args:
        group: Of the pipeline.
        device: Where this stage computes.
        peers: The ranks whose devices this one reaches, and that reach it.
    """

    def __init__(self, group: RankGroup, device: Device, peers: frozenset[int]) -> None:
        self._group, self._engine, self.device, self.peers = group, group.engine, device, peers
        self._outgoing: dict[int, DeviceBlocks] = {}
        self._incoming: dict[int, _Source] = {}
        self._stream = SideStream(device.place)
        self._watch: threading.Thread | None = None

    def carries(self, to: int, message: StageMessage) -> bool:
        """Do tensors of this message go to this rank by device memory?"""
        kind = self.device.place.type
        return to in self.peers and any(
            isinstance(value, torch.Tensor) and value.device.type == kind for value in message.values
        )

    # Sending.

    def write(self, to: int, form: MessageForm, message: StageMessage) -> tuple[bytes, Segment | None]:
        """Give the copy of a message to the current stream; its header, and memory to hand over before it.

        Raises:
            OSError, MemoryError: There is no room for the fences.
        """
        words = None
        if to not in self._outgoing:
            words = make_segment(WORDS)
            self._outgoing[to] = DeviceBlocks(self.device, words)
        return self._outgoing[to].write(form, message), words

    def settle(self) -> None:
        """Wait until all that was sent is written, and its memory mapped by those that read it."""
        for to, blocks in self._outgoing.items():
            self._until(to, lambda blocks=blocks: blocks.settled, "to map device memory", raising=False)  # type: ignore[misc]

    # Receiving.

    def read(self, source: int, header: bytes, form: MessageForm, words: Callable[[], Segment]) -> StageMessage:
        """The message of a header, in tensors that the current stream may use; no host waits for them.

        Args:
            source: The rank that sent it.
            header: What came by the link.
            form: Of the message.
            words: Takes the segment of fences that the rank has handed over before its first message.
        """
        block, count, nbytes, length, handle, number, version, figure = HEADER.unpack(header)
        if source not in self._incoming:
            self._incoming[source] = _Source(self.device.fences(words().view(0, WORDS)))
        of = self._incoming[source]
        if block not in of.blocks:
            of.blocks[block] = self.device.open(handle[:length], nbytes)
        of.last, of.since = max(of.last, count), time.monotonic()
        if self._watch is None:
            self._watch = threading.Thread(target=_watch, args=(weakref.ref(self),), name="polytempo-fences", daemon=True)
            self._watch.start()
        with self._stream.apart():
            of.fences.wait(WRITTEN, count)
            values = copied_out(form, of.blocks[block].tensor, self.device.place)
            of.fences.signal(BLOCKS + block, count)
        self._stream.join(*(value for value in values if isinstance(value, torch.Tensor)))
        return StageMessage(values, form.single, number, version, figure)

    def confirm(self) -> None:
        """Wait until all that was received is written.

        Raises:
            RankLost: A rank was lost before it had written what it has sent.
            PeerError: The time is over, or another rank has failed.
        """
        for source, of in self._incoming.items():
            self._until(source, lambda of=of: not of.missing, "to write its message")  # type: ignore[misc]
            if of.lost is not None:
                raise of.lost

    def _until(self, rank: int, ready: Callable[[], bool], what: str, raising: bool = True) -> None:
        """Wait for what a GPU says in host memory; the loss of the other rank ends the wait, and so does any failure."""
        deadline = Deadline(self._engine.rank, self._group.timeout)
        while not ready():
            self._engine.look()
            failed = self._group.queue.failed
            if (rank in self._engine.messages.left or failed is not None) and not ready():
                if not raising:
                    return
                if failed is not None:
                    raise failed
                self._give_up(rank)
            if deadline.over:
                raise PeerError(deadline.line(f"for rank {rank} {what}"))
            deadline.report(lambda: f"for rank {rank} {what}")
            time.sleep(POLL)

    # Senders that are lost, while this process may be blocked in a call that waits for its own GPU.

    def look(self) -> None:
        """Release the fences of senders that are gone, or that have not written in time."""
        now = time.monotonic()
        waiting = [source for source, of in list(self._incoming.items()) if of.missing and now - of.since > SUSPICIOUS]
        if waiting:
            self._engine.look()
        for source in waiting:
            self._give_up(source)

    def _give_up(self, source: int) -> None:
        """End the waits for a rank that is gone or late; its GPU may still set the fence, so that this may come again."""
        of, patience = self._incoming[source], limit_of(self._group.timeout)
        if source in self._engine.messages.left:
            of.lost = of.lost or self._engine.messages.loss([source])
        elif patience is not None and time.monotonic() - of.since > patience:
            of.lost = of.lost or PeerError(f"rank {source} has not written its message after {patience:g} s")
        if of.lost is not None and of.missing:
            of.fences.release(WRITTEN)


def _watch(reference: weakref.ref[DeviceMessages]) -> None:
    while (messages := reference()) is not None:
        messages.look()
        del messages
        time.sleep(LOOK)


def exchange_devices(group: RankGroup, device: Device | None) -> frozenset[int]:
    """The ranks of this host whose devices this rank's reaches, and that reach it; all ranks of the group call this."""
    identity = device.identity.encode() if device is not None else b""
    own = torch.frombuffer(bytearray(identity.ljust(IDENTITY, b"\0")), dtype=torch.uint8)
    found = [torch.zeros_like(own) for _ in group.ranks]
    group.all_gather(found, own).wait()
    names = [one.numpy().tobytes().rstrip(b"\0").decode() for one in found]
    if not any(names):
        return frozenset()
    here = next(host for host in group.place.hosts if group.rank in host)
    reached = [
        bool(device is not None and name and index in here and device.reaches(name)) for index, name in enumerate(names)
    ]
    rows = [torch.zeros(len(names), dtype=torch.uint8) for _ in names]
    group.all_gather(rows, torch.tensor(reached, dtype=torch.uint8)).wait()
    both = (rank for index, rank in enumerate(group.ranks) if reached[index] and rows[index][group.rank])
    return frozenset(both) - {group.engine.rank}

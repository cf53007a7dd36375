"""Device memory that a worker shares with one shard: gradients are read there, answers land there (`docs/design/0013`).

`ShareDevice` brings handles of the whole model's flat ranges, one for each dtype; the shard takes its stretches of them. A
share ends with its worker (`ForgetWorker`, or the end of its connection): its fence is released and its ranges are unmapped,
once no update that is to be made needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.device.device import FENCE_BYTES, Device, DeviceMemory, Fences
from polytempo.device.exchange_fences import ANSWERED, PUSHED
from polytempo.errors import PeerError
from polytempo.protocol.layout import ITEM_SIZES, Layout, Stretch
from polytempo.protocol.messages import ShareDevice
from polytempo.protocol.values import DeviceRange
from polytempo.server.pull_compression import Flats
from polytempo.transport.channel import Bytes

#: Exchanges whose fences are remembered: the last ones, for answers that are given again.
REMEMBERED = 4


class DeviceShare:
    """What one worker shares with one shard, for one optimizer. The inbox and the executor both have it."""

    def __init__(self, fences: Fences, gradients: Sequence[torch.Tensor], landing: Sequence[torch.Tensor]) -> None:
        self.fences = fences
        self.gradients, self._landing = list(gradients), list(landing)
        self._fence_of: dict[int, int] = {}  # by step
        self._answered = 0
        self._released = False

    def expect(self, step: int, fence: int) -> None:
        """The push of this step lies in the gradients when PUSHED has reached this fence."""
        self._fence_of[step] = fence
        for old in list(self._fence_of)[:-REMEMBERED]:
            del self._fence_of[old]

    def fence_of(self, step: int) -> int:
        """The fence that the answer to this push sets; 0 where the push came in buffers."""
        return self._fence_of.get(step, 0)

    def pushed(self, fence: int) -> bool:
        """Is the push with this fence complete?"""
        return self.fences.reached(PUSHED, fence)

    def answer(self, fence: int, values: Flats | None) -> None:
        """On the current stream: the values into the landing, if the answer brings any, then ANSWERED. Once for a fence."""
        if fence <= self._answered or self._released:
            return
        self._answered = fence
        if values is not None:
            for target, value in zip(self._landing, values.values(), strict=True):
                target.copy_(value, non_blocking=True)
        self.fences.signal(ANSWERED, fence)

    def release(self) -> None:
        """No further answer will come: a stream that waits for one goes on. This device's own stream must have finished."""
        if not self._released:
            self._released = True
            self.fences.release(ANSWERED)


def open_share(message: ShareDevice, words: Sequence[Bytes], device: Device, layout: Layout, shard: int) -> DeviceShare:
    """Map what a worker shares.

    Raises:
        PeerError: It cannot be mapped here, or is not of this model.
    """
    if len(words) != 1 or words[0].nbytes < FENCE_BYTES:
        raise PeerError(f"expected one buffer of {FENCE_BYTES} bytes for the fences, got {[w.nbytes for w in words]}")
    if not device.reaches(message.identity):
        raise PeerError(f"device {message.identity[:60]} is not reachable from {device.identity}, where this shard is")
    sizes = [count * ITEM_SIZES[dtype] for dtype, count in layout.sizes.items()]
    for what, ranges in (("gradients", message.gradients), ("values", message.values)):
        if [given.nbytes for given in ranges] != sizes:
            raise PeerError(f"expected {what} of {sizes} bytes, got {[given.nbytes for given in ranges]}")
    stretches = layout.shards[shard]
    gradients, landing = (
        _stretches(stretches, list(layout.sizes), _opened(ranges, device)) for ranges in (message.gradients, message.values)
    )
    return DeviceShare(device.fences(words[0]), gradients, landing)


def _opened(ranges: Sequence[DeviceRange], device: Device) -> list[DeviceMemory]:
    return [device.open(given.handle, given.nbytes) for given in ranges]


def _stretches(stretches: Sequence[Stretch], dtypes: Sequence[str], memory: Sequence[DeviceMemory]) -> list[torch.Tensor]:
    """This shard's stretches of whole flat ranges."""
    of = dict(zip(dtypes, memory, strict=True))
    return [of[s.dtype].tensor(getattr(torch, s.dtype), s.start * ITEM_SIZES[s.dtype], s.size) for s in stretches]

"""Device memory that a worker shares with one shard: gradients are read there, answers land there (`docs/design/0013`).

`ShareDevice` brings handles of the whole model's flat ranges, one for each dtype; the shard takes its stretches of them. A
share ends with its worker (`ForgetWorker`, or the end of its connection): its fence is released and its ranges are unmapped,
once no update that is to be made needs them.

A GPU tells no host of another process that it has reached a point of its stream; it writes a word. While pushes are pending
a thread (`FenceWatch`) looks at their words again and again: every `QUICK` seconds at first, then less often, at most `LATE`
of the time that the oldest has been pending later than it could have. Without a pending push it sleeps, and costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch

from polytempo.device.device import FENCE_BYTES, Device, Fences
from polytempo.device.exchange_fences import ANSWERED, PUSHED
from polytempo.errors import PeerError
from polytempo.protocol.layout import ITEM_SIZES, Layout
from polytempo.protocol.messages import ShareDevice
from polytempo.server.optimizer_state import Flats
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
    opened: list[list[torch.Tensor]] = []
    for ranges in (message.gradients, message.values):
        whole = {dtype: device.open(r.handle, r.nbytes) for dtype, r in zip(layout.sizes, ranges, strict=True)}
        mine = []
        for stretch in layout.shards[shard]:
            start = stretch.start * ITEM_SIZES[stretch.dtype]
            mine.append(whole[stretch.dtype].tensor(getattr(torch, stretch.dtype), start, stretch.size))
        opened.append(mine)
    return DeviceShare(device.fences(words[0]), *opened)


#: Seconds between looks, at least and at most; and the share of the time that has passed by which a look may be late.
QUICK, SLOW, LATE = 30e-6, 80e-6, 0.005

K = TypeVar("K", bound=Hashable)


def pause(pending_for: float) -> float:
    """Seconds until the next look, after the newest push has been pending for `pending_for` seconds."""
    return min(max(QUICK, LATE * pending_for), SLOW)


class FenceWatch(Generic[K]):
    """Says which pushes are complete. `add`, `discard` and `take` are the I/O loop's.

    Args:
        ring: Called in the watching thread when `take` has something.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._pending: dict[K, Callable[[], bool]] = {}
        self._reached: deque[K] = deque()
        self._wanted = threading.Condition()
        self._since = 0.0  # the last push came then
        self._thread: threading.Thread | None = None
        self._over = False

    def add(self, key: K, is_reached: Callable[[], bool]) -> None:
        with self._wanted:
            self._pending[key] = is_reached
            self._since = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fence watch", daemon=True)
                self._thread.start()
            self._wanted.notify()

    def discard(self, key: K) -> None:
        """Its worker is gone: `take` will not give it any more."""
        with self._wanted:
            self._pending.pop(key, None)
            if key in self._reached:
                self._reached.remove(key)

    def take(self) -> list[K]:
        """Pushes that have become complete, in the order in which that was seen."""
        return [self._reached.popleft() for _ in range(len(self._reached))]

    def close(self) -> None:
        with self._wanted:
            self._over = True
            self._wanted.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over:
            with self._wanted:
                while not self._pending and not self._over:
                    self._wanted.wait()
                # Under the lock: what is discarded is not looked at any more.
                found = [key for key, is_reached in self._pending.items() if is_reached()]
                for key in found:
                    del self._pending[key]
                    self._reached.append(key)
                wait = pause(time.monotonic() - self._since)
            if found:
                self._ring()
            time.sleep(wait)

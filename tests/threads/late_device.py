"""A stand-in for a GPU that is late: its stream does what it was given piece by piece, when it is looked at, or waited for.

So work that a rank has given its device is done long after the rank has gone on, as on a GPU; by chance, and repeatably."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence

from polytempo.collectives.world import World
from polytempo.device.device import Devices, DeviceStream, StreamPoint
from polytempo.device.host_device import HostDevice


class LateStream(DeviceStream):
    """Does at most one piece of work each time it is looked at."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._work: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()
        self.given = self.done = 0

    def give(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._work.append(work)
            self.given += 1

    def mark(self) -> StreamPoint:
        return LatePoint(self, self.given)

    def look(self) -> None:
        with self._lock:
            if self._work and self._chance.random() < 0.5:
                self._do_one()

    def do_until(self, count: int) -> None:
        with self._lock:
            while self.done < count:
                self._do_one()

    def finish(self) -> None:
        self.do_until(self.given)

    def _do_one(self) -> None:
        self._work.popleft()()
        self.done += 1


class LatePoint(StreamPoint):
    def __init__(self, stream: LateStream, count: int) -> None:
        self._stream, self._count = stream, count

    def reached(self) -> bool:
        self._stream.look()
        return self._stream.done >= self._count

    def order(self) -> None:
        """The caller's stream is the host: it waits."""
        self._stream.do_until(self._count)


class LateDevice(HostDevice):
    def __init__(self, identity: str = "late", seed: int = 0) -> None:
        super().__init__(identity)
        self._seed = seed

    def stream(self) -> DeviceStream:
        return LateStream(self._seed)


def on_late_devices(worlds: Sequence[World], ranks: Sequence[int] | None = None, seed: int = 0, alike: bool = True) -> None:
    """Tensors of these ranks (of all) count as a device's; `alike`: of one that they share."""
    for world in worlds:
        if ranks is None or world.rank in ranks:
            name = "late" if alike else f"late-{world.rank}"
            world.engine.streams.devices = Devices(LateDevice(name, 100 * seed + world.rank))

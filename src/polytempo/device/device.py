"""`Device`: memory that processes of one host share, and fences in the order of its streams. The interface of two:

    CudaDevice   a GPU, by CUDA IPC and stream memory operations            `cuda_device.py`
    HostDevice   its stand-in for tests: shared host memory, no streams     `host_device.py`

*Memory* has no name: another process maps it by a handle of a few bytes, which travels in a message. It is given back when
the last tensor on it is gone in every process that has it; a process that is killed gives back its part.

A *fence* is a 32-bit counter in host memory that both processes map. It only grows. A stream writes it behind the work that
it stands for (`signal`), a stream waits for it (`wait`), the host reads it (`reached`). A host that must not wait for ever
for another process releases its own waits (`release`): they end at once, and what is behind them must not be used.

A *stream* of this library's own does work in order, beside the script's:

    point = stream.here()        in the caller's thread: what the caller has given its current stream so far
    stream.after(point)          what the stream is given from now on waits for that
    with stream.current(): ...   torch's calls inside are given to the stream
    stream.give(work)            so is `work`, inside of that
    done = stream.mark()         done.reached(): has the stream come this far? done.order(): the current stream waits for it

The streams here are those of a device that runs what it is given at once: the stand-in. `cuda_device.py` has a GPU's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy
import torch

from polytempo.device.weighted_sum import sum_by_torch
from polytempo.transport.channel import Bytes


class StreamPoint:
    """A place in a stream."""

    def reached(self) -> bool:
        """Whether all before it is complete. Never waits."""
        return True

    def order(self) -> None:
        """What the current stream is given from now on waits for it; the host does not."""


class DeviceStream:
    """Work in order on one device."""

    def here(self) -> StreamPoint:
        """The end of what the caller's current stream was given so far."""
        return StreamPoint()

    def after(self, point: StreamPoint) -> None:
        """What the stream is given from now on waits for a point of another."""

    def current(self) -> AbstractContextManager[object]:
        """Inside, it is torch's current stream in this thread."""
        return nullcontext()

    def give(self, work: Callable[[], object]) -> None:
        """Let it do some work, which reads and writes tensors of its device. Inside of `current`."""
        work()

    def mark(self) -> StreamPoint:
        """The end of what it was given so far."""
        return StreamPoint()

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Memory of these tensors, which other streams made, is not used for others before it has come this far."""

    def finish(self) -> None:
        """Wait until it has done all it was given."""


#: Bytes between fences: each has a cache line to itself.
SPACING = 64
#: Bytes of host memory for the fences of one pair of processes: as much as makes a message share it instead of copying it.
FENCE_BYTES = 16 << 10
#: A released fence is this much ahead; comparisons are modulo 2**32.
RELEASED = 1 << 30
CYCLE = 1 << 32


class DeviceMemory(ABC):
    """A range of device memory.

    Attributes:
        nbytes: Its size.
        handle: By which another process of this host opens it.
    """

    nbytes: int
    handle: bytes

    @abstractmethod
    def tensor(self, dtype: torch.dtype, offset: int = 0, length: int | None = None) -> torch.Tensor:
        """A flat tensor on it, which keeps it mapped.

        Args:
            dtype: Of its elements.
            offset: In bytes.
            length: In elements; to the end by default.
        """


class Fences(ABC):
    """The fences of one pair of processes, numbered from 0.

    Args:
        words: Shared host memory (`FENCE_BYTES`).
    """

    def __init__(self, words: Bytes) -> None:
        self.words = words
        self._counts = words.view(numpy.uint32)[:: SPACING // 4]

    @abstractmethod
    def signal(self, index: int, value: int) -> None:
        """Behind what the current stream has been given, set a fence."""

    @abstractmethod
    def wait(self, index: int, value: int) -> None:
        """What the current stream is given from now on waits for a fence."""

    def reached(self, index: int, value: int) -> bool:
        """Whether a fence has been set to this value, or a later one."""
        return (int(self._counts[index]) - value) % CYCLE < CYCLE // 2

    def release(self, index: int) -> None:
        """End all waits for a fence, now and later. Only where its value is not needed any more. Both sides may do it."""
        marks = self.words.view(numpy.uint32)[1 :: SPACING // 4]  # beside the counts: whether they were released
        if not marks[index]:
            marks[index] = 1
            self._counts[index] = (int(self._counts[index]) + RELEASED) % CYCLE


class Device(ABC):
    """One device, as this process sees it.

    Attributes:
        identity: The same in all processes of this host that see this device, whatever number they have for it.
        place: torch's name for it.
        allocated: Bytes that this process has allocated by it and not given back.
    """

    identity: str
    place: torch.device
    allocated: int

    @abstractmethod
    def allocate(self, nbytes: int) -> DeviceMemory:
        """New memory, zeroed.

        Raises:
            PeerError: There is no room; the message says how much was asked for and is free.
        """

    @abstractmethod
    def open(self, handle: bytes, nbytes: int) -> DeviceMemory:
        """Memory of another process of this host.

        Raises:
            PeerError: It cannot be mapped here.
        """

    @abstractmethod
    def fences(self, words: Bytes) -> Fences:
        """The fences in this host memory, which another process has, too."""

    @abstractmethod
    def own_stream(self) -> AbstractContextManager[object]:
        """A stream of this library's own: what is given inside runs beside the script's kernels."""

    def pin(self, buffer: Bytes) -> None:
        """Pin host memory that lives as long as this: copies between it and the device need no staging then."""

    @abstractmethod
    def finish(self) -> None:
        """Wait, on the host, until the stream of this library's own has done what it was given."""

    def here(self) -> StreamPoint:
        """The end of what the current stream was given so far."""
        return StreamPoint()

    def stream(self) -> DeviceStream:
        """A new stream of this library's own."""
        return DeviceStream()

    def weighted_sum(
        self, terms: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor, divisor: float = 1.0
    ) -> None:
        """`out` becomes (w0 x0 + w1 x1 + ...) / divisor, added in this order, on the current stream.

        Args:
            terms: Flat tensors like `out`, which may be one of them. Numbers of two bytes are added up in four.
            weights: Of each.
            out: Takes the result.
            divisor: Of the whole.
        """
        sum_by_torch(terms, weights, divisor, out)

    @abstractmethod
    def reachable(self) -> frozenset[str]:
        """Identities of the devices whose memory can be mapped and used here: this one, and its peers that are visible."""

    def reaches(self, identity: str) -> bool:
        """Whether memory of that device can be mapped and used here: it is the same one, or a peer."""
        return identity == self.identity or identity in self.reachable()


class Devices:
    """The devices of one process: gives the `Device` of a torch device, made when it is first asked for.

    Args:
        stand_in: Is given for every torch device, also for the CPU: the stand-in for a GPU, in tests.
    """

    def __init__(self, stand_in: Device | None = None) -> None:
        self.stand_in = stand_in
        self._made: dict[int, Device] = {}

    def of(self, place: torch.device | str) -> Device | None:
        """The device, or None where torch's memory is not shared by device: on the CPU, and on other kinds of devices.

        Raises:
            PeerError: The CUDA driver cannot be loaded, or refuses.
        """
        if self.stand_in is not None:
            return self.stand_in
        place = torch.device(place)
        if place.type != "cuda":
            return None
        index = torch.cuda.current_device() if place.index is None else place.index
        if index not in self._made:
            from polytempo.device.cuda_device import CudaDevice

            self._made[index] = CudaDevice(index)
        return self._made[index]

    @property
    def allocated(self) -> int:
        """Bytes that this process has allocated by them and not given back."""
        made = list(self._made.values()) if self.stand_in is None else [self.stand_in]
        return sum(device.allocated for device in made)

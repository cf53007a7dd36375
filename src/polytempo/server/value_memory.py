"""Where the values of a shard lie, and how they get to workers and pushes to them.

    HostValues     in the CPU's memory: values are sent from where they lie, and where memory is shared, read there. An
                   update that comes while they are still being read goes to a copy. Pushes are read where they lie, too.
    DeviceValues   on a GPU, always at the same place: what is sent is a copy in host memory, one for each state of the
                   values however many workers get it; a push that comes in host memory is copied to the device. Workers
                   that share device memory with the server need neither (`server/device_share.py`).

Pushes are never written: they may be a worker's own memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from polytempo.device.device import Device
from polytempo.protocol.layout import Stretch
from polytempo.server.optimizer_state import as_tensor
from polytempo.server.pull_compression import Flats
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, OnSent


class Loan:
    """Counts how often one memory is out. It goes out in the executor's thread and comes back in the I/O loop's."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def out(self) -> None:
        with self._lock:
            self.count += 1

    def back(self) -> None:
        with self._lock:
            self.count -= 1


#: Flat tensors in host memory, that memory, stretch by stretch, and how often it is out.
LentFlats = tuple[Flats, list[Bytes], Loan]


class ValueMemory(ABC):
    """The values of one shard of one optimizer.

    Attributes:
        place: Where they are computed with.
        flats: One flat tensor for each dtype.
    """

    place: torch.device
    flats: Flats

    def __init__(self, stretches: Sequence[Stretch], pool: Pool) -> None:
        self._stretches, self._pool = stretches, pool
        self._scratch: Flats | None = None

    @abstractmethod
    def lend(self) -> tuple[list[Bytes], OnSent]:
        """The values in host memory, to be sent; call the second when they were."""

    @abstractmethod
    def own(self) -> bool:
        """Values will change: what is still being read must not. Whether `flats` are other tensors now."""

    @abstractmethod
    def received(self, part: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the update's part of this number, where they are computed with."""

    def scratch(self) -> Flats:
        """Memory for means, as large as the values."""
        if self._scratch is None:
            self._scratch = self._empty()
        return self._scratch

    def _empty(self) -> Flats:
        return {s.dtype: torch.empty(s.size, dtype=getattr(torch, s.dtype), device=self.place) for s in self._stretches}

    def _lendable(self) -> LentFlats:
        memory = [self._pool.allocate(stretch.nbytes) for stretch in self._stretches]
        return {s.dtype: as_tensor(data, s.dtype) for s, data in zip(self._stretches, memory, strict=True)}, memory, Loan()

    def _collect(self) -> None:
        if self._pool.registry is not None:
            self._pool.registry.collect()


class HostValues(ValueMemory):
    """Values in the CPU's memory."""

    def __init__(self, stretches: Sequence[Stretch], pool: Pool) -> None:
        super().__init__(stretches, pool)
        self.place = torch.device("cpu")
        self._lent = self._lendable()
        self.flats = self._lent[0]
        self._earlier: list[LentFlats] = []  # replaced while they were still being read

    def lend(self) -> tuple[list[Bytes], OnSent]:
        _, memory, loan = self._lent
        loan.out()
        return memory, loan.back

    def own(self) -> bool:
        self._collect()
        if not self._lent[2].count:
            return False
        free = next((index for index, (_, _, loan) in enumerate(self._earlier) if not loan.count), None)
        new = self._lendable() if free is None else self._earlier.pop(free)
        for dtype, flat in self.flats.items():
            new[0][dtype].copy_(flat)
        self._earlier.append(self._lent)
        self._lent, self.flats = new, new[0]
        return True

    def received(self, part: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors


class DeviceValues(ValueMemory):
    """Values on a device."""

    def __init__(self, stretches: Sequence[Stretch], pool: Pool, device: Device) -> None:
        super().__init__(stretches, pool)
        self.place, self._device = device.place, device
        self.flats = {dtype: flat.zero_() for dtype, flat in self._empty().items()}
        self._current: LentFlats | None = None  # what the values are now, in host memory
        self._copies: list[LentFlats] = []
        self._incoming: list[Flats] = []  # pushes that came in host memory, by their part of an update

    def lend(self) -> tuple[list[Bytes], OnSent]:
        if self._current is None:
            self._collect()
            copy = next((copy for copy in self._copies if not copy[2].count), None)
            if copy is None:
                copy = self._lendable()
                self._copies.append(copy)
                for buffer in copy[1]:
                    self._device.pin(buffer)
            for dtype, flat in self.flats.items():
                copy[0][dtype].copy_(flat, non_blocking=True)
            self._device.finish()
            self._current = copy
        _, memory, loan = self._current
        loan.out()
        return memory, loan.back

    def own(self) -> bool:
        self._current = None
        return False

    def received(self, part: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if all(tensor.device == self.place for tensor in tensors):
            return tensors
        while len(self._incoming) <= part:
            self._incoming.append(self._empty())
        here = list(self._incoming[part].values())
        for target, tensor in zip(here, tensors, strict=True):
            target.copy_(tensor)  # waits: the buffer is used again
        return here

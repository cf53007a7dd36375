"""A shard's part of one optimizer: values, optimizer state, version.

Values stand in one flat tensor a dtype; the optimizer runs on segments of it (`server/optimizer_state.py`).

**Memory.** `HostValues` are in the CPU's memory: they are sent from where they lie, and where memory is shared, read there.
An update that comes while they are still being read goes to a copy. `DeviceValues` are on a GPU, always at the same place:
what is sent is a copy in host memory, one for each state of the values however many workers get it; a push that comes in
host memory is copied to the device. Workers that share device memory with the server need neither
(`server/device_share.py`). Pushes are read where they lie, too, and never written: they may be a worker's own memory.

**Stale gradients.** What of `sync/corrections.py` needs tensors or hyper-parameters is carried out here. Delay compensation
needs the values that a worker computed its gradient on: they are kept for each worker from the moment they are sent until it
has pushed what it made of them, one copy a worker, a few where its pushes overlap. A worker without them (after a restart of
the servers) is not compensated, once; the mean of squares of the adaptive form begins anew then, too.

**Divergence.** The first shard measures how far the workers' gradients are apart, in a window of every `EVERY` updates, so
that it costs next to nothing. On a GPU the host hears of a window when it is over.

**On a GPU** all runs on the current stream, and the host waits for it only where an update needs
a number: with `clip_norm`, for ASGD's own, after a window of divergence, and for copies to and from host memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from polytempo.collectives.reduce_ops import weighted_mean
from polytempo.compression.chain import parse_chain
from polytempo.device.device import Device
from polytempo.errors import PeerError
from polytempo.optim.delay_compensation import compensated
from polytempo.optim.several_workers import GradientDivergence
from polytempo.protocol.layout import Stretch
from polytempo.protocol.messages import Push
from polytempo.protocol.push import Content, PushedChange, PushedValues, StepReport
from polytempo.protocol.training_troubles import InPlaceChanges
from polytempo.protocol.values import OptimizerSpec, Share
from polytempo.server.optimizer_state import (
    OF_TABLES,
    Flats,
    SegmentedOptimizer,
    SegmentState,
    ShardCut,
    as_bytes,
    as_tensor,
    digest_of_bytes,
    is_same,
)
from polytempo.server.pull_compression import PullCompression
from polytempo.server.shard_tables import ShardTables
from polytempo.summation import in_order
from polytempo.sync.capabilities import PushedWork
from polytempo.sync.corrections import Corrections
from polytempo.transport.buffer_pool import Arena, Pool
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


class StalenessCorrection:
    """The corrections of one store."""

    def __init__(self, corrections: Corrections) -> None:
        self._corrections = corrections
        self._given: dict[int, dict[int, Flats]] = {}  # worker: version: values
        self._squares: Flats = {}

    def given(self, worker: int, version: int, values: Flats) -> None:
        if self._corrections.compensation is not None:
            self._given.setdefault(worker, {})[version] = {dtype: flat.clone() for dtype, flat in values.items()}

    def gradient(self, worker: int, version: int, gradient: Flats, now: Flats) -> Flats:
        """What this gradient, made on the values of a version, would be on those of now."""
        about = self._corrections.compensation
        given = self._given.get(worker, {})
        for old in [known for known in given if known < version]:
            del given[old]
        if about is None or version not in given:
            return gradient
        if about.adaptive and not self._squares:
            self._squares = {dtype: torch.zeros_like(flat) for dtype, flat in now.items()}
        dtypes = list(gradient)
        grads, squares = [gradient[d] for d in dtypes], [self._squares[d] for d in dtypes] if about.adaptive else None
        values, read = [now[d] for d in dtypes], [given[version][d] for d in dtypes]
        result = compensated(grads, values, read, about.strength, about.adaptive, about.memory, squares)
        return {dtype: flat for dtype, flat in zip(dtypes, result, strict=True) if flat is not None}

    def hyper(self, groups: Sequence[dict[str, Any]], mean_staleness: float) -> Sequence[dict[str, Any]]:
        """Hyper-parameters whose momentum allows for that of stale gradients."""
        if not self._corrections.adapts_momentum:
            return groups
        return [{**g, "momentum": self._corrections.momentum_for(g["momentum"], mean_staleness)} for g in groups]

    def forget(self, worker: int) -> None:
        self._given.pop(worker, None)


#: Of every EVERY updates the first WINDOW are measured.
EVERY, WINDOW = 128, 16


class DivergenceWatch:
    """Watches the pushes of one store."""

    def __init__(self, values: Sequence[torch.Tensor], active: bool) -> None:
        self._values = values
        self._divergence = GradientDivergence(values) if active and any(flat.numel() for flat in values) else None

    @property
    def mean(self) -> float:
        """The mean so far; 0 on other shards, and where there was only ever one worker. On a GPU without the last window."""
        return self._divergence.mean if self._divergence is not None else 0.0

    def settle(self) -> None:
        """Count all that was measured; on a GPU this waits for it."""
        if self._divergence is not None:
            self._divergence.settle()

    def see(self, version: int, gradients: Iterable[tuple[int, Sequence[torch.Tensor]]]) -> None:
        if self._divergence is None:
            return
        if version % EVERY >= WINDOW:
            if version % EVERY == WINDOW:
                self._divergence.settle()
            return
        for worker, tensors in gradients:
            self._divergence.take(worker, tensors, self._values)
        self._divergence.look()


NormOf = Callable[[float], float]


#: Part of a push: in host memory, or on the device of the shard.
PushBuffer: TypeAlias = "Bytes | torch.Tensor"
#: A push of an update, its weight, and its buffers.
PartOfUpdate: TypeAlias = tuple[Push, float, Sequence[PushBuffer]]


class Shard:
    """What one shard holds of one optimizer."""

    def __init__(
        self,
        optimizer_spec: OptimizerSpec,
        shard: int,
        shards: int,
        pool: Pool | None = None,
        alone: bool = True,
        arena: Arena | None = None,
        device: Device | None = None,
    ) -> None:
        self.optimizer_spec = optimizer_spec
        self.device = device  #: where the values are; None: in the CPU's memory
        self._pool = pool or Pool()
        self.version = 0
        self.skipped = False
        self.touched = ""  # a parameter that a worker of the last update had written to
        self.absent: frozenset[int] = frozenset()  # no push of the last update had a gradient for these
        self.averages = optimizer_spec.apply == "mean"
        self.shares: tuple[Share, ...] = ()  # of workers in the last update
        self.cut = ShardCut(optimizer_spec, shard, shards)
        self.stretches = self.cut.stretches
        self._memory: ValueMemory = (
            HostValues(self.stretches, self._pool) if device is None else DeviceValues(self.stretches, self._pool, device)
        )
        self.optimizer: SegmentedOptimizer | None = None
        if optimizer_spec.apply == "server" and self.cut.pieces:
            self.optimizer = SegmentedOptimizer(optimizer_spec, self.cut, self.values, alone)
        self.rows = ShardTables(optimizer_spec, shard, shards, arena or Arena(self._pool))
        capabilities = optimizer_spec.parsed.capabilities
        self.staleness_correction = StalenessCorrection(optimizer_spec.parsed.corrections)
        self._ahead = capabilities.ahead
        self.in_place_changes = InPlaceChanges() if capabilities.common else None  # in rounds all must make the same
        self._has_deadlines = capabilities.work is PushedWork.DEADLINE
        # None where nothing is left out: then nothing is asked of a filter.
        push_filter, pull_filter = parse_chain(optimizer_spec.push_filter), parse_chain(optimizer_spec.pull_filter)
        self._push_filter = None if push_filter.is_lossless else push_filter
        self.pull_compression = None
        if not pull_filter.is_lossless:
            self.pull_compression = PullCompression(pull_filter, self.stretches, self._ahead)
        self.divergence = DivergenceWatch(
            list(self.values.values()), active=shard == 0 and optimizer_spec.apply == "server" and not alone
        )

    @property
    def values(self) -> Flats:
        return self._memory.flats

    # Values in and out.

    @property
    def needs_buffers(self) -> str:
        """Why pushes and answers must come in host memory also where values are on a device; empty where they need not."""
        if self._push_filter is not None or self.pull_compression is not None:
            return "compression"
        return "a mode with several pushes of a worker in flight" if self._ahead else ""

    def lend(self, worker: int | None = None) -> tuple[list[Bytes], OnSent]:
        """The values in host memory, to be sent; call the second when they were. A worker pushes what it makes of them."""
        if worker is not None:
            self.staleness_correction.given(worker, self.version, self.values)
        return self._memory.lend()

    def seed(self, buffers: Sequence[Bytes]) -> None:
        self._own()
        for stretch, tensor in zip(self.stretches, self.tensors_of(buffers), strict=True):
            self.values[stretch.dtype].copy_(tensor)

    def take_values(self, worker: int, touched: str, buffers: Sequence[Bytes]) -> None:
        """A worker's script has changed its values: they are the job's from now on. In rounds all must have done so."""
        pairs = zip(self.stretches, self._memory.received(0, self.tensors_of(buffers)), strict=True)
        same = all(is_same(self.values[stretch.dtype], tensor) for stretch, tensor in pairs)
        if not same:
            self.seed(buffers)
            self.staleness_correction.given(worker, self.version, self.values)  # its next gradient is made on these
        if self.in_place_changes is not None and (self.in_place_changes.any or not same):
            self.in_place_changes.take(worker, touched, digest_of_bytes(buffers))

    def tensors_of(self, buffers: Sequence[PushBuffer]) -> list[torch.Tensor]:
        self.check(buffers)
        pairs = zip(buffers, self.stretches, strict=True)
        return [buffer if isinstance(buffer, torch.Tensor) else as_tensor(buffer, s.dtype) for buffer, s in pairs]

    def unfiltered(self, buffers: Sequence[Bytes]) -> list[Bytes]:
        """A push as it was before its filter; refused when it cannot be one."""
        if self._push_filter is None:
            return list(buffers)
        each = self._push_filter.buffers
        if len(buffers) != each * len(self.stretches):
            raise PeerError(f"a push of {len(buffers)} buffers came, {self._push_filter} has {each * len(self.stretches)}")
        parts = [buffers[i * each : (i + 1) * each] for i in range(len(self.stretches))]
        pairs = zip(parts, self.stretches, strict=True)
        return [as_bytes(self._push_filter.decode(part, s.size, getattr(torch, s.dtype))) for part, s in pairs]

    def forget(self, worker: int) -> None:
        self.rows.forget(worker)
        self.staleness_correction.forget(worker)
        if self.pull_compression is not None:
            self.pull_compression.forget(worker)

    def check(self, buffers: Sequence[PushBuffer]) -> None:
        got = [buffer.nbytes for buffer in buffers]
        if got != self.cut.nbytes:
            raise PeerError(f"a push of {got} bytes came, this shard holds {self.cut.nbytes}")

    def _own(self) -> None:
        """Before values change: what is still being read must not."""
        if self._memory.own() and self.optimizer is not None:
            self.optimizer.attach(self.values)

    # Updates.

    def update(
        self,
        parts: Sequence[PartOfUpdate],
        rate: float,
        barrier: bool,
        total: NormOf,
        mean_staleness: float = 0.0,
        divisor: float = 0.0,
    ) -> None:
        """Make one update of these pushes, each with its weight: their weighted mean at the learning rate times `rate`; with
        a `divisor`, their weighted sum over that."""
        self.version += 1
        weight = in_order(samples for _, samples, _ in parts)
        self.shares = tuple(Share(push.id.worker, samples) for push, samples, _ in parts)
        self.note(parts)
        self.touched = next((p.body.touched for p, _, _ in parts if isinstance(p.body, StepReport) and p.body.touched), "")
        skips = [push for push, samples, _ in parts if push.made.skip and (samples or not self._has_deadlines)]
        self.skipped = weight <= 0 or bool(skips)  # one that had finished nothing by the deadline has no part in the round
        if self.skipped:
            return
        parts = [part for part in parts if part[1] > 0]  # what weighs nothing may hold anything
        self.absent = frozenset.intersection(*(frozenset(push.made.absent) for push, _, _ in parts))
        dense = len(self.stretches) if self.rows.tables else None
        given = [
            (samples, self._memory.received(number, self.tensors_of(buffers[:dense])))
            for number, (_, samples, buffers) in enumerate(parts)
        ]
        self.divergence.see(self.version, zip((p.id.worker for p, _, _ in parts), (t for _, t in given), strict=True))
        mean = self._mean(given)
        if divisor:
            mean = self._scaled(mean, weight / divisor)
        if self.rows.tables:
            self.rows.update(
                [(push, samples, in_host(buffers[dense:])) for push, samples, buffers in parts], rate, self.version
            )
        first = parts[0][0]
        self._own()
        if isinstance(first.body, PushedChange):
            for dtype, change in mean.items():
                self.values[dtype].add_(change, alpha=rate)
        elif isinstance(first.body, PushedValues) or self.averages:
            for dtype, value in mean.items():
                self.values[dtype].copy_(value) if rate == 1.0 else self.values[dtype].lerp_(value, rate)
        else:
            if self.optimizer_spec.clip_norm is not None and barrier:
                mean = self._clipped(mean, self.optimizer_spec.clip_norm, total)
            mean = self.staleness_correction.gradient(first.id.worker, first.version, mean, self.values)
            if self.optimizer is not None:
                hyper = self.staleness_correction.hyper(first.made.hyper, mean_staleness)
                self.optimizer.step(mean, hyper, rate, self.absent)

    def note(self, parts: Sequence[PartOfUpdate]) -> None:
        """Remember what the answers to these pushes shall bring."""
        for push, _, buffers in parts:
            content = push.body
            if isinstance(content, Content) and (self.rows.tables or not content.values):
                self.rows.note(push, content, in_host(buffers))

    def _mean(self, parts: Sequence[tuple[float, list[torch.Tensor]]]) -> Flats:
        """The weighted mean, summed in the order given. Of one push it is the push itself, which must not be written."""
        dtypes = [stretch.dtype for stretch in self.stretches]
        if len(parts) == 1:
            return dict(zip(dtypes, parts[0][1], strict=True))
        result = self._memory.scratch()
        for index, dtype in enumerate(dtypes):
            terms, weights = [tensors[index] for _, tensors in parts], [samples for samples, _ in parts]
            weighted_mean(terms, weights, result[dtype], self.device)
        return result

    def _clipped(self, mean: Flats, limit: float, total: NormOf) -> Flats:
        square = in_order(float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2 for flat in mean.values())
        factor = limit / (total(square) ** 0.5 + 1e-6)
        if factor >= 1:
            return mean
        return self._scaled(mean, factor)

    def _scaled(self, mean: Flats, factor: float) -> Flats:
        result = self._memory.scratch()
        for dtype, flat in mean.items():
            torch.mul(flat, factor, out=result[dtype])
        return result

    # State in and out.

    def saved_values(self) -> list[tuple[str, int, torch.Tensor]]:
        """The values, as stretches of the flat order of the whole model: dtype, where it starts, the elements."""
        return self.cut.in_model(self.values)

    def state(self) -> list[SegmentState]:
        """The optimizer's state, not copied."""
        return self.optimizer.state() if self.optimizer is not None else []

    def load_state(self, segments: Sequence[SegmentState]) -> None:
        """Take the optimizer's state from runs that may be cut in another way; those of no dtype are of tables."""
        for source in segments:
            if source.dtype == OF_TABLES:
                self.rows.load_state(source.state)
        if self.optimizer is not None:
            self.optimizer.load_state([source for source in segments if source.dtype != OF_TABLES])


def in_host(buffers: Sequence[PushBuffer]) -> list[Bytes]:
    """Those that are in host memory: of tables."""
    return [buffer for buffer in buffers if not isinstance(buffer, torch.Tensor)]

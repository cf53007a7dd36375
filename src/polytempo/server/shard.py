"""A shard's part of one optimizer: values, optimizer state, version.

**Segments.** Values stand in one flat tensor a dtype. The optimizer runs on *segments* of it: at first one for each group
and dtype, so that a step is one call however many tensors the model has. When a parameter has no gradient in an update,
plain PyTorch leaves it and its state alone; its segment is then split, state and all, and that part is left alone, too.

**Memory.** Values are sent from where they lie, and where memory is shared, read there. An update that comes while they are
still being read goes to a copy. Pushes are read where they lie, too, and never written: they may be a worker's own memory.

**Stale gradients.** What of `sync/corrections.py` needs tensors or hyper-parameters is carried out here. Delay compensation
needs the values that a worker computed its gradient on: they are kept for each worker from the moment they are sent until it
has pushed what it made of them, one copy a worker, a few where its pushes overlap. A worker without them (after a restart of
the servers) is not compensated, once; the mean of squares of the adaptive form begins anew then, too.

**Divergence.** The first shard measures how far the workers' gradients are apart, in a window of every `EVERY` updates, so
that it costs next to nothing. On a GPU the host hears of a window when it is over.

**On a GPU** (`server/value_memory.py`) all runs on the current stream, and the host waits for it only where an update needs
a number: with `clip_norm`, for ASGD's own, after a window of divergence, and for copies to and from host memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from polytempo.collectives.reduce_ops import weighted_mean
from polytempo.compression.chain import parse_chain
from polytempo.device.device import Device
from polytempo.errors import PeerError
from polytempo.optim.delay_compensation import compensated
from polytempo.optim.several_workers import GradientDivergence
from polytempo.protocol.layout import Stretch, TensorPlace, lay_out
from polytempo.protocol.messages import Push
from polytempo.protocol.push import Content, PushedChange, PushedValues, StepReport
from polytempo.protocol.training_troubles import InPlaceChanges
from polytempo.protocol.values import OptimizerSpec, Share
from polytempo.server.optimizer_state import (
    OF_TABLES,
    SegmentState,
    as_bytes,
    as_tensor,
    build,
    digest_of_bytes,
    find,
    is_same,
    is_whole,
    place_scalars,
    settle,
)
from polytempo.server.pull_compression import Flats, PullCompression
from polytempo.server.shard_tables import ShardTables
from polytempo.server.value_memory import DeviceValues, HostValues, ValueMemory
from polytempo.summation import in_order
from polytempo.sync.capabilities import PushedWork
from polytempo.sync.corrections import Corrections
from polytempo.transport.buffer_pool import Arena, Pool
from polytempo.transport.channel import Bytes, OnSent


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


@dataclass(eq=False)
class FlatSegment:
    """Elements `start` to `stop` of this shard's flat tensor, updated together."""

    dtype: str
    group: int
    start: int
    stop: int
    shape: tuple[int, ...]
    param: torch.nn.Parameter


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
        self._alone = alone  # the only worker is promised plain PyTorch's bits
        self._pool = pool or Pool()
        self.version = 0
        self.skipped = False
        self.touched = ""  # a parameter that a worker of the last update had written to
        self.absent: frozenset[int] = frozenset()  # no push of the last update had a gradient for these
        self.averages = optimizer_spec.apply == "mean"
        self.shares: tuple[Share, ...] = ()  # of workers in the last update
        whole = is_whole(optimizer_spec.optimizer)
        layout = lay_out(() if optimizer_spec.apply == "peers" else optimizer_spec.tensors, shards, whole)
        self.layout = layout
        self.stretches: tuple[Stretch, ...] = layout.shards[shard]
        self.expected = [stretch.nbytes for stretch in self.stretches]
        self._place = torch.device("cpu") if device is None else device.place
        self._offset = {stretch.dtype: stretch.start for stretch in self.stretches}
        self._memory: ValueMemory = (
            HostValues(self.stretches, self._pool) if device is None else DeviceValues(self.stretches, self._pool, device)
        )
        self._pieces = [piece for place in layout.places for piece in self._piece_of(place)]
        self._canonical = (
            {place.index: place.start for place in lay_out(optimizer_spec.tensors, 1).places} if whole else None
        )
        self._hyper: Sequence[dict[str, Any]] = ()  # as they were set last
        self.rows = ShardTables(optimizer_spec, shard, shards, arena or Arena(self._pool))
        capabilities = optimizer_spec.parsed.capabilities
        self.staleness_correction = StalenessCorrection(optimizer_spec.parsed.corrections)
        self.in_place_changes = InPlaceChanges()
        self._in_rounds, self._ahead = capabilities.common, capabilities.ahead
        self._has_deadlines = capabilities.work is PushedWork.DEADLINE
        self._push_filter = parse_chain(optimizer_spec.push_filter)
        self.divergence = DivergenceWatch(
            list(self.values.values()), active=shard == 0 and optimizer_spec.apply == "server" and not alone
        )
        self.pull_compression = PullCompression(parse_chain(optimizer_spec.pull_filter), self.stretches, self._ahead)
        self.segments: list[FlatSegment] = []
        self._optimizer: torch.optim.Optimizer | None = None
        if optimizer_spec.apply == "server":
            self.segments = self._first_segments(whole)
            of_group = [[r.param for r in self.segments if r.group == g] for g in range(len(optimizer_spec.groups))]
            if self.segments:
                self._optimizer = build(optimizer_spec.optimizer, optimizer_spec.groups, of_group)
                # Without torch's wrappers, which import its compiler in the first step (1.4 s, in which all workers wait).
                self._plain_step = inspect.unwrap(type(self._optimizer).step)

    # Where everything lies.

    @property
    def values(self) -> Flats:
        return self._memory.flats

    def _piece_of(self, place: TensorPlace) -> list[tuple[TensorPlace, int, int]]:
        """The part of a tensor that is here, in elements of this shard's flat tensor."""
        stretch = next((s for s in self.stretches if s.dtype == place.info.dtype), None)
        if stretch is None:
            return []
        start, stop = max(place.start, stretch.start), min(place.stop, stretch.stop)
        return [(place, start - stretch.start, stop - stretch.start)] if start < stop else []

    def _first_segments(self, whole: bool) -> list[FlatSegment]:
        segments: list[FlatSegment] = []
        for place, start, stop in self._pieces:
            last = segments[-1] if segments else None
            if not whole and last and (last.dtype, last.group) == (place.info.dtype, place.info.group):
                last.stop = stop
            else:
                shape = tuple(place.info.shape) if whole else ()
                segments.append(
                    FlatSegment(place.info.dtype, place.info.group, start, stop, shape, torch.nn.Parameter(torch.empty(0)))
                )
        for segment in segments:
            segment.param = torch.nn.Parameter(self._view(self.values, segment))
        return segments

    def _view(self, flats: Flats, segment: FlatSegment) -> torch.Tensor:
        flat = flats[segment.dtype]
        view = flat if segment.stop - segment.start == flat.numel() else flat[segment.start : segment.stop]
        return view.view(segment.shape) if segment.shape else view

    # Values in and out.

    @property
    def needs_buffers(self) -> str:
        """Why pushes and answers must come in host memory also where values are on a device; empty where they need not."""
        if not (self._push_filter.is_lossless and self.pull_compression.chain.is_lossless):
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
        if self._in_rounds and (self.in_place_changes.any or not same):
            self.in_place_changes.take(worker, touched, digest_of_bytes(buffers))

    def tensors_of(self, buffers: Sequence[PushBuffer]) -> list[torch.Tensor]:
        self.check(buffers)
        pairs = zip(buffers, self.stretches, strict=True)
        return [buffer if isinstance(buffer, torch.Tensor) else as_tensor(buffer, s.dtype) for buffer, s in pairs]

    def unfiltered(self, buffers: Sequence[Bytes]) -> list[Bytes]:
        """A push as it was before its filter; refused when it cannot be one."""
        if self._push_filter.is_lossless:
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
        self.pull_compression.forget(worker)

    def check(self, buffers: Sequence[PushBuffer]) -> None:
        got = [buffer.nbytes for buffer in buffers]
        if got != self.expected:
            raise PeerError(f"a push of {got} bytes came, this shard holds {self.expected}")

    def _own(self) -> None:
        """Before values change: what is still being read must not."""
        if self._memory.own():
            for segment in self.segments:
                segment.param.data = self._view(self.values, segment)

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
        dense = len(self.stretches) if self.rows else None
        given = [
            (samples, self._memory.received(number, self.tensors_of(buffers[:dense])))
            for number, (_, samples, buffers) in enumerate(parts)
        ]
        self.divergence.see(self.version, zip((p.id.worker for p, _, _ in parts), (t for _, t in given), strict=True))
        mean = self._mean(given)
        if divisor:
            mean = self._scaled(mean, weight / divisor)
        if self.rows:
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
            self._step(mean, self.staleness_correction.hyper(first.made.hyper, mean_staleness), rate, self.absent)

    def note(self, parts: Sequence[PartOfUpdate]) -> None:
        """Remember what the answers to these pushes shall bring."""
        for push, _, buffers in parts:
            content = push.body
            if isinstance(content, Content) and (self.rows or not content.values):
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

    def _step(self, mean: Flats, hyper: Sequence[dict[str, Any]], rate: float, absent: frozenset[int]) -> None:
        if self._optimizer is None:
            return
        without = [(p.info.dtype, a, b) for p, a, b in self._pieces if p.index in absent] if absent else []
        for dtype, start, stop in without:
            self._split(dtype, start)
            self._split(dtype, stop)
        if hyper != self._hyper:
            for group, values in zip(self._optimizer.param_groups, hyper, strict=True):
                group.update(settle(values, self._optimizer, self._alone, self._place.type == "cuda"))
            place_scalars(self._optimizer, self._place)
            self._hyper = hyper
        for group, values in zip(self._optimizer.param_groups, hyper, strict=True):
            group["lr"] = values["lr"] * rate
        # Fused SGD wants momentum for all runs or for none; split runs may begin at different steps.
        if len(self.segments) > 1 and isinstance(self._optimizer, torch.optim.SGD):
            for group in self._optimizer.param_groups:
                if group["fused"] and group["momentum"]:
                    have = {"momentum_buffer" in self._optimizer.state.get(param, {}) for param in group["params"]}
                    if len(have) > 1:
                        group["fused"], self._hyper = False, ()
        for segment in self.segments:
            left_alone = any(d == segment.dtype and a <= segment.start and segment.stop <= b for d, a, b in without)
            segment.param.grad = None if left_alone else self._view(mean, segment)
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            self._plain_step(self._optimizer)
        for segment in self.segments:
            segment.param.grad = None

    # Runs are split; their state with them.

    def _split(self, dtype: str, at: int) -> None:
        segment = next((r for r in self.segments if r.dtype == dtype and r.start < at < r.stop), None)
        if segment is None or self._optimizer is None:
            return
        whole = SegmentState(dtype, segment.start, segment.stop, dict(self._optimizer.state.pop(segment.param, {})))
        rest = FlatSegment(dtype, segment.group, at, segment.stop, (), torch.nn.Parameter(torch.empty(0)))
        old, segment.stop = segment.param, at
        params = self._optimizer.param_groups[segment.group]["params"]
        place = next(index for index, param in enumerate(params) if param is old)
        for part in (segment, rest):
            part.param = torch.nn.Parameter(self._view(self.values, part))
            if whole.state:
                self._optimizer.state[part.param] = whole.part(part.start, part.stop)
        params[place : place + 1] = [segment.param, rest.param]
        self.segments.insert(self.segments.index(segment) + 1, rest)

    # State in and out, in the flat order of the whole model.

    def _shift(self, segment: FlatSegment) -> int:
        """From this shard's elements to the flat order of the whole model."""
        if self._canonical is None:
            return self._offset[segment.dtype]
        place = next(p for p, start, _ in self._pieces if p.info.dtype == segment.dtype and start == segment.start)
        return self._canonical[place.index] - segment.start

    def saved_values(self) -> list[tuple[str, int, torch.Tensor]]:
        """The values, as stretches of the flat order of the whole model: dtype, where it starts, the elements."""
        if self._canonical is None:
            return [(s.dtype, s.start, self.values[s.dtype]) for s in self.stretches if s.size]
        return [
            (p.info.dtype, self._canonical[p.index], self.values[p.info.dtype][start:stop])
            for p, start, stop in self._pieces
        ]

    def from_model(self, flats: Flats) -> list[torch.Tensor]:
        """This shard's values, out of the flat order of the whole model."""
        if self._canonical is None:
            return [flats[s.dtype][s.start : s.stop] for s in self.stretches]
        mine = {s.dtype: torch.empty(s.size, dtype=getattr(torch, s.dtype)) for s in self.stretches}
        for place, start, stop in self._pieces:
            source = self._canonical[place.index]
            mine[place.info.dtype][start:stop] = flats[place.info.dtype][source : source + stop - start]
        return [mine[s.dtype] for s in self.stretches]

    def state(self) -> list[SegmentState]:
        """The optimizer's state, not copied."""
        if self._optimizer is None:
            return []
        return [
            SegmentState(
                r.dtype, r.start + self._shift(r), r.stop + self._shift(r), dict(self._optimizer.state.get(r.param, {}))
            )
            for r in self.segments
        ]

    def load_state(self, segments: Sequence[SegmentState]) -> None:
        """Take the optimizer's state from runs that may be cut in another way; those of no dtype are of tables."""
        for source in segments:
            if source.dtype == OF_TABLES:
                self.rows.load_state(source.state)
        segments = [source for source in segments if source.dtype != OF_TABLES]
        if self._optimizer is None:
            return
        if self._canonical is None:
            for source in segments:
                self._split(source.dtype, source.start - self._offset[source.dtype])
                self._split(source.dtype, source.stop - self._offset[source.dtype])
        for segment in self.segments:
            start, stop = segment.start + self._shift(segment), segment.stop + self._shift(segment)
            touching = find(segments, segment.dtype, start, stop)
            self._optimizer.state.pop(segment.param, None)
            if touching and touching[0].state:
                state = touching[0].part(start, stop)
                self._optimizer.state[segment.param] = {n: self._fit(v, segment) for n, v in state.items()}
        place_scalars(self._optimizer, self._place)

    def _fit(self, value: Any, segment: FlatSegment) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        fits = value.numel() == segment.stop - segment.start
        return value.to(self._place).reshape(segment.param.shape) if fits else value.to(self._place)


def in_host(buffers: Sequence[PushBuffer]) -> list[Bytes]:
    """Those that are in host memory: of tables."""
    return [buffer for buffer in buffers if not isinstance(buffer, torch.Tensor)]

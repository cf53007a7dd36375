"""The optimizers that servers run: which classes, how they run on flat values, and their state, cut along runs: how it is
described, sent, saved, cut anew and put together.

A class of `torch.optim` is named, never sent: only names in a table are built. Element-wise classes treat every element by
itself, so a server may run them on any stretch of a flat tensor. Adafactor and Muon look at whole matrices and get whole
tensors. Everything else runs on the worker: `apply="delta"`.

A *run* is a stretch of the flat order of all parameters whose elements have the same history. Its state is what torch keeps
for one parameter: tensors with an element for each of the run's, and single numbers such as the count of steps.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy
import torch

from polytempo.errors import PeerError, UsageError
from polytempo.optim.asup import AsuP
from polytempo.protocol.layout import Stretch, TensorPlace, lay_out
from polytempo.protocol.values import OptimizerSpec
from polytempo.transport.channel import Bytes

#: One flat tensor for each dtype.
Flats = dict[str, torch.Tensor]
StateTensors = dict[str, Any]
#: The "dtype" of a run that is no stretch: it holds what rules keep beside the rows of tables.
OF_TABLES = "tables"


@dataclass
class SegmentState:
    """Elements `start` to `stop` of a dtype's flat order, and their state."""

    dtype: str
    start: int
    stop: int
    state: StateTensors = field(default_factory=dict)

    def part(self, start: int, stop: int) -> StateTensors:
        """The state of a stretch inside this run."""
        if (start, stop) == (self.start, self.stop):
            return {name: _copied(value) for name, value in self.state.items()}
        size = self.stop - self.start
        return {
            name: value.reshape(-1)[start - self.start : stop - self.start].clone()
            if _spread(value, size)
            else _copied(value)
            for name, value in self.state.items()
        }


def _spread(value: Any, size: int) -> bool:
    """Does this value have an element for each of the run's?"""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == size


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def find(segments: Iterable[SegmentState], dtype: str, start: int, stop: int) -> list[SegmentState]:
    """The runs that touch a stretch, in order."""
    touching = (segment for segment in segments if segment.dtype == dtype and segment.start < stop and segment.stop > start)
    return sorted(touching, key=lambda segment: segment.start)


def of_tensor(segments: Sequence[SegmentState], dtype: str, start: int, stop: int, shape: Sequence[int]) -> StateTensors:
    """The state of one parameter, as torch keeps it, from the runs that hold it."""
    touching = find(segments, dtype, start, stop)
    if not touching or not all(segment.state for segment in touching):
        return {}
    if len(touching) == 1 and (touching[0].start, touching[0].stop) == (start, stop):
        whole = touching[0].part(start, stop)
        return {
            name: value.reshape(tuple(shape)) if _spread(value, stop - start) else value for name, value in whole.items()
        }
    result: StateTensors = {}
    for name, value in touching[0].state.items():
        if _spread(value, touching[0].stop - touching[0].start):
            pieces = [segment.part(max(segment.start, start), min(segment.stop, stop))[name] for segment in touching]
            result[name] = torch.cat([piece.reshape(-1) for piece in pieces]).view(tuple(shape))
        else:
            result[name] = _copied(value)
    return result


# On the wire: a description in msgpack, and the tensors as buffers.


def pack(segments: Sequence[SegmentState]) -> tuple[bytes, list[Bytes]]:
    """Runs as a description and buffers."""
    buffers: list[Bytes] = []
    described = []
    for segment in segments:
        state: dict[str, Any] = {}
        for name, value in segment.state.items():
            if isinstance(value, torch.Tensor):
                state[name] = {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "buffer": len(buffers)}
                buffers.append(as_bytes(value))
            else:
                state[name] = value
        described.append([segment.dtype, segment.start, segment.stop, state])
    return msgspec.msgpack.encode(described), buffers


def unpack(description: bytes, buffers: Sequence[Bytes]) -> list[SegmentState]:
    """The runs in a description and buffers; `PeerError` when they do not fit."""
    try:
        segments = []
        for dtype, start, stop, described in msgspec.msgpack.decode(
            description, type=list[tuple[str, int, int, dict[str, Any]]]
        ):
            state = {}
            for name, value in described.items():
                if isinstance(value, dict):
                    value = as_tensor(buffers[value["buffer"]], value["dtype"]).clone().view(value["shape"])
                state[name] = value
            segments.append(SegmentState(dtype, start, stop, state))
        return segments
    except PeerError:
        raise
    except (msgspec.DecodeError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise PeerError(f"an optimizer's state cannot be read: {error}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """As it stands in messages: "float32"."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """A tensor as bytes in the CPU's memory: its own where it is there and contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = flat.as_strided((flat.numel(),), (1,))  # one element counts as contiguous whatever its stride
    return flat.view(torch.uint8).numpy() if flat.numel() else numpy.empty(0, dtype=numpy.uint8)


def as_tensor(buffer: Bytes, dtype: str) -> torch.Tensor:
    """A flat tensor on this memory."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise PeerError(f"{dtype!r} is not a dtype")
    if not buffer.nbytes:
        return torch.empty(0, dtype=kind)
    return torch.from_numpy(buffer).view(kind)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Are all elements equal? NaN counts as equal to NaN."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def digest_of_bytes(buffers: Iterable[Bytes], head: bytes = b"") -> bytes:
    """Eight bytes that differ where these do."""
    digest = hashlib.blake2b(head, digest_size=8)
    for buffer in buffers:
        digest.update(buffer.data)
    return digest.digest()


ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "Adagrad",
    "RMSprop",
    "Rprop",
    "ASGD",
)
WHOLE = ("Adafactor", "Muon")
#: Of this library: element-wise, too.
OWN: dict[str, type] = {"AsuP": AsuP}
REASONS = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "it works on sparse gradients",
}
#: Their step does not grow with the learning rate, so a mode cannot scale it down for single pushes.
BARRIER_ONLY = ("Rprop",)


def check_optimizer(cls: type, barrier: bool) -> str:
    """The name under which a server runs this class; refused with the reason where none can."""
    name = cls.__name__
    known = OWN.get(name) is cls or (name in ELEMENTWISE + WHOLE and getattr(torch.optim, name, None) is cls)
    if not known:
        why = REASONS.get(name, "it runs classes of torch.optim by their names, and no others")
        raise UsageError(f'a server cannot run {name}: {why}; use apply="delta", which runs it on the worker')
    if name in BARRIER_ONLY and not barrier:
        raise UsageError(
            f"{name} ignores the learning rate, so single pushes cannot be scaled; use bsp, or another optimizer"
        )
    return name


def is_whole(name: str) -> bool:
    """Must this class see whole tensors?"""
    return name in WHOLE


def build(name: str, groups: Sequence[dict[str, Any]], params: Sequence[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """An optimizer of the named class over these parameters, a list for each group."""
    if name not in (*ELEMENTWISE, *WHOLE, *OWN):
        raise UsageError(f"a server runs {', '.join((*ELEMENTWISE, *WHOLE, *OWN))}, not {name!r}")
    described = [{**settle(group), "params": list(own)} for group, own in zip(groups, params, strict=True)]
    optimizer: torch.optim.Optimizer = (OWN.get(name) or getattr(torch.optim, name))(described)
    if name == "Adagrad":  # reads this one from its arguments, not from the group
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param]["sum"].fill_(group["initial_accumulator_value"])
    return optimizer


#: Classes whose fused form does a step in one pass; from this many elements on it is faster.
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
FUSED_FROM = 1 << 20
#: On a GPU, where launches and memory bound a step, these are always fused; plain PyTorch's bits are promised on the CPU.
FUSED_ON_GPU = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def settle(
    group: dict[str, Any], optimizer: torch.optim.Optimizer | None = None, alone: bool = True, on_gpu: bool = False
) -> dict[str, Any]:
    """Hyper-parameters as torch wants them on a server: pairs are tuples, nothing is captured in a CUDA graph.

    Where the user has left the choice to torch, the fused form is taken for large tensors. It rounds differently, but for
    SGD without momentum, so a worker that is alone, and is promised plain PyTorch's bits, gets the plain form.
    """
    settled = {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
    if "capturable" in settled:
        settled["capturable"] = False
    if "foreach" in settled and settled["foreach"] is None and not settled.get("fused"):
        if on_gpu and optimizer is not None:
            fused = type(optimizer) in FUSED_ON_GPU and not settled["differentiable"]
            return settled | (
                {"foreach": False, "fused": True} if fused else {"foreach": not is_whole(type(optimizer).__name__)}
            )
        same_bits = type(optimizer) is torch.optim.SGD and settled["momentum"] == 0
        groups = optimizer.param_groups if optimizer is not None else []
        size = sum(param.numel() for group in groups for param in group["params"])
        wanted = (same_bits or not alone) and type(optimizer) in FUSED and not settled["differentiable"]
        settled |= {"foreach": False, "fused": True} if wanted and size >= FUSED_FROM else {"foreach": False}
    return settled


def place_scalars(optimizer: torch.optim.Optimizer, place: torch.device) -> None:
    """Single numbers of an optimizer's state, such as the count of steps, to where its form wants them.

    Fused forms want them beside the values. Others would wait for the GPU to read them there, so they are on the CPU; only
    ASGD keeps its own on the GPU, and waits.
    """
    beside = isinstance(optimizer, torch.optim.ASGD)
    for group in optimizer.param_groups:
        wanted = place if beside or group.get("fused") else torch.device("cpu")
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != wanted:
                    state[name] = value.to(wanted)


class ShardCut:
    """What of a model is on one shard, and where that is in the flat order of the whole model."""

    def __init__(self, spec: OptimizerSpec, shard: int, shards: int) -> None:
        tensors = () if spec.apply == "peers" else spec.tensors
        self.whole = is_whole(spec.optimizer)
        self.layout = lay_out(tensors, shards, self.whole)
        self.stretches: tuple[Stretch, ...] = self.layout.shards[shard]
        self.nbytes = [stretch.nbytes for stretch in self.stretches]
        self._start = {stretch.dtype: stretch.start for stretch in self.stretches}
        #: Parts of tensors that are here, in elements of this shard's flat tensor.
        self.pieces: list[tuple[TensorPlace, int, int]] = []
        for place in self.layout.places:
            for own in [own for own in self.stretches if own.dtype == place.info.dtype]:
                start, stop = max(place.start, own.start), min(place.stop, own.stop)
                if start < stop:
                    self.pieces.append((place, start - own.start, stop - own.start))
        # Whole tensors are dealt out to the shards, so that their order there is another one.
        self._canonical = {place.index: place.start for place in lay_out(tensors, 1).places} if self.whole else None

    def shift(self, dtype: str, start: int) -> int:
        """From this shard's elements to the flat order of the whole model, for the segment that starts here."""
        if self._canonical is None:
            return self._start[dtype]
        place = next(p for p, first, _ in self.pieces if p.info.dtype == dtype and first == start)
        return self._canonical[place.index] - start

    def in_model(self, flats: Flats) -> list[tuple[str, int, torch.Tensor]]:
        """Stretches of the flat order of the whole model: dtype, where it starts, the elements."""
        if self._canonical is None:
            return [(s.dtype, s.start, flats[s.dtype]) for s in self.stretches if s.size]
        return [(p.info.dtype, self._canonical[p.index], flats[p.info.dtype][a:b]) for p, a, b in self.pieces]

    def of_model(self, flats: Flats) -> list[torch.Tensor]:
        """This shard's values, out of the flat order of the whole model."""
        if self._canonical is None:
            return [flats[s.dtype][s.start : s.stop] for s in self.stretches]
        mine = {s.dtype: torch.empty(s.size, dtype=getattr(torch, s.dtype)) for s in self.stretches}
        for place, start, stop in self.pieces:
            source = self._canonical[place.index]
            mine[place.info.dtype][start:stop] = flats[place.info.dtype][source : source + stop - start]
        return [mine[s.dtype] for s in self.stretches]


@dataclass(eq=False)
class FlatSegment:
    """Elements `start` to `stop` of this shard's flat tensor, updated together."""

    dtype: str
    group: int
    start: int
    stop: int
    shape: tuple[int, ...]
    param: torch.nn.Parameter

    def of(self, flats: Flats) -> torch.Tensor:
        flat = flats[self.dtype]
        view = flat if self.stop - self.start == flat.numel() else flat[self.start : self.stop]
        return view.view(self.shape) if self.shape else view


class SegmentedOptimizer:
    """An optimizer of torch on the flat values of one shard.

    It runs on *segments*: at first one for each group and dtype, so that a step is one call however many tensors the model
    has. When a parameter has no gradient in an update, plain PyTorch leaves it and its state alone; its segment is then
    split, state and all, and that part is left alone, too.
    """

    def __init__(self, spec: OptimizerSpec, cut: ShardCut, flats: Flats, alone: bool) -> None:
        self._cut = cut
        self._flats = flats
        self._place = next(iter(flats.values())).device
        self._alone = alone  # the only worker is promised plain PyTorch's bits
        self._hyper: Sequence[dict[str, Any]] = ()  # as they were set last
        self.segments: list[FlatSegment] = []
        for place, start, stop in cut.pieces:
            last = self.segments[-1] if self.segments else None
            if not cut.whole and last and (last.dtype, last.group) == (place.info.dtype, place.info.group):
                last.stop = stop
            else:
                shape = tuple(place.info.shape) if cut.whole else ()
                param = torch.nn.Parameter(torch.empty(0))
                self.segments.append(FlatSegment(place.info.dtype, place.info.group, start, stop, shape, param))
        for segment in self.segments:
            segment.param = torch.nn.Parameter(segment.of(flats))
        of_group = [[r.param for r in self.segments if r.group == group] for group in range(len(spec.groups))]
        self.inner = build(spec.optimizer, spec.groups, of_group)
        # Without torch's wrappers, which import its compiler in the first step (1.4 s, in which all workers wait).
        self._plain_step = inspect.unwrap(type(self.inner).step)

    def attach(self, flats: Flats) -> None:
        """The values are in other memory now."""
        self._flats = flats
        for segment in self.segments:
            segment.param.data = segment.of(flats)

    def step(self, mean: Flats, hyper: Sequence[dict[str, Any]], rate: float, absent: frozenset[int]) -> None:
        without = [(p.info.dtype, a, b) for p, a, b in self._cut.pieces if p.index in absent] if absent else []
        for dtype, start, stop in without:
            self._split(dtype, start)
            self._split(dtype, stop)
        if hyper != self._hyper:
            for group, values in zip(self.inner.param_groups, hyper, strict=True):
                group.update(settle(values, self.inner, self._alone, self._place.type == "cuda"))
            place_scalars(self.inner, self._place)
            self._hyper = hyper
        for group, values in zip(self.inner.param_groups, hyper, strict=True):
            group["lr"] = values["lr"] * rate
        # Fused SGD wants momentum for all runs or for none; split runs may begin at different steps.
        if len(self.segments) > 1 and isinstance(self.inner, torch.optim.SGD):
            for group in self.inner.param_groups:
                if group["fused"] and group["momentum"]:
                    have = {"momentum_buffer" in self.inner.state.get(param, {}) for param in group["params"]}
                    if len(have) > 1:
                        group["fused"], self._hyper = False, ()
        for segment in self.segments:
            left_alone = any(d == segment.dtype and a <= segment.start and segment.stop <= b for d, a, b in without)
            segment.param.grad = None if left_alone else segment.of(mean)
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            self._plain_step(self.inner)
        for segment in self.segments:
            segment.param.grad = None

    def _split(self, dtype: str, at: int) -> None:
        segment = next((r for r in self.segments if r.dtype == dtype and r.start < at < r.stop), None)
        if segment is None:
            return
        whole = SegmentState(dtype, segment.start, segment.stop, dict(self.inner.state.pop(segment.param, {})))
        rest = FlatSegment(dtype, segment.group, at, segment.stop, (), torch.nn.Parameter(torch.empty(0)))
        old, segment.stop = segment.param, at
        params = self.inner.param_groups[segment.group]["params"]
        place = next(index for index, param in enumerate(params) if param is old)
        for part in (segment, rest):
            part.param = torch.nn.Parameter(part.of(self._flats))
            if whole.state:
                self.inner.state[part.param] = whole.part(part.start, part.stop)
        params[place : place + 1] = [segment.param, rest.param]
        self.segments.insert(self.segments.index(segment) + 1, rest)

    def state(self) -> list[SegmentState]:
        """In the flat order of the whole model, not copied."""
        shifts = [self._cut.shift(r.dtype, r.start) for r in self.segments]
        return [
            SegmentState(r.dtype, r.start + by, r.stop + by, dict(self.inner.state.get(r.param, {})))
            for r, by in zip(self.segments, shifts, strict=True)
        ]

    def load_state(self, segments: Sequence[SegmentState]) -> None:
        """Take the state from runs that may be cut in another way."""
        if not self._cut.whole:
            for source in segments:
                by = self._cut.shift(source.dtype, source.start)
                self._split(source.dtype, source.start - by)
                self._split(source.dtype, source.stop - by)
        for segment in self.segments:
            by = self._cut.shift(segment.dtype, segment.start)
            start, stop = segment.start + by, segment.stop + by
            touching = find(segments, segment.dtype, start, stop)
            self.inner.state.pop(segment.param, None)
            if touching and touching[0].state:
                state = touching[0].part(start, stop)
                self.inner.state[segment.param] = {name: self._fit(value, segment) for name, value in state.items()}
        place_scalars(self.inner, self._place)

    def _fit(self, value: Any, segment: FlatSegment) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        fits = value.numel() == segment.stop - segment.start
        return value.to(self._place).reshape(segment.param.shape) if fits else value.to(self._place)

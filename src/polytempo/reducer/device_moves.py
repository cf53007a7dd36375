"""Moves between parameters on a device and flat memory, there or in the host's.

On a device they are made on the current stream, and the host waits for nothing: tensors whose memory has the same form as
their place in the flat memory are copied together, by one call for each dtype; the others, such as convolution weights in
channels_last, one by one. A flat buffer has its elements in the canonical order.

Staging: parameters on a GPU, flat buffers in host memory, and between them a flat twin of those buffers on the GPU.

    gather    gradients -> twin, by one call on the current stream; twin -> flat buffer, one copy a dtype, on a side stream
    scatter   received bytes -> twin, one copy a stretch, on the side stream; twin -> parameters, by one call behind them

So no parameter is copied to or from the host by itself, and the host waits for the copies that it needs and nothing else.
Whether a gradient is finite is found out on the GPU, and comes along. Flat buffers are pinned, also where they are shared
memory; so is, once it was seen, shared memory of servers in which answers lie: the GPU reads values there.

Parameters on the CPU, or on another GPU than the first, are copied one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from polytempo.device.copy_stream import CopyMark, CopyStream, copy_stream
from polytempo.device.device import Device, Devices
from polytempo.device.driver import CudaDriver
from polytempo.device.pinned_memory import HostPins
from polytempo.protocol.layout import Layout, Stretch, TensorPlace
from polytempo.server.optimizer_state import as_tensor
from polytempo.transport.channel import Bytes


def device_of_all(devices: Devices, params: Sequence[torch.Tensor]) -> Device | None:
    """The device that all these parameters are on; None where there is no such one."""
    places = {param.device for param in params}
    return devices.of(places.pop()) if len(places) == 1 else None


def shaped_like(view: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The view with the strides of a parameter, where these mean the same order in memory: those of dimensions of size 1
    have no meaning, and a copy is straight only where all are equal."""
    pairs = zip(param.shape, param.stride(), view.stride(), strict=True)
    same = all(own == other for size, own, other in pairs if size > 1)
    return view.as_strided(param.shape, param.stride()) if same and param.numel() else view


def is_permuted(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in another order than the canonical one (channels_last)."""
    at = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ):
        if stride != at:
            return False
        at *= size
    return not tensor.is_contiguous()


class Copies:
    """Copies to make together: of each pair `(target, source)` the source into the target."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._straight: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in pairs:
            if source.dtype == target.dtype and source.stride() == target.stride() and source.device == target.device:
                targets, sources = self._straight.setdefault(target.dtype, ([], []))
                targets.append(target)
                sources.append(source)
            else:
                self._others.append((target, source))

    def make(self) -> None:
        """On the current stream."""
        for targets, sources in self._straight.values():
            torch._foreach_copy_(targets, sources)
        for target, source in self._others:
            target.copy_(source)


def copy_together(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source into its target: `(target, source)`."""
    Copies(pairs).make()


def largest(flat: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in a flat tensor, on its device: not finite where an element is not. One pass, no copy."""
    return torch.linalg.vector_norm(flat, float("inf")) if flat.numel() else flat.new_zeros(())


def gather_views(
    views: Mapping[int, torch.Tensor],
    params: Sequence[torch.Tensor],
    order: Sequence[int],
    of: Callable[[torch.Tensor], torch.Tensor | None],
) -> tuple[int, ...]:
    """Copy `of(param)` of these parameters to their views, on the current stream; where it is None, zeros. Returns those
    parameters."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    absent: list[int] = []
    for index in order:
        tensor = of(params[index])
        if tensor is None:
            absent.append(index)
        elif tensor is not views[index]:
            pairs.append((views[index], tensor if tensor.layout == torch.strided else tensor.to_dense()))
    with torch.no_grad():
        copy_together(pairs)
        if absent:
            torch._foreach_zero_([views[index] for index in absent])
    return tuple(absent)


def runs_of(places: Sequence[TensorPlace], staged: Sequence[int]) -> list[Stretch]:
    """The stretches of the flat order that these tensors fill, as few as there can be."""
    runs: list[Stretch] = []
    chosen = set(staged)
    for place in sorted(places, key=lambda place: (place.info.dtype, place.start)):
        if place.index not in chosen or place.start == place.stop:
            continue
        last = runs[-1] if runs else None
        if last is not None and (last.dtype, last.stop) == (place.info.dtype, place.start):
            runs[-1] = Stretch(last.dtype, last.start, place.stop)
        else:
            runs.append(Stretch(place.info.dtype, place.start, place.stop))
    return runs


def common(stretch: Stretch, runs: Sequence[Stretch]) -> Iterator[Stretch]:
    """The parts of a stretch that lie in these."""
    for run in runs:
        start, stop = max(stretch.start, run.start), min(stretch.stop, run.stop)
        if run.dtype == stretch.dtype and start < stop:
            yield Stretch(run.dtype, start, stop)


class HostStaging:
    """The parameters of one optimizer that lie on one GPU.

    Args:
        params: All parameters.
        layout: Their order in flat buffers.
        place: The GPU.
        copies: To and from it.
        pins: Pins memory for it; None where that has no meaning.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        layout: Layout,
        place: torch.device,
        copies: CopyStream,
        pins: HostPins | None = None,
    ) -> None:
        self._params, self._layout, self.place, self.copies, self.pins = params, layout, place, copies, pins
        self.twin = {
            dtype: torch.zeros(size, dtype=getattr(torch, dtype), device=place) for dtype, size in layout.sizes.items()
        }
        self.places = layout.places  #: of all tensors, in flat order
        self._place_of = {where.index: where for where in layout.places}
        self._largest = {
            dtype: torch.zeros((), dtype=getattr(torch, dtype), pin_memory=place.type == "cuda") for dtype in layout.sizes
        }
        self.find_places()

    def find_places(self) -> None:
        """Parameters may lie elsewhere than before."""
        self._values = [param.detach() for param in self._params]
        self.staged = [where.index for where in self._layout.places if self._params[where.index].device == self.place]
        staged = set(self.staged)
        self.others = [where.index for where in self.places if where.index not in staged]  #: not on this GPU
        self.runs = runs_of(self.places, self.staged)
        self.views = {index: self.view(index, self.twin) for index in self.staged}

    def view(self, index: int, flats: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A parameter's place in the twin, or in flat tensors like it."""
        where = self._place_of[index]
        flat = flats[where.info.dtype][where.start : where.stop].view(tuple(where.info.shape))
        return shaped_like(flat, self._params[index])

    # To the host.

    def fetch(self, flats: Mapping[str, torch.Tensor] | None = None) -> bool:
        """Copy the twin to these flat tensors, if there are some, and wait for it; are all elements finite?"""
        most = {dtype: largest(flat) for dtype, flat in self.twin.items()}
        self.copies.follow()
        if flats is not None:
            for run in self.runs:
                self.copies.copy(flats[run.dtype][run.start : run.stop], self.twin[run.dtype][run.start : run.stop])
        for dtype, found in most.items():
            self.copies.copy(self._largest[dtype], found)
        self.copies.mark().wait()
        return all(math.isfinite(found.item()) for found in self._largest.values())

    def collect(self, of: Callable[[torch.Tensor], torch.Tensor | None]) -> tuple[int, ...]:
        """Copy `of(param)` of the staged parameters to the twin, on the current stream; where it is None, zeros."""
        return gather_views(self.views, self._params, self.staged, of)

    # To the GPU.

    def scatter(self, parts: dict[int, list[Bytes]]) -> None:
        """Received values, one list of buffers for each shard, into the staged parameters. The buffers may change
        afterwards."""
        mark = self.spread(parts)
        with torch.no_grad():
            copy_together((self._values[index], self.views[index]) for index in self.staged)
        mark.wait()

    def spread(self, parts: dict[int, list[Bytes]]) -> CopyMark:
        """Start to copy received values to the twin: the current stream waits for them, the host does not."""
        self.copies.follow()
        for shard, buffers in parts.items():
            for segment, data in zip(self._layout.shards[shard], buffers, strict=True):
                if self.pins is not None:
                    self.pins.pin_borrowed(data)
                flat = as_tensor(data, segment.dtype)
                for part in common(segment, self.runs):
                    source = flat[part.start - segment.start : part.stop - segment.start]
                    self.copies.copy(self.twin[part.dtype][part.start : part.stop], source)
        mark = self.copies.mark()
        mark.hold()
        return mark


def staging_for(params: Sequence[torch.Tensor], layout: Layout) -> HostStaging | None:
    """The staging of these parameters; None where no parameter is on a GPU."""
    place = next((param.device for param in params if param.is_cuda), None)
    if place is None:
        return None
    return HostStaging(params, layout, place, copy_stream(place), HostPins(CudaDriver(place.index)))

"""Staging: parameters on a GPU, flat buffers in host memory, and between them a flat twin of those buffers on the GPU.

    gather    gradients -> twin, by one call on the current stream; twin -> flat buffer, one copy a dtype, on a side stream
    scatter   received bytes -> twin, one copy a stretch, on the side stream; twin -> parameters, by one call behind them

So no parameter is copied to or from the host by itself, and the host waits for the copies that it needs and nothing else.
Whether a gradient is finite is found out on the GPU, and comes along. Flat buffers are pinned, also where they are shared
memory; so is, once it was seen, shared memory of servers in which answers lie: the GPU reads values there.

Parameters on the CPU, or on another GPU than the first, are copied one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from polytempo.device.copy_stream import CopyMark, CopyStream, copy_stream
from polytempo.device.driver import CudaDriver
from polytempo.device.pinned_memory import HostPins
from polytempo.protocol.layout import Layout, Stretch, TensorPlace
from polytempo.reducer.device_moves import copy_together, largest, shaped_like
from polytempo.server.optimizer_state import as_tensor
from polytempo.transport.channel import Bytes


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
        self._places = {where.index: where for where in layout.places}
        self._largest = {
            dtype: torch.zeros((), dtype=getattr(torch, dtype), pin_memory=place.type == "cuda") for dtype in layout.sizes
        }
        self.find_places()

    def find_places(self) -> None:
        """Parameters may lie elsewhere than before."""
        self._values = [param.detach() for param in self._params]
        self.staged = [where.index for where in self._layout.places if self._params[where.index].device == self.place]
        self.others = [index for index in self._places if index not in set(self.staged)]  #: not on this GPU
        self.runs = runs_of(self._layout.places, self.staged)
        self.views = {index: shaped_like(self.view(index), self._params[index]) for index in self.staged}

    @property
    def places(self) -> Sequence[TensorPlace]:
        """Of all tensors, in flat order."""
        return self._layout.places

    def place_of(self, index: int) -> TensorPlace:
        """Where a tensor stands in the flat order."""
        return self._places[index]

    def view(self, index: int) -> torch.Tensor:
        """A parameter's place in the twin, in the usual order."""
        where = self.place_of(index)
        return self.twin[where.info.dtype][where.start : where.stop].view(tuple(where.info.shape))

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in it."""
        return sum(flat.nbytes for flat in self.twin.values())

    # To the host.

    def gather(
        self, of: Callable[[torch.Tensor], torch.Tensor | None], flats: Mapping[str, torch.Tensor]
    ) -> tuple[list[int], bool]:
        """Copy `of(param)` of the staged parameters to these flat tensors; where it is None, zeros.

        Returns:
            The parameters for which it is None, and whether all elements are finite.
        """
        absent = self.collect(of)
        return absent, self.fetch(flats)

    def fetch(self, flats: Mapping[str, torch.Tensor]) -> bool:
        """Copy the twin to these flat tensors, and wait for it; are all elements finite?"""
        return self._fetch(flats, self.runs)

    def is_finite(self) -> bool:
        """Are all elements of the twin finite? The host waits for the current stream."""
        return self._fetch({}, ())

    def _fetch(self, flats: Mapping[str, torch.Tensor], runs: Sequence[Stretch]) -> bool:
        most = {dtype: largest(flat) for dtype, flat in self.twin.items()}
        self.copies.follow()
        for run in runs:
            self.copies.copy(flats[run.dtype][run.start : run.stop], self.twin[run.dtype][run.start : run.stop])
        for dtype, found in most.items():
            self.copies.copy(self._largest[dtype], found)
        self.copies.mark().wait()
        return all(math.isfinite(found.item()) for found in self._largest.values())

    def collect(self, of: Callable[[torch.Tensor], torch.Tensor | None]) -> list[int]:
        """Copy `of(param)` of the staged parameters to the twin, on the current stream; where it is None, zeros."""
        pairs, absent = [], []
        for index in self.staged:
            tensor = of(self._params[index])
            if tensor is None:
                absent.append(index)
            else:
                pairs.append((self.views[index], tensor if tensor.layout == torch.strided else tensor.to_dense()))
        with torch.no_grad():
            copy_together(pairs)
            if absent:
                torch._foreach_zero_([self.views[index] for index in absent])
        return absent

    # To the GPU.

    def scatter(self, parts: dict[int, list[Bytes]], targets: Sequence[torch.Tensor] | None = None) -> None:
        """Received values, one list of buffers for each shard, into the staged parameters, or into these tensors instead.
        The buffers may change afterwards."""
        mark = self.spread(parts)
        into = self._values if targets is None else targets
        with torch.no_grad():
            copy_together((into[index], self.views[index]) for index in self.staged)
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

"""The flat buffer: gradients of all parameters in, new values out.

One flat tensor a dtype holds all gradients in the layout's order, so that each shard's part is one segment of memory. On one
host that memory is shared, and the servers read it in place. A parameter's `.grad` becomes a view of the buffer once it was
copied there, and whatever then changes it in place (accumulation, clipping, unscaling) changes the buffer. New values go
from the receive buffers, or the servers' own memory, straight into the parameters; where a parameter is not contiguous, they
pass through the flat tensor, which is free by then. Parameters on a GPU are staged (`device_moves.py`).

Given a `Device` for memory, flat tensors lie on it, in memory that other processes map (`FlatBuffer.ranges`). Then gradients
and new values each have a flat buffer: new values are in `Copier.landing` when `land` copies them, and no bytes pass through
the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from polytempo.device.device import Device, DeviceMemory
from polytempo.device.pinned_memory import HostPins
from polytempo.errors import UsageError
from polytempo.protocol.layout import ITEM_SIZES, Layout
from polytempo.protocol.values import TensorInfo
from polytempo.reducer.device_moves import (
    Copies,
    copy_together,
    gather_views,
    is_permuted,
    largest,
    shaped_like,
    staging_for,
)
from polytempo.reducer.parameter_watch import ParameterWatch
from polytempo.server.optimizer_state import as_bytes, as_tensor, dtype_name, is_same
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes


def describe(params: Sequence[torch.Tensor], names: Sequence[str], groups: Sequence[int]) -> tuple[TensorInfo, ...]:
    """What the servers must know of each parameter."""
    return tuple(
        TensorInfo(name, tuple(param.shape), dtype_name(param.dtype), group)
        for param, name, group in zip(params, names, groups, strict=True)
    )


class Memory(Protocol):
    """Where flat tensors lie."""

    @property
    def pins(self) -> bool:
        """May memory of torch's own be taken instead, which GPUs can reach?"""

    def allocate(self, size: int) -> Bytes:
        """Zeroed memory to keep."""


class FlatBuffer:
    """One set of flat tensors, with a view for each parameter.

    Args:
        layout: The order of the parameters.
        memory: Where the tensors lie: host memory, or a device.
        pinned: Take host memory of torch's own instead, which GPUs can reach.
    """

    def __init__(self, layout: Layout, memory: Memory | Device, pinned: bool = False) -> None:
        self.ranges: dict[str, DeviceMemory] = {}  #: by dtype, where it lies on a device; `parts` is for the host
        self._bytes: dict[str, Bytes] = {}
        for dtype, size in layout.sizes.items():
            if isinstance(memory, Device):
                self.ranges[dtype] = memory.allocate(size * ITEM_SIZES[dtype])
            elif pinned:
                self._bytes[dtype] = as_bytes(torch.zeros(size, dtype=getattr(torch, dtype), pin_memory=True))
            else:
                self._bytes[dtype] = memory.allocate(size * ITEM_SIZES[dtype])
        self.on_device = isinstance(memory, Device)
        self._forms: dict[int, tuple[int, ...]] = {}  # strides of views that are not in the canonical order
        self.tensors = {dtype: self._flat(dtype, 0, size) for dtype, size in layout.sizes.items()}
        self._layout_places = {place.index: place for place in layout.places}
        self.views = {index: self._view(index) for index in self._layout_places}
        self._places = {index: view.data_ptr() for index, view in self.views.items()}
        self._renewed = dict.fromkeys(self.views, 0)
        self._finite: dict[int, int] = {}  # views that were found finite, and their version then
        self.in_twin = False  #: what was gathered lies on the GPU alone, in the twin of this buffer
        self._staged: frozenset[int] = frozenset()  # of these, views that were just filled from a GPU
        shards = () if self.on_device else layout.shards
        self.parts = [[self._part(s.dtype, s.start, s.stop) for s in segments] for segments in shards]

    def _flat(self, dtype: str, start: int, stop: int) -> torch.Tensor:
        """A tensor of its own, not a slice: on the host it has a version counter of its own."""
        if self.on_device:
            return self.ranges[dtype].tensor(getattr(torch, dtype), start * ITEM_SIZES[dtype], stop - start)
        return as_tensor(self._part(dtype, start, stop), dtype)

    def _part(self, dtype: str, start: int, stop: int) -> Bytes:
        return self._bytes[dtype][start * ITEM_SIZES[dtype] : stop * ITEM_SIZES[dtype]]

    def _view(self, index: int) -> torch.Tensor:
        place = self._layout_places[index]
        flat, shape = self._flat(place.info.dtype, place.start, place.stop), tuple(place.info.shape)
        return flat.as_strided(shape, self._forms[index]) if index in self._forms else flat.view(shape)

    def order_as(self, params: Sequence[torch.Tensor]) -> str:
        """Have elements in the order that they have in the memory of these parameters, from now on; they may move later.

        Returns:
            The order: where flat buffers have the same, their elements are the same.
        """
        self._forms = {i: params[i].stride() for i in self.views if is_permuted(params[i])}
        self.take_forms(params)
        return repr(sorted(self._forms.items()))

    def take_forms(self, params: Sequence[torch.Tensor]) -> None:
        """Give views the strides of these parameters where that does not change the order of elements: copies are straight
        then."""
        self.views = {index: shaped_like(self._view(index), params[index]) for index in self.views}

    def is_in_place(self, index: int) -> bool:
        """Does a view still lie in here? As `.grad` of a parameter it may have been given other memory: through `.data`, or
        with the model's (`model.to(...)`)."""
        view = self.views[index]
        return bool(view.data_ptr() == self._places[index] and view.is_contiguous())

    def renew(self, index: int) -> None:
        """Make a view anew."""
        self.views[index] = self._view(index)
        self._renewed[index] += 1
        self._finite.pop(index, None)

    def stamp(self, index: int) -> tuple[int, int]:
        """Differs once torch has changed a view, or it was made anew."""
        return self._renewed[index], self.views[index]._version

    def holds(self, tensor: torch.Tensor) -> bool:
        """Does this tensor lie in here?"""
        return any(
            flat.data_ptr() <= tensor.data_ptr() < flat.data_ptr() + flat.nbytes
            for flat in self.tensors.values()
            if flat.device == tensor.device
        )

    def view(self, index: int) -> torch.Tensor:
        """A parameter's view, made anew where it has gone elsewhere."""
        if not self.is_in_place(index):
            self.renew(index)
        return self.views[index]

    def found_finite(self, index: int, total: float) -> None:
        """The sum of one view, as it is: where that is finite, so are all its elements."""
        if math.isfinite(total):
            self._finite[index] = self.views[index]._version

    def find_finite(self, index: int) -> bool:
        """Are all elements of one view finite? NaN and Inf propagate through sum(), which is cheaper to look at."""
        view = self.views[index]
        finite = math.isfinite(view.sum().item()) or bool(torch.isfinite(view).all())
        if finite:
            self._finite[index] = view._version
        return finite

    def is_finite(self, everything: bool) -> bool:
        """Are all elements finite? Views whose version is as when they were last checked are checked only with `everything`:
        what is written through `.data` or NumPy does not change the version. On a device the host waits for it."""
        if self.on_device:
            return all(math.isfinite(largest(flat).item()) for flat in self.tensors.values())
        unknown = [
            i
            for i, view in self.views.items()
            if (everything and i not in self._staged) or self._finite.get(i) != view._version
        ]
        return all(self.find_finite(index) for index in unknown)

    def changed_all(self) -> None:
        """Something was written that views do not know of."""
        self._finite.clear()
        self._staged, self.in_twin = frozenset(), False

    def filled(self, indices: Sequence[int], finite: bool) -> None:
        """These views were filled from a GPU, where their elements were found finite, or not."""
        self.changed_all()
        if finite:
            self._finite = {index: self.views[index]._version for index in indices}
            self._staged = frozenset(indices)

    def pin(self, pins: HostPins) -> None:
        """Pin its memory."""
        for data in self._bytes.values():
            pins.pin(data)


class Copier:
    """Moves between parameters and flat tensors. `slots` flat buffers are used in turn: one, unless pushes overlap."""

    landing: FlatBuffer  #: where new values pass through, or on a device land
    _buffers: list[FlatBuffer]

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        layout: Layout,
        memory: Memory | Device,
        slots: int = 1,
        compares: bool = False,
        beside: Copier | None = None,
    ) -> None:
        """`beside`: another of the same parameters on a device, whose flat buffers serve both: streams keep them apart."""
        self.params = list(params)
        infos = [place.info for place in sorted(layout.places, key=lambda place: place.index)]
        self.watch = ParameterWatch(params, infos, compares)
        self.layout = layout
        self.on_device = isinstance(memory, Device)
        self.staging = staging_for(params, layout) if not isinstance(memory, Device) else None
        pins = self.staging is not None and self.staging.pins is not None
        pinned = pins and not isinstance(memory, Device) and memory.pins
        if beside is not None and beside.on_device and self.on_device and beside.layout == layout:
            self._buffers, self.landing = beside._buffers, beside.landing
        else:
            self._buffers = [FlatBuffer(layout, memory, pinned) for _ in range(slots)]
            # Pushes under way must not change, and on a device servers write new values while gradients are read.
            shared = slots == 1 and not self.on_device
            self.landing = self._buffers[0] if shared else FlatBuffer(layout, memory, pinned)
        self._every = list(dict.fromkeys((*self._buffers, self.landing)))
        self._turn = 0
        self._order = [place.index for place in layout.places]
        self._landings = Copies(())  # what `land` makes
        self._spare: FlatBuffer | None = None  # pinned, for values of a GPU that are looked at here, once there were some
        if self.staging is not None and self.staging.pins is not None and not pinned:
            for buffer in self._every:
                buffer.pin(self.staging.pins)
        self.find_places()

    def find_places(self) -> None:
        """Find where parameters lie now, and in which form."""
        if self.staging is not None:
            self.staging.find_places()
            return
        if self.on_device:
            for one in self._every:
                one.take_forms(self.params)
            self._landings = Copies((self.params[index].detach(), self.landing.views[index]) for index in self._order)
            return
        buffer = self.landing
        # The parameters that pass through the flat tensor; and for each shard and dtype, where its values go.
        self._indirect = [i for i in self._order if not self.params[i].is_contiguous()]
        self._direct: list[list[list[torch.Tensor]]] = []
        for index in self._order:
            buffer.view(index)  # made anew, if as `.grad` it went along with its parameter
        for segments in self.layout.shards:
            of_shard: list[list[torch.Tensor]] = []
            for segment in segments:
                targets = []
                for place in self.layout.places:
                    start, stop = max(place.start, segment.start), min(place.stop, segment.stop)
                    if place.info.dtype == segment.dtype and start < stop:
                        passes = place.index in self._indirect
                        source = buffer.views[place.index] if passes else self.params[place.index].detach()
                        targets.append(source.view(-1)[start - place.start : stop - place.start])
                of_shard.append(targets)
            self._direct.append(of_shard)

    @property
    def on_gpu(self) -> bool:
        """Do parameters lie on a GPU, or where a device exchanges them?"""
        return self.on_device or self.staging is not None

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in its flat buffers."""
        staged = self.staging.twin.values() if self.staging is not None else ()
        own = [memory.nbytes for one in self._every for memory in one.ranges.values()]
        return sum(own) + sum(int(flat.nbytes) for flat in staged)

    def look(self, compare: bool = True) -> bool:
        """Look at the parameters; new values go to where they lie now, if that is elsewhere."""
        moved = self.watch.look(compare)
        if moved:
            self.find_places()
        return moved

    def next_buffer(self) -> FlatBuffer:
        """The flat buffer whose turn it is."""
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn]

    def gather(self, buffer: FlatBuffer, of: Callable[[torch.Tensor], torch.Tensor | None]) -> tuple[int, ...]:
        """Copy `of(param)` of every parameter into a flat buffer; where it is None, zeros. Returns those parameters."""
        if buffer.on_device:
            return gather_views(buffer.views, self.params, self._order, of)
        if self.staging is None:
            return self._gather_here(self._order, buffer, of)
        absent = self.staging.collect(of)
        buffer.filled(self.staging.staged, self.staging.fetch(buffer.tensors))
        return (*absent, *self._gather_here(self.staging.others, buffer, of))

    def collect(self, buffer: FlatBuffer, of: Callable[[torch.Tensor], torch.Tensor | None]) -> tuple[int, ...]:
        """As `gather`, of parameters on a GPU, for what goes on there: values are in the twin of the buffer. They are in the
        buffer, too, where one of them is not finite: for the report of it."""
        assert self.staging is not None
        absent = self.staging.collect(of)
        finite = self.staging.fetch()
        if not finite:
            self.staging.fetch(buffer.tensors)
        buffer.filled(self.staging.staged, finite)
        buffer.in_twin = True
        return absent

    def _gather_here(
        self, order: Sequence[int], buffer: FlatBuffer, of: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> tuple[int, ...]:
        absent: list[int] = []
        targets, sources = [], []
        for index in order:
            tensor = of(self.params[index])
            in_place = buffer.is_in_place(index)
            if tensor is buffer.views[index] and in_place:
                continue
            if not in_place:  # whatever `.grad` is now: once it was the view
                buffer.renew(index)
            if tensor is None:
                absent.append(index)
                continue
            if tensor.layout != torch.strided:  # of an embedding that is no table of ours: all its rows travel
                tensor = tensor.to_dense()
            targets.append(buffer.views[index])
            sources.append(tensor.clone() if buffer.holds(tensor) else tensor)  # another's view: it may be written first
        if targets:
            torch._foreach_copy_(targets, sources)
        for index in absent:
            buffer.views[index].zero_()
        return tuple(absent)

    def scatter(self, parts: dict[int, list[Bytes]], absent: Sequence[int] = ()) -> None:
        """New values, one list of buffers for each shard, into the parameters."""
        if self.on_device:
            self._receive(parts)
            self.land()
            return
        self.watch.see_writes()
        if self.staging is not None:
            self.staging.scatter(parts)
            if self.staging.others:
                self.landing.changed_all()
                self._receive(parts)
                with torch.no_grad():
                    for index in self.staging.others:
                        self.params[index].detach().copy_(self.landing.views[index])
            self.watch.record()
            return
        buffer = self.landing
        if self._indirect:
            buffer.changed_all()
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            for shard, buffers in parts.items():
                for segment, data, targets in zip(self.layout.shards[shard], buffers, self._direct[shard], strict=True):
                    if len(targets) == 1:
                        targets[0].copy_(as_tensor(data, segment.dtype))
                    elif targets:
                        sources = torch.split(as_tensor(data, segment.dtype), [t.numel() for t in targets])
                        torch._foreach_copy_(targets, list(sources))
            for index in self._indirect:
                self.params[index].detach().copy_(buffer.views[index])
        self.watch.record()

    def subtract_from_values(self, buffer: FlatBuffer) -> None:
        """Make a flat buffer of earlier values what was added to them since."""
        views = [buffer.views[index] for index in range(len(self.params))]
        values = dict(enumerate(param.detach() for param in self.params))
        if not buffer.on_device:
            values = self.here(lambda param: param.detach())
        torch._foreach_neg_(views)
        torch._foreach_add_(views, [values[index] for index in range(len(views))])

    def land(self) -> None:
        """New values that are in `landing`, on a device, into the parameters: on the current stream."""
        self.watch.see_writes()
        with torch.no_grad():
            self._landings.make()
        self.watch.record()

    def _receive(self, parts: dict[int, list[Bytes]]) -> None:
        """Bytes that have come through the host into `landing`."""
        with torch.no_grad():
            for shard, buffers in parts.items():
                for segment, data in zip(self.layout.shards[shard], buffers, strict=True):
                    flat = self.landing.tensors[segment.dtype]
                    flat[segment.start : segment.stop].copy_(as_tensor(data, segment.dtype))

    def holds(self, parts: dict[int, list[Bytes]]) -> bool:
        """Are these the values of the parameters?"""
        own = FlatBuffer(self.layout, Pool())
        self.gather(own, lambda param: param.detach())
        return all(
            is_same(as_tensor(mine, segment.dtype), as_tensor(given, segment.dtype))
            for shard, buffers in parts.items()
            for segment, mine, given in zip(self.layout.shards[shard], own.parts[shard], buffers, strict=True)
        )

    def here(self, of: Callable[[torch.Tensor], torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """`of(param)` of each parameter that has it, in host memory: itself, or from a GPU a copy that stays until the next
        call."""
        if self.staging is None and not self.on_device:
            found = {index: of(self.params[index]) for index in self._order}
            return {index: tensor for index, tensor in found.items() if tensor is not None}
        absent = self.gather(self._spare_buffer(), of)
        return {index: view for index, view in self._spare_buffer().views.items() if index not in absent}

    def _spare_buffer(self) -> FlatBuffer:
        if self._spare is None:
            self._spare = FlatBuffer(self.layout, Pool(), pinned=any(param.is_cuda for param in self.params))
        return self._spare

    def write(self, values: Sequence[torch.Tensor], adds: bool = False) -> None:
        """Copy these into the parameters, in their order, or add them; values of the host go to a GPU together."""
        own = [param.detach() for param in self.params]
        staging, spare = self.staging, None
        if staging is not None and not staging.others and not any(value.is_cuda for value in values):
            spare = self._spare_buffer()
            torch._foreach_copy_([spare.views[index] for index in range(len(own))], list(values))
            mark = staging.spread(dict(enumerate(spare.parts)))
            values = [staging.views[index] for index in range(len(own))]
        with torch.no_grad():
            for target, value in zip(own, values, strict=True):
                if adds:
                    target.add_(value.to(target.device))
                else:
                    target.copy_(value)
        if spare is not None:
            mark.wait()

    def scatter_gradients(self, parts: dict[int, list[Bytes]], absent: Sequence[int]) -> None:
        """Copy agreed gradients into `.grad` of every parameter, and set it to None where no worker had one."""
        self.landing.changed_all()
        if self.staging is None or self.staging.others:
            self._receive(parts)
        if self.staging is None:
            self.assign_gradients(self.landing.views, absent)
            return
        mark = self.staging.spread(parts)
        self.assign_gradients(self.landing.views | self.staging.views, absent)
        mark.wait()

    def assign_gradients(self, views: Mapping[int, torch.Tensor], absent: Sequence[int]) -> None:
        """Copy what is in these views into `.grad` of every parameter, and set it to None where it is absent."""
        pairs = []
        for index in self._order:
            param = self.params[index]
            if index in absent:
                param.grad = None  # this worker may have a gradient, of weight zero
                continue
            if param.grad is None or param.grad.layout != torch.strided:
                param.grad = torch.empty_like(param)
            pairs.append((param.grad, views[index]))
        with torch.no_grad():
            copy_together(pairs)

    def check_same(self, params: Sequence[torch.Tensor]) -> None:
        """Refuse parameters that were added or replaced after the start."""
        same = len(params) == len(self.params) and all(one is other for one, other in zip(params, self.params, strict=True))
        if not same:
            raise UsageError("the optimizer's parameters were changed after it was made distributed; wrap it after that")

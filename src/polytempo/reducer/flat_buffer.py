"""The flat buffer, in which gradients of all parameters lie side by side, and the hooks that bring them there.

One flat tensor a dtype holds all gradients in the layout's order, so that each shard's part is one segment of memory. On one
host that memory is shared, and the servers read it in place. A parameter's `.grad` becomes a view of the buffer once it was
copied there, and whatever then changes it in place (accumulation, clipping, unscaling) changes the buffer. Given a
`Device` for memory, flat tensors lie on it, in memory that other processes map (`FlatBuffer.ranges`).

Autograd puts a gradient wherever it likes. A hook that it calls when a parameter's gradient is complete copies it into the
flat buffer, while backward goes on and the gradient is still in the cache, and makes `.grad` the view. From then on whatever
changes `.grad` in place changes the buffer. All of this is a matter of speed: at `step()` every gradient that is not a view,
for whatever reason, is copied (`Copier.gather`).

Without hooks, because a view would not do: parameters whose memory is not in the usual order (channels_last), on a GPU, or
frozen when the optimizer was wrapped; sparse gradients; gradients that are differentiated again. Left as they are: gradients
that the script holds a reference to or has put into memory of its own, and views that it still holds (`ReferenceCounts`).
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from polytempo.device.device import Device, DeviceMemory
from polytempo.device.pinned_memory import HostPins
from polytempo.protocol.layout import ITEM_SIZES, Layout
from polytempo.protocol.values import TensorInfo
from polytempo.reducer.device_moves import is_permuted, largest, shaped_like
from polytempo.server.optimizer_state import as_bytes, as_tensor, dtype_name
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
        self._segments = layout.shards
        self.in_twin = False  #: what was gathered lies on the GPU alone, in the twin of this buffer
        self._staged: frozenset[int] = frozenset()  # of these, views that were just filled from a GPU
        shards = () if self.on_device else self._segments
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

    def receive(self, parts: Mapping[int, Sequence[Bytes]]) -> None:
        """Copy what servers have answered, one list of buffers for each shard, to where it belongs."""
        with torch.no_grad():
            for shard, buffers in parts.items():
                for segment, data in zip(self._segments[shard], buffers, strict=True):
                    self.tensors[segment.dtype][segment.start : segment.stop].copy_(as_tensor(data, segment.dtype))

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


class ReferenceCounts:
    """Decides by `sys.getrefcount` whether the script holds a gradient or a view of the flat buffer.

    A script that keeps `g = param.grad` expects `g` to stay what it is; replacing `.grad` by a view, or writing the next
    gradient into a view that it holds, would change what it sees. Torch has no call that tells, so references are counted,
    and compared with counts taken where the script certainly holds none: those depend on the versions of torch and Python
    (torch may or may not count its own reference through `.grad`), so they are measured, never written down here.
    A wrong answer costs speed in one direction (a copy at `step()`) and the script's values in the other;
    `tests/threads/test_gradient_hooks.py` has both.
    """

    def __init__(self, buffer: FlatBuffer, indices: Sequence[int]) -> None:
        self._buffer = buffer
        self._views_at_rest = {index: sys.getrefcount(buffer.views[index]) for index in indices}
        param = torch.nn.Parameter(torch.zeros(1))
        param.grad = torch.zeros(1)
        self._fresh_gradient = sys.getrefcount(param.grad)

    def only_parameter_holds_gradient(self, param: torch.Tensor) -> bool:
        """Is `.grad` referenced by its parameter alone, and memory of its own?"""
        return sys.getrefcount(param.grad) <= self._fresh_gradient and (param.grad is None or not param.grad._is_view())

    def is_view_unused(self, index: int) -> bool:
        """Is a view of the flat buffer referenced by the buffer alone?"""
        return sys.getrefcount(self._buffer.views[index]) <= self._views_at_rest[index]


class HearsCompletion(Protocol):
    """Wants to hear of gradients."""

    def complete(self, index: int) -> None:
        """Backward has made this parameter's gradient."""


def tell_completion(params: Sequence[torch.Tensor], indices: Sequence[int], hears: HearsCompletion) -> None:
    """Hooks of these parameters, which do not keep an optimizer alive that the script has dropped. They are optional: a
    gradient that appears without a call is taken at `step()`."""
    reference = weakref.ref(hears)

    def hook(index: int) -> Callable[[torch.Tensor], None]:
        def complete(param: torch.Tensor) -> None:
            owner = reference()
            if owner is not None:
                owner.complete(index)

        complete.optional = True  # type: ignore[attr-defined]
        return complete

    for index in indices:
        params[index].register_post_accumulate_grad_hook(hook(index))


class GradientHooks:
    """The parameters of one optimizer whose gradients live in a flat buffer.

    Args:
        params: All parameters.
        buffer: Where their gradients go.
        on_complete: Called with a parameter's index once its gradient is in the buffer.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], buffer: FlatBuffer, on_complete: Callable[[int], None] | None = None
    ) -> None:
        self._may = [i for i, param in enumerate(params) if param.device.type == "cpu" and param.is_contiguous()]
        self._active = set(self._may)
        self._params = list(params)
        self._buffer = buffer
        self._references = ReferenceCounts(buffer, self._may)
        self.on_complete = on_complete
        self.indices = [index for index in self._may if params[index].requires_grad]  #: of gradients that the hooks copy
        tell_completion(params, self.indices, self)

    def complete(self, index: int) -> None:
        """Backward has made this parameter's gradient."""
        param = self._params[index]
        if index not in self._active:
            return
        if not self._buffer.is_in_place(index):
            self._buffer.renew(index)
        # Before the names below hold references of their own.
        free = self._references.only_parameter_holds_gradient(param) and self._references.is_view_unused(index)
        grad, view = param.grad, self._buffer.views[index]
        if not _fits(grad, view):
            return
        if grad is not view:
            if not free:
                return
            with torch.no_grad():
                view.copy_(grad)
                self._buffer.find_finite(index)  # now it is in the cache
            param.grad = view
        if self.on_complete is not None:
            self.on_complete(index)

    def renew(self) -> None:
        """Parameters were moved: some may have other strides now, or the usual ones again."""
        self._active = {index for index in self._may if self._params[index].is_contiguous()}

    def adopt(self) -> None:
        """Make `.grad` the view where `step()` has copied a gradient into the buffer: it need not be copied again."""
        for index in self._active:
            param, view = self._params[index], self._buffer.views[index]
            if param.grad is view or not self._references.only_parameter_holds_gradient(param):
                continue
            if _fits(param.grad, view):
                param.grad = view


def _fits(grad: torch.Tensor | None, view: torch.Tensor) -> bool:
    return grad is not None and grad.layout == torch.strided and grad.dtype == view.dtype and not grad.requires_grad

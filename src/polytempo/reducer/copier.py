"""Between the parameters of an optimizer and flat buffers: gradients in, new values out; what the script writes meanwhile.

New values go from the receive buffers, or the servers' own memory, straight into the parameters; where a parameter is not
contiguous, they pass through the flat tensor, which is free by then. Parameters on a GPU are staged (`device_moves.py`).

On a device gradients and new values each have a flat buffer (`flat_buffer.py`): new values are in `Copier.landing` when
`land` copies them, and no bytes pass through the host.

`ParameterWatch` finds parameters that the script has written to, or given other memory, since this library wrote them last.
Torch counts writes to a tensor (its version), but not those through `.data` or NumPy. For these a sample of the values is
compared, another one in each step, so that writes in every step are found soon. Both cost microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch

from polytempo.device.device import Device
from polytempo.errors import UsageError
from polytempo.protocol.layout import Layout
from polytempo.protocol.training_troubles import ALIKE
from polytempo.protocol.values import TensorInfo
from polytempo.reducer.device_moves import Copies, copy_together, gather_views, staging_for
from polytempo.reducer.flat_buffer import FlatBuffer, Memory
from polytempo.server.optimizer_state import as_bytes, as_tensor, digest_of_bytes, dtype_name, is_same
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes

#: Bytes of the values that are compared in a step, and of how many parameters at most.
COMPARED = 64 << 10
AT_MOST = 16
#: When values are compared.
CAUSES = "a change in place, or the loss of a rank"


class ParameterWatch:
    """The parameters of one optimizer. `compares`: also find writes that torch does not count."""

    def __init__(self, params: Sequence[torch.Tensor], infos: Sequence[TensorInfo], compares: bool = False) -> None:
        self._params, self._infos = list(params), infos
        self._devices = [param.device for param in params]
        self._compares = compares and all(device.type == "cpu" for device in self._devices)
        self.touched = ""  #: the first parameter that something else was seen to write to; until that is dealt with
        self._anchor: Sequence[torch.Tensor] | None = None
        self._turn = 0  # where the comparing goes on
        self._compared: list[tuple[int, Bytes, bytes]] = []
        self._find_places()
        self.record()

    def is_clean(self) -> bool:
        """Has only this library written to them, as far as can be seen?"""
        self.see_writes()
        return not self.touched and not self._has_moved()

    def _find_places(self) -> None:
        """Note where the values lie. Holding the memory keeps its address from being reused."""
        self._held = [param.detach() for param in self._params]
        self._places = [param.data_ptr() for param in self._params]
        self._plain = [param.is_contiguous() for param in self._params]
        self._strides = [param.stride() for param, plain in zip(self._params, self._plain, strict=True) if not plain]
        self._bytes = {
            index: as_bytes(param)
            for index, param in enumerate(self._params)
            if self._compares and self._plain[index] and param.numel()
        }
        self._order = list(self._bytes)
        self._compared = []

    def record(self) -> None:
        """This library has written: remember versions and a sample of the values."""
        self._versions = [param._version for param in self._params]
        self._compared = []
        room = COMPARED
        while self._order and room > 0 and len(self._compared) < min(AT_MOST, len(self._order)):
            index = self._order[self._turn % len(self._order)]
            self._turn += 1
            data = self._bytes[index]
            start = (self._turn // len(self._order)) * room % data.nbytes if data.nbytes > room else 0
            part = data[start : start + room]
            self._compared.append((index, part, part.tobytes()))
            room -= part.nbytes

    def see_writes(self) -> None:
        """Note if something else has written to a parameter."""
        if self.touched or [param._version for param in self._params] == self._versions:
            return
        pairs = zip(self._params, self._versions, strict=True)
        self.touched = next(self._infos[i].name for i, (param, version) in enumerate(pairs) if param._version != version)

    def declare(self) -> None:
        """The script says that it has written."""
        self.touched = self.touched or self.name_of(0)

    def was_written(self, tensors: Sequence[torch.Tensor]) -> bool:
        """These tensors have other values than before, which torch may not have counted: are there parameters among them?"""
        places = {tensor.data_ptr() for tensor in tensors}
        written = [index for index, param in enumerate(self._params) if param.data_ptr() in places]
        if written and not self.touched:
            self.touched = self._infos[written[0]].name
        return bool(written)

    def look(self, compare: bool = True) -> bool:
        """Note writes; do values lie elsewhere than before? What does not fit any more is refused by name; so is, where it
        is to be compared, what was written uncounted."""
        self.see_writes()
        moved = self._has_moved()
        if moved:
            self._check_forms()
            self._find_places()
        elif compare and not self.touched:
            for index, part, before in self._compared:
                if part.tobytes() != before:
                    raise UsageError(
                        f"{self._infos[index].name} was written to through .data or NumPy, which torch does not count and "
                        "the next step() would undo; call optimizer.push_parameters() after each such write"
                    )
        return moved

    def _has_moved(self) -> bool:
        params = self._params
        return (
            [param.data_ptr() for param in params] != self._places
            or [param.is_contiguous() for param in params] != self._plain
            or [param.stride() for param, plain in zip(params, self._plain, strict=True) if not plain] != self._strides
        )

    def _check_forms(self) -> None:
        for index, (param, before) in enumerate(zip(self._params, self._held, strict=True)):
            now, was = _form(param), _form(before)
            if now != was:
                raise UsageError(
                    f"{self._infos[index].name} was {was} when the optimizer was wrapped and is {now} now; "
                    "cast, move and reshape a model before DistributedOptimizer()"
                )
            shared = self._compares and param.numel() and [p.data_ptr() for p in self._params].count(param.data_ptr()) > 1
            if shared and not param.is_set_to(before):
                raise UsageError(
                    f"{self._infos[index].name} was made to share memory with another parameter, and servers keep values "
                    "for each; tie them as one parameter before DistributedOptimizer()"
                )
            if not self.touched and not param.is_set_to(before) and not is_same(param.detach(), before):
                self.touched = self._infos[index].name

    def compare_by(self, tensors: Sequence[torch.Tensor]) -> None:
        """Where these start from an anchor, and differ between workers, that is what must be alike on all."""
        self._anchor = tensors

    @property
    def is_anchored(self) -> bool:
        """Are other tensors compared in their place?"""
        return self._anchor is not None

    def digests(self) -> bytes:
        """Eight bytes for the values of each parameter, or of its anchor: of what must be alike on all workers."""
        compared = self._params if self._anchor is None else self._anchor
        return b"".join(digest_of_bytes([as_bytes(tensor.detach().cpu())]) for tensor in compared)

    def check_alike(self, digests: Mapping[int, bytes], name: str = "") -> None:
        """Refuse values that are not the same on all workers.

        Args:
            digests: For each worker eight bytes for each parameter, or for all together.
            name: A parameter to name where there is one digest for all.
        """
        first = min(digests)
        for worker, theirs in digests.items():
            if theirs != digests[first]:
                unlike = (i for i in range(0, len(theirs), 8) if theirs[i : i + 8] != digests[first][i : i + 8])
                which = name or self.name_of(next(unlike) // 8)
                raise UsageError(f"workers {first} and {worker} hold different {which} after {CAUSES}; {ALIKE}")

    def name_of(self, index: int) -> str:
        """What a parameter is called."""
        return self._infos[index].name


def _form(tensor: torch.Tensor) -> str:
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}{device}"


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
            self.landing.receive(parts)
            self.land()
            return
        self.watch.see_writes()
        if self.staging is not None:
            self.staging.scatter(parts)
            if self.staging.others:
                self.landing.changed_all()
                self.landing.receive(parts)
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
            self.landing.receive(parts)
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

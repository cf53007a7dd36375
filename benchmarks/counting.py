"""What a rank moves and holds in a step, counted, to judge what was predicted.

Bytes are those that a rank hands to the transport, by axis: what it sends to other ranks and what it puts into shared memory
for them count alike (`Messaging.handed`, by the group of the message; `Reducer.handed` for the data axis).

Memory is counted by hooks on a stage: each piece of memory that autograd saves counts from its saving to its release, once,
without parameters and module buffers; so do the inputs and outputs of microbatches between forward and backward. On a GPU
`torch.cuda.max_memory_allocated` is there, too, for all that the process has on it.

While memory is counted, weight gradients are not deferred (`pipeline/weight_gradients.py` leaves saved tensors with hooks to
autograd).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from polytempo.pipeline.profiler import tensors_in
from polytempo.pipeline.stage import Stage
from polytempo.pipeline.stage_message import StageMessage
from polytempo.strategy.bytes_moved import RankBytes
from polytempo.strategy.measure import state_tensors
from polytempo.strategy.prediction import RankMemory


class ByteCounter:
    """The bytes of this rank by axis, since the counter was made. `handed`: all so far, as `DistributedModel.stats` has
    them."""

    def __init__(self, handed: Callable[[], Mapping[str, int]]) -> None:
        self._handed = handed
        self._before = dict(handed())

    def read(self) -> RankBytes:
        """Since the counter was made."""
        now = self._handed()
        return RankBytes(**{axis: now[axis] - self._before[axis] for axis in ("pipe", "tensor", "data")})


class HeldMemory:
    """Bytes of the memory that is held now, each piece once, and the most that was. `apart`: tensors that do not count."""

    def __init__(self, apart: Iterable[torch.Tensor]) -> None:
        self._apart = Counter(_address(tensor) for tensor in apart)
        self._holders: Counter[int] = Counter()  # by address
        self.bytes = self.peak = 0

    def hold(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Another holder of a tensor's memory; the result ends it."""
        where = _address(tensor)
        return self._held(where, tensor.untyped_storage().nbytes()) if where not in self._apart else _nothing

    def hold_view(self, tensor: torch.Tensor, nbytes: int) -> Callable[[], None]:
        """The same of a view of a whole batch: it counts as these bytes, and what else shares its storage as none."""
        where, end = _address(tensor), self._held(-tensor.data_ptr(), nbytes)
        self._apart[where] += 1

        def release() -> None:
            end()
            self._apart[where] -= 1
            if not self._apart[where]:
                del self._apart[where]

        return release

    def _held(self, where: int, nbytes: int) -> Callable[[], None]:
        self._holders[where] += 1
        if self._holders[where] == 1:
            self.bytes += nbytes
            self.peak = max(self.peak, self.bytes)

        def release() -> None:
            self._holders[where] -= 1
            if not self._holders[where]:
                self.bytes -= nbytes

        return release


def _nothing() -> None:
    pass


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


class _Saved:
    """A tensor that autograd has saved; its memory is held as long as this object is."""

    __slots__ = ("_release", "tensor")

    def __init__(self, memory: HeldMemory, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # the tensor itself would hold the graph that holds this object
        self._release = memory.hold(self.tensor)

    def __del__(self) -> None:
        self._release()


class MemoryCount:
    """The memory of a stage: parameters and optimizer state now, the most of gradients and activations while counted."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self.gradients = stage, 0
        self.allocated: int | None = None  #: on a GPU, at the end: the most that the process had there
        self.held = HeldMemory([*stage.params, *stage.part.module.buffers()])
        self._in_flight: dict[int, list[Callable[[], None]]] = {}

    def begin(self, number: int, inputs: StageMessage, target: Any) -> None:
        """A microbatch is there; its targets, which the script has, do not count."""
        given = [self.held.hold_view(value, value.nbytes) for value in tensors_in(inputs.values)]
        self._in_flight[number] = given + [self.held.hold_view(value, 0) for value in tensors_in(target)]

    def forwarded(self, number: int) -> None:
        """Its outputs are kept for its backward."""
        outputs = self._stage.in_flight[number].outputs
        self._in_flight[number] += [self.held.hold(value) for value in tensors_in(outputs)]

    def ended(self, number: int) -> None:
        """Its backward is done."""
        for release in self._in_flight.pop(number):
            release()

    def see_gradients(self) -> None:
        """Before an update, all gradients are there."""
        found = [param.grad for param in self._stage.params if param.grad is not None]
        self.gradients = max(self.gradients, sum(gradient.nbytes for gradient in found))

    def read(self) -> RankMemory:
        """All that was counted."""
        optimizer = self._stage.optimizer
        return RankMemory(
            parameters=sum(param.nbytes for param in self._stage.params),
            gradients=self.gradients,
            state=sum(tensor.nbytes for tensor in state_tensors(optimizer)) if optimizer is not None else 0,
            activations=self.held.peak,
        )


@contextmanager
def counted_memory(stage: Stage) -> Iterator[MemoryCount]:
    """Count the memory of the steps that this thread makes in here.

    Args:
        stage: The stage of this rank.

    Yields:
        The count, to be read at the end.
    """
    count = MemoryCount(stage)
    forward, backward, update = stage.forward, stage.backward, stage.update

    def counted_forward(number: int, inputs: StageMessage, target: Any = None, recompute: bool = False) -> StageMessage:
        count.begin(number, inputs, target)
        out = forward(number, inputs, target, recompute)
        count.forwarded(number)
        return out

    def counted_backward(number: int, *given: Any) -> StageMessage:
        back = backward(number, *given)
        count.ended(number)
        return back

    def counted_update() -> None:
        count.see_gradients()
        update()

    own: Any = stage
    if stage.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(stage.device)
    own.forward, own.backward, own.update = counted_forward, counted_backward, counted_update
    try:
        with torch.autograd.graph.saved_tensors_hooks(partial(_Saved, count.held), attrgetter("tensor")):
            yield count
    finally:
        for name in ("forward", "backward", "update"):
            delattr(own, name)
        if stage.device.type == "cuda":
            count.allocated = torch.cuda.max_memory_allocated(stage.device)

"""A model measured layer by layer, for the planner: seconds of forward and backward, and bytes.

Layers are those that a pipeline can be cut between (`partition.py`). Each runs by itself on what the layer before gave, once
to warm up and then some more times; the medians count, without the time in which other processes had the core. Only the
layer under measurement is moved to the device, so a model can be measured that does not fit there. What a layer keeps for
its backward is what torch saves, each piece of memory once, without weights, statistics and its input, which the layer
before has counted. A tied weight counts wherever it is used. Afterwards the model is as it was: weights, gradients, running
statistics, and the state of the random generator.

Departure from the paper: it measures over many minibatches of the data; here one example stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time, thread_time
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from polytempo.errors import PolytempoError, UsageError
from polytempo.pipeline.layer_profile import Layer, Profile
from polytempo.pipeline.partition import ModelPart, layers_of

Device: TypeAlias = torch.device | str | None


def profile(
    model: nn.Module | Sequence[nn.Module],
    example: Any,
    *,
    repeats: int = 5,
    batch: int | None = None,
    progress: Callable[[float], None] | None = None,
    device: Device = None,
) -> Profile:
    """Measure every layer on an example of the inputs (a tensor, or a tuple of them), in the mode that the model is in.

    `batch`: the number of samples of the example, if not its first dimension. `progress` is called with the share done.
    `device`: where to measure, if not where the model is.
    """
    if repeats < 1:
        raise UsageError(f"expected repeats, how often each layer is measured, to be at least 1, got {repeats}")
    inputs = tuple(example) if isinstance(example, tuple | list) else (example,)
    if batch is None:
        first = next((value for value in tensors_in(inputs) if value.dim()), None)
        if first is None:
            kinds = ", ".join(type(value).__name__ for value in inputs)
            raise UsageError(
                f"expected an example with a tensor of samples, got ({kinds}); give the model's inputs, or batch="
            )
        batch = int(first.shape[0])
    chain = layers_of(model, inputs)
    count, layers = len(chain.costs), []
    parts = [chain.part(number, number + 1) for number in range(count)]
    for measured in measure_parts(list(zip(chain.names, parts, strict=True)), inputs, repeats=repeats, device=device):
        layers.append(measured.layer)
        if progress is not None:
            progress(len(layers) / count)
    return Profile(type(model).__name__ if isinstance(model, nn.Module) else "model", tuple(layers), batch)


@dataclass(frozen=True)
class MeasuredPart:
    """A measured part of a model. `runs`: how often it ran forward and backward; `core_share`: the part of its seconds in
    which it kept a core busy, and did not sleep or wait for a device; `input_saved`: bytes of its input that its backward
    needs; `output_unsaved`: bytes of its output that its own backward does not need."""

    layer: Layer
    runs: int
    core_share: float
    input_saved: int
    output_unsaved: int


def measure_parts(
    parts: Sequence[tuple[str, ModelPart]],
    inputs: tuple[Any, ...],
    *,
    repeats: int = 5,
    device: Device = None,
    seconds: float | None = None,
) -> Iterator[MeasuredPart]:
    """Measure parts by name, each on what the one before gave, when it is asked for. `seconds`: repeats end when this share
    of time for each part is used up."""
    value: Any = inputs if parts[0][1].spreads or len(inputs) > 1 else inputs[0]
    # The devices whose random generators the model may use.
    places = {param.device for _, part in parts for _, param in part.parameters()}
    places |= {torch.device(device)} if device is not None else set()
    for name, part in parts:
        with torch.random.fork_rng(devices=[place for place in places if place.type == "cuda"]):
            measured, value = _measured_or_refused(name, part, value, repeats, device, seconds)
        yield measured


def _measured_or_refused(
    name: str, part: ModelPart, value: Any, repeats: int, device: Device, seconds: float | None
) -> tuple[MeasuredPart, Any]:
    try:
        with _borrowed(part.module, device):
            if device is not None:
                value = mapped_tensors(lambda one: one.detach().to(device).requires_grad_(one.requires_grad), value)
            return _measured(name, part, value, repeats, seconds)
    except PolytempoError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as problem:
        said = " ".join(str(problem).split())[:200]
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(value))
        raise UsageError(
            f"layer {name!r} cannot be run on the example: it got {shapes or type(value).__name__} and said "
            f"{type(problem).__name__}: {said}; give an example that the model accepts"
        ) from problem


def _measured(name: str, part: ModelPart, value: Any, repeats: int, seconds: float | None) -> tuple[MeasuredPart, Any]:
    params = {param: None for _, param in part.parameters()}
    made: dict[int, int] = {}  # the memory that autograd saves for backward

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        made.update([_memory(tensor)])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        inputs = _fresh(value, part.changes_its_input())
        output = _called(part, inputs)
    given = dict(_memory(tensor) for tensor in tensors_in(inputs))
    known = {_memory(tensor)[0] for tensor in (*params, *part.module.buffers())} | set(given)
    input_saved = sum(size for where, size in given.items() if where in made)
    passed = dict(_memory(tensor) for tensor in tensors_in(output))
    output_unsaved = sum(size for where, size in passed.items() if where not in known | set(made))
    made |= passed
    gradients = [torch.ones_like(tensor) if tensor.requires_grad else None for tensor in tensors_in(output)]
    _backward(output, gradients)
    times: list[_Times] = []
    while len(times) < repeats and not (seconds is not None and times and sum(map(_wall, times)) > seconds):
        times.append(_timed(part, value, gradients))
    spread = None
    if len(times) >= 3:  # half of the interquartile range: one slow measurement in five does not change it
        low, _, high = quantiles([_wall(one) for one in times], n=4, method="inclusive")
        spread = (high - low) / 2
    layer = Layer(
        name,
        median(one.forward for one in times),
        median(one.backward for one in times),
        sum(tensor.nbytes for tensor in tensors_in(output)),
        sum(param.nbytes for param in params),
        sum(size for where, size in made.items() if where not in known),
        spread,
    )
    fastest = min(times, key=_wall)  # which other processes have disturbed least
    share = min(1.0, fastest.cpu / max(1e-9, _wall(fastest)))
    return MeasuredPart(layer, 1 + len(times), share, input_saved, output_unsaved), output


class _Times(NamedTuple):
    """Seconds of one forward and of its backward, and of both on all cores of this process."""

    forward: float
    backward: float
    cpu: float


def _wall(times: _Times) -> float:
    return times.forward + times.backward


def _timed(part: ModelPart, value: Any, gradients: Sequence[torch.Tensor | None]) -> _Times:
    inputs = _fresh(value, part.changes_its_input())
    devices = {tensor.device for tensor in tensors_in(inputs) if tensor.is_cuda}
    busy = process_time()
    forward = Undisturbed(devices)
    output = _called(part, inputs)
    forward.end()
    backward = Undisturbed(devices)
    _backward(output, gradients)
    backward.end()
    return _Times(forward.seconds, backward.seconds, process_time() - busy)


class Undisturbed:
    """Seconds until `end`, without those for which this thread was ready and other processes had its core."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._devices, self.seconds = devices, 0.0
        self._queued, self._cpu, self._started = queued_seconds(), thread_time(), _now(devices)

    def end(self) -> None:
        """Stop the clock."""
        wall, cpu = _now(self._devices) - self._started, thread_time() - self._cpu
        # Some of the queueing may have been just before or after: it was no less than the time on the core.
        self.seconds = max(wall - (queued_seconds() - self._queued), min(wall, cpu))


def queued_seconds() -> float:
    """Seconds for which this thread has been ready without a core so far; 0 where the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _now(devices: set[torch.device]) -> float:
    """The time when all work on the device is complete."""
    for device in devices:
        torch.cuda.synchronize(device)
    return perf_counter()


def _called(part: ModelPart, value: Any) -> Any:
    return part.module(*value) if part.spreads else part.module(value)


def _backward(output: Any, gradients: Sequence[torch.Tensor | None]) -> None:
    outputs = tensors_in(output)
    pairs = [(one, gradient) for one, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    if pairs:
        torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])


# Memory.


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the storage of a tensor, and its bytes."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@contextmanager
def _borrowed(module: nn.Module, device: Device) -> Iterator[None]:
    """A layer on a device and without gradients; afterwards its device and gradients are restored."""
    params = [(param, param.data, param.grad) for param in module.parameters()]
    owners = [(owner, name, buffer) for owner in module.modules() for name, buffer in owner.named_buffers(recurse=False)]
    contents = [buffer.clone() for _, _, buffer in owners]
    for param, _, _ in params:
        param.grad = None
    try:
        if device is not None:
            module.to(device)
        yield
    finally:
        for param, data, gradient in params:
            param.data, param.grad = data, gradient
        for (owner, name, buffer), content in zip(owners, contents, strict=True):
            buffer.data.copy_(content)
            owner._buffers[name] = buffer


# Values between layers: tensors, and tuples, lists and dicts of them.


def mapped_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same structure with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped_tensors(change, one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        changed = [mapped_tensors(change, one) for one in value]
        return changed if isinstance(value, list) else tuple(changed)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in tuples, lists and dicts."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped_tensors(collect, value)
    return found


def _fresh(value: Any, copied: bool) -> Any:
    """The same values, detached. `copied`: for a layer that changes its input."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.detach().requires_grad_(tensor.requires_grad)
        return leaf.clone() if copied else leaf

    return mapped_tensors(change, value)

"""One stage: its part of the model, its optimizer, microbatches in flight, and versions of its weights (weight stashing).

Where updates happen while microbatches are in flight (PipeDream), forwards run on aliases: other leaf parameters that share
the memory of the module's parameters. If microbatches in flight still need the present version, an update first moves the
parameters to new memory: the aliases keep the old version for those backwards, so no backward has to restore anything.
(Hooks on parameters do not see this.) A version is freed with its last reader. Buffers (running statistics) have no
versions: BatchNorm normalises each microbatch by its own statistics, and counts each once.

A backward may defer weight gradients (`weight_gradients.py`): `run_deferred` computes a piece of them. An update needs all.
The only stage of a pipeline defers none: no other waits for the gradient of its input.

Where the optimizer is a `DistributedOptimizer`, whose steps replicas of the model take together, the stage is one of several
on the data axis, and a step is told its number of examples. A gradient may leave this rank as soon as it is complete: in the
last backward of an update, or, where parts of it are deferred, when the last of them is added. It leaves once, however many
microbatches there are. Where it still changes after that (tied copies, clipping), nothing leaves before the step.

Dropout draws from a generator seeded for each microbatch and stage: masks depend neither on the schedule, nor on replicas,
nor on whether a forward is recomputed.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polytempo.errors import UsageError
from polytempo.pipeline.partition import ModelPart
from polytempo.pipeline.stage_message import StageMessage
from polytempo.pipeline.weight_gradients import SplitBackward, WeightGradient, call_hooks, may_split
from polytempo.train.optimizer import DistributedOptimizer


class DataAxis:
    """Of one stage. `defers`: its backwards may leave weight gradients for later."""

    def __init__(self, optimizer: DistributedOptimizer, defers: bool) -> None:
        self.optimizer, self._defers = optimizer, defers
        self.sends_early = True  #: may gradients leave before the step?
        # After the last backward of an update: how many deferred pieces are still to be added to each gradient.
        self._waiting: Counter[nn.Parameter] = Counter()

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """The context of a backward: no gradient leaves in it but in the `last` of an update, if autograd completes all."""
        return nullcontext() if last and self.sends_early and not self._defers else self.optimizer.no_sync()

    def last_backward_done(self, params: Sequence[nn.Parameter], deferred: Iterable[WeightGradient]) -> None:
        """Gradients to which no deferred piece is to be added are complete."""
        if not self.sends_early or not self._defers:
            return
        self._waiting = Counter(leaf for piece in deferred for leaf in piece.leaves)
        for param in params:
            if param.grad is not None and param not in self._waiting:
                call_hooks(param)

    def added(self, piece: WeightGradient) -> None:
        """A deferred piece was added to its gradients."""
        for leaf in piece.leaves if self._waiting else ():
            self._waiting[leaf] -= 1
            if not self._waiting[leaf]:
                del self._waiting[leaf]
                call_hooks(leaf)

    def average(self, samples: float) -> None:
        """Make the gradients the mean over the replicas, where the mode averages gradients."""
        can = self.optimizer.spec.capabilities
        if can.rounds and not can.averages:
            self.optimizer.synchronize(samples)


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass
class MicrobatchInFlight:
    """A microbatch between its forward and its backward. Without `outputs` the backward recomputes the forward."""

    version: int
    inputs: StageMessage
    target: Any
    outputs: list[Any] | None


@dataclass
class DeferredBackward:
    """The deferred weight gradients of a microbatch."""

    number: int
    version: int
    pieces: deque[WeightGradient]


class Stage:
    """`stashing`: updates happen while microbatches are in flight. `vertical_sync`: the first stage decides the version of a
    microbatch for all. `divisor`: gradients are those of the loss divided by this. `alone`: there is no other stage."""

    def __init__(
        self,
        part: ModelPart,
        number: int,
        make_optimizer: MakeOptimizer,
        loss: Loss | None,
        *,
        stashing: bool = False,
        vertical_sync: bool = False,
        divisor: int = 1,
        seed: int = 0,
        device: torch.device | None = None,
        alone: bool = False,
    ) -> None:
        self.part, self.number, self.loss, self.seed = part, number, loss, seed
        self.divisor = divisor
        self._vertical_sync = vertical_sync and number > 0
        if device is not None:
            part.module.to(device)
        self.params = list(dict.fromkeys(param for _, param in part.parameters()))
        self._names = {param: name for name, param in part.parameters()}
        tensors = [*self.params, *part.module.buffers()]
        self.device = device or (tensors[0].device if tensors else torch.device("cpu"))
        self.optimizer = make_optimizer(self.params) if self.params else None
        self.samples = 0.0  #: examples of the backwards since the last update
        self._losses: Any = 0.0  # of these, summed over examples, on the last stage
        self.version = 0
        self.backwards = 0  #: since the last update
        self.updating = False  #: the weights may be those of no version
        self.in_flight: dict[int, MicrobatchInFlight] = {}
        self.deferred: deque[DeferredBackward] = deque()
        self.peak_in_flight = 0
        self.peak_versions = 1
        self._slots = list(_parameter_slots(part.module, self.params))
        self._stashing = stashing
        self._weights = {0: self._aliases() if stashing else self.params}  # by version
        self._active = -1 if stashing else 0  # the version that the module computes with
        self._oldest = 0  # version that a forward may still need
        self._in_place = part.changes_its_input()
        self._split = SplitBackward() if may_split(part.module) and not alone else None
        self.data_axis: DataAxis | None = None  #: where the optimizer's steps are taken together with other replicas
        if isinstance(self.optimizer, DistributedOptimizer):
            self.data_axis = DataAxis(self.optimizer, self._split is not None)

    @property
    def distributed(self) -> DistributedOptimizer | None:
        """The optimizer, where its steps are taken together with other replicas."""
        return self.data_axis.optimizer if self.data_axis is not None else None

    # Forward and backward.

    def forward(self, number: int, inputs: StageMessage, target: Any = None, recompute: bool = False) -> StageMessage:
        """The output of this part, or the loss. `recompute`: keep the input only."""
        version = inputs.version if self._vertical_sync else self.version
        microbatch = MicrobatchInFlight(version, inputs, target, None)
        with torch.set_grad_enabled(not recompute):
            outputs, single = self._compute(number, microbatch)
        if not recompute:
            microbatch.outputs = outputs
        self.in_flight[number] = microbatch
        self._oldest = version
        self.peak_in_flight = max(self.peak_in_flight, len(self.in_flight))
        passed = [_with_gradient(value) if recompute else value for value in outputs]
        return StageMessage(passed, single, number, version, inputs.figure)

    def _compute(self, number: int, microbatch: MicrobatchInFlight) -> tuple[list[Any], bool]:
        self._activate(microbatch.version)
        seed(mixed(self.seed, number, self.number), self.device)
        with self._split or nullcontext():
            result = self._call(microbatch.inputs)
            if self.loss is not None:
                return [scalar(self.loss(result, microbatch.target))], True
        single = not isinstance(result, tuple | list)
        return ([result] if single else list(result)), single

    def _call(self, inputs: StageMessage) -> Any:
        apart = self._in_place
        values = [value.clone() if apart and isinstance(value, torch.Tensor) else value for value in inputs.values]
        if inputs.single:
            return self.part.module(values[0])
        return self.part.module(*values) if self.part.spreads else self.part.module(tuple(values))

    def infer(self, inputs: StageMessage) -> Any:
        """The output of this part with the newest weights, without training."""
        self._activate(self.version)
        return self._call(inputs)

    def backward(self, number: int, gradients: StageMessage | None, last: bool = False) -> StageMessage:
        """The gradients of the inputs; those of the parameters are accumulated, or deferred. `last`: before the update."""
        microbatch = self.in_flight.pop(number)
        if microbatch.outputs is None:
            with self._buffers_apart():
                microbatch.outputs, _ = self._compute(number, microbatch)
        outputs = microbatch.outputs
        given = gradients.values if gradients is not None else [torch.full_like(outputs[0], 1 / self.divisor)]
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, given, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad and gradient is not None
        ]
        pieces: list[WeightGradient] = []
        if pairs:
            with self.data_axis.accumulating(last) if self.data_axis else nullcontext(), self._deferring(pieces):
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        self.backwards += 1
        self.samples += microbatch.inputs.figure
        if self.loss is not None:
            self._losses = self._losses + outputs[0].detach() * microbatch.inputs.figure
        if pieces:
            self.deferred.append(DeferredBackward(number, microbatch.version, deque(pieces)))
        elif microbatch.version != self.version:
            self._collect(microbatch.version)
        if last and self.data_axis is not None:
            self.data_axis.last_backward_done(self.params, (piece for one in self.deferred for piece in one.pieces))
        inputs = microbatch.inputs.values if self.number else []  # the batch itself needs no gradient
        back = [value.grad if isinstance(value, torch.Tensor) else None for value in inputs]
        self._free_versions()
        return StageMessage(back, number=number, version=microbatch.version)

    @contextmanager
    def _deferring(self, pieces: list[WeightGradient]) -> Iterator[None]:
        """Weight gradients of backwards in here are appended to `pieces`, where the part can be split."""
        if self._split is None:
            yield
            return
        self._split.deferred = pieces
        try:
            yield
        finally:
            self._split.deferred = None

    def deferred_pieces(self, number: int) -> int:
        """The number of deferred pieces of a microbatch whose backward has just run."""
        return len(self.deferred[-1].pieces) if self.deferred and self.deferred[-1].number == number else 0

    def run_deferred(self) -> int:
        """Compute a deferred piece, the oldest first; returns the version of its weights."""
        oldest = self.deferred[0]
        piece = oldest.pieces.popleft()
        piece.compute()
        if self.data_axis is not None:
            self.data_axis.added(piece)
        if not oldest.pieces:
            self.deferred.popleft()
            if oldest.version != self.version:
                self._collect(oldest.version)
            self._free_versions()
        return oldest.version

    # Updates.

    def collect(self) -> list[nn.Parameter]:
        """The parameters, with all gradients since the last update accumulated; none is deferred."""
        self._collect(self.version)
        return self.params

    def update(self) -> None:
        """A step of the optimizer, which makes a new version. If the present one is still read, step into a copy."""
        self.updating = True
        read = self._vertical_sync or any(one.version == self.version for one in self.in_flight.values())
        if self._stashing and read:
            for param in self.params:
                param.data = param.data.clone()
        if self.data_axis is not None:
            loss = None if self.loss is None or not self.samples else self._losses / self.samples
            self.data_axis.optimizer.step(samples=self.samples, loss=loss)
        elif self.optimizer is not None:
            self.optimizer.step()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        old, self.version, self.backwards, self.samples, self._losses = self.version, self.version + 1, 0, 0.0, 0.0
        self._weights[self.version] = self._aliases() if self._stashing and read else self._weights[old]
        if not read:
            del self._weights[old]
            self._active = self.version if self._active == old else self._active
        self._free_versions()
        self.peak_versions = max(self.peak_versions, len(self._weights))
        self.updating = False

    def check_memory(self) -> None:
        """Refuse parameters that were moved to other memory: updates would not reach the versions that compute."""
        for param, leaf in zip(self.params, self._weights[self.version], strict=True):
            if leaf is not param and leaf.data_ptr() != param.data_ptr():
                raise UsageError(
                    f"{self._names[param]} was moved to other memory after the pipeline was built, which weight versions do "
                    "not follow; convert the model before Pipeline(), set values by pipe.load_state_dict()"
                )

    def settle(self) -> None:
        """No microbatch is in flight on any stage: old versions are freed."""
        self._oldest = self.version
        self._free_versions()

    @property
    def versions(self) -> int:
        """The number of versions of the weights that are held now."""
        return len(self._weights)

    def _free_versions(self) -> None:
        deferred = (one.version for one in self.deferred)
        needed = {self.version, *deferred, *(one.version for one in self.in_flight.values())}
        for version in [*self._weights]:
            if version not in needed and not (self._vertical_sync and version >= self._oldest):
                del self._weights[version]

    def _aliases(self) -> list[nn.Parameter]:
        """Other leaf parameters with the present memory of the parameters."""
        return [nn.Parameter(param.data, requires_grad=param.requires_grad) for param in self.params]

    def _collect(self, version: int) -> None:
        for param, leaf in zip(self.params, self._weights[version], strict=True):
            if leaf is not param and leaf.grad is not None:
                param.grad = leaf.grad if param.grad is None else param.grad + leaf.grad
                leaf.grad = None

    def _activate(self, version: int) -> None:
        if version != self._active:
            for module, name, index in self._slots:
                setattr(module, name, self._weights[version][index])
            self._active = version

    # The state.

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers now, by their names in the whole model."""
        self._activate(self.version)
        return self.part.state()

    def reset_versions(self, version: int | None = None) -> None:
        """Parameters were loaded between steps: drop all other versions and microbatches."""
        self.version = self.version if version is None else version
        self._weights = {self.version: self._aliases() if self._stashing else self.params}
        self._active, self._oldest = -1, self.version
        self.in_flight.clear()
        self.deferred.clear()
        self.backwards, self.samples, self._losses = 0, 0.0, 0.0

    @contextmanager
    def _buffers_apart(self) -> Iterator[None]:
        """A recomputed forward does not change running statistics: they have counted this microbatch."""
        places = [
            (module, name, buffer) for module in self.part.module.modules() for name, buffer in module._buffers.items()
        ]
        for module, name, buffer in places:
            module._buffers[name] = None if buffer is None else buffer.clone()
        try:
            yield
        finally:
            for module, name, buffer in places:
                module._buffers[name] = buffer


def _parameter_slots(module: nn.Module, params: list[nn.Parameter]) -> Iterator[tuple[nn.Module, str, int]]:
    """Where in the module each parameter is registered: module, attribute, index."""
    index = {param: at for at, param in enumerate(params)}
    for member in module.modules():
        for name, param in member._parameters.items():
            if param is not None:
                yield member, name, index[param]


def _with_gradient(value: Any) -> Any:
    """An output that was computed without a graph, marked to receive a gradient."""
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.detach().requires_grad_()
    return value


def scalar(loss: Any) -> torch.Tensor:
    """A loss, checked to be one number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(f"expected the loss to be one number, the mean over a microbatch; got {got}; use reduction='mean'")
    return loss


@contextmanager
def drawing_apart(device: torch.device) -> Iterator[None]:
    """Restore the random generators afterwards: seeds and draws in here do not change them."""
    before = torch.default_generator.get_state()
    with torch.random.fork_rng(devices=[device]) if device.type == "cuda" else nullcontext():
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


def seed(number: int, device: torch.device) -> None:
    """Seed the generators that this device's layers draw from. (torch.manual_seed seeds all kinds of devices: 0.3 ms.)"""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def mixed(seed: int, number: int, stage: int) -> int:
    """The seed of a microbatch at a stage."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number} {stage}".encode(), digest_size=7).digest(), "little")

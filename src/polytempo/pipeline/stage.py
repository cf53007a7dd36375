"""One stage: its part of the model, its optimizer, what it keeps between forward and backward, and versions of its weights.

Where updates happen while microbatches are under way, forwards run on stand-ins of the parameters, which share their memory.
An update that somebody still reads behind moves the parameters to new memory first: the stand-ins keep the old version
for those backwards, and no backward needs anything put back. (Hooks on parameters see nothing of this.) A version goes
with its last reader. Buffers (running statistics) have no versions: BatchNorm normalises each microbatch by its own
statistics, and counts each once.

A backward may leave gradients of weights for later (`weight_gradients.py`): `catch_up` does a piece of that. An update
needs all of it.

Dropout draws from a generator seeded for each microbatch and stage: masks depend neither on the schedule, nor on replicas,
nor on whether a forward is made again.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polytempo.errors import UsageError
from polytempo.pipeline.model_part import ModelPart
from polytempo.pipeline.stage_message import StageMessage
from polytempo.pipeline.weight_gradients import Job, SplitBackward, may_split

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass
class Kept:
    """A microbatch between its forward and its backward. Without `outputs` the forward is made again."""

    version: int
    inputs: StageMessage
    target: Any
    outputs: list[Any] | None


@dataclass
class Owed:
    """What is left of the backward of a microbatch."""

    number: int
    version: int
    jobs: deque[Job]


class Stage:
    """`versioned`: updates happen while microbatches are under way. `told`: which version to use comes from before.
    `share`: gradients are those of a loss divided by this."""

    def __init__(
        self,
        part: ModelPart,
        number: int,
        make_optimizer: MakeOptimizer,
        loss: Loss | None,
        *,
        versioned: bool = False,
        told: bool = False,
        share: int = 1,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.part, self.number, self.loss, self.seed = part, number, loss, seed
        self.share = share
        self._told = told and number > 0
        if device is not None:
            part.module.to(device)
        self.params = list(dict.fromkeys(param for _, param in part.parameters()))
        self._names = {param: name for name, param in part.parameters()}
        tensors = [*self.params, *part.module.buffers()]
        self.device = device or (tensors[0].device if tensors else torch.device("cpu"))
        self.optimizer = make_optimizer(self.params) if self.params else None
        self.version = 0
        self.backwards = 0  #: since the last update
        self.updating = False  #: weights may be those of no version
        self.kept: dict[int, Kept] = {}
        self.owed: deque[Owed] = deque()
        self.most_kept = 0  #: microbatches under way at once
        self.most_versions = 1
        self._spots = list(_spots(part.module, self.params))
        self._versioned = versioned
        self._weights = {0: self._stand_ins() if versioned else self.params}
        self._in_use = -1 if versioned else 0
        self._oldest = 0  # that a forward may still ask for
        self._in_place = part.changes_its_input()
        self._split = SplitBackward() if may_split(part.module) else None

    # Forward and backward.

    def forward(self, number: int, inputs: StageMessage, target: Any = None, again: bool = False) -> StageMessage:
        """The output of this part, or the loss. `again`: keep the input only."""
        version = inputs.version if self._told else self.version
        kept = Kept(version, inputs, target, None)
        with torch.set_grad_enabled(not again):
            outputs, single = self._compute(number, kept)
        if not again:
            kept.outputs = outputs
        self.kept[number] = kept
        self._oldest = version
        self.most_kept = max(self.most_kept, len(self.kept))
        passed = [_wanting(value) if again else value for value in outputs]
        return StageMessage(passed, single, number, version)

    def _compute(self, number: int, kept: Kept) -> tuple[list[Any], bool]:
        self._use(kept.version)
        seed(mixed(self.seed, number, self.number), self.device)
        with self._split or nullcontext():
            result = self._called(kept.inputs)
            if self.loss is not None:
                return [scalar(self.loss(result, kept.target))], True
        single = not isinstance(result, tuple | list)
        return ([result] if single else list(result)), single

    def _called(self, inputs: StageMessage) -> Any:
        values = [_copied(value) if self._in_place else value for value in inputs.values]
        if inputs.single:
            return self.part.module(values[0])
        return self.part.module(*values) if self.part.spreads else self.part.module(tuple(values))

    def infer(self, inputs: StageMessage) -> Any:
        """The output of this part with the newest weights; nothing is kept."""
        self._use(self.version)
        return self._called(inputs)

    def backward(self, number: int, gradients: StageMessage | None) -> StageMessage:
        """The gradients of what came in; those of the parameters are added to what is there, or owed."""
        kept = self.kept.pop(number)
        if kept.outputs is None:
            with self._buffers_apart():
                kept.outputs, _ = self._compute(number, kept)
        given = gradients.values if gradients is not None else [torch.full_like(kept.outputs[0], 1 / self.share)]
        pairs = [
            (output, gradient)
            for output, gradient in zip(kept.outputs, given, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad and gradient is not None
        ]
        jobs: list[Job] = []
        if pairs:
            with self._owing(jobs):
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        self.backwards += 1
        if jobs:
            self.owed.append(Owed(number, kept.version, deque(jobs)))
        elif kept.version != self.version:
            self._collect(kept.version)
        given = kept.inputs.values if self.number else []  # nobody wants the gradient of the batch
        back = [value.grad if isinstance(value, torch.Tensor) else None for value in given]
        self._forget()
        return StageMessage(back, number=number, version=kept.version)

    @contextmanager
    def _owing(self, jobs: list[Job]) -> Iterator[None]:
        if self._split is None:
            yield
            return
        self._split.jobs = jobs
        try:
            yield
        finally:
            self._split.jobs = None

    def owes(self, number: int) -> int:
        """How many pieces, for a microbatch that had its backward just now."""
        return len(self.owed[-1].jobs) if self.owed and self.owed[-1].number == number else 0

    def catch_up(self) -> int:
        """Do a piece of what is owed, the oldest first; with which version."""
        oldest = self.owed[0]
        oldest.jobs.popleft().do()
        if not oldest.jobs:
            self.owed.popleft()
            if oldest.version != self.version:
                self._collect(oldest.version)
            self._forget()
        return oldest.version

    # Updates.

    def collect(self) -> list[nn.Parameter]:
        """The parameters, with all gradients since the last update added up; nothing is owed."""
        self._collect(self.version)
        return self.params

    def update(self) -> None:
        """A step of the optimizer: a new version."""
        self.updating = True
        read = self._told or any(kept.version == self.version for kept in self.kept.values())
        if self._versioned and read:
            for param in self.params:
                param.data = param.data.clone()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        old, self.version, self.backwards = self.version, self.version + 1, 0
        self._weights[self.version] = self._stand_ins() if self._versioned and read else self._weights[old]
        if not read:
            del self._weights[old]
            self._in_use = self.version if self._in_use == old else self._in_use
        self._forget()
        self.most_versions = max(self.most_versions, len(self._weights))
        self.updating = False

    def check_memory(self) -> None:
        """Refuse parameters that were given other memory: updates would not reach what computes."""
        for param, leaf in zip(self.params, self._weights[self.version], strict=True):
            if leaf is not param and leaf.data_ptr() != param.data_ptr():
                raise UsageError(
                    f"{self._names[param]} was given other memory after the pipeline was built, which versions of weights "
                    "do not follow; convert the model before Pipeline(), set values by pipe.load_state_dict()"
                )

    def settle(self) -> None:
        """Nothing is under way anywhere: nobody asks for an old version any more."""
        self._oldest = self.version
        self._forget()

    @property
    def versions(self) -> int:
        """How many versions of the weights are held now."""
        return len(self._weights)

    def _forget(self) -> None:
        """Let go of versions that nobody can read any more."""
        needed = {self.version, *(kept.version for kept in self.kept.values()), *(owed.version for owed in self.owed)}
        for version in [*self._weights]:
            if version not in needed and not (self._told and version >= self._oldest):
                del self._weights[version]

    def _stand_ins(self) -> list[nn.Parameter]:
        """Other leaves with the memory of the parameters, as it is now."""
        return [nn.Parameter(param.data, requires_grad=param.requires_grad) for param in self.params]

    def _collect(self, version: int) -> None:
        for param, leaf in zip(self.params, self._weights[version], strict=True):
            if leaf is not param and leaf.grad is not None:
                param.grad = leaf.grad if param.grad is None else param.grad + leaf.grad
                leaf.grad = None

    def _use(self, version: int) -> None:
        """Let the module compute with a version of the weights."""
        if version != self._in_use:
            for module, name, index in self._spots:
                setattr(module, name, self._weights[version][index])
            self._in_use = version

    # The state.

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers now, by their names in the whole model."""
        self._use(self.version)
        return self.part.state()

    def renew(self, version: int | None = None) -> None:
        """Parameters were written to from outside, between steps: all that is kept is gone."""
        self.version = self.version if version is None else version
        self._weights = {self.version: self._stand_ins() if self._versioned else self.params}
        self._in_use, self._oldest = -1, self.version
        self.kept.clear()
        self.owed.clear()

    @contextmanager
    def _buffers_apart(self) -> Iterator[None]:
        """A forward that is made again does not count: running statistics have seen this microbatch."""
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


def _spots(module: nn.Module, params: list[nn.Parameter]) -> Iterator[tuple[nn.Module, str, int]]:
    """Where in the module each parameter stands: module, attribute, index."""
    index = {param: at for at, param in enumerate(params)}
    for member in module.modules():
        for name, param in member._parameters.items():
            if param is not None:
                yield member, name, index[param]


def _wanting(value: Any) -> Any:
    """An output that was computed without a graph, but will have one."""
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.detach().requires_grad_()
    return value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def scalar(loss: Any) -> torch.Tensor:
    """A loss, if it is one number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(f"expected the loss to be one number, the mean over a microbatch; got {got}; use reduction='mean'")
    return loss


@contextmanager
def drawing_apart(device: torch.device) -> Iterator[None]:
    """Whatever is seeded and drawn here: generators go on afterwards as if nothing had been."""
    before = torch.default_generator.get_state()
    with torch.random.fork_rng(devices=[device]) if device.type == "cuda" else nullcontext():
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


def seed(number: int, device: torch.device) -> None:
    """Seed the generators that this device's layers draw from. (torch's own function asks all kinds of devices: 0.3 ms.)"""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def mixed(seed: int, number: int, stage: int) -> int:
    """A seed for a microbatch at a stage."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number} {stage}".encode(), digest_size=7).digest(), "little")

"""Gradients beside a simulated run, on the weights each simulated worker would have held, and the updates made of them.

There are two copies of the model: the *master*, to which the optimizer applies updates, and the *worker*, into which the
weights of a step are loaded to compute its gradient. The gradient of a step is computed when its push is applied. One copy
is kept of each version that a worker may still read: the newest lives in the model's own tensors and is copied only when it
is about to change while it has readers; all readers of a version share its copy, and the copy is freed with the last of
them.

An update of one push takes its gradient as it is; of several, their mean weighted by samples, added in the order of the
pushes. The learning rate of every group is multiplied by `rate` for that one step. Corrections of staleness beyond the rate
are made here: the gradient is compensated for the updates since its weights were read, and the momentum of every group is
corrected for that one step. (torch's SGD leaves its velocity alone in a step whose momentum is 0.) Where workers keep
momentum of their own (`virtual_momentum.py`), a push is what theirs makes of the gradient: along it the master makes a plain
step, or it adds the change.

Buffers belong to each worker. For evaluation BatchNorm's running statistics are merged as those of one population, and other
buffers are averaged.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from polytempo.errors import UsageError
from polytempo.optim.asup import AsuP
from polytempo.optim.delay_compensation import compensated
from polytempo.optim.gradient_divergence import GradientDivergence
from polytempo.optim.norm_statistics import merged
from polytempo.simulate.datasets import Shards, TensorPair
from polytempo.simulate.trainer import Trainer
from polytempo.simulate.virtual_momentum import VirtualMomentum
from polytempo.sync.actions import Apply
from polytempo.sync.corrections import MeanStaleness
from polytempo.sync.events import Pushed
from polytempo.sync.momentum import BARE, MomentumForm
from polytempo.sync.spec import Spec

LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Gradient = list[torch.Tensor | None]
Weights = list[torch.Tensor]


class WeightHistory:
    """Counts the readers of each version of `tensors` and keeps the old ones they need."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.newest = 0
        self._tensors = tensors
        self._readers: Counter[int] = Counter()
        self._copies: dict[int, list[torch.Tensor]] = {}

    def keep(self, version: int) -> None:
        """One reader more."""
        self._readers[version] += 1

    def drop(self, version: int) -> None:
        """One reader less; the copy is freed with the last."""
        self._readers[version] -= 1
        if self._readers[version] == 0:
            del self._readers[version]
            self._copies.pop(version, None)

    def read(self, version: int) -> list[torch.Tensor]:
        """The tensors of a version that has readers. Not to be changed."""
        return self._tensors if version == self.newest else self._copies[version]

    def advance(self) -> None:
        """The newest version is about to change in place: keep it if it has readers."""
        if self._readers[self.newest]:
            self._copies[self.newest] = [tensor.detach().clone() for tensor in self._tensors]
        else:
            del self._readers[self.newest]
        self.newest += 1

    @property
    def copies(self) -> int:
        """The number of old versions that are kept."""
        return len(self._copies)


def optimizer_for(spec: Spec, given: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`given`, or AsuP with its parameters, rates and weight decays where the mode asks for that."""
    if spec.mode.rule == "AsuP" and not isinstance(given, AsuP):
        names = ("params", "lr", "weight_decay")
        groups = [{name: group[name] for name in names if name in group} for group in given.param_groups]
        given = AsuP(groups, **spec.rule_options)
    elif spec.mode.rule == "AsuP":  # its own options, but for those that the spec names
        for group in given.param_groups:
            group.update({name: value for name, value in spec.rule_options.items() if name in spec.options})
    if spec.corrections.adapts_momentum and not all("momentum" in group for group in given.param_groups):
        kind = type(given).__name__
        raise UsageError(f"momentum=async needs an optimizer with a momentum to correct, got {kind}; use SGD with momentum")
    return given


class VirtualTrainer(Trainer):
    """Real training beside a simulated run."""

    def __init__(
        self, model: nn.Module, train: TensorPair, shards: Shards, loss: LossFn, make_optimizer: OptimizerFactory, spec: Spec
    ) -> None:
        super().__init__()
        self.master = copy.deepcopy(model).train()
        self._worker = copy.deepcopy(model).train()
        self._train, self._shards, self._loss = train, shards, loss
        self._parameters = [p for p in self.master.parameters() if p.requires_grad]
        self._loadable = [p for p in self._worker.parameters() if p.requires_grad]
        self.optimizer = optimizer_for(spec, make_optimizer(self._parameters))
        self._momentum: VirtualMomentum | None = None  # of each worker, where they keep it
        if spec.worker_momentum:
            self._momentum = VirtualMomentum(self._loadable, make_optimizer, spec, shards.workers)
            for group in self.optimizer.param_groups if self._momentum.form is MomentumForm.GRADIENT else ():
                group.update(BARE)
        self._corrections = spec.corrections
        self._staleness = MeanStaleness()
        self._squares: list[torch.Tensor] | None = None  # running means, for adaptive compensation
        self.spread = GradientDivergence(self._parameters)
        self.versions = WeightHistory(list(self._parameters))
        self._loaded = -1  # the version in the worker's model
        self._buffers: dict[int, list[torch.Tensor]] = {}

    # Called by the engine.

    def keep(self, version: int) -> None:
        self.versions.keep(version)

    def drop(self, version: int) -> None:
        self.versions.drop(version)

    def lose(self, worker: int, step: int, version: int) -> None:
        if self._momentum is not None:
            self._momentum.settle(worker, self._pushed(worker, step, version), self.versions.newest)
        self.drop(version)

    def end(self, worker: int, finished: bool) -> None:
        if self._momentum is not None:
            self._momentum.end(worker)

    def apply(self, apply: Apply, versions: Sequence[int], contents: Sequence[Any], part: int) -> None:
        pushes = apply.pushes
        gradient = self._mean(pushes, versions)
        if self._corrections.compensation:  # modes with corrections apply single pushes
            gradient = self._compensated(gradient, self.versions.read(versions[0]))
        for version in versions:
            self.versions.drop(version)
        self._update(gradient, [self.versions.newest - version for version in versions], apply.rate)
        if self._momentum is not None:
            self._momentum.settle(pushes[0].worker, gradient, self.versions.newest)

    # One update.

    def _update(self, gradient: Gradient, staleness: list[int], rate: float) -> None:
        """Make the next version."""
        self.spread.look()
        self.versions.advance()
        for parameter, grad in zip(self._parameters, gradient, strict=True):
            parameter.grad = grad
        mean = [self._staleness.add(stale) for stale in staleness][-1]
        self._step(rate, mean)

    def _compensated(self, gradient: Gradient, read: list[torch.Tensor]) -> Gradient:
        how = self._corrections.compensation
        assert how is not None
        if how.adaptive and self._squares is None:
            self._squares = [torch.zeros_like(parameter) for parameter in self._parameters]
        now = [parameter.detach() for parameter in self._parameters]
        return compensated(gradient, now, read, how.strength, how.adaptive, how.memory, self._squares)

    def _mean(self, pushes: tuple[Pushed, ...], versions: Sequence[int]) -> Gradient:
        total = sum(push.samples for push in pushes)
        mean: Gradient = [None] * len(self._parameters)
        for push, version in zip(pushes, versions, strict=True):
            weight = push.samples / total
            add_weighted(mean, self._pushed(push.worker, push.step, version), weight)
        return mean

    def _pushed(self, worker: int, step: int, version: int) -> Gradient:
        """What a worker pushes of a step that has read this version."""
        self._load(version)
        if self._momentum is None:
            return self._gradient(worker, step)
        if self._momentum.add_own(worker, version):
            self._loaded = -1
        return self._momentum.push(worker, self._gradient(worker, step))

    def _gradient(self, worker: int, step: int) -> Gradient:
        """The gradient of a worker's step, on the loaded weights."""
        return self._gradient_of(worker, self._shards.batch(worker, step))

    def _gradient_of(self, worker: int, index: torch.Tensor) -> Gradient:
        """The gradient of these samples, on the loaded weights."""
        self._load_buffers(worker)
        inputs, targets = self._train
        for parameter in self._loadable:
            parameter.grad = None
        loss: torch.Tensor = self._loss(self._worker(inputs[index]), targets[index])
        loss.backward()
        self._save_buffers(worker)
        gradient = [parameter.grad for parameter in self._loadable]
        self.spread.take(worker, gradient, self._loadable)
        return gradient

    def _load(self, version: int) -> None:
        if self._loaded != version:
            self._load_values(self.versions.read(version))
            self._loaded = version

    def _load_values(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._loadable, values, strict=True):
                parameter.copy_(value)

    def _step(self, rate: float, mean_staleness: float) -> None:
        if self._momentum is not None and self._momentum.form is MomentumForm.CHANGE:
            self._add_changes(rate)
            return
        groups, corrections = self.optimizer.param_groups, self._corrections
        before = [{name: group[name] for name in ("lr", "momentum") if name in group} for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * rate
            if corrections.adapts_momentum:
                group["momentum"] = corrections.momentum_for(group["momentum"], mean_staleness)
        self.optimizer.step()
        for group, values in zip(groups, before, strict=True):
            group.update(values)

    def _add_changes(self, rate: float) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=rate)

    def _load_buffers(self, worker: int) -> None:
        if worker in self._buffers:
            for buffer, value in zip(self._worker.buffers(), self._buffers[worker], strict=True):
                buffer.copy_(value)
        elif self._buffers:  # a first step: from the initial buffers of the model
            for buffer, value in zip(self._worker.buffers(), self.master.buffers(), strict=True):
                buffer.copy_(value)

    def _save_buffers(self, worker: int) -> None:
        buffers = [buffer.detach().clone() for buffer in self._worker.buffers()]
        if buffers:
            self._buffers[worker] = buffers

    def evaluable(self) -> nn.Module:
        """The master's weights with the merged buffers of the workers, in evaluation mode."""
        return with_merged_buffers(self.master, self._buffers.values()) if self._buffers else self.master.eval()


def add_weighted(mean: Gradient, gradient: Gradient, weight: float) -> None:
    """Add a gradient, times a weight, to what a mean has so far; the gradient is used up."""
    for index, grad in enumerate(gradient):
        if grad is not None:
            part = grad if weight == 1 else grad.mul_(weight)
            so_far = mean[index]
            mean[index] = part if so_far is None else so_far.add_(part)


def with_merged_buffers(master: nn.Module, buffers_of: Iterable[list[torch.Tensor]]) -> nn.Module:
    """A copy of `master` with the merged buffers of workers, in evaluation mode."""
    model = copy.deepcopy(master).eval()
    names = [name for name, _ in model.named_buffers()]
    given = list(buffers_of)
    of = {name: [buffers[index] for buffers in given] for index, name in enumerate(names)}
    for name, buffer in model.named_buffers():
        buffer.copy_(_merged_buffer(name, of).to(buffer.dtype))
    return model


def _merged_buffer(name: str, of: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    """The merged buffers of one name: means and variances as those of one population, others their mean."""
    layer, _, kind = name.rpartition("running_")
    mean, variance = f"{layer}running_mean", f"{layer}running_var"
    if kind in ("mean", "var") and mean in of and variance in of:
        return merged(of[mean], of[variance])[kind == "var"]
    return torch.stack([value.to(torch.float64) for value in of[name]]).mean(0)

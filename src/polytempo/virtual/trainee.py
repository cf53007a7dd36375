"""Computes the gradients of all simulated workers, on the weights each of them would have held.

There are two copies of the model: the *master*, on which updates are applied by the optimizer, and the *worker*, into which
the weights of a step are loaded to compute its gradient. The gradient of a step is computed when its push is applied.

An update of one push takes its gradient as it is; of several, their mean weighted by samples, added in the order of the
pushes. The learning rate of every group is multiplied by `rate` for that one step. Buffers, such as BatchNorm's running
statistics, belong to each worker; for evaluation they are averaged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from polytempo.sync.events import Pushed
from polytempo.virtual.data import Shards, Tensors
from polytempo.virtual.versions import Versions

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Gradient = list[torch.Tensor | None]


class Trainee:
    """Real training beside a simulated run."""

    def __init__(self, model: nn.Module, train: Tensors, shards: Shards, loss: Loss, make_optimizer: MakeOptimizer) -> None:
        self.master = copy.deepcopy(model).train()
        self._worker = copy.deepcopy(model).train()
        self._train, self._shards, self._loss = train, shards, loss
        self._parameters = [p for p in self.master.parameters() if p.requires_grad]
        self._loadable = [p for p in self._worker.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self._parameters)
        self.versions = Versions(list(self._parameters))
        self._loaded = -1  # the version in the worker's model
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self.observers: list[Callable[[float], None]] = []

    # What the engine calls.

    def keep(self, version: int) -> None:
        """One reader of a version more."""
        self.versions.keep(version)

    def drop(self, version: int) -> None:
        """One reader of a version less."""
        self.versions.drop(version)

    def apply(self, pushes: tuple[Pushed, ...], versions: list[int], rate: float) -> None:
        """Make one update of these pushes."""
        gradient = self._mean(pushes, versions)
        for version in versions:
            self.versions.drop(version)
        self.versions.advance()
        for parameter, grad in zip(self._parameters, gradient, strict=True):
            parameter.grad = grad
        self._step(rate)

    def observe(self, now: float) -> None:
        """Let the observers look at the master."""
        for observer in self.observers:
            observer(now)

    # How it is done.

    def _mean(self, pushes: tuple[Pushed, ...], versions: list[int]) -> Gradient:
        total = sum(push.samples for push in pushes)
        mean: Gradient = [None] * len(self._parameters)
        for push, version in zip(pushes, versions, strict=True):
            weight = push.samples / total
            for index, grad in enumerate(self._gradient(push.worker, push.step, version)):
                if grad is not None:
                    part = grad if weight == 1 else grad.mul_(weight)
                    so_far = mean[index]
                    mean[index] = part if so_far is None else so_far.add_(part)
        return mean

    def _gradient(self, worker: int, step: int, version: int) -> Gradient:
        self._load(version)
        self._load_buffers(worker)
        inputs, targets = self._train
        index = self._shards.batch(worker, step)
        for parameter in self._loadable:
            parameter.grad = None
        loss: torch.Tensor = self._loss(self._worker(inputs[index]), targets[index])
        loss.backward()
        self._save_buffers(worker)
        return [parameter.grad for parameter in self._loadable]

    def _load(self, version: int) -> None:
        if self._loaded != version:
            with torch.no_grad():
                for parameter, value in zip(self._loadable, self.versions.read(version), strict=True):
                    parameter.copy_(value)
            self._loaded = version

    def _step(self, rate: float) -> None:
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * rate
        self.optimizer.step()
        for group, lr in zip(groups, rates, strict=True):
            group["lr"] = lr

    def _load_buffers(self, worker: int) -> None:
        if worker in self._buffers:
            for buffer, value in zip(self._worker.buffers(), self._buffers[worker], strict=True):
                buffer.copy_(value)
        elif self._buffers:  # a first step: from the start the model was given with
            for buffer, value in zip(self._worker.buffers(), self.master.buffers(), strict=True):
                buffer.copy_(value)

    def _save_buffers(self, worker: int) -> None:
        buffers = [buffer.detach().clone() for buffer in self._worker.buffers()]
        if buffers:
            self._buffers[worker] = buffers

    def evaluable(self) -> nn.Module:
        """The master's weights with the mean of the workers' buffers, in evaluation mode."""
        if not self._buffers:
            return self.master.eval()
        model = copy.deepcopy(self.master).eval()
        for index, buffer in enumerate(model.buffers()):
            values = torch.stack([buffers[index].to(torch.float64) for buffers in self._buffers.values()])
            buffer.copy_(values.mean(0).to(buffer.dtype))
        return model

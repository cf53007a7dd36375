"""Models beside a simulated run of gossip or AD-PSGD: every worker has a model z, a push-sum weight w and an optimizer.

A local step moves z by what the worker's own optimizer says. Mixing and averaging work on x = w z and w alike. A step is
computed on a snapshot of z and added when it is finished; where z has not changed meanwhile, the result of the optimizer is
taken as it is, so one worker is plain training, bit for bit. The model to look at is the mean of all z, weighted by w, with
the merged buffers of all workers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from polytempo.optim.gradient_divergence import GradientDivergence
from polytempo.simulate.datasets import Shards, TensorPair
from polytempo.simulate.gradient_trainer import LossFn, OptimizerFactory, Weights, with_merged_buffers
from polytempo.simulate.trainer import Trainer
from polytempo.sync.actions import Apply
from polytempo.sync.directives import Mixing
from polytempo.sync.spec import Spec


class MixingModel:
    """One worker's model and weight."""

    def __init__(self, model: nn.Module, make_optimizer: OptimizerFactory, weight: float) -> None:
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters)
        self.values: Weights = [p.detach().clone() for p in self.parameters]
        self.weight = weight
        self.snapshot: Weights = []  # the values of a step that is computed
        self.changed = False  # since the snapshot

    def set(self, values: Iterable[torch.Tensor]) -> None:
        """New values, from others."""
        self.values = list(values)
        self.changed = True


class VirtualGossipTrainer(Trainer):
    """Real training beside a simulated run of a mode whose workers mix their models."""

    def __init__(
        self, model: nn.Module, train: TensorPair, shards: Shards, loss: LossFn, make_optimizer: OptimizerFactory, spec: Spec
    ) -> None:
        super().__init__()
        self.master = copy.deepcopy(model).train()
        self._initial = copy.deepcopy(model).train()
        self._train, self._shards, self._loss, self._make_optimizer = train, shards, loss, make_optimizer
        self._parameters = [p for p in self.master.parameters() if p.requires_grad]
        self._models: dict[int, MixingModel] = {}
        self._finished: dict[int, MixingModel] = {}
        self._sent: dict[int, dict[int, tuple[Weights, float]]] = {}  # step: worker: its values and weight
        self.spread = GradientDivergence(self._parameters)

    # Called by the engine.

    def apply(self, apply: Apply, versions: Sequence[int], contents: Sequence[None], part: int) -> None:
        self.spread.look()

    def begin(self, worker: int, empty: bool = False) -> None:
        if worker in self._models and self._models[worker].weight > 0:  # others have sent it one meanwhile
            return
        self._models[worker] = MixingModel(copy.deepcopy(self._initial), self._make_optimizer, 0.0 if empty else 1.0)

    def end(self, worker: int, finished: bool) -> None:
        gone = self._models.pop(worker, None)
        if finished and gone is not None:
            self._finished[worker] = gone

    def snapshot(self, worker: int) -> None:
        one = self._models[worker]
        one.snapshot, one.changed = one.values, False

    def step(self, worker: int, number: int) -> None:
        one = self._models[worker]
        with torch.no_grad():
            for parameter, value in zip(one.parameters, one.snapshot, strict=True):
                parameter.copy_(value)
        inputs, targets = self._train
        index = self._shards.batch(worker, number)
        one.optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = self._loss(one.model(inputs[index]), targets[index])
        loss.backward()
        self.spread.take(worker, [p.grad for p in one.parameters], one.parameters)
        one.optimizer.step()

    def add_step(self, worker: int) -> None:
        one = self._models[worker]
        new = [p.detach().clone() for p in one.parameters]
        one.values = _plus_change(one.values, new, one.snapshot) if one.changed else new

    def send_model(self, worker: int, step: int) -> None:
        one = self._models[worker]
        self._sent.setdefault(step, {})[worker] = one.values, one.weight

    def mix(self, worker: int, step: int, mixing: Mixing, lost: tuple[int, ...]) -> None:
        if not mixing.send and not mixing.receive:
            return
        one, sent = self._models[worker], self._sent.get(step, {})
        keep = mixing.keep + sum(share for other, share in mixing.send if other in lost)
        mine = sent.get(worker)
        parts = [(mine, keep)] + [(sent.get(other), share) for other, share in mixing.receive if other not in lost]
        given = [(values, share * weight) for (values, weight), share in ((p, s) for p, s in parts if p is not None)]
        weight = sum(part for _, part in given)
        if not weight > 0:
            return
        mixed = [torch.zeros_like(parameter) for parameter in self._parameters]
        for values, part in given:
            for so_far, value in zip(mixed, values, strict=True):
                so_far.add_(value, alpha=part)
        mixed = [value / weight for value in mixed]
        stepped_since = mine is not None and mine[0] is not one.values
        one.set(_plus_change(mixed, one.values, mine[0]) if mine is not None and stepped_since else mixed)
        one.weight = weight

    def forget(self, step: int) -> None:
        self._sent.pop(step, None)

    def average(self, asker: int, answerer: int) -> None:
        a, b = self._models[asker], self._models[answerer]
        weight = a.weight + b.weight
        mean = [(x * a.weight + y * b.weight) / weight for x, y in zip(a.values, b.values, strict=True)]
        a.weight = b.weight = weight / 2
        a.set(mean)
        b.set(mean)

    def evaluable(self) -> nn.Module:
        """The mean of all models, in evaluation mode."""
        given = [one for one in (*self._models.values(), *self._finished.values()) if one.weight > 0]
        total = sum(one.weight for one in given)
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters if given else ()):
                if len(given) == 1:
                    parameter.copy_(given[0].values[index])
                    continue
                parameter.zero_()
                for one in given:
                    parameter.add_(one.values[index], alpha=one.weight / total)
        buffers = [list(one.model.buffers()) for one in given]
        return with_merged_buffers(self.master, buffers) if any(buffers) else self.master.eval()


def _plus_change(values: Weights, new: Weights, old: Weights) -> Weights:
    return [value + (after - before) for value, after, before in zip(values, new, old, strict=True)]

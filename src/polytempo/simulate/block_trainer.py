"""Models beside a simulated run of a mode with blocks: every worker has values and an optimizer of its own.

A local step is one of the worker's own optimizer. When pushes are merged, the *master* moves: it becomes their mean,
weighted by samples, or makes an outer step towards it (`optim/outer_step.py`). In decoupled modes a push is the change since
the values the worker last took, and the mean is that of the changes. A worker takes the master's values as of the moment at
which its release was decided; what it has changed since it sent its own stays on top. The model to look at is the newest
that a worker has taken: an average is worth nothing while it is on its way.

Optimizer state stays with its worker ("keep"), is averaged as the values are ("mean") or dropped ("reset"). Buffers belong
to each worker, and are merged for evaluation. One worker without an outer step is plain training, bit for bit.

Fragments are those of a live job (`optim/fragments.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polytempo.optim.fragments import cut
from polytempo.optim.gradient_divergence import GradientDivergence
from polytempo.optim.outer_step import OuterRule, OuterStep
from polytempo.simulate.datasets import Shards, TensorPair
from polytempo.simulate.gradient_trainer import LossFn, OptimizerFactory, Weights, with_merged_buffers
from polytempo.simulate.trainer import Trainer
from polytempo.sync.actions import Apply
from polytempo.sync.spec import Spec

#: Optimizer state of some parameters: for each, names and tensors.
State = list[dict[str, torch.Tensor]]


@dataclass
class ModelBlock:
    """What a worker has sent of a fragment."""

    values: Weights  #: or, in decoupled modes, their change
    state: State  #: to be averaged, where it is
    rates: list[float]  #: the learning rate of each group, in the last step
    loss: float | None
    lr: float | None


class Learner:
    """One worker's model."""

    def __init__(self, model: nn.Module, make_optimizer: OptimizerFactory, fragments: int) -> None:
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters)
        self.losses: list[list[float]] = [[] for _ in range(fragments)]  # since the last sending of each fragment
        self.base: list[Weights] = [[] for _ in range(fragments)]  # the values it last took
        self.sent: list[Weights | None] = [None] * fragments  # its own at the sending, until the answer is taken
        self.fetched: list[tuple[Weights, State, int]] = [([], [], 0)] * fragments  # and the number of merges in them

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]


class VirtualBlockTrainer(Trainer):
    """Real training beside a simulated run of a mode whose workers average their models."""

    def __init__(
        self, model: nn.Module, train: TensorPair, shards: Shards, loss: LossFn, make_optimizer: OptimizerFactory, spec: Spec
    ) -> None:
        super().__init__()
        assert spec.averaging is not None
        self.master = copy.deepcopy(model).train()
        self._train, self._shards, self._loss, self._make_optimizer = train, shards, loss, make_optimizer
        self._averaging = spec.averaging
        self._initial = copy.deepcopy(model).train()  # its buffers are those of a joiner
        self._parameters = [p for p in self.master.parameters() if p.requires_grad]
        bytes_of = [p.numel() * p.element_size() for p in self._parameters]
        self._fragments = [list(members) for members in cut(bytes_of, spec.averaging.fragments)]
        self._outer = [self._outer_step(members) for members in self._fragments]
        self._learners: dict[int, Learner] = {}
        self._buffers: dict[int, Weights] = {}
        self._newest: list[Weights] = [self._snapshot(members) for members in self._fragments]
        self._states: list[State] = [[] for _ in self._fragments]  # averaged at the last merge
        self._merges = [0] * len(self._fragments)
        self._shown: list[tuple[int, Weights]] = [(0, values) for values in self._newest]  # the newest that were taken
        self.spread = GradientDivergence(self._parameters)

    def _outer_step(self, members: list[int]) -> OuterStep | None:
        how = self._averaging
        if (how.plain and not how.decoupled) or not members:
            return None
        rule = OuterRule(how.outer_lr, how.outer_momentum, how.nesterov, how.in_lr)
        groups = self._make_optimizer([p for p in self.master.parameters() if p.requires_grad]).param_groups
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        own = [self._parameters[index] for index in members]
        return OuterStep([p.data for p in own], [group_of[id(p)] for p in own], [rule] * len(groups))

    # Called by the engine.

    def begin(self, worker: int, empty: bool = False) -> None:
        learner = Learner(copy.deepcopy(self._initial), self._make_optimizer, len(self._fragments))
        with torch.no_grad():
            for own, value in zip(learner.parameters, self._parameters, strict=True):
                own.copy_(value)
        self._learners[worker] = learner
        buffers = list(learner.model.buffers())
        if buffers:
            self._buffers[worker] = buffers

    def end(self, worker: int, finished: bool) -> None:
        self._learners.pop(worker, None)

    def step(self, worker: int, number: int) -> None:
        learner = self._learners[worker]
        inputs, targets = self._train
        index = self._shards.batch(worker, number)
        learner.optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = self._loss(learner.model(inputs[index]), targets[index])
        loss.backward()
        self.spread.take(worker, [p.grad for p in learner.parameters], learner.parameters)
        learner.optimizer.step()
        for losses in learner.losses:
            losses.append(float(loss.detach()))

    def send(self, worker: int, fragment: int) -> ModelBlock:
        learner, members = self._learners[worker], self._fragments[fragment]
        own = [learner.parameters[index].detach().clone() for index in members]
        values = own
        if self._averaging.decoupled:
            values = [base - value for base, value in zip(learner.base[fragment], own, strict=True)]
        learner.sent[fragment] = own
        losses, learner.losses[fragment] = learner.losses[fragment], []
        loss = sum(losses) / len(losses) if losses else None
        state = self._state_of(learner, members) if self._averaging.state == "mean" else []
        return ModelBlock(values, state, learner.rates, loss, learner.rates[0])

    def apply(self, apply: Apply, versions: Sequence[int], contents: Sequence[ModelBlock], part: int) -> None:
        given, fragment = contents, part
        weights = apply.weights or tuple(push.samples for push in apply.pushes)
        total = sum(weights)
        if not total > 0:  # workers that finish have sent nothing new
            return
        shares = [weight / total for weight in weights]
        mean = weighted_mean([block.values for block in given], shares)
        own = [self._parameters[index] for index in self._fragments[fragment]]
        outer = self._outer[fragment]
        with torch.no_grad():
            if outer is None:
                for parameter, value in zip(own, mean, strict=True):
                    parameter.copy_(value)
            else:
                if self._averaging.decoupled:
                    mean = [parameter - change for parameter, change in zip(own, mean, strict=True)]
                outer.step(mean, given[0].rates)
        self._newest[fragment] = self._snapshot(self._fragments[fragment])
        self._merges[fragment] += 1
        if self._averaging.state == "mean":
            self._states[fragment] = mean_state([block.state for block in given], shares)
        self.spread.look()

    def fetch(self, worker: int, fragment: int) -> None:
        self._learners[worker].fetched[fragment] = self._newest[fragment], self._states[fragment], self._merges[fragment]

    def install(self, worker: int, fragment: int) -> None:
        learner, members = self._learners[worker], self._fragments[fragment]
        values, state, merges = learner.fetched[fragment]
        if merges > self._shown[fragment][0]:
            self._shown[fragment] = merges, values
        sent, learner.sent[fragment], learner.base[fragment] = learner.sent[fragment], None, values
        with torch.no_grad():
            for place, index in enumerate(members):
                parameter = learner.parameters[index]
                if sent is None or torch.equal(parameter, sent[place]):
                    parameter.copy_(values[place])
                else:
                    parameter.add_(values[place] - sent[place])
        if sent is not None:
            self._treat_state(learner, members, state)

    def close(self) -> None:
        # What was merged last is the model.
        self._shown = list(zip(self._merges, self._newest, strict=True))

    def evaluable(self) -> nn.Module:
        """The newest values that were taken, with the merged buffers of the workers, in evaluation mode."""
        model = (
            with_merged_buffers(self.master, self._buffers.values()) if self._buffers else copy.deepcopy(self.master).eval()
        )
        own = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            for members, (_, values) in zip(self._fragments, self._shown, strict=True):
                for index, value in zip(members, values, strict=True):
                    own[index].copy_(value)
        return model

    # Weights and state.

    def _snapshot(self, members: list[int]) -> Weights:
        return [self._parameters[index].detach().clone() for index in members]

    def _state_of(self, learner: Learner, members: list[int]) -> State:
        kept = [learner.optimizer.state.get(learner.parameters[index], {}) for index in members]
        return [{name: value.clone() for name, value in one.items() if is_averaged(value)} for one in kept]

    def _treat_state(self, learner: Learner, members: list[int], state: State) -> None:
        """What an average does to the state of a worker's optimizer."""
        kept = learner.optimizer.state
        for place, index in enumerate(members):
            parameter = learner.parameters[index]
            if self._averaging.state == "reset":
                kept.pop(parameter, None)
            elif self._averaging.state == "mean" and state:
                for name, value in state[place].items():
                    if parameter in kept and is_averaged(kept[parameter].get(name)):
                        kept[parameter][name].copy_(value)


def is_averaged(value: Any) -> bool:
    """Is this part of an optimizer's state a tensor of numbers?"""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def weighted_mean(values: Sequence[Weights], shares: Sequence[float]) -> Weights:
    """The mean of lists of tensors; of one list its tensors themselves."""
    if len(values) == 1:
        return list(values[0])
    mean = [tensor * shares[0] for tensor in values[0]]
    for tensors, share in zip(values[1:], shares[1:], strict=True):
        for so_far, tensor in zip(mean, tensors, strict=True):
            so_far.add_(tensor, alpha=share)
    return mean


def mean_state(states: Sequence[State], shares: Sequence[float]) -> State:
    """The mean of optimizer states, of what all of them have."""
    result: State = []
    for place in range(len(states[0])):
        names = set.intersection(*(set(state[place]) for state in states))
        tensors = [[state[place][name] for name in sorted(names)] for state in states]
        result.append(dict(zip(sorted(names), weighted_mean(tensors, shares), strict=True)))
    return result

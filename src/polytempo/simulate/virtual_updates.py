"""Updates of the master model beside a simulated run, and the versions of its weights that workers read.

    GradientUpdates   the optimizer makes a step along a weighted sum of gradients, corrected for staleness
    ValueUpdates      a fragment becomes the weighted mean of values, or makes an outer step towards it

Corrections of staleness beyond the rate are made here: a gradient is compensated for the updates since its weights were
read, and the momentum of every group is corrected for that one step. (torch's SGD leaves its velocity alone in a step whose
momentum is 0.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from polytempo.errors import UsageError
from polytempo.optim.asup import AsuP
from polytempo.optim.delay_compensation import compensated
from polytempo.optim.outer_step import OuterRule, OuterStep, cut
from polytempo.optim.several_workers import weighted_sum
from polytempo.simulate.replicas import FetchedValues, Gradient, SentValues, State, Weights, cloned
from polytempo.sync.blocks import Averaging
from polytempo.sync.corrections import MeanStaleness
from polytempo.sync.spec import Spec


class WeightHistory:
    """The versions of some tensors. Each old one that has readers is kept, in one copy for all of them, which is freed with
    the last; the newest lies in the tensors themselves, and is copied only when it changes while it has readers."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.newest = 0
        self._tensors = tensors
        self._readers: Counter[int] = Counter()
        self._copies: dict[int, list[torch.Tensor]] = {}

    def keep(self, version: int) -> None:
        """One reader more."""
        self._readers[version] += 1

    def drop(self, version: int) -> None:
        """One reader less."""
        self._readers[version] -= 1
        if self._readers[version] == 0:
            del self._readers[version]
            self._copies.pop(version, None)

    def read(self, version: int) -> list[torch.Tensor]:
        """The tensors of a version that has readers. Not to be changed."""
        return self._tensors if version == self.newest else self._copies[version]

    def advance(self) -> None:
        """The newest version is about to change in place."""
        if self._readers[self.newest]:
            self._copies[self.newest] = cloned(self._tensors)
        else:
            del self._readers[self.newest]
        self.newest += 1

    @property
    def copies(self) -> int:
        """The number of old versions that are kept."""
        return len(self._copies)


def master_optimizer(spec: Spec, given: torch.optim.Optimizer) -> torch.optim.Optimizer:
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


class GradientUpdates:
    """Updates along gradients; or, with `adds`, by changes, which are added."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, spec: Spec, adds: bool) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._corrections, self._adds = spec.corrections, adds
        self._staleness = MeanStaleness()
        self._squares: list[torch.Tensor] | None = None  # running means, for adaptive compensation

    def compensated(self, gradient: Gradient, read: Weights) -> Gradient:
        """A gradient, taken on the values `read`, for those of now."""
        how = self._corrections.compensation
        if how is None:
            return gradient
        if how.adaptive and self._squares is None:
            self._squares = [torch.zeros_like(parameter) for parameter in self._parameters]
        now = [parameter.detach() for parameter in self._parameters]
        return compensated(gradient, now, read, how.strength, how.adaptive, how.memory, self._squares)

    def step(self, gradient: Gradient, staleness: Sequence[int], rate: float) -> None:
        """Make one update of pushes of this staleness, at `rate` times the learning rate of every group."""
        for parameter, grad in zip(self._parameters, gradient, strict=True):
            parameter.grad = grad
        mean = [self._staleness.add(stale) for stale in staleness][-1]
        if self._adds:
            with torch.no_grad():
                for parameter in self._parameters:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=rate)
            return
        groups, corrections = self._optimizer.param_groups, self._corrections
        before = [{name: group[name] for name in ("lr", "momentum") if name in group} for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * rate
            if corrections.adapts_momentum:
                group["momentum"] = corrections.momentum_for(group["momentum"], mean)
        self._optimizer.step()
        for group, values in zip(groups, before, strict=True):
            group.update(values)


class ValueUpdates:
    """Updates by values, or by their changes, of the fragments of a model; fragments are those of a live job."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, averaging: Averaging) -> None:
        self._parameters, self._averaging = parameters, averaging
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        self.fragments = [slice(one.start, one.stop) for one in cut(sizes, averaging.fragments)]
        groups = optimizer.param_groups
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        rule = OuterRule(averaging.outer_lr, averaging.outer_momentum, averaging.nesterov, averaging.in_lr)
        self._outer: list[OuterStep] = []  # of each fragment, where the mean itself is not the new model
        for fragment in self.fragments if averaging.decoupled or not averaging.plain else ():
            own = parameters[fragment]
            self._outer.append(OuterStep([p.data for p in own], [group_of[id(p)] for p in own], [rule] * len(groups)))
        self.newest = [FetchedValues(0, cloned(parameters[fragment])) for fragment in self.fragments]
        self.taken = list(self.newest)  # the newest of each fragment that a worker has taken

    def merge(self, part: int, sent: Sequence[SentValues], weights: Sequence[float]) -> None:
        """Move a fragment."""
        total, own = sum(weights), self._parameters[self.fragments[part]]
        if not total > 0:  # workers that finish have sent nothing new
            return
        shares = [weight / total for weight in weights]
        mean = weighted_sum(zip((one.values for one in sent), shares, strict=True))
        with torch.no_grad():
            if self._averaging.decoupled:
                mean = [parameter - change for parameter, change in zip(own, mean, strict=True)]
            if self._outer:
                self._outer[part].step(mean, sent[0].rates)
            else:
                for parameter, value in zip(own, mean, strict=True):
                    parameter.copy_(value)
        state = mean_state([one.state for one in sent], shares) if self._averaging.state == "mean" else []
        self.newest[part] = FetchedValues(self.newest[part].number + 1, cloned(own), state)

    def take(self, part: int, values: FetchedValues) -> None:
        """A worker has taken these."""
        if values.number > self.taken[part].number:
            self.taken[part] = values

    def shown(self) -> Weights:
        """The model to look at: an average is worth nothing while it is on its way."""
        return [value for taken in self.taken for value in taken.values]


def mean_state(states: Sequence[State], shares: Sequence[float]) -> State:
    """The mean of optimizer states, of what all of them have."""
    result: State = []
    for every in zip(*states, strict=True):
        names = sorted(set.intersection(*map(set, every)))
        tensors = ([state[name] for name in names] for state in every)
        result.append(dict(zip(names, weighted_sum(zip(tensors, shares, strict=True)), strict=True)))
    return result

"""The models beside a simulated run, which perform the orders of machines and the decisions of policies on tensors.

    gradients   of given samples on given values, each worker with buffers of its own     `SampleGradients`
    master      the values at servers; versions of it have readers                        `WeightHistory`
    updates     of weighted gradients, or of weighted values                              `ValueUpdates`
    replicas    values, an optimizer or a momentum that are a worker's own                `replicas.py`

Which of them a run has follows from what a push brings:

    gradient, share, batches   workers read versions of the master. The gradient is computed when its push is applied
    sum                        replicas with steps along plain gradients; the sum of these is a gradient for the master
    values                     replicas; the master moves towards their mean
    nothing                    replicas alone, which are mixed with one another

Corrections of staleness beyond the rate are made here: a gradient is compensated for the updates since its weights were
read, and the momentum of every group is corrected for that one step. (torch's SGD leaves its velocity alone in a step whose
momentum is 0.) For evaluation BatchNorm's running statistics are merged as those of one population, other buffers averaged.

Where samples are dealt out, their places are those of `Shards`. There, each of n workers takes every n-th place: the joint
batch of a round of `bsp` has the same samples as that of `bsp+balance`, as long as shares are even and no epoch has ended
(`bsp` leaves the rest of an epoch that fills no joint batch; here it is a short one).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from polytempo.optim.asup import AsuP
from polytempo.optim.delay_compensation import compensated
from polytempo.optim.outer_step import OuterRule, OuterStep, cut
from polytempo.optim.several_workers import GradientDivergence, weighted_sum, with_change, with_merged_buffers
from polytempo.simulate.replicas import (
    BlockReplica,
    FetchedValues,
    Gradient,
    LossFn,
    OptimizerFactory,
    OwnMomentum,
    Replica,
    SampleGradients,
    SentValues,
    Shards,
    State,
    SteppedReplica,
    Weights,
    cloned,
    trainable,
)
from polytempo.simulate.worker import MicroBatch
from polytempo.sync import momentum
from polytempo.sync.actions import Apply
from polytempo.sync.blocks import Averaging
from polytempo.sync.compatibility import Feature, check_features
from polytempo.sync.corrections import MeanStaleness
from polytempo.sync.directives import Mixing
from polytempo.sync.events import Pushed
from polytempo.sync.momentum import MomentumForm
from polytempo.sync.spec import Spec
from polytempo.tasks import TensorPair


class WeightHistory:
    """The versions of some tensors. Each old one that has readers is kept, in one copy for all of them, which is freed with
    the last; the newest lies in the tensors themselves, and is copied only when it changes while it has readers."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.newest = 0
        self.copies: dict[int, Weights] = {}  #: of old versions
        self._tensors = tensors
        self._readers: Counter[int] = Counter()

    def keep(self, version: int) -> None:
        self._readers[version] += 1

    def drop(self, version: int) -> None:
        self._readers[version] -= 1
        if self._readers[version] == 0:
            del self._readers[version]
            self.copies.pop(version, None)

    def read(self, version: int) -> list[torch.Tensor]:
        """The tensors of a version that has readers. Not to be changed."""
        return self._tensors if version == self.newest else self.copies[version]

    def advance(self) -> None:
        """The newest version is about to change in place."""
        if self._readers[self.newest]:
            self.copies[self.newest] = cloned(self._tensors)
        else:
            del self._readers[self.newest]
        self.newest += 1


class ValueUpdates:
    """Updates by values, or by their changes: a fragment, cut as in a live job, becomes the weighted mean, or makes an outer
    step towards it."""

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
        #: The newest of each fragment that a worker has taken: an average is worth nothing while it is on its way.
        self.taken = list(self.newest)

    def merge(self, part: int, sent: Sequence[SentValues], weights: Sequence[float], rate: float) -> None:
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
                    parameter.copy_(value) if rate == 1.0 else parameter.lerp_(value, rate)
        state: State = []
        for every in zip(*(one.state for one in sent), strict=True):  # none, where it is not averaged
            names = sorted(set.intersection(*map(set, every)))
            tensors = ([one[name] for name in names] for one in every)
            state.append(dict(zip(names, weighted_sum(zip(tensors, shares, strict=True)), strict=True)))
        self.newest[part] = FetchedValues(self.newest[part].number + 1, cloned(own), state)


class VirtualModel:
    """The models of one run. The engine calls its methods, most of them named like orders of machines, at the virtual time
    at which things happen."""

    #: Compute micro-batches of a push in one pass: the same sum, if the loss is a mean over samples and no layer (batch
    #: norm, dropout) depends on what else is in a batch; several times faster.
    one_pass = False

    def __init__(
        self, model: nn.Module, train: TensorPair, shards: Shards, loss: LossFn, make_optimizer: OptimizerFactory, spec: Spec
    ) -> None:
        self.length = len(train[0])
        self.observers: list[Callable[[float], None]] = []
        self.master = copy.deepcopy(model).train()
        self._parameters = trainable(self.master)
        self.spread = GradientDivergence(self._parameters)
        self.versions = WeightHistory(list(self._parameters))
        self.replicas: dict[int, Any] = {}  #: the `Replica` of each worker
        self.gradients = SampleGradients(model, train, loss, self.spread)
        machine: Any = spec.machine(0)
        self._shards, self._brings = shards, machine.brings
        self._reads = self._brings in ("gradient", "share", "batches")  # do workers compute on versions of the master?
        optimizer = self._optimizer = master_optimizer(spec, make_optimizer(self._parameters))
        self._corrections, self._staleness = spec.corrections, MeanStaleness()
        self._squares: list[torch.Tensor] | None = None  # running means, for adaptive compensation
        self.momenta: dict[int, OwnMomentum] = {}
        self._make_momentum = partial(OwnMomentum, spec, self.gradients.parameters, make_optimizer, shards.workers)
        self._keeps_momentum, form = bool(spec.worker_momentum), MomentumForm.NONE
        if self._keeps_momentum:
            form = self._make_momentum().form
            for group in optimizer.param_groups if form is MomentumForm.GRADIENT else ():
                group.update(momentum.BARE)
        self._adds = form is MomentumForm.CHANGE  # what workers push is added as it is
        self._means: ValueUpdates | None = None
        self._make: Callable[..., Replica] = partial(Replica, make_optimizer=make_optimizer)
        if self._brings == "values":
            self._means = ValueUpdates(self._parameters, optimizer, machine.averaging)
            self._make = partial(BlockReplica, self._means.fragments, machine.averaging, make_optimizer=make_optimizer)
        elif self._brings == "sum":
            steps = partial(plain_steps, master=optimizer, rate=machine.local.alpha, like=self._parameters)
            self._make = partial(SteppedReplica, make_optimizer=steps)
        self._finished: dict[int, Replica] = {}  # of workers that have made all their steps
        self._sent: dict[int, dict[int, tuple[Weights, float]]] = {}  # step: worker: its values and weight

    def observe(self, now: float) -> None:
        """Call the observers, which evaluate the model."""
        for observer in self.observers:
            observer(now)

    # Versions of the master. They are numbered 0, 1, 2, ... by update.

    def keep(self, version: int) -> None:
        """One reader of this version more; it is the newest, or has readers already."""
        if self._reads:
            self.versions.keep(version)

    def drop(self, version: int) -> None:
        """One reader of this version less."""
        if self._reads:
            self.versions.drop(version)

    # A worker, and its orders.

    def begin(self, worker: int, empty: bool = False) -> None:
        """A worker is given the newest values, or none; what it has already, it keeps."""
        if worker in self.replicas and self.replicas[worker].weight > 0:  # others have sent it some meanwhile
            return
        self.gradients.buffers.pop(worker, None)
        one = self.replicas[worker] = self._make(values=cloned(self._parameters))
        one.weight = 0.0 if empty else 1.0

    def end(self, worker: int, finished: bool) -> None:
        """A worker has left, with all its steps made or not; what it alone had is dropped."""
        self.momenta.pop(worker, None)
        gone = self.replicas.pop(worker, None)
        if finished and gone is not None:
            self._finished[worker] = gone

    def snapshot(self, worker: int) -> None:
        self.replicas[worker].snapshot = self.replicas[worker].values

    def step(self, worker: int, number: int) -> None:
        one = self.replicas[worker]
        self.gradients.load(one.values if one.snapshot is None else one.snapshot)
        one.step(*self.gradients.of(worker, self._shards.batch(worker, number)))

    def add_step(self, worker: int) -> None:
        self.replicas[worker].add_step()

    def send(self, worker: int, part: int) -> Any:
        """What a worker has made of a fragment since it last sent is under way, as it is now."""
        return self.replicas[worker].send(part)

    def fetch(self, worker: int, part: int) -> None:
        """The newest values are sent to a worker."""
        if self._means is not None:
            newest = self._means.newest[part]
        else:
            newest = FetchedValues(self.versions.newest, cloned(self._parameters))
        self.replicas[worker].fetch(part, newest)

    def install(self, worker: int, part: int, pull: float = 1.0) -> None:
        """They have arrived: the worker goes on from them, with its own steps that they lack; or goes a part of the way."""
        taken = self.replicas[worker].install(part, pull)
        if self._means is not None and taken.number > self._means.taken[part].number:
            self._means.taken[part] = taken

    # Values that workers mix. Mixing and averaging work on x = w z and on the push-sum weight w alike.

    def send_model(self, worker: int, step: int) -> None:
        one = self.replicas[worker]
        self._sent.setdefault(step, {})[worker] = one.values, one.weight

    def mix(self, worker: int, step: int, row: Mixing, lost: tuple[int, ...]) -> None:
        """A worker has what its in-neighbours of this step sent; shares for those that are lost stay with it."""
        if not row.send and not row.receive:
            return
        one, sent = self.replicas[worker], self._sent.get(step, {})
        kept = row.keep + sum(share for other, share in row.send if other in lost)
        shares = [(worker, kept), *((other, share) for other, share in row.receive if other not in lost)]
        given = [(sent[other][0], share * sent[other][1]) for other, share in shares if other in sent]
        weight = sum(part for _, part in given)
        if not weight > 0:
            return
        mixed = [value / weight for value in weighted_sum(given)]
        # Steps made since it sent its values stay on top.
        one.values = with_change(mixed, one.values, sent[worker][0]) if worker in sent else mixed
        one.weight = weight

    def forget(self, step: int) -> None:
        """Nothing that was sent in this step is needed any more."""
        self._sent.pop(step, None)

    def average(self, asker: int, partner: int) -> None:
        """Two workers take the mean of both."""
        a, b = self.replicas[asker], self.replicas[partner]
        weight = a.weight + b.weight
        a.values = b.values = [(x * a.weight + y * b.weight) / weight for x, y in zip(a.values, b.values, strict=True)]
        a.weight = b.weight = weight / 2

    # Decisions.

    def apply(self, apply: Apply, versions: Sequence[int], contents: Sequence[Any], part: int) -> None:
        """Make the next version.

        Args:
            apply: The pushes, and how they count.
            versions: Of each, that of the weights on which it was computed; each of them has then one reader less.
            contents: Of each, what `send` has made, or the micro-batches that it is made of.
            part: The fragment.
        """
        if self._means is not None:
            weights = apply.weights or [push.samples for push in apply.pushes]
            self._means.merge(part, contents, weights, apply.rate)
        elif self._brings != "nothing":
            self._update(apply, versions, contents)
        self.spread.look()

    def lose(self, worker: int, step: int, version: int) -> None:
        """A push, computed on this version, is not applied; the version has one reader less."""
        if self._keeps_momentum:  # it has moved on by this push
            pushed = self._pushed(worker, self._shards.batch(worker, step), version)
            self.momenta[worker].settle(pushed, self.versions.newest)
        self.drop(version)
        if worker in self.replicas:
            self.replicas[worker].settle()

    def close(self) -> None:
        """The run has ended: what was merged last is the model."""
        if self._means is not None:
            self._means.taken = list(self._means.newest)

    def _update(self, apply: Apply, versions: Sequence[int], contents: Sequence[Any]) -> None:
        """An update of gradients: their sum, each times its share of the samples."""
        newest, pushes = self.versions.newest, apply.pushes
        if self._reads:
            batches = self._batches(pushes, versions, contents)
            total = apply.divisor or sum(samples for _, _, samples, _ in batches)
            gradient = weighted_sum(
                (self._pushed(worker, index, version), samples / total) for worker, index, samples, version in batches
            )
            read = self.versions.read(versions[0]) if versions else []  # an update may be of no pushes
        else:
            gradient = weighted_sum((one, 1.0) for sent in contents for one in sent.gradients)
            # With no updates of others since, nothing is to be compensated, even where local steps differ from the master's.
            read = contents[0].read if versions[0] < newest else list(self._parameters)
        if (how := self._corrections.compensation) is not None:
            if how.adaptive and self._squares is None:
                self._squares = [torch.zeros_like(parameter) for parameter in self._parameters]
            now = [parameter.detach() for parameter in self._parameters]
            gradient = compensated(gradient, now, read, how.strength, how.adaptive, how.memory, self._squares)
        for version in versions:
            self.drop(version)
        self.versions.advance()
        if gradient:  # a round may be without samples
            self._step(gradient, [newest - version for version in versions], apply.rate)
        for push in pushes:
            if self._keeps_momentum:
                self.momenta[push.worker].settle(gradient, self.versions.newest)
            if not self._reads:
                self.replicas[push.worker].settle()

    def _batches(
        self, pushes: Sequence[Pushed], versions: Sequence[int], contents: Sequence[Sequence[MicroBatch]]
    ) -> list[tuple[int, torch.Tensor, float, int]]:
        """Of all samples in these pushes the worker, their indices, their number, and the version they are computed on."""
        if self._brings == "gradient":
            return [
                (push.worker, self._shards.batch(push.worker, push.step), push.samples, version)
                for push, version in zip(pushes, versions, strict=True)
            ]
        return [
            (push.worker, self._shards.at(batch.places), batch.samples, batch.version if batch.late else version)
            for push, version, made_of in zip(pushes, versions, contents, strict=True)
            for batch in (in_one(made_of) if self.one_pass else made_of)
        ]

    def _pushed(self, worker: int, index: torch.Tensor, version: int) -> Gradient:
        """What a worker pushes of a step on these samples, which has read this version."""
        if not self._keeps_momentum:
            self.gradients.load(self.versions.read(version), version)
            return self.gradients.of(worker, index)[0]
        if worker not in self.momenta:
            self.momenta[worker] = self._make_momentum()
        self.gradients.load(self.versions.read(version))
        self.momenta[worker].add_own(version)
        return self.momenta[worker].push(self.gradients.of(worker, index)[0])

    def _step(self, gradient: Gradient, staleness: Sequence[int], rate: float) -> None:
        """One update of pushes of this staleness, at `rate` times the learning rate of every group."""
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

    # The model to look at.

    def evaluable(self) -> nn.Module:
        """A copy of the model as it is now, with the merged buffers of the workers, in evaluation mode."""
        values: Sequence[torch.Tensor] = self._parameters
        buffers = list(self.gradients.buffers.values())
        if self._means is not None:
            values = [value for taken in self._means.taken for value in taken.values]
        elif self._brings == "nothing":
            given = [(rank, one) for rank, one in (*self.replicas.items(), *self._finished.items()) if one.weight > 0]
            total = self.push_sum
            values = weighted_sum((one.values, one.weight / total) for _, one in given) or values
            buffers = [self.gradients.buffers[rank] for rank, _ in given if rank in self.gradients.buffers]
        model = copy.deepcopy(self.master).eval()
        with torch.no_grad():
            for parameter, value in zip(trainable(model), values, strict=True):
                parameter.copy_(value)
            return with_merged_buffers(model, buffers)

    @property
    def push_sum(self) -> float:
        """The sum of the weights of all models that count."""
        return float(sum(one.weight for one in (*self.replicas.values(), *self._finished.values())))


def master_optimizer(spec: Spec, given: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`given`, or AsuP with its parameters, rates and weight decays where the mode asks for that."""
    if spec.mode.rule == "AsuP" and not isinstance(given, AsuP):
        names = ("params", "lr", "weight_decay")
        groups = [{name: group[name] for name in names if name in group} for group in given.param_groups]
        given = AsuP(groups, **spec.rule_options)
    elif spec.mode.rule == "AsuP":  # its own options, but for those that the spec names
        for group in given.param_groups:
            group.update({name: value for name, value in spec.rule_options.items() if name in spec.options})
    without = not all("momentum" in group for group in given.param_groups)
    check_features(spec, {Feature.NO_MOMENTUM: without}, optimizer=type(given).__name__)
    return given


def plain_steps(
    parameters: list[nn.Parameter], master: torch.optim.Optimizer, rate: float | None, like: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Plain SGD for local steps at this rate, or at that which the master's optimizer has for each of its parameters."""
    rates = {id(p): float(group["lr"]) for group in master.param_groups for p in group["params"]}
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter, own in zip(parameters, like, strict=True):
        groups.setdefault(rate or rates[id(own)], []).append(parameter)
    return torch.optim.SGD([{"params": members, "lr": lr} for lr, members in groups.items()])


def in_one(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The same samples; all that are not late as one."""
    fresh = [batch for batch in batches if not batch.late]
    samples, places = sum(batch.samples for batch in fresh), tuple(place for batch in fresh for place in batch.places)
    return [*(batch for batch in batches if batch.late), *([MicroBatch(samples, places)] if fresh else [])]

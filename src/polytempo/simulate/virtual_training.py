"""Training in virtual time: a model, data and a loss, a mode and a cluster in; accuracy against simulated seconds out.

The engine computes which worker pushes when, and on which version of the weights; a `VirtualTrainer` computes the gradients
of all simulated workers, on the weights each of them would have held. There are two copies of the model: the *master*, to
which the optimizer applies updates, and the *worker*, into which the weights of a step are loaded to compute its gradient.
The gradient of a step is computed when its push is applied. One copy is kept of each version that a worker may still read:
the newest lives in the model's own tensors and is copied only when it is about to change while it has readers; all readers
of a version share its copy, and the copy is freed with the last of them.

An update of one push takes its gradient as it is; of several, their mean weighted by samples, added in the order of the
pushes. The learning rate of every group is multiplied by `rate` for that one step. Corrections of staleness beyond the rate
are made here: the gradient is compensated for the updates since its weights were read, and the momentum of every group is
corrected for that one step. (torch's SGD leaves its velocity alone in a step whose momentum is 0.) Buffers belong to each
worker. For evaluation BatchNorm's running statistics are merged as those of one population, and other buffers are averaged.

Local steps (`downpour`). Every simulated worker has weights of its own between fetches. A local step is w = w - alpha * g,
where alpha is the rate of the parameter's group unless the spec has another. A fetch brings the master's weights as of its
request. When it is installed, the local steps that those weights cannot contain are repeated on top of it, one by one: all
that were not applied at the request. With one worker, plain SGD and push=fetch=1 this is plain SGD bit for bit, for any
network. Compensation uses the weights that the worker held at the first gradient of a push; with no updates of other workers
since, there is nothing to compensate, even where local steps and the master's rule differ.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polytempo.errors import UsageError
from polytempo.optim.asup import AsuP
from polytempo.optim.delay_compensation import compensated
from polytempo.optim.gradient_divergence import GradientDivergence
from polytempo.optim.norm_statistics import merged
from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.datasets import Shards, TensorPair, as_tensors
from polytempo.simulate.outcome import Outcome
from polytempo.simulate.run import simulate_job
from polytempo.sync.corrections import MeanStaleness
from polytempo.sync.events import Pushed
from polytempo.sync.spec import Spec, parse_spec

MetricFn = Callable[[torch.Tensor, torch.Tensor], float]


@dataclass(frozen=True)
class TrainingRun:
    """The outcome of training in virtual time."""

    outcome: Outcome
    curve: tuple[tuple[float, float], ...]  #: (simulated seconds, accuracy on the test data)
    model: nn.Module
    spread: float = 0.0  #: of the gradients of different workers: their deviation over their mean, over the run

    @property
    def accuracy(self) -> float:
        """At the end."""
        return self.curve[-1][1]

    def time_to(self, target: float) -> float | None:
        """The first simulated second at which the target was seen, or None."""
        return next((seconds for seconds, accuracy in self.curve if accuracy >= target), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.outcome.as_dict(), "curve": [list(point) for point in self.curve], "spread": self.spread}


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    """The share of samples whose largest output is the target."""
    return float((output.argmax(1) == target).float().mean())


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer when none is given: plain SGD at 0.1."""
    return torch.optim.SGD(parameters, lr=0.1)


def train_virtually(
    model: nn.Module,
    data: tuple[Any, Any],
    loss: LossFn,
    *,
    sync: str = "bsp",
    cluster: Cluster | None = None,
    via: str = "auto",
    optimizer: OptimizerFactory = sgd,
    metric: MetricFn = accuracy,
    evaluate_every: float = 1.0,
    seed: int = 0,
    record: Callable[[RecordLine], None] | None = None,
    progress: Callable[[float], None] | None = None,
    **budget: Any,
) -> TrainingRun:
    """Train a copy of a model in virtual time: real gradients on the weights that each worker would hold, stale ones
    included.

    Args:
        model: The model; it is not changed.
        data: (train, test), each a pair of tensors or a data set.
        loss: A function of outputs and targets.
        sync: The mode, such as `"ssp:3"`.
        cluster: The machines and links; four equal workers by default.
        via: As in `simulate_job`.
        optimizer: Makes an optimizer from a list of parameters; plain SGD at 0.1 by default.
        metric: A function of outputs and targets of the test data; the accuracy by default.
        evaluate_every: Virtual seconds between evaluations.
        seed: Of everything random.
        record: Called with every line of the record.
        progress: Called with the share of the budget that is used up.
        **budget: At least one of `seconds`, `steps`, `samples` (summed over all workers) and `steps_each`.

    Returns:
        The trained model, the curve of the metric against virtual seconds, and the figures of the run.

    Raises:
        UsageError: The mode, the way or the budget cannot be used.
    """
    spec = parse_spec(sync)
    train, test = as_tensors(data[0], "training data"), as_tensors(data[1], "test data")
    cluster = cluster or Cluster()
    ranks = cluster.ranks()
    batches = [cluster.batches.get(rank, cluster.batch) for rank in ranks]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = VirtualTrainer if spec.local is None else VirtualLocalTrainer
        trainer = kind(model, train, Shards(len(train[0]), len(ranks), batches, seed), loss, optimizer, spec)
        curve: dict[float, float] = {}  # of several evaluations at one time the last counts
        trainer.observers.append(lambda now: curve.update({now: _evaluate(trainer, test, metric)}))
        outcome = simulate_job(
            cluster,
            sync,
            via=via,
            seed=seed,
            record=record,
            trainer=trainer,
            observe_every=evaluate_every,
            progress=progress,
            **budget,
        )
    return TrainingRun(outcome, tuple(curve.items()), trainer.evaluable(), trainer.spread.mean)


def model_bytes(model: nn.Module) -> float:
    """The bytes of a model that are sent: its trainable parameters."""
    return float(sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad))


def _evaluate(trainer: VirtualTrainer, test: TensorPair, metric: MetricFn) -> float:
    with torch.no_grad():
        value = metric(trainer.evaluable()(test[0]), test[1])
    trainer.master.train()
    return value


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


LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Gradient = list[torch.Tensor | None]


class VirtualTrainer:
    """Real training beside a simulated run."""

    def __init__(
        self, model: nn.Module, train: TensorPair, shards: Shards, loss: LossFn, make_optimizer: OptimizerFactory, spec: Spec
    ) -> None:
        self.master = copy.deepcopy(model).train()
        self._worker = copy.deepcopy(model).train()
        self._train, self._shards, self._loss = train, shards, loss
        self._parameters = [p for p in self.master.parameters() if p.requires_grad]
        self._loadable = [p for p in self._worker.parameters() if p.requires_grad]
        self.optimizer = optimizer_for(spec, make_optimizer(self._parameters))
        self._corrections = spec.corrections
        self._staleness = MeanStaleness()
        self._squares: list[torch.Tensor] | None = None  # running means, for adaptive compensation
        self.spread = GradientDivergence(self._parameters)
        self.versions = WeightHistory(list(self._parameters))
        self._loaded = -1  # the version in the worker's model
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self.observers: list[Callable[[float], None]] = []

    # Called by the engine.

    def keep(self, version: int) -> None:
        """One reader of a version more."""
        self.versions.keep(version)

    def drop(self, version: int) -> None:
        """One reader of a version less."""
        self.versions.drop(version)

    def apply(self, pushes: tuple[Pushed, ...], versions: list[int], rate: float) -> None:
        """Make one update of these pushes."""
        gradient = self._mean(pushes, versions)
        if self._corrections.compensation:  # modes with corrections apply single pushes
            gradient = self._compensated(gradient, self.versions.read(versions[0]))
        for version in versions:
            self.versions.drop(version)
        self._update(gradient, [self.versions.newest - version for version in versions], rate)

    def observe(self, now: float) -> None:
        """Call the observers, which evaluate the master."""
        for observer in self.observers:
            observer(now)

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

    def _mean(self, pushes: tuple[Pushed, ...], versions: list[int]) -> Gradient:
        total = sum(push.samples for push in pushes)
        mean: Gradient = [None] * len(self._parameters)
        for push, version in zip(pushes, versions, strict=True):
            weight = push.samples / total
            self._load(version)
            for index, grad in enumerate(self._gradient(push.worker, push.step)):
                if grad is not None:
                    part = grad if weight == 1 else grad.mul_(weight)
                    so_far = mean[index]
                    mean[index] = part if so_far is None else so_far.add_(part)
        return mean

    def _gradient(self, worker: int, step: int) -> Gradient:
        """The gradient of a worker's step, on the loaded weights."""
        self._load_buffers(worker)
        inputs, targets = self._train
        index = self._shards.batch(worker, step)
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
        groups, corrections = self.optimizer.param_groups, self._corrections
        before = [{name: group[name] for name in ("lr", "momentum") if name in group} for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * rate
            if corrections.adapts_momentum:
                group["momentum"] = corrections.momentum_for(group["momentum"], mean_staleness)
        self.optimizer.step()
        for group, values in zip(groups, before, strict=True):
            group.update(values)

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
        if not self._buffers:
            return self.master.eval()
        model = copy.deepcopy(self.master).eval()
        names = [name for name, _ in model.named_buffers()]
        of = {name: [buffers[index] for buffers in self._buffers.values()] for index, name in enumerate(names)}
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


Weights = list[torch.Tensor]


class Replica:
    """The weights of one worker, and its local steps."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.steps: deque[Gradient] = deque()  # the gradients of its local steps that a fetch may still lack, in order
        self.forgotten = 0  # how many there were before them
        self.settled = 0  # local steps whose push was applied, or dropped
        self.fetched: tuple[Weights, int] | None = None  # and how many of its local steps they contain
        self.pending: list[Gradient] = []  # of the next push
        self.read: Weights = []  # weights at the first of these
        self.sent: deque[tuple[list[Gradient], Weights]] = deque()

    def settle(self, count: int) -> None:
        """The next `count` steps were applied or dropped: the fetch in flight lacks them, later ones do not."""
        self.settled += count
        self.forget()

    def forget(self) -> None:
        """Free steps that no fetch lacks any more."""
        needed = self.settled if self.fetched is None else self.fetched[1]
        while self.forgotten < needed:
            self.steps.popleft()
            self.forgotten += 1


class VirtualLocalTrainer(VirtualTrainer):
    """Real training beside a simulated run of a mode with local steps."""

    def __init__(
        self, model: nn.Module, train: TensorPair, shards: Shards, loss: LossFn, make_optimizer: OptimizerFactory, spec: Spec
    ) -> None:
        super().__init__(model, train, shards, loss, make_optimizer, spec)
        assert spec.local is not None
        rates = {id(p): group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        self._rates = [spec.local.alpha or float(rates[id(parameter)]) for parameter in self._parameters]
        self._replicas: dict[int, Replica] = {}

    def keep(self, version: int) -> None:
        """Versions have no readers here."""

    def drop(self, version: int) -> None:
        """Versions have no readers here."""

    def begin(self, worker: int) -> None:
        """A worker is given the newest weights."""
        self._replicas[worker] = Replica(self._snapshot())

    def fetch(self, worker: int) -> None:
        """A worker requests the newest weights."""
        replica = self._replicas[worker]
        replica.fetched = self._snapshot(), replica.settled

    def install(self, worker: int) -> None:
        """The fetched weights have arrived."""
        replica = self._replicas[worker]
        assert replica.fetched is not None
        replica.weights = replica.fetched[0]
        for gradient in replica.steps:  # all since the request of the fetch, which it cannot contain
            self._walk(replica.weights, gradient)
        replica.fetched = None
        replica.forget()

    def step(self, worker: int, step: int) -> None:
        """A local step."""
        replica = self._replicas[worker]
        self._load_values(replica.weights)
        gradient = self._gradient(worker, step)
        if not replica.pending and self._corrections.compensation:
            replica.read = [value.clone() for value in replica.weights]
        self._walk(replica.weights, gradient)
        replica.steps.append(gradient)
        replica.pending.append(gradient)

    def send(self, worker: int) -> None:
        """The gradients since the last push are in flight."""
        replica = self._replicas[worker]
        replica.sent.append((replica.pending, replica.read))
        replica.pending = []

    def lose(self, worker: int) -> None:
        """The oldest push in flight is not applied."""
        replica = self._replicas[worker]
        replica.settle(len(replica.sent.popleft()[0]))

    def end(self, worker: int) -> None:
        """A worker has left."""
        self._replicas.pop(worker, None)

    def apply(self, pushes: tuple[Pushed, ...], versions: list[int], rate: float) -> None:
        """Make one update of a push: the sum of its gradients."""
        replica = self._replicas[pushes[0].worker]
        gradients, read = replica.sent.popleft()
        gradient, staleness = _sum(gradients), self.versions.newest - versions[0]
        if self._corrections.compensation:
            gradient = self._compensated(gradient, read if staleness else list(self._parameters))
        self._update(gradient, [staleness], rate)
        replica.settle(len(gradients))

    def _snapshot(self) -> Weights:
        return [parameter.detach().clone() for parameter in self._parameters]

    def _walk(self, weights: Weights, gradient: Gradient) -> None:
        for value, grad, rate in zip(weights, gradient, self._rates, strict=True):
            if grad is not None:
                value.add_(grad, alpha=-rate)


def _sum(gradients: list[Gradient]) -> Gradient:
    """The sum of the gradients of a push, in order; its terms are not changed."""
    total: Gradient = [None if grad is None else grad.clone() for grad in gradients[0]]
    for gradient in gradients[1:]:
        for index, grad in enumerate(gradient):
            if grad is not None:
                so_far = total[index]
                total[index] = grad.clone() if so_far is None else so_far.add_(grad)
    return total

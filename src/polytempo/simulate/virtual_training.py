"""One call: a model, data and a loss, a mode and a cluster in; accuracy against simulated seconds out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.outcome import Outcome
from polytempo.simulate.run import simulate_job
from polytempo.simulate.sharded_data import Shards, TensorPair, as_tensors
from polytempo.simulate.virtual_local_trainer import VirtualLocalTrainer
from polytempo.simulate.virtual_trainer import LossFn, OptimizerFactory, VirtualTrainer
from polytempo.sync.spec import parse_spec

MetricFn = Callable[[torch.Tensor, torch.Tensor], float]


@dataclass(frozen=True)
class TrainingRun:
    """What came of training in virtual time."""

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
    """Train a copy of `model` in virtual time.

    `data` is (train, test), each a pair of tensors or a data set. `optimizer` makes one from a list of parameters; in
    barrier modes it steps once a round on the mean gradient, in the others once a push at its rate divided by the number
    of active workers; `asup` brings its own, at the rate of the one given. `cluster` gives step times, batches, links and
    the bytes that travel. The budget is any of `seconds`, `steps`, `samples` (summed over workers), `steps_each`. Same seed,
    same result.
    """
    spec = parse_spec(sync)
    train, test = as_tensors(data[0], "training data"), as_tensors(data[1], "test data")
    cluster = cluster or Cluster()
    ranks = cluster.ranks()
    batches = [cluster.batches.get(rank, cluster.batch) for rank in ranks]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = VirtualTrainer if spec.local is None else VirtualLocalTrainer
        trainee = kind(model, train, Shards(len(train[0]), len(ranks), batches, seed), loss, optimizer, spec)
        curve: dict[float, float] = {}  # of several looks in one moment the last counts
        trainee.observers.append(lambda now: curve.update({now: _evaluate(trainee, test, metric)}))
        outcome = simulate_job(
            cluster,
            sync,
            via=via,
            seed=seed,
            record=record,
            trainee=trainee,
            observe_every=evaluate_every,
            progress=progress,
            **budget,
        )
    return TrainingRun(outcome, tuple(curve.items()), trainee.evaluable(), trainee.spread.mean)


def model_bytes(model: nn.Module) -> float:
    """What travels of a model: its trainable parameters."""
    return float(sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad))


def _evaluate(trainee: VirtualTrainer, test: TensorPair, metric: MetricFn) -> float:
    with torch.no_grad():
        value = metric(trainee.evaluable()(test[0]), test[1])
    trainee.master.train()
    return value

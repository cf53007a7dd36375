"""Training in virtual time: a model, data and a loss, a mode and a cluster in; accuracy against simulated seconds out.

The engine computes which worker does what when; a `VirtualModel` computes beside it what happens to the models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polytempo.errors import UsageError, WrongType
from polytempo.optim.worker_momentum import known_name
from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.outcome import Outcome
from polytempo.simulate.replicas import LossFn, OptimizerFactory, Shards, trainable
from polytempo.simulate.run import simulate_job
from polytempo.simulate.virtual_model import VirtualModel
from polytempo.sync.mode import Mode
from polytempo.sync.spec import Spec, spec_of
from polytempo.tasks import TensorPair

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
    sync: str | Mode | Spec = "bsp",
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
        sync: The mode, such as `"ssp:3"`, or one of your own: `K_BATCH(2)`. What it leaves to the optimizer is written out
            in the outcome and the record, as in a live job: `asp` with SGD and momentum is
            `asp,momentum=lookahead,spike=1.5`.
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
    cluster = cluster or Cluster()
    spec = settled_spec(sync, model, optimizer, cluster.workers)
    train, test = as_tensors(data[0], "training data"), as_tensors(data[1], "test data")
    ranks = cluster.ranks()
    batches = [cluster.batches.get(rank, cluster.batch) for rank in ranks]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        beside = VirtualModel(model, train, Shards(len(train[0]), len(ranks), batches, seed), loss, optimizer, spec)
        curve: dict[float, float] = {}  # of several evaluations at one time the last counts

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def evaluate(now: float) -> None:
            curve[now] = metric(beside.evaluable()(test[0]), test[1])

        beside.observers.append(evaluate)
        outcome = simulate_job(
            cluster,
            spec,
            via=via,
            seed=seed,
            record=record,
            trainer=beside,
            observe_every=evaluate_every,
            progress=progress,
            **budget,
        )
    return TrainingRun(outcome, tuple(curve.items()), beside.evaluable(), beside.spread.mean)


def as_tensors(data: Any, name: str) -> TensorPair:
    """Inputs and targets from a pair of tensors, or from a data set of (input, target) items."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data):
        inputs, targets = data
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        items = [data[index] for index in range(len(data))]
        inputs = torch.stack([torch.as_tensor(x) for x, _ in items])
        targets = torch.stack([torch.as_tensor(y) for _, y in items])
    else:
        raise WrongType(f"expected {name} as (inputs, targets) or as a data set with items, got {type(data).__name__}")
    if len(inputs) != len(targets) or len(inputs) == 0:
        raise UsageError(f"{name}: expected as many inputs as targets, got {len(inputs)} and {len(targets)}")
    return inputs, targets


def settled_spec(sync: str | Mode | Spec, model: nn.Module, optimizer: OptimizerFactory, workers: int) -> Spec:
    """A mode with what it leaves to the optimizer written out, as a live job of this number of workers has it."""
    made = optimizer(trainable(model))
    return spec_of(sync).settled(known_name(made), made.param_groups, workers=workers)


def model_bytes(model: nn.Module) -> float:
    """The bytes of a model that are sent: its trainable parameters."""
    return float(sum(p.numel() * p.element_size() for p in trainable(model)))

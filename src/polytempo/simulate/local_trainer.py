"""Local steps beside a simulated run of `downpour`.

Every simulated worker has weights of its own between fetches. A local step is w = w - alpha * g, where alpha is the rate of
the parameter's group unless the spec has another. A fetch brings the master's weights as of its request. When it is
installed, the local steps that those weights cannot contain are repeated on top of it, one by one: all that were not applied
at the request. With one worker, plain SGD and push=fetch=1 this is plain SGD bit for bit, for any network. Compensation uses
the weights that the worker held at the first gradient of a push; with no updates of other workers since, there is nothing to
compensate, even where local steps and the master's rule differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import nn

from polytempo.simulate.datasets import Shards, TensorPair
from polytempo.simulate.gradient_trainer import Gradient, LossFn, OptimizerFactory, VirtualTrainer, Weights
from polytempo.sync.actions import Apply
from polytempo.sync.spec import Spec


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

    def begin(self, worker: int, empty: bool = False) -> None:
        if worker not in self._replicas:
            self._replicas[worker] = Replica(self._snapshot())

    def fetch(self, worker: int, part: int) -> None:
        replica = self._replicas[worker]
        replica.fetched = self._snapshot(), replica.settled

    def install(self, worker: int, part: int) -> None:
        replica = self._replicas[worker]
        assert replica.fetched is not None
        replica.weights = replica.fetched[0]
        for gradient in replica.steps:  # all since the request of the fetch, which it cannot contain
            self._walk(replica.weights, gradient)
        replica.fetched = None
        replica.forget()

    def step(self, worker: int, number: int) -> None:
        replica = self._replicas[worker]
        self._load_values(replica.weights)
        gradient = self._gradient(worker, number)
        if not replica.pending and self._corrections.compensation:
            replica.read = [value.clone() for value in replica.weights]
        self._walk(replica.weights, gradient)
        replica.steps.append(gradient)
        replica.pending.append(gradient)

    def send(self, worker: int, part: int) -> None:
        replica = self._replicas[worker]
        replica.sent.append((replica.pending, replica.read))
        replica.pending = []

    def lose(self, worker: int, step: int, version: int) -> None:
        """The oldest push in flight is not applied."""
        replica = self._replicas[worker]
        replica.settle(len(replica.sent.popleft()[0]))

    def end(self, worker: int, finished: bool) -> None:
        """A worker has left."""
        self._replicas.pop(worker, None)

    def apply(self, apply: Apply, versions: Sequence[int], contents: Sequence[None], part: int) -> None:
        replica = self._replicas[apply.pushes[0].worker]
        gradients, read = replica.sent.popleft()
        gradient, staleness = _sum(gradients), self.versions.newest - versions[0]
        if self._corrections.compensation:
            gradient = self._compensated(gradient, read if staleness else list(self._parameters))
        self._update(gradient, [staleness], apply.rate)
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

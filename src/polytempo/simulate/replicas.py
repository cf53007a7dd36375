"""What is a worker's own beside a simulated run: its samples, values, optimizer and buffers, and what it has to push.

    Replica         a local step is one of the worker's own optimizer; nothing is pushed, values go to other workers
    SteppedReplica  a push brings the gradients of the steps since the last one
    BlockReplica    a push brings the values of a fragment, or their change
    OwnMomentum     a push brings what the worker's momentum makes of a gradient; the values are the servers'

A list of values is replaced, its tensors are never changed: that which was sent, fetched or read needs no copy.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from polytempo.errors import UsageError
from polytempo.optim.several_workers import GradientDivergence, with_change
from polytempo.optim.worker_momentum import ChangeMomentum, GradientMomentum, known_name
from polytempo.simulate.worker import EpochRange
from polytempo.sync.blocks import Averaging
from polytempo.sync.momentum import MomentumForm, check_kept, form_of
from polytempo.sync.spec import Spec
from polytempo.tasks import TensorPair

LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
#: Of each parameter a tensor, or nothing where it was not used.
Gradient = list[torch.Tensor | None]
Weights = list[torch.Tensor]
#: Optimizer state of some parameters: for each, names and tensors.
State = list[dict[str, torch.Tensor]]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained, and sent."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def cloned(tensors: Sequence[torch.Tensor]) -> Weights:
    """The values of tensors, in memory of their own."""
    return [tensor.detach().clone() for tensor in tensors]


class Shards:
    """The training samples of each worker: a new shuffle each epoch, each worker every n-th of it, whole batches only."""

    def __init__(self, size: int, ranks: int, batches: Sequence[int], seed: int) -> None:
        self._size, self._batches, self._seed = size, batches, seed
        self.workers = ranks  #: among which the samples are dealt
        self._shuffles: dict[int, torch.Tensor] = {}
        short = size // ranks
        if short < max(batches):
            raise UsageError(
                f"{size} samples over {ranks} workers are {short} each, less than a batch of {max(batches)}; "
                f"use a smaller batch or fewer workers"
            )

    def batch(self, worker: int, step: int) -> torch.Tensor:
        """The indices of a worker's samples in its step."""
        batch = self._batches[worker]
        epoch, place = divmod(step, (self._size // self.workers) // batch)
        mine = self.order(epoch)[worker :: self.workers]
        return mine[place * batch : (place + 1) * batch]

    def at(self, places: Sequence[EpochRange]) -> torch.Tensor:
        """The indices of samples that were dealt out."""
        return torch.cat([self.order(epoch)[start:stop] for epoch, start, stop in places])

    def order(self, epoch: int) -> torch.Tensor:
        """The indices of all samples in the order of an epoch."""
        if epoch not in self._shuffles:
            if len(self._shuffles) > 64:  # workers are rarely further apart; a shuffle is made again if one is
                self._shuffles.clear()
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._shuffles[epoch] = torch.randperm(self._size, generator=generator)
        return self._shuffles[epoch]


class SampleGradients:
    """Gradients of given samples on values that are loaded into one model; buffers are those of the worker."""

    def __init__(self, model: nn.Module, train: TensorPair, loss: LossFn, spread: GradientDivergence) -> None:
        self._model, self._train, self._loss, self._spread = copy.deepcopy(model).train(), train, loss, spread
        self.parameters = trainable(self._model)
        self._initial = cloned(list(model.buffers()))
        self._loaded: int | None = None
        self.buffers: dict[int, Weights] = {}  #: of each worker that has computed

    def load(self, values: Sequence[torch.Tensor], version: int | None = None) -> None:
        """Take these values; those of a version that is loaded already are not copied again."""
        if version is None or version != self._loaded:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, values)
        self._loaded = version

    def of(self, worker: int, index: torch.Tensor) -> tuple[Gradient, torch.Tensor]:
        """The gradient of these samples on the values that are loaded, and the loss."""
        for buffer, value in zip(self._model.buffers(), self.buffers.get(worker, self._initial), strict=True):
            buffer.copy_(value)
        for parameter in self.parameters:
            parameter.grad = None
        inputs, targets = self._train
        loss = self._loss(self._model(inputs[index]), targets[index])
        loss.backward()
        if self._initial:
            self.buffers[worker] = cloned(list(self._model.buffers()))
        gradient = [parameter.grad for parameter in self.parameters]
        self._spread.take(worker, gradient, self.parameters)
        return gradient, loss.detach()


@dataclass
class FetchedValues:
    """Values that are sent to a worker."""

    number: int  #: of updates in them
    values: Weights
    state: State = field(default_factory=list)  #: of optimizers, where it is averaged


class Replica:
    """The model of one worker."""

    def __init__(self, values: Weights, make_optimizer: OptimizerFactory) -> None:
        self.values = values
        self.weight = 1.0  #: of the model, in push-sum; 0: there is none yet
        self.snapshot: Weights | None = None  #: what the step is computed on, where others change the values meanwhile
        self._stepped = values  # what that step has made of the snapshot
        self.parameters = [nn.Parameter(value.clone()) for value in values]  #: on these the optimizer works
        self.optimizer = make_optimizer(self.parameters)

    def step(self, gradient: Gradient, loss: torch.Tensor) -> None:
        """A local step, along a gradient that was taken on the snapshot, or on the values."""
        if self.snapshot is None:
            self.values = self._walk(self.values, [gradient])
        else:
            self._stepped = self._walk(self.snapshot, [gradient])

    def add_step(self) -> None:
        """The step on the snapshot is added to the values."""
        assert self.snapshot is not None
        self.values = with_change(self.values, self._stepped, self.snapshot)

    def settle(self) -> None:
        """A push was applied, or dropped."""

    def _walk(self, values: Weights, gradients: Sequence[Gradient]) -> Weights:
        """What the optimizer makes of values, with a step along each of these gradients."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, values)
        for gradient in gradients:
            for parameter, grad in zip(self.parameters, gradient, strict=True):
                parameter.grad = grad
            self.optimizer.step()
        return cloned(self.parameters)


@dataclass
class SentSteps:
    """A push of local steps."""

    gradients: list[Gradient]
    read: Weights  #: the values at the first of them


class SteppedReplica(Replica):
    """A worker that pushes the gradients of its local steps, and fetches values now and then.

    Of the steps those are kept that a fetch may lack: all that were not applied when it was requested. They are repeated on
    top of what it brings, one by one, so that one worker is plain SGD bit for bit, for any network.
    """

    def __init__(self, values: Weights, make_optimizer: OptimizerFactory) -> None:
        super().__init__(values, make_optimizer)
        self.kept: deque[Gradient] = deque()  #: in order
        self.under_way: deque[int] = deque()  #: steps of each push
        self._fetched: FetchedValues | None = None
        self._settled = 0  # steps whose push was applied, or dropped, since these were requested: they lack them
        self._next = SentSteps([], values)  # the push that they are gathered for

    def step(self, gradient: Gradient, loss: torch.Tensor) -> None:
        if not self._next.gradients:
            self._next.read = self.values
        self.kept.append(gradient)
        self._next.gradients.append(gradient)
        super().step(gradient, loss)

    def send(self, part: int) -> SentSteps:
        sent, self._next = self._next, SentSteps([], self.values)
        self.under_way.append(len(sent.gradients))
        return sent

    def settle(self) -> None:
        """The oldest push under way was applied or dropped: a fetch in flight lacks it, later ones do not."""
        self._settled += self.under_way.popleft()
        if self._fetched is None:
            self._forget()

    def fetch(self, part: int, newest: FetchedValues) -> None:
        self._fetched = newest

    def install(self, part: int, pull: float = 1.0) -> FetchedValues:
        assert self._fetched is not None
        fetched, self._fetched = self._fetched, None
        self.values = self._walk(fetched.values, self.kept)
        self._forget()
        return fetched

    def _forget(self) -> None:
        for _ in range(self._settled):
            self.kept.popleft()
        self._settled = 0


@dataclass
class SentValues:
    """A push of a fragment."""

    values: Weights  #: or, in decoupled modes, their change
    state: State  #: to be averaged, where it is
    rates: list[float]  #: the learning rate of each group, in the last step
    loss: float | None  #: the mean over the steps since the last push

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return self.rates[0]


class BlockReplica(Replica):
    """A worker that averages its model with others, fragment by fragment. What it has changed since it sent its own values
    stays on top of those that it takes.

    The state of its optimizer stays with it ("keep"), is averaged as the values are ("mean") or dropped ("reset").
    """

    def __init__(
        self, fragments: Sequence[slice], averaging: Averaging, values: Weights, make_optimizer: OptimizerFactory
    ) -> None:
        super().__init__(values, make_optimizer)
        self._fragments, self._averaging = fragments, averaging
        self._losses: list[list[float]] = [[] for _ in fragments]  # since the last push of each fragment
        self._base = [values[fragment] for fragment in fragments]  # the values it last took
        self._sent: list[Weights | None] = [None] * len(fragments)  # its own at the push, until an answer is taken
        self._fetched: dict[int, FetchedValues] = {}

    def step(self, gradient: Gradient, loss: torch.Tensor) -> None:
        super().step(gradient, loss)
        for losses in self._losses:
            losses.append(float(loss))

    def send(self, part: int) -> SentValues:
        values = own = self._sent[part] = self.values[self._fragments[part]]
        if self._averaging.decoupled:
            values = [base - value for base, value in zip(self._base[part], own, strict=True)]
        losses, self._losses[part] = self._losses[part], []
        state: State = []
        if self._averaging.state == "mean":
            kept = [self.optimizer.state.get(one, {}) for one in self.parameters[self._fragments[part]]]
            state = [{name: value.clone() for name, value in one.items() if is_averaged(value)} for one in kept]
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return SentValues(values, state, rates, sum(losses) / len(losses) if losses else None)

    def fetch(self, part: int, newest: FetchedValues) -> None:
        self._fetched[part] = newest

    def install(self, part: int, pull: float = 1.0) -> FetchedValues:
        fetched, sent, fragment = self._fetched[part], self._sent[part], self._fragments[part]
        self._sent[part], self._base[part] = None, fetched.values
        self.values = list(self.values)
        if sent is None:
            self.values[fragment] = fetched.values
            return fetched
        if pull == 1.0:
            self.values[fragment] = with_change(self.values[fragment], fetched.values, sent)
        else:
            ways = zip(self.values[fragment], fetched.values, sent, strict=True)
            self.values[fragment] = [own + pull * (new - old) for own, new, old in ways]
        kept = self.optimizer.state
        for place, parameter in enumerate(self.parameters[fragment]):
            if self._averaging.state == "reset":
                kept.pop(parameter, None)
            elif fetched.state and parameter in kept:
                for name, value in fetched.state[place].items():
                    if is_averaged(kept[parameter].get(name)):
                        kept[parameter][name].copy_(value)
        return fetched


def is_averaged(value: Any) -> bool:
    """Is this part of an optimizer's state a tensor of numbers?"""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class OwnMomentum:
    """The momentum of one worker: `sync/momentum.py` has the rule, `optim/worker_momentum.py` its tensors, as in a live job.

    It changes in the order of the worker's pushes, those that are not applied included: the worker has made them. The
    parameters are those into which the values of a step are loaded.
    """

    def __init__(self, spec: Spec, parameters: list[nn.Parameter], make_optimizer: OptimizerFactory, workers: int) -> None:
        self._parameters, self._optimizer = parameters, make_optimizer(parameters)
        name = known_name(self._optimizer)
        check_kept(spec.text, name, type(self._optimizer).__name__)
        self.form = form_of(name, self._optimizer.param_groups)
        looks_ahead = spec.looks_ahead
        self._momentum = (
            GradientMomentum(self._optimizer, looks_ahead, spec.spike)
            if self.form is MomentumForm.GRADIENT
            else ChangeMomentum(self._optimizer, looks_ahead)
        )
        self._own_rate = spec.own_push_rate(workers)
        #: Pushes that a step to come may lack, each with the first version that has it: the answer's, if it is not applied.
        self.pushes: list[tuple[Gradient, int]] = []

    def add_own(self, read: int) -> None:
        """Add the worker's unanswered pushes to the values of this version, which are loaded (`reducer/servers.py`
        says why). Later steps read this version or newer."""
        self.pushes = [(push, version) for push, version in self.pushes if version > read]
        factors = dict.fromkeys(map(id, self._parameters), self._own_rate)
        if self.form is MomentumForm.GRADIENT:
            for group in self._optimizer.param_groups:
                factors.update((id(param), -self._own_rate * float(group["lr"])) for param in group["params"])
        with torch.no_grad():
            for push, _ in self.pushes:
                for parameter, tensor in zip(self._parameters, push, strict=True):
                    if tensor is not None:
                        parameter.add_(tensor, alpha=factors[id(parameter)])

    def push(self, gradient: Gradient) -> Gradient:
        """What is pushed of a gradient, taken on the values that are loaded, which stay. The gradient is used up."""
        return self._momentum.push_all(self._parameters, gradient)

    def settle(self, pushed: Gradient, version: int) -> None:
        """A push was applied, or dropped; the answer to it has this version."""
        if self._own_rate:
            self.pushes.append((pushed, version))

"""The live driver: it performs the orders of a worker's machine (`sync/machine.py`) on tensors and on an exchange.

    step()    the script has computed a gradient: the machine is told, and its orders are performed, one after another.
              Where it orders no further step, the driver waits for the release and tells it of that, until it does

A driver decides nothing: what is sent when, what is waited for and what is done with the answer is the machine's. What an
order means for tensors is said by those that know them, in a table.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polytempo.protocol.push import Measures, no_steps
from polytempo.protocol.values import beside
from polytempo.records.lines import MAIN
from polytempo.reducer.exchange import Exchange
from polytempo.reducer.servers import ServerExchange
from polytempo.sync import machine as machines
from polytempo.sync.actions import Admit, Release
from polytempo.sync.machine import Orders, WorkerEvent, WorkerMachine


@dataclass
class StepRequest:
    """One call of `step()`."""

    measures: Measures  #: what its push says of this worker; first of all the weight of its gradient
    skip: bool  #: the step changes nothing: a GradScaler has found gradients that are not finite
    agreed: bool  #: `synchronize()` was called: `.grad` is the mean already
    closure: Callable[[], Any] | None = None
    loss: Any = None  #: the loss, where the script gave it or a closure has returned it
    scale: Any = None  #: what a GradScaler has multiplied the loss by
    weighed: bool = False  #: the script gave the weight
    unscaled: bool = False  #: a GradScaler has multiplied it, and the script has unscaled the gradients


def no_request() -> StepRequest:
    """Before the first."""
    return StepRequest(no_steps(), skip=True, agreed=False)


class StepUpdate(ABC):
    """One way to make the update."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """The number of steps so far."""

    @abstractmethod
    def step(self, request: StepRequest) -> Any:
        """Make one step; what the closure returned, if this way calls it."""

    def join(self) -> None:
        """This worker has run out of data: take part until all others have."""

    def look(self, reducer: Exchange, params: Sequence[torch.Tensor]) -> None:
        """Before a step: refuse other parameters than at the start, and deal with values that the script has written."""
        reducer.copier.check_same(params)
        reducer.renew()
        reducer.take_writes()

    def push_values(self, reducer: Exchange) -> None:
        """Make this worker's values the job's."""
        reducer.renew(compare=False)
        reducer.take_writes(declared=True)

    def consolidate(self, reducer: Exchange) -> None:
        """Load the job's newest values."""
        reducer.read_values()

    def samples(self) -> float:
        """The weight of the next step, where the script does not say it."""
        return 1.0

    def state(self, reducer: Exchange) -> dict[str, Any]:
        """What is kept beside the optimizer's state, and belongs to its `state_dict()`."""
        residual = reducer.filters.state() if isinstance(reducer, ServerExchange) else {}
        return {"filters": residual} if residual else {}

    def load_state(self, reducer: Exchange, state: dict[str, Any]) -> None:
        """Go on from what `state` has put into a `state_dict()`."""
        if isinstance(reducer, ServerExchange):
            reducer.filters.load(state.get("filters", {}))

    def stats(self) -> dict[str, Any]:
        """Figures of this way."""
        return {}


#: What each kind of order does here.
LivePerforms = dict[type, Callable[[Any], object]]


def nothing(order: object) -> None:
    """What an order does that is about virtual time, or that the script carries out by itself."""


class MachineUpdate(StepUpdate):
    """Steps of one optimizer as its machine orders them.

    Args:
        machine: The worker's half of the mode.
        reducer: How what it sends gets to the others.
    """

    def __init__(self, machine: WorkerMachine, reducer: Exchange) -> None:
        self._machine, self._reducer = machine, reducer
        self._request = no_request()  # the one that is carried out
        self._result: Any = None  # what its closure has returned
        self._performs: LivePerforms = {
            machines.Compute: self._compute,
            machines.AskAgain: lambda order: self._tell(machines.ASKED),
            machines.Settle: nothing,  # when a worker goes is the script's business
            machines.GoHome: nothing,
            **self.performs(),
        }

    @abstractmethod
    def performs(self) -> LivePerforms:
        """What the orders of this kind of machine do."""

    def start(self) -> None:
        """The worker is admitted, and may make its first step."""
        self._tell(Admit(self._reducer.session.rank, self._reducer.step))
        self._hear()

    @property
    def steps(self) -> int:
        return self._reducer.step

    def step(self, request: StepRequest) -> Any:
        self._request, self._result = request, None
        self._tell(machines.COMPUTED)
        while not self._machine.computes:
            self._wait()
        return self._result

    def _wait(self) -> None:
        """Nothing more can be done before the release."""
        self._reducer.finish()
        self._hear()

    def _hear(self) -> None:
        """Tell the machine of the release that has come."""
        reducer = self._reducer
        if reducer.step > self._machine.step:  # its push was discarded, and the job is further
            self._tell(machines.DROPPED)
        self._tell(
            Release(reducer.session.rank, max(reducer.step, reducer.client_state.released), reducer.step, reducer.directive)
        )

    def _tell(self, event: WorkerEvent, part: int = 0) -> None:
        self._obey(self._machine.handle(event, time.monotonic(), part))

    def _compute(self, order: machines.Compute) -> None:
        """The script does it, on what its samplers deal. Steps of other optimizers are made of the same batches."""
        if order.weights and beside(self._reducer.name) == MAIN:
            self._reducer.session.ledger.cut_by(order.weights, order.since)

    def _obey(self, orders: Orders) -> None:
        for order in orders:
            self._performs[type(order)](order)

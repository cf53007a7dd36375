"""The worker's half of a mode: when it sends what, what it waits for, and what it does with the answer.

    policy  -> Release ->  machine  -> orders ->  driver  -> Computed, Fetched, ... ->  machine

The rules of this folder hold here, too: no clock, no tensor, no socket. A machine is told what has happened to its worker
and answers with orders. A driver carries them out, one after another: live on tensors and sockets, in virtual time on a
heap and, beside training, on virtual models. It asks no mode anything.

    Compute        a step, on the values that are held
    StepHere       run the worker's own optimizer on the gradient that was computed
    PushStep       the policy hears of the step, and its gradient goes with it
    SendPush       likewise, with what several (local) steps have made
    SendModel      the values of now, to the neighbours of this row
    AskPartner     the values of now, for an average of two; the partner has an AnswerPartner
    RequestValues  the newest ones, beside the pushes
    Install, Mix   take values that have come
    Settle         say when nothing that was sent is under way any more
    GoHome         leave the job

After orders without `Compute` a worker that computes nothing waits. A machine lives as long as its worker: one that comes
back starts with a new one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polytempo.sync.actions import Admit, Release
from polytempo.sync.directives import Mixing
from polytempo.sync.fields import Fields

# What happens to a worker. That it was admitted or released is told by the policy's own actions.


@dataclass(slots=True)
class Computed:
    """The step that was ordered is computed: there is a gradient."""

    seconds: float = 0.0  #: that it took, in modes that follow the workers' speed
    empty: bool = False  #: there is none: the step changes nothing


@dataclass(slots=True)
class Fetched:
    """The values that were requested are here."""


@dataclass(slots=True)
class Dropped:
    """A push was not applied; the release that follows says where this worker goes on."""


@dataclass(slots=True)
class Asked:
    """What was ordered before `AskAgain` is done."""


@dataclass(slots=True)
class AllArrived:
    """Nothing that was sent is under way any more."""


@dataclass(slots=True)
class StartsAt:
    """This worker takes part as if it had made this many local steps: its budget is that of the others."""

    made: int


@dataclass(slots=True)
class EndBlock:
    """What was made and not sent is to be sent now: the script wants to see the job's values, or has ended."""

    restarts: bool = False  #: fragments of a model begin a new cycle of turns after it, on all workers


@dataclass(slots=True)
class SatOut:
    """A round was made to which this worker, which has no more data, has added nothing; its release was told before."""


@dataclass(slots=True)
class BudgetUsed:
    """All that the job was to make is made: a worker may go on, but it keeps nothing for a later push."""


@dataclass(slots=True)
class Leaving:
    """No further step is to be made."""


@dataclass(slots=True)
class Requested:
    """Another worker asks for an average of two."""

    sender: int
    step: int  #: the sender's


@dataclass(slots=True)
class Replied:
    """The worker that was asked has answered; without `averaged` both keep what they have."""

    sender: int
    step: int
    averaged: bool


@dataclass(slots=True)
class Parted:
    """Another worker is gone."""

    worker: int


@dataclass(slots=True)
class TimeUp:
    """The deadline of this step has come."""

    step: int


WorkerEvent = (
    Admit
    | Release
    | StartsAt
    | Computed
    | Fetched
    | Dropped
    | Asked
    | AllArrived
    | EndBlock
    | SatOut
    | BudgetUsed
    | Leaving
    | Requested
    | Replied
    | Parted
    | TimeUp
)

# What a driver is to do.


@dataclass(slots=True)
class Compute:
    """Compute a step."""

    weights: tuple[tuple[int, float], ...] = ()  #: the shares by which the joint batch is cut, in modes that cut it
    since: tuple[int, int] | None = None  #: the first batch (pass, number) for which they hold, if any was drawn before


@dataclass(slots=True)
class StepHere:
    """Run the worker's own optimizer."""

    number: int  #: of the step, in this worker's data


@dataclass(slots=True)
class PushStep:
    """Tell the policy of the step that was computed, with its gradient. Its number is the machine's `step` before this."""

    measured: Fields | None = None  #: what else the policy is told, in modes that declare it


@dataclass(slots=True)
class SendPush:
    """Tell the policy of a step, with what was made for it."""

    step: int
    count: int = 1  #: (local) steps in it; 0: this worker only takes part
    part: int = 0  #: the fragment of the model
    beside: bool = False  #: the worker computes meanwhile
    measured: Fields | None = None  #: what else the policy is told, in modes that declare it


@dataclass(slots=True)
class SendModel:
    """Send the values of now to the receivers of this row."""

    row: Mixing
    step: int


@dataclass(slots=True)
class AskPartner:
    """Send the values of now to a worker that will make an average of two."""

    partner: int
    step: int


@dataclass(slots=True)
class AnswerPartner:
    """Answer a worker that asks for an average of two; with `averaged` the values of both become it."""

    asker: int
    step: int  #: the asker's
    averaged: bool


@dataclass(slots=True)
class RequestValues:
    """Request the newest values."""


@dataclass(slots=True)
class Install:
    """Take values that have come: x = new + (x - x at the sending). With `pull`, go that part of the way: x + pull (new - x
    at the sending)."""

    part: int = 0
    pull: float = 1.0


@dataclass(slots=True)
class Begin:
    """Start with the values that every worker starts with; `empty`: with none, until others have sent some."""

    empty: bool = False


@dataclass(slots=True)
class Mix:
    """Make the values what this row says; shares for neighbours that are lost stay here."""

    row: Mixing
    step: int
    lost: tuple[int, ...] = ()


@dataclass(slots=True)
class Snapshot:
    """The step is computed on the values of now, whatever becomes of them meanwhile."""


@dataclass(slots=True)
class AddStep:
    """Add what the step has changed on the snapshot to the values, which others may have changed."""


@dataclass(slots=True)
class Abandon:
    """What was computed last is not used: its samples go back."""


@dataclass(slots=True)
class AskAgain:
    """Say when what was ordered before this is done."""


@dataclass(slots=True)
class Settle:
    """Say when nothing that was sent is under way."""


@dataclass(slots=True)
class GoHome:
    """Leave the job: all steps are made."""


WorkerOrder = (
    Compute
    | StepHere
    | PushStep
    | SendPush
    | SendModel
    | AskPartner
    | AnswerPartner
    | RequestValues
    | Install
    | Begin
    | Mix
    | Snapshot
    | AddStep
    | Abandon
    | AskAgain
    | Settle
    | GoHome
)
Orders = Sequence[WorkerOrder]

#: Orders and events that say the same each time: a simulation gives tens of millions of them.
COMPUTE, SNAPSHOT, ADD_STEP, ABANDON = Compute(), Snapshot(), AddStep(), Abandon()
ASK_AGAIN, SETTLE = AskAgain(), Settle()
GO: Orders = (COMPUTE,)
PUSHES: Orders = (PushStep(),)
PUSH_AND_GO: Orders = (PushStep(), COMPUTE)
NO_ORDERS: Orders = ()
FINISHED: Orders = (SETTLE,)
GOES_HOME: Orders = (GoHome(),)
COMPUTED, FETCHED, DROPPED, ASKED, ALL_ARRIVED, LEAVING = Computed(), Fetched(), Dropped(), Asked(), AllArrived(), Leaving()


#: What a push brings: the gradient of a step, of a share of the joint batch, of micro-batches, the sum of those of local
#: steps, values of a fragment, or nothing: the values go to other workers.
Brings = Literal["gradient", "share", "batches", "sum", "values", "nothing"]

#: The orders that go with each of these, beside those that go with all: drivers perform no others.
_ORDERS: Mapping[str, tuple[type, ...]] = {
    "gradient": (PushStep,),
    "share": (PushStep,),
    "batches": (SendPush, Abandon),
    "sum": (StepHere, SendPush, RequestValues, Install, Begin),
    "values": (StepHere, SendPush, Install),
    "nothing": (StepHere, SendPush, SendModel, AskPartner, AnswerPartner, Begin, Mix, Snapshot, AddStep),
}


def orders_for(brings: str) -> tuple[type, ...]:
    """The orders of a machine that brings this, beside those of all machines; none where nothing can be brought so."""
    return _ORDERS.get(brings, ())


class WorkerMachine(ABC):
    """The half of one worker.

    Args:
        last: How many steps it makes at most.
    """

    brings: Brings = "gradient"
    parts = 1  #: fragments of the model, each with a policy of its own
    micro = 0  #: micro-batches of a whole step, where the worker takes whole ones
    measures: frozenset[str] = frozenset()  #: what a push says of its block: "loss", "lr"
    overlaps = False  #: does the worker compute while the policy holds it, so that all its idleness is waiting?
    sends_early = False  #: where values go to other workers: do they leave before the step changes them?
    asks = False  #: likewise: does it ask one worker at a time for an average of two?

    __slots__ = ("_dropped", "allowed", "computes", "last", "leaving", "step")

    def __init__(self, last: float = math.inf) -> None:
        self.last = last
        self.step = 0  #: the next that the policy is told of
        self.allowed = -1  #: the last that was released
        self.computes = False
        self.leaving = False
        self._dropped = False  # a push was: the next release says where to go on

    @property
    def done(self) -> bool:
        """Has it made all its steps?"""
        return self.step >= self.last

    @property
    def is_free(self) -> bool:
        """May it leave? It computes nothing, and no other worker has promised it anything."""
        return not self.computes

    @abstractmethod
    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        """What this worker does now.

        Here is what most machines do alike; those of modes end with it, `super().handle(event, now, part)`.

        Args:
            event: What has happened to it; an action of the policy has reached it.
            now: When.
            part: The fragment of the model whose policy has acted.
        """
        match event:
            case Leaving():
                self.leaving = True
            case Dropped():
                self._dropped = True
            case AllArrived():
                return GOES_HOME
            case Admit():
                self.step, self.computes = event.step, False
        return NO_ORDERS

    def may_make(self, step: int) -> None:
        """A release of this step has come. Where a push was dropped, it is the step to go on with."""
        self.allowed = step
        if self._dropped:
            self._dropped, self.step = False, step


class StepMachine(WorkerMachine):
    """One push a step: of modes whose values live on servers or are the same on all workers (`bsp`, `ssp`, `asp`, `delay`).

    How many pushes may be under way is the policy's business: it releases that many steps ahead.
    """

    __slots__ = ()

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        kind = type(event)  # `isinstance`, and a method for each event, cost a third of a simulated step
        if kind is Release:
            allowed = self.allowed = event.step  # type: ignore[union-attr]
            if self._dropped:  # `may_make`, without the call
                self._dropped, self.step = False, allowed
            if self.computes or self.leaving or self.step > allowed:
                return NO_ORDERS
            if self.step >= self.last:
                return FINISHED
            self.computes = True
            return GO
        if kind is Computed:
            step = self.step = self.step + 1
            if step <= self.allowed and step < self.last and not self.leaving:
                return PUSH_AND_GO
            self.computes = False
            return PUSHES
        return super().handle(event, now, part)


@dataclass(frozen=True)
class MachineEntry:
    """What a machine was told, and what it ordered then: fed to a fresh machine, the same events give the same orders."""

    optimizer: str
    event: WorkerEvent
    now: float
    part: int
    orders: tuple[WorkerOrder, ...]


class LoggedMachine:
    """A machine whose events and orders are logged."""

    def __init__(self, machine: WorkerMachine, optimizer: str, log: Callable[[MachineEntry], object]) -> None:
        self._machine, self._optimizer, self._log = machine, optimizer, log

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        """As the machine does."""
        orders = self._machine.handle(event, now, part)
        self._log(MachineEntry(self._optimizer, event, now, part, tuple(orders)))
        return orders

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


def a_push_each_step(worker: int, last: float, *_: Any, **__: Any) -> WorkerMachine:
    """The machine of a mode that declares none of its own."""
    return StepMachine(last)

"""`gossip` and `adpsgd` at the worker: a step of the wrapped optimizer on this worker's own model and gradients, and mixing
with the models of other workers. Pushes carry no data; the optimizer and its state are this worker's own and are not mixed.

`gossip` (`sync/gossip.py`) mixes with its neighbours. The parameters are the model z = x / w; a step moves z by what the
optimizer says:

    by default      the optimizer steps; the new values are sent; push; release; x = sum of P_ij x_j of the new values
    overlap=1       the values were sent when the step began; the optimizer steps; push; release;
                    x = sum of P_ij x_j of the old values + what the optimizer has changed (D-PSGD as printed)

`adpsgd` (`sync/adpsgd.py`) computes gradients on a snapshot, while pairs of workers are averaged. The parameters are written
only inside `step()`: averages that others ask for change x alone, so backward always sees the values that forward saw:

    snapshot    the parameters become x, the state beside them (`reducer/neighbours.py`); active workers ask a partner
    step        the optimizer steps on the snapshot; what was asked is finished; x = x + what the optimizer has changed; push
"""

from __future__ import annotations

from typing import Any

from polytempo.profile_ranges import profiled
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.neighbours import GossipExchange, NeighbourExchange, PairExchange
from polytempo.session.leaving import LeavingStep
from polytempo.sync.machine import AddStep, AskPartner, Begin, Mix, SendModel, SendPush, Snapshot, StepHere, WorkerMachine
from polytempo.train.driver import LivePerforms, MachineUpdate, StepRequest, nothing
from polytempo.train.update import Wrapped, left_as_shown
from polytempo.transport.buffer_pool import Pool


class OwnModelUpdate(MachineUpdate):
    """Steps of the wrapped optimizer on this worker's own model."""

    def __init__(self, wrapped: Wrapped, reducer: NeighbourExchange, machine: WorkerMachine) -> None:
        self._wrapped, self._neighbours = wrapped, reducer
        super().__init__(machine, reducer)

    def performs(self) -> LivePerforms:
        return {
            Begin: nothing,  # all have the first worker's values
            StepHere: self._step_here,
            SendPush: self._push,
        }

    def step(self, request: StepRequest) -> Any:
        self._neighbours.restore()
        return super().step(request)

    def _step_here(self, order: StepHere) -> None:
        request, wrapped, reducer = self._request, self._wrapped, self._neighbours
        if request.skip or request.measures.samples == 0:
            return
        wrapped.clip()
        request.measures.nonfinite = wrapped.finite.check(reducer.gradients()[0], reducer.step)
        self._result = wrapped.step(request.closure)
        reducer.copier.watch.record()

    def _push(self, order: SendPush) -> None:
        self._request.measures.fields = order.measured
        self._neighbours.begin(None, self._wrapped.hyper(), self._request.measures, skip=self._request.skip)

    def _changes_since(self, before: FlatBuffer) -> FlatBuffer:
        """What the parameters have changed since they were these values, in the same memory."""
        self._neighbours.copier.subtract_from_values(before)
        return before


class GossipUpdate(OwnModelUpdate):
    """Local steps, mixed with those of neighbours."""

    def __init__(self, wrapped: Wrapped, reducer: NeighbourExchange, machine: WorkerMachine, overlap: bool) -> None:
        self._exchange = GossipExchange(reducer)
        # The model when it was sent, where that is before the step; in the step, the change since then.
        self._sent = FlatBuffer(reducer.layout, Pool(), pinned=False) if overlap else None
        super().__init__(wrapped, reducer, machine)
        reducer.session.on_leave(LeavingStep.FLUSH, self._leave)
        self.start()

    def performs(self) -> LivePerforms:
        return {
            **super().performs(),
            SendModel: lambda order: self._exchange.send(order.row, order.step),
            Snapshot: self._snapshot,
            AddStep: nothing,  # the optimizer has changed the parameters
            Mix: self._mix,
        }

    def _snapshot(self, order: Snapshot) -> None:
        if self._sent is not None:
            self._neighbours.copier.gather(self._sent, lambda param: param.detach())

    def _mix(self, order: Mix) -> None:
        change = None if self._sent is None else self._changes_since(self._sent)
        with profiled("mix"):
            self._exchange.mix(order.row, order.step, order.lost, change)

    def _leave(self) -> None:
        with left_as_shown(self._wrapped.params, self._neighbours.shows_the_mean):
            self._neighbours.restore()  # what is handed over is what the parameters are
            self._exchange.leave()


class PairUpdate(OwnModelUpdate):
    """Local steps, with averages of pairs beside them."""

    def __init__(self, wrapped: Wrapped, reducer: NeighbourExchange, machine: WorkerMachine) -> None:
        self._seen = FlatBuffer(reducer.layout, Pool(), pinned=False)  # the snapshot; in a step, the change since then
        self._exchange = PairExchange(reducer, machine) if reducer.session.size > 1 else None
        super().__init__(wrapped, reducer, machine)
        if self._exchange is not None:
            reducer.session.on_leave(LeavingStep.FLUSH, self._exchange.leave)
        self.start()

    def performs(self) -> LivePerforms:
        exchange = self._exchange
        if exchange is None:  # no partner to ask: x is in the parameters
            return {**super().performs(), AskPartner: nothing, Snapshot: nothing, AddStep: nothing}
        return {
            **super().performs(),
            AskPartner: lambda order: exchange.ask(order.partner, order.step),
            Snapshot: lambda order: self._snapshot(exchange),
            AddStep: lambda order: exchange.add(self._changes_since(self._seen)),
        }

    def _snapshot(self, exchange: PairExchange) -> None:
        exchange.snapshot(self._seen)
        self._neighbours.copier.scatter({0: self._seen.parts[0]})

    def _wait(self) -> None:
        """For the reply to what was asked; or, where there is none to come, for the release."""
        if self._exchange is None or self._machine.is_free:
            super()._wait()
            return
        with profiled("mix"):
            self._obey(self._exchange.finish())

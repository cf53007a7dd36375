"""`gossip` at the worker: a step of the wrapped optimizer on this worker's own model, then mixing with its neighbours.

    by default      the optimizer steps; the new values are sent; push; release; x = sum of P_ij x_j of the new values
    overlap=1       the values were sent when the step began; the optimizer steps; push; release;
                    x = sum of P_ij x_j of the old values + what the optimizer has changed (D-PSGD as printed)

The parameters are the model z = x / w. A step moves z by what the optimizer says. The optimizer and its state are this
worker's own and are not mixed.
"""

from __future__ import annotations

from typing import Any

import torch

from polytempo.profile_ranges import profiled
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.neighbour_reducer import GossipExchange, NeighbourReducer
from polytempo.sync.machine import AddStep, Begin, Mix, SendModel, SendPush, Snapshot, StepHere, WorkerMachine
from polytempo.train.driver import LivePerforms, MachineUpdate, StepRequest, nothing
from polytempo.train.update import Wrapped, step_unwrapped
from polytempo.transport.buffer_pool import Pool


class LocalStep:
    """A step of the wrapped optimizer on this worker's own gradients."""

    def __init__(self, wrapped: Wrapped, reducer: NeighbourReducer) -> None:
        self._wrapped, self._reducer = wrapped, reducer

    def make(self, request: StepRequest) -> Any:
        """Make it, unless it is to be skipped; what the closure returned."""
        if request.skip or request.measures.samples == 0:
            return None
        wrapped, reducer, loss = self._wrapped, self._reducer, None
        wrapped.clip()
        request.measures.nonfinite = wrapped.finite.check(reducer.gradients()[0], reducer.step)
        if request.closure is None:
            step_unwrapped(wrapped.optimizer)
        else:
            with torch.enable_grad():
                loss = wrapped.optimizer.step(request.closure)
        reducer.copier.watch.record()
        return loss


def changes_since(before: FlatBuffer, copier: Copier) -> FlatBuffer:
    """What the parameters have changed since they were these values, in the same memory."""
    copier.subtract_from_values(before)
    return before


class GossipUpdate(MachineUpdate):
    """Local steps, mixed with those of neighbours."""

    def __init__(self, wrapped: Wrapped, reducer: NeighbourReducer, machine: WorkerMachine, overlap: bool) -> None:
        self._wrapped, self._neighbours = wrapped, reducer
        self._local, self._exchange = LocalStep(wrapped, reducer), GossipExchange(reducer)
        # The model when it was sent, where that is before the step; in the step, the change since then.
        self._sent = FlatBuffer(reducer.layout, Pool(), pinned=False) if overlap else None
        super().__init__(machine, reducer)
        reducer.session.flushing.append(self._leave)
        self.start()

    def performs(self) -> LivePerforms:
        return {
            Begin: nothing,  # all have the first worker's values
            SendModel: lambda order: self._exchange.send(order.row, order.step),
            Snapshot: self._snapshot,
            StepHere: self._step_here,
            AddStep: nothing,  # the optimizer has changed the parameters
            SendPush: self._push,
            Mix: self._mix,
        }

    def step(self, request: StepRequest) -> Any:
        self._neighbours.restore()
        return super().step(request)

    def _snapshot(self, order: Snapshot) -> None:
        if self._sent is not None:
            self._neighbours.copier.gather(self._sent, lambda param: param.detach())

    def _step_here(self, order: StepHere) -> None:
        self._result = self._local.make(self._request)

    def _push(self, order: SendPush) -> None:
        self._neighbours.begin(None, self._wrapped.hyper(), self._request.measures, skip=self._request.skip)

    def _mix(self, order: Mix) -> None:
        change = None if self._sent is None else changes_since(self._sent, self._neighbours.copier)
        with profiled("mix"):
            self._exchange.mix(order.row, order.step, order.lost, change)

    def _leave(self) -> None:
        self._neighbours.restore()
        self._exchange.leave()

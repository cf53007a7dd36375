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
from polytempo.reducer.gossip_exchange import GossipExchange
from polytempo.reducer.neighbour_reducer import NeighbourReducer
from polytempo.train.update import StepRequest, StepUpdate, Wrapped, step_unwrapped
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


class GossipUpdate(StepUpdate):
    """Local steps, mixed with those of neighbours."""

    def __init__(self, wrapped: Wrapped, reducer: NeighbourReducer, overlap: bool) -> None:
        self._wrapped, self._reducer = wrapped, reducer
        self._local, self._exchange = LocalStep(wrapped, reducer), GossipExchange(reducer)
        self._sent: FlatBuffer | None = None  # the model when it was sent, where that is before the step
        if overlap:
            self._sent = FlatBuffer(reducer.layout, Pool(), pinned=False)
            self._send_ahead()
        reducer.session.flushing.append(self._leave)

    @property
    def steps(self) -> int:
        return self._reducer.step

    def step(self, request: StepRequest) -> Any:
        reducer, step = self._reducer, self._reducer.step
        reducer.restore()
        loss = self._local.make(request)
        change = None if self._sent is None else changes_since(self._sent, reducer.copier)
        if self._sent is None:
            self._exchange.send()
        reducer.begin(None, self._wrapped.hyper(), request.measures, skip=request.skip)
        reducer.finish()
        with profiled("mix"):
            self._exchange.mix(step, change)
        self._send_ahead()
        return loss

    def _leave(self) -> None:
        self._reducer.restore()
        self._exchange.leave()

    # Overlap.

    def _send_ahead(self) -> None:
        if self._sent is not None and not self._exchange.alone:
            self._reducer.copier.gather(self._sent, lambda param: param.detach())
            self._exchange.send()

"""`adpsgd` at the worker (`sync/adpsgd.py`): gradients are computed on a snapshot, while pairs of workers are averaged.

    snapshot    the parameters become x, the state beside them (`reducer/pair_exchange.py`); active workers ask a partner
    step        the optimizer steps on the snapshot; what was asked is finished; x = x + what the optimizer has changed; push

The parameters are written only inside `step()`: averages that others ask for change x alone, so backward always sees the
values that forward saw. The optimizer and its state are this worker's own.
"""

from __future__ import annotations

from typing import Any

from polytempo.profile_ranges import profiled
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.neighbour_reducer import NeighbourReducer
from polytempo.reducer.pair_exchange import PairExchange
from polytempo.train.gossip import LocalStep, changes_since
from polytempo.train.update import StepRequest, StepUpdate, Wrapped
from polytempo.transport.buffer_pool import Pool


class PairUpdate(StepUpdate):
    """Local steps, with averages of pairs beside them."""

    def __init__(self, wrapped: Wrapped, reducer: NeighbourReducer) -> None:
        self._wrapped, self._reducer = wrapped, reducer
        self._local = LocalStep(wrapped, reducer)
        self._exchange: PairExchange | None = None
        self._seen = FlatBuffer(reducer.layout, Pool(), pinned=False)  # the snapshot; in a step, the change since then
        if reducer.session.size > 1:
            self._exchange = PairExchange(reducer)
            self._begin(self._exchange)
            reducer.session.flushing.append(self._exchange.leave)

    @property
    def steps(self) -> int:
        return self._reducer.step

    def step(self, request: StepRequest) -> Any:
        self._reducer.restore()
        loss = self._local.make(request)
        if self._exchange is not None:
            with profiled("mix"):
                self._exchange.finish()
            self._exchange.add(changes_since(self._seen, self._reducer.copier))
        self._reducer.begin(None, self._wrapped.hyper(), request.measures, skip=request.skip)
        self._reducer.finish()
        if self._exchange is not None:
            self._begin(self._exchange)
        return loss

    def _begin(self, exchange: PairExchange) -> None:
        """Take a snapshot, and ask the next partner."""
        copier = self._reducer.copier
        exchange.snapshot(self._seen)
        copier.scatter({0: self._seen.parts[0]})
        exchange.begin()

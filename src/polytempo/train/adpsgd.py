"""`adpsgd` at the worker (`sync/adpsgd.py`): gradients are computed on a snapshot, while pairs of workers are averaged.

    snapshot    the parameters become x, the state beside them (`reducer/pair_exchange.py`); active workers ask a partner
    step        the optimizer steps on the snapshot; what was asked is finished; x = x + what the optimizer has changed; push

The parameters are written only inside `step()`: averages that others ask for change x alone, so backward always sees the
values that forward saw. The optimizer and its state are this worker's own. `consolidate()` first lets all workers finish
what they have asked, so that the mean is of one moment; all go on from it.
"""

from __future__ import annotations

from typing import Any

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
            reducer.before_read, reducer.after_read = self._before_mean, self._after_mean
            self._begin(self._exchange)

    @property
    def steps(self) -> int:
        return self._reducer.step

    def step(self, request: StepRequest) -> Any:
        loss = self._local.make(request)
        if self._exchange is not None:
            self._exchange.finish()
            self._add_change(self._exchange)
        self._reducer.push(None, self._wrapped.hyper(), samples=request.samples, skip=request.skip, **request.about)
        if self._exchange is not None:
            self._begin(self._exchange)
        return loss

    def _begin(self, exchange: PairExchange) -> None:
        """Take a snapshot, and ask the next partner."""
        copier = self._reducer.copier
        exchange.snapshot(self._seen)
        copier.scatter({0: self._seen.parts[0]})
        exchange.begin()

    def _add_change(self, exchange: PairExchange) -> None:
        changes_since(self._seen, self._reducer.copier.params)
        exchange.add(self._seen)

    # The mean of all models.

    def _before_mean(self) -> None:
        """Finish all averages, here and elsewhere; the parameters are then what this worker has."""
        exchange = self._exchange
        assert exchange is not None
        exchange.finish()
        self._reducer.meet()
        exchange.hold_gifts()
        self._add_change(exchange)  # what the script has written since the last step
        exchange.snapshot(self._seen)
        self._reducer.copier.scatter({0: self._seen.parts[0]})

    def _after_mean(self) -> None:
        assert self._exchange is not None
        self._add_change(self._exchange)
        self._exchange.snapshot(self._seen)
        self._exchange.accept_gifts()

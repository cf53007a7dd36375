"""`adpsgd` at the worker (`sync/adpsgd.py`): gradients are computed on a snapshot, while pairs of workers are averaged.

    snapshot    the parameters become x, the state beside them (`reducer/neighbours.py`); active workers ask a partner
    step        the optimizer steps on the snapshot; what was asked is finished; x = x + what the optimizer has changed; push

The parameters are written only inside `step()`: averages that others ask for change x alone, so backward always sees the
values that forward saw. The optimizer and its state are this worker's own.
"""

from __future__ import annotations

from polytempo.profile_ranges import profiled
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.neighbours import NeighbourExchange, PairExchange
from polytempo.sync.machine import AddStep, AskPartner, Snapshot, WorkerMachine
from polytempo.train.driver import LivePerforms
from polytempo.train.gossip import OwnModelUpdate
from polytempo.train.update import Wrapped
from polytempo.transport.buffer_pool import Pool


class PairUpdate(OwnModelUpdate):
    """Local steps, with averages of pairs beside them."""

    def __init__(self, wrapped: Wrapped, reducer: NeighbourExchange, machine: WorkerMachine) -> None:
        self._seen = FlatBuffer(reducer.layout, Pool(), pinned=False)  # the snapshot; in a step, the change since then
        self._exchange: PairExchange | None = None
        if reducer.session.size > 1:
            self._exchange = PairExchange(reducer, machine)
            reducer.session.flushing.append(self._leave)
        super().__init__(wrapped, reducer, machine)
        self.start()

    def performs(self) -> LivePerforms:
        return {
            **super().performs(),
            AskPartner: self._ask,
            Snapshot: self._snapshot,
            AddStep: self._add_step,
        }

    def _ask(self, order: AskPartner) -> None:
        if self._exchange is not None:
            self._exchange.ask(order.partner, order.step)

    def _snapshot(self, order: Snapshot) -> None:
        if self._exchange is not None:
            self._exchange.snapshot(self._seen)
            self._neighbours.copier.scatter({0: self._seen.parts[0]})

    def _add_step(self, order: AddStep) -> None:
        if self._exchange is not None:
            self._exchange.add(self._changes_since(self._seen))

    def _wait(self) -> None:
        """For the reply to what was asked; or, where there is none to come, for the release."""
        if self._exchange is None or self._machine.is_free:
            super()._wait()
            return
        with profiled("mix"):
            self._obey(self._exchange.finish())

    def _leave(self) -> None:
        assert self._exchange is not None
        self._exchange.leave()

"""The engine for AD-PSGD: pairs of workers average their models while they compute.

    release -> snapshot, compute ------------------------------------> both done: the step is added, push
            `-> ask the partner -> (model in flight) -> average -> (model in flight) -> replied

The average happens in one moment, when the request reaches the partner: both have the mean from then on, as far as other
workers can tell, because the asker takes part in no other average before the reply (`sync/pairwise.py`). A partner that has
crashed does not answer: the asker waits until the job notices. A worker that enters without a model asks first, and computes
when it has one; else it pushes with 0 samples.
"""

from __future__ import annotations

from typing import Any, cast

from polytempo.simulate.cluster import Cluster
from polytempo.simulate.engine import ANSWERED, ARRIVED, LEAVE, OBSERVE, EventHandler, SimulationEngine
from polytempo.simulate.links import PeerRoute, Route
from polytempo.simulate.outcome import Budget
from polytempo.simulate.worker import NO_WEIGHTS, GossipTrainer, Trainer, Worker
from polytempo.sync.actions import Apply, Release
from polytempo.sync.directives import NextMixing
from polytempo.sync.events import Event, Left, Pushed
from polytempo.sync.pairwise import PairAveraging, PairReply, PairRequest
from polytempo.sync.policy import Policy

REQUESTED, REPLIED = OBSERVE + 1, OBSERVE + 2


class PairState:
    """One worker in its present step."""

    __slots__ = ("computed", "enters", "has_model", "pair", "partner_life", "request", "samples")

    def __init__(self, rank: int) -> None:
        self.pair = PairAveraging(rank)
        self.request: PairRequest | None = None  # that it waits for
        self.partner_life = 0
        self.enters = False  # its release says that it has no model
        self.has_model = False
        self.computed = False  # its gradient
        self.samples = 0


class PairEngine(SimulationEngine):
    """One run of a mode in which pairs are averaged without a barrier."""

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        peers: PeerRoute,
        budget: Budget,
        trainer: GossipTrainer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(cluster, policy, peers, budget, trainer=cast(Trainer | None, trainer), **options)
        self._peers, self._learner = peers, trainer
        self._states = [PairState(worker.rank) for worker in self.workers]
        self._released: list[NextMixing | None] = [None] * len(self.workers)
        self._askers: dict[int, set[int]] = {}  # of each worker, those that wait for its reply

    def _handlers(self) -> tuple[EventHandler, ...]:
        return (*super()._handlers(), self._requested, self._replied)

    # Steps.

    def _go(self, now: float, worker: Worker) -> None:
        step, state = worker.next_step, self._states[worker.rank]
        if step > worker.allowed or worker.leaving or step >= self._steps_each:
            self._stay(now, worker)
            return
        worker.next_step = step + 1
        state.computed, state.samples = False, 0
        release = self._released[worker.rank]
        if release is not None and release.mixing is not None:
            self._ask(now, worker, state, step, release.mixing.send[0][0])
        if state.has_model:
            self._compute(now, worker, step, NO_WEIGHTS)
        elif state.request is None:
            self._complete(now, worker, state, step)

    def _compute(self, now: float, worker: Worker, step: int, version: int) -> None:
        if self._learner:
            self._learner.step(worker.rank, step)
        super()._compute(now, worker, step, version)

    def _computed(self, now: float, worker: Worker, step: int, version: int) -> None:
        state = self._states[worker.rank]
        worker.busy = False
        worker.spent, worker.since = now - worker.since, now
        state.computed, state.samples = True, worker.batch
        if state.request is None:
            self._complete(now, worker, state, step)

    def _complete(self, now: float, worker: Worker, state: PairState, step: int) -> None:
        """The gradient and the average of a step are there, as far as it has them."""
        if state.computed and self._learner:
            self._learner.finish(worker.rank)
        state.computed = False
        worker.flying += 1
        self._plan(self._peers.push(worker.rank, now), ARRIVED, worker, step)

    def _pushed(self, now: float, worker: Worker, step: int, version: int, push: Pushed | None = None) -> None:
        samples = self._states[worker.rank].samples
        super()._pushed(now, worker, step, self.updates, Pushed(worker.rank, step, samples))

    def _stay(self, now: float, worker: Worker) -> None:
        waits = worker.flying or self._states[worker.rank].request is not None
        if self._steps_each <= worker.next_step <= worker.allowed and not waits:
            self._plan(now, LEAVE, worker)

    # Pairs. An event of a pair belongs to the asker: if it dies, the message meets a newer life.

    def _ask(self, now: float, worker: Worker, state: PairState, step: int, partner: int) -> None:
        state.request = state.pair.begin(step, partner)
        state.partner_life = self.workers[partner].life
        self._askers.setdefault(partner, set()).add(worker.rank)
        worker.messages += 1
        self._plan(self._peers.send(worker.rank, [partner], now)[1][0], REQUESTED, worker, step)

    def _requested(self, now: float, worker: Worker, step: int, version: int) -> None:
        """The request of a worker has reached its partner."""
        state = self._states[worker.rank]
        request = state.request
        if request is None or request.step != step:  # the wait has ended: the partner was lost
            return
        partner = self.workers[request.receiver]
        if not partner.alive or partner.life != state.partner_life:
            if partner.alive or partner.rank not in self._policy.members:
                self._plan(self._peers.push(worker.rank, now), REPLIED, worker, step, 0)
            return  # else it crashed, which is not known yet
        other = self._states[partner.rank]
        averaged = other.pair.requested(request).averaged and other.has_model
        if not averaged:
            self._plan(self._peers.push(worker.rank, now), REPLIED, worker, step, 0)
            return
        if self._learner:
            self._learner.average(worker.rank, partner.rank)
        partner.messages += 1
        self._plan(self._peers.send(partner.rank, [worker.rank], now)[1][0], REPLIED, worker, step, 1)

    def _replied(self, now: float, worker: Worker, step: int, version: int) -> None:
        state = self._states[worker.rank]
        if state.request is None or state.request.step != step:
            return
        state.pair.replied(PairReply(state.request.receiver, worker.rank, step, bool(version)))
        self._answered_or_lost(now, worker, state, step, bool(version))

    def _answered_or_lost(self, now: float, worker: Worker, state: PairState, step: int, averaged: bool) -> None:
        assert state.request is not None
        self._askers.get(state.request.receiver, set()).discard(worker.rank)
        state.request = None
        if not state.has_model and averaged:  # it has half of the partner's now
            state.has_model = True
            self._compute(now, worker, step, NO_WEIGHTS)
        elif not worker.busy:
            self._complete(now, worker, state, step)

    def _feed(self, event: Event, now: float) -> None:
        super()._feed(event, now)
        if not isinstance(event, Left):
            return
        for rank in sorted(self._askers.pop(event.worker, ())):
            state = self._states[rank]
            request = state.request
            if request is not None and state.pair.lost(event.worker):
                self._answered_or_lost(now, self.workers[rank], state, request.step, averaged=False)

    # Membership and actions.

    def _leave(self, now: float, worker: Worker, step: int = -1, version: int = NO_WEIGHTS) -> None:
        worker.leaving = True
        if self._states[worker.rank].request is None:
            super()._leave(now, worker, step, version)

    def _end_life(self, worker: Worker) -> None:
        super()._end_life(worker)
        if (request := self._states[worker.rank].request) is not None:
            self._askers.get(request.receiver, set()).discard(worker.rank)
        self._states[worker.rank] = PairState(worker.rank)

    def _release(self, release: Release, now: float) -> None:
        assert isinstance(release.directive, NextMixing)
        self._released[release.worker] = release.directive
        super()._release(release, now)

    def _answer(self, route: Route, now: float) -> None:
        told = route.answer([worker.rank for worker in self._answers], now, 0)
        for (worker, step), at in zip(self._answers.items(), told, strict=True):
            self._plan(at, ANSWERED, worker, step)

    def _answered(self, now: float, worker: Worker, step: int, version: int) -> None:
        state, release = self._states[worker.rank], self._released[worker.rank]
        assert release is not None
        if worker.allowed < 0 and self._learner:
            self._learner.begin(worker.rank, release.enters)
        if not release.enters and not state.has_model:
            state.has_model = True
            if self._learner and not self._learner.has_model(worker.rank):
                self._learner.begin(worker.rank, empty=False)
        worker.allowed = step
        if not worker.busy:
            self._go(now, worker)

    def _apply(self, apply: Apply, now: float) -> None:
        if not apply.pushes[0].samples:
            self.workers[apply.pushes[0].worker].steps -= 1
            self._used.steps -= 1
        super()._apply(apply, now)

"""The engine for gossip: what a step computed goes from worker to worker, and a worker waits for its neighbours alone.

    compute -> (values to out-neighbours in flight) -> push -> policy -> release -> all values are there -> mix -> compute

A push carries no data: it reaches the policy a latency after the worker's last byte has left. A released worker goes on when
the release and the values of its in-neighbours have come. With `overlap` the values leave when the step begins.

A worker that enters without a model computes nothing and sends nothing: it pushes at once, with 0 samples.
"""

from __future__ import annotations

from typing import Any, cast

from polytempo.simulate.cluster import Cluster
from polytempo.simulate.engine import ANSWERED, ARRIVED, LEAVE, SimulationEngine
from polytempo.simulate.links import PeerRoute, Route
from polytempo.simulate.outcome import Budget
from polytempo.simulate.worker import NO_WEIGHTS, GossipTrainer, Trainer, Worker
from polytempo.sync.actions import Apply, Release
from polytempo.sync.directives import Mixing, NextMixing
from polytempo.sync.events import Pushed
from polytempo.sync.gossip import GossipSpec
from polytempo.sync.policy import Policy

#: The row of a worker without neighbours.
ALONE = Mixing(1.0, (), ())


class GossipEngine(SimulationEngine):
    """One run of a mode whose workers mix their models with those of neighbours, step by step."""

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        peers: PeerRoute,
        budget: Budget,
        gossip: GossipSpec,
        trainer: GossipTrainer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(cluster, policy, peers, budget, trainer=cast(Trainer | None, trainer), **options)
        self._peers, self._gossip, self._learner = peers, gossip, trainer
        self._rows: list[Mixing] = [ALONE] * len(self.workers)  # of the step each worker is in, or has pushed last
        self._released: list[NextMixing | None] = [None] * len(self.workers)  # and not answered
        self._entering = [False] * len(self.workers)
        self._there: dict[int, dict[int, float]] = {}  # step: worker: when all values sent to it have come
        self._left_at = [0.0] * len(self.workers)  # when the last byte of a worker has left
        self._oldest = 0  # the first step that is not forgotten

    # Steps.

    def _go(self, now: float, worker: Worker) -> None:
        step = worker.next_step
        if step > worker.allowed or worker.leaving or step >= self._steps_each:
            self._stay(now, worker)
            return
        worker.next_step = step + 1
        if self._entering[worker.rank]:
            self._push(now, worker, step)
            return
        if self._gossip.overlap:
            self._send(now, worker, step)
        self._compute(now, worker, step, NO_WEIGHTS)

    def _computed(self, now: float, worker: Worker, step: int, version: int) -> None:
        worker.busy = False
        worker.spent, worker.since = now - worker.since, now
        if self._learner:
            self._learner.step(worker.rank, step)
            self._learner.finish(worker.rank)
        if not self._gossip.overlap:
            self._send(now, worker, step)
        self._push(max(now, self._left_at[worker.rank]), worker, step)

    def _send(self, now: float, worker: Worker, step: int) -> None:
        if self._learner:
            self._learner.send(worker.rank, step)
        receivers = [other for other, _ in self._rows[worker.rank].send]
        worker.messages += len(receivers)
        self._left_at[worker.rank], arrivals = self._peers.send(worker.rank, receivers, now)
        there = self._there.setdefault(step, {})
        for other, at in zip(receivers, arrivals, strict=True):
            there[other] = max(at, there.get(other, 0.0))

    def _push(self, at: float, worker: Worker, step: int) -> None:
        worker.flying += 1
        self._plan(self._peers.push(worker.rank, at), ARRIVED, worker, step)

    def _pushed(self, now: float, worker: Worker, step: int, version: int, push: Pushed | None = None) -> None:
        samples = 0 if self._entering[worker.rank] else worker.batch
        super()._pushed(now, worker, step, self.updates, Pushed(worker.rank, step, samples))
        self._forget_old()

    def _forget_old(self) -> None:
        """All members have mixed what was sent two steps before the slowest one's."""
        while self._oldest + 2 <= self._policy.progress.slowest:
            self._there.pop(self._oldest, None)
            if self._learner:
                self._learner.forget(self._oldest)
            self._oldest += 1

    def _stay(self, now: float, worker: Worker) -> None:
        if self._steps_each <= worker.next_step <= worker.allowed and not worker.flying:
            self._plan(now, LEAVE, worker)

    # Actions.

    def _release(self, release: Release, now: float) -> None:
        assert isinstance(release.directive, NextMixing)
        self._released[release.worker] = release.directive
        super()._release(release, now)

    def _answer(self, route: Route, now: float) -> None:
        told = route.answer([worker.rank for worker in self._answers], now, 0)
        for (worker, step), at in zip(self._answers.items(), told, strict=True):
            there = self._there.get(step - 1, {}).get(worker.rank, 0.0)
            self._plan(max(at, there), ANSWERED, worker, step)

    def _answered(self, now: float, worker: Worker, step: int, version: int) -> None:
        rank, release = worker.rank, self._released[worker.rank]
        assert release is not None
        first = worker.allowed < 0
        if self._learner:
            if first:
                self._learner.begin(rank, release.enters)
            else:
                self._learner.mix(rank, step - 1, self._rows[rank], release.lost)
            if not release.enters and not self._learner.has_model(rank):
                self._learner.begin(rank, empty=False)
        self._rows[rank], self._entering[rank] = release.mixing or ALONE, release.enters
        worker.allowed = step
        if not worker.busy:
            self._go(now, worker)

    def _apply(self, apply: Apply, now: float) -> None:
        empty = not apply.pushes[0].samples
        if empty:
            self.workers[apply.pushes[0].worker].steps -= 1
            self._used.steps -= 1
        super()._apply(apply, now)

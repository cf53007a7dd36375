"""The engine for downpour: several local steps to a push, and fetches beside the pushes.

    step, step, ... -> (push in flight) -> arrived -> policy -> apply -> (permission in flight) -> answered
      `- each F steps, at a step's boundary: fetch -> (weights in flight) -> installed at the next boundary

What the policy counts as a step is a push. A worker begins to accumulate one when it has the permission for it, sends it
when it holds P local steps, and goes on at once if it may: so it waits only when a push becomes due while the one before is
not answered. Pushes, fetches and first weights carry the model's bytes; permissions carry none. One fetch of a worker is
in flight at a time; one that is due meanwhile is made as soon as the other is there.

Staleness is what the weights lack of others: updates made since the fetch that the first gradient of a push was taken on,
without the worker's own, which its local steps stand for.
"""

from __future__ import annotations

from typing import Any

from polytempo.simulate.cluster import Cluster
from polytempo.simulate.engine import ANSWERED, LEAVE, OBSERVE, EventHandler, SimulationEngine
from polytempo.simulate.links import Route, ServerRoute
from polytempo.simulate.outcome import Budget
from polytempo.simulate.worker import NO_WEIGHTS, LocalTrainer, Worker
from polytempo.sync.actions import Apply, Discard, Refuse, Release
from polytempo.sync.downpour import LocalSteps
from polytempo.sync.events import Pushed
from polytempo.sync.policy import Policy

FETCHED = OBSERVE + 1


class LocalProgress:
    """The state of a worker between its pushes. Weights are identified by the number of updates of others they contain."""

    __slots__ = ("applied", "arrived", "due", "fresh", "made", "pending", "read", "seconds", "sent", "started", "weights")

    def __init__(self) -> None:
        self.made = 0  # local steps in this life
        self.pending = 0  # of them, not yet in a push
        self.seconds = 0.0  # that these took
        self.sent: dict[int, tuple[int, float]] = {}  # steps and seconds of each push in flight
        self.applied = 0  # of its pushes
        self.weights = NO_WEIGHTS  # those it steps from
        self.fresh = False  # its first weights are to be sent
        self.started = 0  # the weights at the first step of the next push
        self.read = NO_WEIGHTS  # those of the fetch in flight
        self.arrived = False  # it is there, to be installed at the next boundary
        self.due = False  # a fetch is to be made


class LocalEngine(SimulationEngine):
    """One run of a mode with local steps."""

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        route: ServerRoute | None,
        budget: Budget,
        local: LocalSteps,
        trainer: LocalTrainer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(cluster, policy, route, budget, trainer=trainer, **options)
        self._local, self._learner, self._servers = local, trainer, route
        self._progress_of = [LocalProgress() for _ in self.workers]

    def _handlers(self) -> tuple[EventHandler, ...]:
        return (*super()._handlers(), self._fetched)

    # Steps and pushes.

    def _go(self, now: float, worker: Worker) -> None:
        progress, step = self._progress_of[worker.rank], worker.next_step
        done = step * self._local.push + progress.pending >= self._steps_each
        if (step > worker.allowed and not progress.pending) or worker.leaving or done:
            self._stay(now, worker)
            return
        self._cross(now, worker, progress)
        if not progress.pending:
            progress.started = progress.weights
        self._compute(now, worker, step, progress.started)

    def _computed(self, now: float, worker: Worker, step: int, version: int) -> None:
        progress, size = self._progress_of[worker.rank], self._local.push
        if self._learner:
            self._learner.step(worker.rank, step * size + progress.pending)
        progress.made += 1
        progress.pending += 1
        progress.seconds += now - worker.since
        if progress.pending < size and not worker.leaving and step * size + progress.pending < self._steps_each:
            worker.busy = False
            worker.since = now
            self._go(now, worker)
            return
        progress.sent[step] = progress.pending, progress.seconds
        progress.pending, progress.seconds = 0, 0.0
        worker.next_step = step + 1
        if self._learner:
            self._learner.send(worker.rank)
        super()._computed(now, worker, step, version)

    def _pushed(self, now: float, worker: Worker, step: int, version: int, push: Pushed | None = None) -> None:
        progress = self._progress_of[worker.rank]
        push = Pushed(worker.rank, step, worker.batch * progress.sent[step][0])
        super()._pushed(now, worker, step, version + progress.applied, push)

    def _stay(self, now: float, worker: Worker) -> None:
        done = worker.next_step * self._local.push >= self._steps_each
        if done and worker.next_step <= worker.allowed and not worker.flying:
            self._plan(now, LEAVE, worker)

    # Fetches.

    def _cross(self, now: float, worker: Worker, progress: LocalProgress) -> None:
        """The boundary between two steps: install a fetch that has arrived, start one that is due."""
        if progress.arrived:
            progress.weights, progress.read, progress.arrived = progress.read, NO_WEIGHTS, False
            if self._learner:
                self._learner.install(worker.rank)
        progress.due = progress.due or (progress.made > 0 and progress.made % self._local.fetch == 0)
        if not progress.due or progress.read != NO_WEIGHTS:
            return
        progress.due, progress.read = False, self.updates - progress.applied
        if self._learner:
            self._learner.fetch(worker.rank)
        if self._servers is None:
            progress.arrived = True
        else:
            self._plan(self._servers.fetch(worker.rank, now), FETCHED, worker)

    def _fetched(self, now: float, worker: Worker, step: int, version: int) -> None:
        self._progress_of[worker.rank].arrived = True

    # Actions.

    def _release(self, release: Release, now: float) -> None:
        progress = self._progress_of[release.worker]
        if progress.weights == NO_WEIGHTS and self.workers[release.worker].alive:
            progress.weights, progress.fresh = self.updates, True
            if self._learner:
                self._learner.begin(release.worker)
        super()._release(release, now)

    def _answer(self, route: Route, now: float) -> None:
        first = [worker for worker in self._answers if self._progress_of[worker.rank].fresh]
        arrivals = dict(zip(first, route.answer([worker.rank for worker in first], now, 1), strict=True)) if first else {}
        for worker, step in self._answers.items():
            self._progress_of[worker.rank].fresh = False
            permitted = self._servers.permit(worker.rank, now) if self._servers else now
            self._plan(arrivals.get(worker, permitted), ANSWERED, worker, step)

    def _answered(self, now: float, worker: Worker, step: int, version: int) -> None:
        worker.allowed = step
        if not worker.busy:
            self._go(now, worker)

    def _apply(self, apply: Apply, now: float) -> None:
        worker, progress = self.workers[apply.pushes[0].worker], self._progress_of[apply.pushes[0].worker]
        more = progress.sent[apply.pushes[0].step][0] - 1
        worker.steps += more
        worker.staleness_sum += more * (self.updates - worker.used)
        self._used.steps += more
        super()._apply(apply, now)
        progress.applied += 1
        del progress.sent[apply.pushes[0].step]

    def _drop(self, action: Discard | Refuse, now: float) -> None:
        worker = self.workers[action.worker]
        wasted = worker.wasted
        super()._drop(action, now)
        worker.wasted = wasted + self._progress_of[action.worker].sent.pop(action.step)[1]

    def _end_life(self, worker: Worker) -> None:
        super()._end_life(worker)
        self._progress_of[worker.rank] = LocalProgress()

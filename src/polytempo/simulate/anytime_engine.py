"""The engine for `anytime`: workers compute micro-batches until the deadline of a round, each what it manages.

    answered -> micro-batch, micro-batch, ... -> (push in flight) -> arrived -> policy -> apply, release -> answered

A step's time is that of `micro` micro-batches, and its random stall falls into one of them: work of the same number of
samples takes the same time as in other modes, and stalls are as frequent. The fixed time of a step is that of each
micro-batch: small ones take longer for the same samples.

A worker pushes when its next micro-batch would not end in time, by its own pace. If one is not done at the deadline, the
worker's communication thread pushes what was finished before, and takes the answer, and pushes nothing for any further round
that ends meanwhile. When it is done at last, it is abandoned, or kept for the worker's next push; then the worker goes on
with what is left of the round that is open. A deadline is counted from the answer's arrival at the worker.

All micro-batches of a worker's round are planned at once: a round costs one event for each worker, whatever its number of
micro-batches.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random
from typing import Any

from polytempo.simulate.cluster import Cluster
from polytempo.simulate.dealing import DealtSamples, MicroBatch
from polytempo.simulate.durations import stretched
from polytempo.simulate.engine import ARRIVED, COMPUTED, OBSERVE, EventHandler, SimulationEngine
from polytempo.simulate.links import Route
from polytempo.simulate.outcome import Budget
from polytempo.simulate.worker import NOT_HELD, DealtTrainer, Worker
from polytempo.summation import in_order
from polytempo.sync.actions import Apply, Discard, Hold, Refuse, Release
from polytempo.sync.anytime import AnytimeSpec, Pace, fits, latest
from polytempo.sync.directives import NextDeadline
from polytempo.sync.events import Pushed
from polytempo.sync.policy import Policy

DEADLINE, FREE = OBSERVE + 1, OBSERVE + 2


class RoundProgress:
    """What a worker has done in its round, and what it is in the middle of."""

    __slots__ = (
        "abandoned",
        "deadline",
        "held",
        "made_of",
        "opened",
        "pace",
        "pushed",
        "round",
        "sent",
        "started",
        "unfinished",
        "until",
    )

    def __init__(self) -> None:
        self.round = -1  # the one it takes part in
        self.opened = 0.0  # when it heard of it
        self.deadline = 0.0  # seconds from then on
        self.pushed = True  # has it pushed in this round?
        self.pace = Pace()
        self.made_of: list[MicroBatch] = []  # finished, to be pushed
        self.sent: list[MicroBatch] = []  # of the push in flight
        self.unfinished: MicroBatch | None = None  # at the deadline
        self.started = 0.0  # when it was begun
        self.until = 0.0  # when it will be done
        self.abandoned: tuple[float, float] | None = None  # work and seconds of one that has ended since the last push
        self.held = False  # is its push in a round that is open, while it is busy?


class MicroBatchTimes:
    """The times of a worker's micro-batches, from those of its steps."""

    __slots__ = ("_left", "_micro", "_stall", "_stall_at", "_step", "_worker", "size")

    def __init__(self, worker: Worker, micro: int) -> None:
        self.size = max(1, round(worker.batch / micro))
        self._worker, self._micro = worker, micro
        self._left = 0  # micro-batches of the present step
        self._step = self._stall = 0.0  # seconds of the whole step, and of its stall
        self._stall_at = 0
        worker.hiccups = array("d")

    def next(self, samples: int) -> float:
        """The seconds of the next one, which has this number of samples."""
        worker = self._worker
        if not self._left:
            if not worker.step_times:
                worker.draw()
            self._left, self._step = self._micro, worker.step_times.pop()
            self._stall = worker.hiccups.pop() if worker.hiccups else 0.0
            if self._stall:
                number = worker.drawn - len(worker.step_times)
                self._stall_at = Random(f"{worker.seed}/{worker.rank}/{number}/stall").randrange(self._micro)
        self._left -= 1
        seconds = worker.seconds_for(samples, self._step)
        return seconds + self._stall if self._stall and self._left == self._stall_at else seconds


class AnytimeEngine(SimulationEngine):
    """One run of a mode with deadlines. A budget in steps is one in samples: a step of others has a whole batch."""

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        route: Route | None,
        budget: Budget,
        anytime: AnytimeSpec,
        trainer: DealtTrainer | None = None,
        **options: Any,
    ) -> None:
        budget = replace(budget, samples=min(budget.samples, budget.steps * cluster.batch), steps=float("inf"))
        super().__init__(cluster, policy, route, budget, trainer=trainer, **options)
        self._anytime, self._learner = anytime, trainer
        self._samples = DealtSamples(None if trainer is None else trainer.length)
        self._times = [MicroBatchTimes(worker, anytime.micro) for worker in self.workers]
        self._rounds = [RoundProgress() for _ in self.workers]
        self._applied: list[list[MicroBatch]] = []  # what the pushes of the last update were made of
        self._ended = 0.0  # when the last life ended
        for worker in self.workers:
            worker.samples = 0

    def _handlers(self) -> tuple[EventHandler, ...]:
        return (*super()._handlers(), self._deadline, self._free)

    def _finish(self) -> None:
        if not self._stopped and not self._policy.members:
            self.now = self._ended  # alarms may ring later
        super()._finish()

    # A worker's round.

    def _release(self, release: Release, now: float) -> None:
        worker, progress = self.workers[release.worker], self._rounds[release.worker]
        assert isinstance(release.directive, NextDeadline)
        progress.deadline, progress.held = release.directive.seconds, False
        super()._release(release, now)
        if worker.busy and self._route is None:
            self._hear(now, worker)

    def _answered(self, now: float, worker: Worker, step: int, version: int) -> None:
        super()._answered(now, worker, step, version)
        if worker.busy:
            self._hear(now, worker)

    def _hear(self, now: float, worker: Worker) -> None:
        """A new round, while the worker is in the middle of a micro-batch: its communication thread takes part."""
        progress, step, version = self._rounds[worker.rank], worker.next_step, worker.weights
        if step > worker.allowed or step >= self._steps_each:
            return
        worker.next_step = step + 1
        progress.round, progress.opened, progress.pushed = step, now, False
        at = now + latest(progress.deadline)
        if progress.deadline and progress.until > at:
            if self._trainer:
                self._trainer.keep(version)
            self._plan(at, DEADLINE, worker, step, version)

    def _compute(self, now: float, worker: Worker, step: int, version: int) -> None:
        """A worker begins a round that it has just heard of."""
        progress = self._rounds[worker.rank]
        progress.round, progress.opened, progress.pushed = step, now, False
        self._work(now, worker, version)

    def _work(self, now: float, worker: Worker, version: int) -> None:
        """Plan the micro-batches until the push, or the one that is not done at the deadline."""
        progress, times = self._rounds[worker.rank], self._times[worker.rank]
        if self._route is not None:
            worker.communicating += now - worker.since - worker.held_for
            worker.held_for = 0.0
        worker.busy, worker.since = True, now
        deadline, opened, pace, made_of = progress.deadline, progress.opened, progress.pace, progress.made_of
        last, at = opened + latest(deadline), now
        while True:
            if not deadline:
                goes_on = len(made_of) < self._anytime.micro
            else:  # one that takes longer than a whole round is begun all the same
                goes_on = fits(at - opened, pace.seconds, deadline) or (not made_of and pace.seconds > last - opened)
            if not goes_on:
                break
            batch = self._samples.take(worker.rank, times.size, version)
            seconds = times.next(batch.samples)
            end = stretched(at, seconds, worker.stalls) if worker.stalls else at + seconds
            if deadline and end > last:
                progress.unfinished, progress.started, progress.until = batch, at, end
                if self._trainer:
                    self._trainer.keep(version)
                self._plan(last, DEADLINE, worker, progress.round, version)
                self._plan(end, FREE, worker, progress.round, version)
                return
            made_of.append(MicroBatch(batch.samples, batch.places, version, end - at))
            pace.add(end - at)
            at = end
        self._plan(at, COMPUTED, worker, progress.round, version)

    def _computed(self, now: float, worker: Worker, step: int, version: int) -> None:
        self._send(worker)
        super()._computed(now, worker, step, version)

    def _deadline(self, now: float, worker: Worker, step: int, version: int) -> None:
        """The communication thread pushes what was finished."""
        self._send(worker)
        worker.since = max(worker.since, self._rounds[worker.rank].started)
        if self._route is None:
            self._pushed(now, worker, step, version)
        else:
            worker.flying += 1
            worker.messages += 1
            self._plan(self._route.push(worker.rank, now), ARRIVED, worker, step, version)

    def _send(self, worker: Worker) -> None:
        progress = self._rounds[worker.rank]
        progress.sent, progress.made_of, progress.pushed = progress.made_of, [], True

    def _free(self, now: float, worker: Worker, step: int, version: int) -> None:
        """The micro-batch that was not done at a deadline is done."""
        progress = self._rounds[worker.rank]
        batch, progress.unfinished = progress.unfinished, None
        assert batch is not None
        progress.pace.add(now - progress.started)
        if self._anytime.late == "keep":
            progress.made_of.append(batch._replace(seconds=now - progress.started, late=True))
        else:
            progress.abandoned = batch.samples, now - progress.started
            self._samples.give_back(worker.rank, [batch])
            worker.wasted += now - worker.since
            self._forget([batch._replace(late=True)])
        worker.busy, worker.since = False, now
        if worker.leaving:
            self._leave(now, worker)
        elif not progress.pushed:  # it has heard of a round, and is in time for it
            if self._trainer:
                self._trainer.keep(worker.weights)
            self._work(now, worker, worker.weights)
        else:
            worker.held_since = now if progress.held else NOT_HELD
            self._go(now, worker)

    # Pushes, and the policy's actions.

    def _pushed(self, now: float, worker: Worker, step: int, version: int, push: Pushed | None = None) -> None:
        progress = self._rounds[worker.rank]
        made_of, progress.sent = progress.sent, []
        samples, computed = sum([batch.samples for batch in made_of]), in_order(batch.seconds for batch in made_of)
        work: float = samples
        if not made_of and progress.abandoned:
            work, computed = progress.abandoned
        progress.abandoned = None
        self._samples.pushed(worker.rank, step, made_of)
        push = Pushed(worker.rank, step, samples, (), len(made_of), None, None, work, computed)
        super()._pushed(now, worker, step, version, push)

    def _hold(self, hold: Hold, now: float) -> None:
        if self.workers[hold.worker].busy:
            self._rounds[hold.worker].held = True
        else:
            super()._hold(hold, now)

    def _apply(self, apply: Apply, now: float) -> None:
        self._applied = self._samples.applied(apply.pushes)
        for push, made_of in zip(apply.pushes, self._applied, strict=True):
            worker = self.workers[push.worker]
            worker.steps += push.count - 1
            worker.samples = (worker.samples or 0) + int(push.samples)
            for batch in made_of:
                if batch.late:
                    stale = self.updates - batch.version
                    worker.staleness_sum += stale
                    worker.staleness_max = max(worker.staleness_max, stale)
        super()._apply(apply, now)

    def _learn(self, apply: Apply, used: list[int]) -> None:
        assert self._learner is not None
        self._learner.apply_dealt(apply.pushes, self._applied, used, apply.rate, apply.divisor)
        for made_of in self._applied:
            self._forget(made_of)

    def _drop(self, action: Discard | Refuse, now: float) -> None:
        worker = self.workers[action.worker]
        wasted, dropped = worker.wasted, self._samples.dropped(action.worker, action.step)
        super()._drop(action, now)
        worker.wasted = wasted + in_order(batch.seconds for batch in dropped)
        self._forget(dropped)

    def _end_life(self, worker: Worker) -> None:
        progress, self._rounds[worker.rank] = self._rounds[worker.rank], RoundProgress()
        super()._end_life(worker)
        self._ended = self.now
        lost = [*progress.made_of, *progress.sent]
        self._forget(lost)
        self._samples.give_back(worker.rank, [*lost, *([progress.unfinished] if progress.unfinished else [])])

    def _forget(self, made_of: list[MicroBatch]) -> None:
        """Late micro-batches have read weights of their own, which they do not need any more."""
        if self._trainer:
            for batch in made_of:
                if batch.late:
                    self._trainer.drop(batch.version)

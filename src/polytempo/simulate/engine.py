"""The discrete-event engine: virtual time drives the same policies as a live job.

    computed -> (push in flight) -> arrived -> policy -> apply, hold, release -> (answer in flight) -> answered -> compute

A heap holds what will happen; each entry is (time, order, what, worker, life, step, version). `order` makes equal times
happen in the order they were planned, so a run is the same every time. `life` counts a rank's lives: what a crashed worker
had in flight meets a newer life and is dropped; events of a rank in any life have ANY_LIFE. `version` is the version of
the weights the step is computed on: with it the engine knows every gradient's staleness, and training in virtual time knows
which weights to take.

Weights are read at the moment the release is decided: an answer carries all updates decided before it and none after.
`Corrections` may slow or drop an update before it is applied. Modes with local steps have engines of their own: downpour
(`local_engine.py`), and those whose workers average their models (`block_engine.py`); so have those in which workers take
shares of a joint batch (`balance_engine.py`), or what they manage until a deadline (`anytime_engine.py`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polytempo.errors import StuckError
from polytempo.records.lines import RecordLine, action_line, apply_line, event_line
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.durations import stretched
from polytempo.simulate.links import Route
from polytempo.simulate.outcome import Budget, BudgetUse
from polytempo.simulate.worker import NO_WEIGHTS, NOT_HELD, Trainer, Worker
from polytempo.sync.actions import NAMED_AT_MOST, Action, Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.corrections import NOTHING, Corrections
from polytempo.sync.events import Event, Joined, Left, Pushed, Ticked
from polytempo.sync.policy import Policy

COMPUTED, ARRIVED, ANSWERED, JOIN, LEAVE, CRASH, NOTICE, WAKE, OBSERVE = range(9)

ANY_LIFE = -1

#: How many events pass between two calls of the progress function, in plain runs and beside training.
PROGRESS_EVERY = (8192, 64)

HeapEntry = tuple[float, int, int, Worker, int, int, int]
EventHandler = Callable[[float, Worker, int, int], None]


class Decisions:
    """What a policy decides, corrected for staleness, and the lines of the record that say so."""

    def __init__(
        self,
        policy: Policy,
        corrections: Corrections,
        shards: int,
        version: Callable[[], int],
        used: Callable[[Pushed], int],
    ) -> None:
        self._policy, self._corrections = policy, corrections
        self._shards, self._version, self._used = shards, version, used

    def corrected(self, event: Event, now: float) -> list[Action]:
        """The actions of the policy, corrected for staleness: updates are slower, or become discards."""
        actions = self._policy.handle(event, now)
        return [self._judged(action) if type(action) is Apply else action for action in actions]

    def _judged(self, apply: Apply) -> Apply | Discard:
        push = apply.pushes[0]  # modes with corrections apply single pushes
        verdict = self._corrections.verdict(self._version() - self._used(push))
        if verdict.drop:
            return Discard(push.worker, push.step, verdict.drop)
        return Apply(apply.pushes, apply.rate * verdict.rate, apply.weights)

    def record_lines(
        self, event: Event, actions: list[Action], now: float, figures: RecordLine | None = None
    ) -> Iterator[RecordLine]:
        """The lines of an event, with its figures, and of its actions."""
        version = self._version()
        if (line := event_line(event, now, figures)) is not None:
            yield line
        for action in actions:
            if isinstance(action, Apply):
                staleness = [version - self._used(push) for push in action.pushes]
                version += 1
                for server in range(self._shards):
                    yield apply_line(action, now, server, version, staleness)
            elif (line := action_line(action, now)) is not None:
                yield line


class SimulationEngine:
    """One run of one policy on one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        route: Route | None,
        budget: Budget,
        seed: int = 0,
        record: Callable[[RecordLine], None] | None = None,
        trainer: Trainer | None = None,
        observe_every: float | None = None,
        progress: Callable[[float], None] | None = None,
        corrections: Corrections = NOTHING,
        figures: bool = False,
    ) -> None:
        self.now = 0.0
        self.workers = [Worker(cluster, rank, seed) for rank in cluster.ranks()]
        self.updates = 0
        self.max_lead = 0
        self._cluster, self._policy, self._route, self._budget = cluster, policy, route, budget
        self._record, self._trainer, self._progress = record, trainer, progress
        self._observe_every = observe_every
        self._corrections, self._figures = corrections, figures
        self._decisions = Decisions(
            policy, corrections, cluster.servers.shards, lambda: self.updates, lambda push: self.workers[push.worker].used
        )
        self._decide = self._decisions.corrected if corrections.any else policy.handle
        self._steps_each = budget.steps_each
        self._heap: list[HeapEntry] = []
        self._order = 0
        self._counts = min(budget.steps, budget.samples) < math.inf
        self._used = BudgetUse(budget)
        self._stopped = False
        self._together = 0  # pushes of the last update
        self._answers: dict[Worker, int] = {}  # to be sent: the last step released to each
        self._acts: dict[type, Callable[[Any, float], None]] = {
            Release: self._release,
            Apply: self._apply,
            Hold: self._hold,
            Discard: self._drop,
            Refuse: self._drop,
            Admit: self._admit,
            Wake: self._set_alarm,
        }
        policy.explains = record is not None

    # The run.

    def run(self) -> None:
        """Run to the end of the budget."""
        self._plan_membership()
        if self._observe_every:
            self._plan(0.0, OBSERVE, self.workers[0], life=ANY_LIFE)
        handlers = self._handlers()
        heap, pop, limit, progress = self._heap, heapq.heappop, self._budget.seconds, self._progress
        count, every = 0, PROGRESS_EVERY[self._trainer is not None]
        while heap and not self._stopped:
            now, _, what, worker, life, step, version = pop(heap)
            if now > limit:
                self.now, self._stopped = limit, True
                break
            self.now = now
            if life == worker.life or life == ANY_LIFE:
                handlers[what](now, worker, step, version)
            elif self._trainer and version != NO_WEIGHTS:
                self._trainer.drop(version)
            count += 1
            if progress and count % every == 0:
                progress(self._budget.used(now, sum(w.steps for w in self.workers), self._used.samples, len(self.workers)))
        self._finish()

    def _handlers(self) -> tuple[EventHandler, ...]:
        """The handler of each kind of event, in the order of their numbers."""
        return (
            self._computed,
            self._arrived,
            self._answered,
            self._join,
            self._leave,
            self._crash,
            self._notice,
            self._wake,
            self._observe,
        )

    def _finish(self) -> None:
        if not self._stopped and self._policy.members:
            raise StuckError(f"nothing can happen after {self.now:g} s: {deadlock_report(self._policy, self.workers)}")
        for worker in self.workers:
            if worker.alive:
                worker.settle(self.now, self._route is not None)
        if self._trainer:
            self._trainer.observe(self.now)
        if self._progress:
            self._progress(1.0)

    def _plan(
        self,
        at: float,
        what: int,
        worker: Worker,
        step: int = -1,
        version: int = NO_WEIGHTS,
        life: int | None = None,
    ) -> None:
        self._order += 1
        life = worker.life if life is None else life
        heapq.heappush(self._heap, (at, self._order, what, worker, life, step, version))

    def _plan_membership(self) -> None:
        cluster, workers = self._cluster, self.workers
        for worker in workers[: cluster.workers]:
            self._plan(0.0, JOIN, worker, life=ANY_LIFE)
        for join in cluster.joins:
            self._plan(join.at, JOIN, workers[join.worker], life=ANY_LIFE)
        for leave in cluster.leaves:
            self._plan(leave.at, LEAVE, workers[leave.worker], life=ANY_LIFE)
        for number, crash in enumerate(cluster.crashes):
            self._plan(crash.at, CRASH, workers[crash.worker], step=number, life=ANY_LIFE)

    # Events of a worker.

    def _computed(self, now: float, worker: Worker, step: int, version: int) -> None:
        worker.busy = False
        if self._route is None:
            self._pushed(now, worker, step, version)
        else:
            worker.spent = now - worker.since
            worker.since = now
            worker.flying += 1
            worker.messages += 1
            self._plan(self._route.push(worker.rank, now), ARRIVED, worker, step, version)
            self._go(now, worker)

    def _arrived(self, now: float, worker: Worker, step: int, version: int) -> None:
        worker.flying -= 1
        self._pushed(now, worker, step, version)

    def _pushed(self, now: float, worker: Worker, step: int, version: int, push: Pushed | None = None) -> None:
        worker.used = version
        push = push or Pushed(worker.rank, step, worker.batch)
        if self._record is None:
            self._carry_out(self._decide(push, now), now)
        else:
            self._feed(push, now)
        if worker.leaving:
            self._leave(now, worker)

    def _answered(self, now: float, worker: Worker, step: int, version: int) -> None:
        if self._trainer:
            self._forget_weights(worker)
        worker.weights = version
        worker.allowed = step
        if not worker.busy:
            self._go(now, worker)

    def _go(self, now: float, worker: Worker) -> None:
        """Start the next step of a worker, if it is free and may."""
        step = worker.next_step
        if step > worker.allowed or worker.leaving or step >= self._steps_each:
            self._stay(now, worker)
            return
        worker.next_step = step + 1
        if self._trainer:
            self._trainer.keep(worker.weights)
        self._compute(now, worker, step, worker.weights)

    def _compute(self, now: float, worker: Worker, step: int, version: int) -> None:
        """A worker is busy from now on, for the time of one step."""
        if self._route is not None:
            worker.exchanged = now - worker.since - worker.held_for
            worker.communicating += worker.exchanged
            worker.held_for = 0.0
        worker.busy = True
        worker.since = now
        if not worker.step_times:
            worker.draw()
        end = now + worker.step_times.pop()
        if worker.stalls:
            end = stretched(now, end - now, worker.stalls)
        self._order += 1
        heapq.heappush(self._heap, (end, self._order, COMPUTED, worker, worker.life, step, version))

    def _stay(self, now: float, worker: Worker) -> None:
        """An idle worker starts no step now; one that has completed its steps, and has its last answer, leaves."""
        self._forget_weights(worker)  # it will not compute on them again
        if self._steps_each <= worker.next_step <= worker.allowed and not worker.flying:
            self._plan(now, LEAVE, worker)

    def _forget_weights(self, worker: Worker) -> None:
        if self._trainer and worker.weights != NO_WEIGHTS:
            self._trainer.drop(worker.weights)
            worker.weights = NO_WEIGHTS

    # Membership.

    def _join(self, now: float, worker: Worker, step: int, version: int) -> None:
        if worker.alive:
            return
        if worker.rank in self._policy.members:  # its crash was not noticed before it came back
            self._feed(Left(worker.rank, "lost"), now)
        worker.join(now)
        self._feed(Joined(worker.rank), now)

    def _leave(self, now: float, worker: Worker, step: int = -1, version: int = NO_WEIGHTS) -> None:
        worker.leaving = True
        if worker.alive and not worker.busy and not worker.flying:
            self._end_life(worker)
            self._feed(Left(worker.rank, "finished"), now)

    def _crash(self, now: float, worker: Worker, number: int, version: int) -> None:
        if not worker.alive:
            return
        self._end_life(worker)
        noticed_after = self._cluster.crashes[number].noticed_after
        if noticed_after is not None:
            self._plan(now + noticed_after, NOTICE, worker)

    def _notice(self, now: float, worker: Worker, step: int, version: int) -> None:
        self._feed(Left(worker.rank, "lost"), now)

    def _end_life(self, worker: Worker) -> None:
        self._forget_weights(worker)
        worker.end_life(self.now, self._route is not None)
        if self._trainer:
            self._trainer.end(worker.rank, worker.next_step >= self._steps_each)

    # The policy, and its actions.

    def _feed(self, event: Event, now: float) -> None:
        """Let the policy decide on an event, record it, and carry out the actions."""
        actions = self._decide(event, now)
        if self._record is not None:
            figures = self._own_time(event, now) if self._figures and isinstance(event, Pushed) else None
            for line in self._decisions.record_lines(event, actions, now, figures):
                self._record(line)
        self._carry_out(actions, now)

    def _own_time(self, push: Pushed, now: float) -> RecordLine:
        """What a worker of a live job would tell of the step that it has pushed (`records/step_figures.py`)."""
        worker = self.workers[push.worker]
        computed = now - worker.since if self._route is None else worker.spent
        return {"computed": computed, "exchanged": worker.exchanged} if computed else {}

    def _carry_out(self, actions: list[Action], now: float) -> None:
        for action in actions:
            self._acts[type(action)](action, now)
        if self._answers and self._route is not None:
            self._answer(self._route, now)
            self._answers.clear()

    def _answer(self, route: Route, now: float) -> None:
        """Send weights and permissions, in one message to each worker."""
        arrivals = route.answer([worker.rank for worker in self._answers], now, self._together)
        for (worker, step), at in zip(self._answers.items(), arrivals, strict=True):
            self._plan(at, ANSWERED, worker, step, self._read())

    def _release(self, release: Release, now: float) -> None:
        worker, step = self.workers[release.worker], release.step
        lead = step - release.slowest
        if lead > self.max_lead:
            self.max_lead = lead
        if not worker.alive:  # it crashed, and the policy does not know yet
            return
        if worker.resuming:
            worker.resuming = False
            worker.next_step = step
        if worker.held_since != NOT_HELD:
            worker.end_hold(now)
        if self._route is not None:  # several steps released to a worker at once travel in one answer
            self._answers[worker] = step
        elif self._trainer:
            self._answered(now, worker, step, self._read())
        else:
            worker.weights, worker.allowed = self.updates, step
            if not worker.busy:
                self._go(now, worker)

    def _hold(self, hold: Hold, now: float) -> None:
        worker = self.workers[hold.worker]
        if worker.held_since == NOT_HELD:  # else it stays held, for another reason
            worker.held_since = now

    def _admit(self, admit: Admit, now: float) -> None:
        self.workers[admit.worker].next_step = admit.step
        self._together = 0  # its first answer belongs to no update

    def _set_alarm(self, wake: Wake, now: float) -> None:
        self._plan(wake.at, WAKE, self.workers[0], life=ANY_LIFE)

    def _read(self) -> int:
        """The newest version, which gets one reader more."""
        if self._trainer:
            self._trainer.keep(self.updates)
        return self.updates

    def _apply(self, apply: Apply, now: float) -> None:
        version, workers = self.updates, self.workers
        self._together = len(apply.pushes)
        for push in apply.pushes:
            worker = workers[push.worker]
            stale = version - worker.used
            worker.steps += 1
            worker.staleness_sum += stale
            if stale > worker.staleness_max:
                worker.staleness_max = stale
        if self._trainer:
            self._learn(apply, [workers[push.worker].used for push in apply.pushes])
        self.updates = version + 1
        if self._route is not None:
            self._route.applied(now)
        if self._counts:
            self._stopped = self._used.charge(apply)

    def _learn(self, apply: Apply, used: list[int]) -> None:
        """Make the next version from gradients that were taken on these."""
        assert self._trainer is not None
        self._trainer.apply(apply.pushes, used, apply.rate)

    def _drop(self, action: Discard | Refuse, now: float) -> None:
        worker = self.workers[action.worker]
        worker.discarded += 1
        worker.wasted += worker.spent if self._route else now - worker.since
        worker.resuming = not self._corrections.gives(action.reason)  # a too stale push does not move its worker
        if self._trainer:
            self._trainer.lose(worker.rank, action.step, worker.used)

    def _wake(self, now: float, worker: Worker, step: int, version: int) -> None:
        self._feed(Ticked(), now)

    def _observe(self, now: float, worker: Worker, step: int, version: int) -> None:
        if self._trainer and self._observe_every and self._heap:
            self._trainer.observe(now)
            self._plan(now + self._observe_every, OBSERVE, worker, life=ANY_LIFE)


def deadlock_report(policy: Policy, workers: Sequence[Worker]) -> str:
    """All holds, and the crashed workers that are still members."""
    holds = policy.holds()
    waits = "; ".join(_wait_text(hold) for hold in holds[:NAMED_AT_MOST]) or "no worker is held"
    more = f" and {len(holds) - NAMED_AT_MOST} more wait" if len(holds) > NAMED_AT_MOST else ""
    gone = [rank for rank in policy.members if not workers[rank].alive]
    crashed = f"; crashed and not noticed: {', '.join(map(str, gone[:NAMED_AT_MOST]))}" if gone else ""
    return f"{waits}{more}{crashed}"


def _wait_text(hold: Hold) -> str:
    others = hold.waiting_count - len(hold.waiting_for)
    names = ", ".join(map(str, hold.waiting_for)) + (f" and {others} more" if others else "")
    return f"worker {hold.worker} waits for {names} ({hold.reason})"

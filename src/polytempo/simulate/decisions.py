"""The policies of a run: what happens is told to them, and their actions are carried out on workers and models.

A model in P fragments has P policies, each with a clock of its own. `Corrections` may slow or drop an update before it is
applied. Weights are read at the moment the release is decided: an answer carries all updates decided before it, and none
after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from polytempo.records.lines import RecordLine, action_line, apply_line, event_line
from polytempo.simulate.freight import FragmentClock
from polytempo.simulate.outcome import Budget
from polytempo.simulate.worker import ANY_LIFE, NOT_HELD, Worker
from polytempo.sync import machine as machines
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.events import Event, Left, Pushed, Ticked

if TYPE_CHECKING:
    from polytempo.simulate.run import Engine


class Decisions:
    """What the policies of one run decide.

    Args:
        engine: The run.
        budget: When it ends; steps and samples are counted here.
        record: Called with every line of the record.
        figures: Do lines of pushes say what the step took of its worker's own time?
    """

    def __init__(self, engine: Engine, budget: Budget, record: Callable[[RecordLine], None] | None, figures: bool) -> None:
        self.max_lead = 0
        self.stopped = False
        self.used_samples = 0.0  # of the budget
        self._used_steps = 0
        self._budget = budget
        self._counts = min(budget.steps, budget.samples) < math.inf
        self._record, self._figures = record, figures
        # Looked up once: most of a run without a network is spent in `_apply` and `_release`.
        self._engine, self._work = engine, engine.work
        self._clocks = engine.clocks
        self._workers = engine.workers
        self._trainer, self._trains = engine.trainer, engine.trains
        self._route = engine.route
        self._freight, self._carries = engine.freight, engine.freight.carries
        self._overlaps = engine.overlaps
        self._direct = engine.instant and not engine.trains  # nothing is read or sent: machines hear of releases at once
        self._corrections = engine.spec.corrections
        self._corrects = self._corrections.any
        self._together = 0  # pushes of the last update
        self._answers: dict[Worker, Release] = {}  # to be sent: the last release of each
        self._acts: dict[type, Callable[[FragmentClock, Any, float], None]] = {
            Release: self._release,
            Apply: self._apply,
            Hold: self._hold,
            Discard: self._drop,
            Refuse: self._drop,
            Admit: self._admit,
            Wake: lambda clock, wake, now: engine.plan(wake.at, self._wake, self._workers[0], clock, life=ANY_LIFE),
        }

    def tell_all(self, event: Event, now: float) -> None:
        """All policies hear of it."""
        for clock in self._clocks:
            self.feed(clock, event, now)
        if isinstance(event, Left):
            self._freight.parted(event.worker, now)

    def feed(self, clock: FragmentClock, event: Event, now: float) -> None:
        """Let a policy decide on an event, record it, and carry out the actions."""
        actions = clock.decide(event, now)
        if self._corrects:
            actions = [self._corrected(clock, action) if type(action) is Apply else action for action in actions]
        if self._record is not None:
            for line in self._lines(clock, event, actions, now):
                self._record({**line, "optimizer": str(clock.number)} if clock.number else line)
        for action in actions:
            self._acts[type(action)](clock, action, now)
        if self._answers:  # weights and permissions, in one message to each worker
            arrivals = self._freight.arrivals(self._answers, now, self._together)
            for (worker, release), at in zip(self._answers.items(), arrivals, strict=True):
                self._engine.plan(at, self._engine.answered, worker, (clock, release), self._read(clock))
            self._answers.clear()

    def _corrected(self, clock: FragmentClock, update: Apply) -> Apply | Discard:
        """An update, corrected for staleness: slower, or discarded."""
        push = update.pushes[0]  # modes with corrections apply single pushes
        return self._corrections.corrected(update, clock.version - clock.version_of(push, self._workers[push.worker]))

    def _lines(self, clock: FragmentClock, event: Event, actions: list[Action], now: float) -> Iterator[RecordLine]:
        """The lines of an event, with what a worker of a live job would tell of its step, and of its actions."""
        figures: RecordLine = {}
        if self._figures and type(event) is Pushed and (worker := self._workers[event.worker]).spent:
            figures = self._freight.figures(worker)
        if (line := event_line(event, now, figures)) is not None:
            yield line
        version = clock.version
        for action in actions:
            if isinstance(action, Apply):
                staleness = [version - clock.version_of(push, self._workers[push.worker]) for push in action.pushes]
                version += 1
                for server in range(self._engine.cluster.servers.shards):
                    yield apply_line(action, now, server, version, staleness)
            elif (line := action_line(action, now)) is not None:
                yield line

    def _release(self, clock: FragmentClock, release: Release, now: float) -> None:
        worker = self._workers[release.worker]
        lead = release.step - release.slowest
        if lead > self.max_lead:
            self.max_lead = lead
        if not worker.alive:  # it crashed, and the policy does not know yet
            return
        if worker.held_since != NOT_HELD and not self._overlaps:
            worker.end_hold(now)
        if self._direct:
            worker.weights = clock.version
            orders = worker.machine.handle(release, now)
            if orders is machines.GO:
                self._work(worker, now)
            elif orders:
                self._engine.obey(orders, worker, now)
            return
        worker.held = False
        self._freight.released(clock, worker)
        if self._route is not None:  # several steps released to a worker at once travel in one answer
            self._answers[worker] = release
        else:
            self._engine.answered(now, worker, (clock, release), self._read(clock))

    def _hold(self, clock: FragmentClock, hold: Hold, now: float) -> None:
        worker = self._workers[hold.worker]
        if self._overlaps:  # it goes on; what it waits in the end is counted where it stops
            return
        if worker.busy and self._freight.until_deadline:
            worker.held = True
        elif worker.held_since == NOT_HELD:  # else it stays held, for another reason
            worker.held_since = now

    def _admit(self, clock: FragmentClock, admit: Admit, now: float) -> None:
        worker = self._workers[admit.worker]
        self._together = 0  # its first answer belongs to no update
        worker.machine.handle(admit, now, clock.number)
        self._freight.admitted(clock, worker, now)

    def _wake(self, now: float, worker: Worker, clock: FragmentClock, version: int) -> None:
        if clock.policy.members or not self._overlaps:
            self.feed(clock, Ticked(), now)

    def _read(self, clock: FragmentClock) -> int:
        """The newest version, which gets one reader more."""
        self._trainer.keep(clock.version)
        return clock.version

    def _apply(self, clock: FragmentClock, apply: Apply, now: float) -> None:
        version, pushes, workers = clock.version, apply.pushes, self._workers
        self._together = steps = len(pushes)
        if self._carries:
            steps = self._freight.applied(clock, apply)
        else:
            for push in pushes:
                worker = workers[push.worker]
                stale = version - worker.used
                worker.steps += 1
                worker.staleness_sum += stale
                if stale > worker.staleness_max:
                    worker.staleness_max = stale
            if self._trains:
                self._trainer.apply(apply, [workers[push.worker].used for push in pushes], (), 0)
        clock.version = version + 1
        if self._route is not None:
            self._route.applied(now)
        if self._counts:
            parts = len(self._clocks)
            self._used_steps += steps
            self.used_samples += sum(push.samples for push in pushes) / parts
            budget = self._budget
            self.stopped = self._used_steps // parts >= budget.steps or self.used_samples >= budget.samples

    def _drop(self, clock: FragmentClock, action: Discard | Refuse, now: float) -> None:
        worker = self._workers[action.worker]
        worker.discarded += 1
        self._freight.dropped(clock, worker, action.step)
        if isinstance(action, Refuse) or not action.too_stale:  # else it goes on where it is, as after an update
            worker.machine.handle(machines.DROPPED, now)
        self._trainer.lose(worker.rank, action.step, worker.used)

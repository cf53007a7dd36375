"""The engine for modes whose workers average their models: blocks of local steps, and one push at the end of each.

    step, step, ... -> (push in flight) -> arrived -> policy -> apply, release -> (answer in flight) -> answered -> step, ...

What the policy counts as a step is a block; a release says how many local steps it has. The answer brings the new values.
A worker without `overlap` waits for it. With overlap S it goes on and takes the values S local steps after the sending, for
which it waits if it must. In decoupled modes it never waits: it takes them at the first boundary between two steps after
they have come, and leaves out a turn whose push before is not answered yet.

Fragments. The model may have P parts, each with a policy (and so a clock) of its own and 1/P of the bytes. A turn comes
every period / P local steps; the turns are those of fragments 1, 2, ..., P - 1, 0, on all workers in this order, as in live
jobs. A worker that joins begins at the turn of the fragment that has made the fewest rounds.

Useful are local steps whose push was merged: for each fragment 1/P of their seconds. What is pending when a worker dies or
the run ends is wasted. A push that has arrived counts, though its worker may be dead when it is merged.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

from polytempo.simulate.cluster import Cluster
from polytempo.simulate.engine import ANSWERED, ANY_LIFE, ARRIVED, LEAVE, WAKE, Decisions, SimulationEngine
from polytempo.simulate.links import Route
from polytempo.simulate.outcome import Budget
from polytempo.simulate.worker import NO_WEIGHTS, NOT_HELD, BlockTrainer, SentBlock, Trainer, Worker
from polytempo.sync.actions import Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.events import Event, Pushed, Ticked
from polytempo.sync.local_sgd import Averaging
from polytempo.sync.policy import Policy


@dataclass(slots=True)
class BlockPush:
    """A push in flight, or one that waits for its merge."""

    fragment: int
    step: int
    count: int  #: local steps in it
    seconds: float  #: that these took
    base: int  #: the version of the values they started from
    life: int  #: of its worker
    block: SentBlock | None  #: its values, beside training
    arrived: bool = False


class FragmentProgress:
    """One fragment of one worker's model."""

    __slots__ = ("allowed", "base", "made", "next", "ready", "seconds")

    def __init__(self) -> None:
        self.next = 0  # the step of its next push
        self.allowed = -1  # the last step that was released
        self.base = NO_WEIGHTS  # the version of the values it last took
        self.ready = False  # new values have come and are not taken yet
        self.made = 0  # the worker's local steps at the last sending
        self.seconds = 0.0  # and the seconds it had computed


class BlockProgress:
    """The state of a worker in one life."""

    __slots__ = ("fragments", "made", "position", "seconds", "since", "turn")

    def __init__(self, fragments: int) -> None:
        self.fragments = [FragmentProgress() for _ in range(fragments)]
        self.turn = 0  # the next to come
        self.since = 0  # local steps since the last turn
        self.made = 0  # local steps
        self.seconds = 0.0  # that these took
        self.position = -1  # of the next local step in the worker's data; -1: not known yet


class BlockEngine(SimulationEngine):
    """One run of a mode with blocks of local steps. `policies` has one policy for each fragment."""

    def __init__(
        self,
        cluster: Cluster,
        policies: list[Policy],
        route: Route | None,
        budget: Budget,
        averaging: Averaging,
        trainer: BlockTrainer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(cluster, policies[0], route, budget, trainer=cast(Trainer | None, trainer), **options)
        self._averaging, self._learner = averaging, trainer
        self._decoupled = not averaging.waits
        self._overlap: float = math.inf if self._decoupled else averaging.overlap
        self._interval = max(1, averaging.period // len(policies))  # local steps between two turns
        self._states = [BlockProgress(len(policies)) for _ in self.workers]
        self._versions = [0] * len(policies)
        self._sent: list[dict[tuple[int, int], deque[BlockPush]]] = [{} for _ in policies]
        self._merged = [0] * len(self.workers)  # local steps, times the number of fragments
        self._merged_by_all = 0
        self._positions = [0] * len(self.workers)  # of each worker's data, over all lives
        self._starts: dict[int, int] = {}  # the position at which each turn's block begins
        self._policies = policies
        self._all_decisions = [self._decisions_of(number) for number in range(len(policies))]
        self._told = self._record
        self._ended = 0.0  # the last life
        self._fragment = -1  # whose policy decides now
        self._switch(0)
        for policy in policies:
            policy.explains = self._told is not None

    def _decisions_of(self, number: int) -> Decisions:
        def used(push: Pushed) -> int:
            return self._sent[number][push.worker, push.step][0].base

        shards = self._cluster.servers.shards
        return Decisions(self._policies[number], self._corrections, shards, lambda: self._versions[number], used)

    def _switch(self, fragment: int) -> None:
        """Events and actions are this fragment's from now on."""
        if fragment == self._fragment:
            return
        self._fragment, self._policy = fragment, self._policies[fragment]
        self._decide, self._decisions = self._policy.handle, self._all_decisions[fragment]
        told = self._told
        if told is not None and fragment:
            self._record = lambda line: told({**line, "optimizer": str(fragment)})
        else:
            self._record = told

    # Local steps and turns.

    def _go(self, now: float, worker: Worker) -> None:
        state = self._states[worker.rank]
        if worker.leaving or self._waits(state) or state.position >= self._steps_each:
            self._stay(now, worker)
            return
        self._take_values(worker, state)
        if worker.held_since != NOT_HELD:
            worker.end_hold(now)
        self._compute(now, worker, state.turn, NO_WEIGHTS)

    def _waits(self, state: BlockProgress) -> bool:
        """Must this worker wait for values, those of its start or those of a push?"""
        for part in state.fragments:
            if part.base == NO_WEIGHTS or (part.next > part.allowed and state.since >= self._overlap):
                return True
        return False

    def _take_values(self, worker: Worker, state: BlockProgress) -> None:
        for number, part in enumerate(state.fragments):
            if part.ready and (self._decoupled or state.since >= self._overlap):
                part.ready = False
                if self._learner:
                    self._learner.install(worker.rank, number)

    def _computed(self, now: float, worker: Worker, step: int, version: int) -> None:
        state = self._states[worker.rank]
        if self._learner:
            self._learner.step(worker.rank, state.position)
        state.made += 1
        state.since += 1
        state.position += 1
        state.seconds += now - worker.since
        self._positions[worker.rank] = state.position
        worker.busy = False
        last = worker.leaving or state.position >= self._steps_each
        if state.since < self._interval and not last:
            worker.since = now
            self._go(now, worker)
            return
        due = self._due(state, last)
        worker.since = now
        worker.flying += len(due)
        for fragment in due:
            self._send(now, worker, fragment)
        if worker.leaving:
            self._leave(now, worker)
        elif not worker.busy:
            self._go(now, worker)

    def _due(self, state: BlockProgress, last: bool) -> list[int]:
        """The fragments to be sent now: that of the turn; after the last step all that have something to send."""
        count, first = len(state.fragments), state.turn
        state.turn += 1
        state.since = 0
        if not self._averaging.decoupled:
            self._starts[state.turn] = max(state.position, self._starts.get(state.turn, 0))
        turns = range(first, first + count if last else first + 1)
        numbers = [(turn + 1) % count for turn in turns]
        return [n for n in numbers if self._may_send(state, state.fragments[n])]

    def _may_send(self, state: BlockProgress, part: FragmentProgress) -> bool:
        return part.made < state.made and part.next <= part.allowed

    def _send(self, now: float, worker: Worker, fragment: int) -> None:
        state = self._states[worker.rank]
        part = state.fragments[fragment]
        block = self._learner.send(worker.rank, fragment) if self._learner else None
        count, seconds = state.made - part.made, state.seconds - part.seconds
        push = BlockPush(fragment, part.next, count, seconds, part.base, worker.life, block)
        self._sent[fragment].setdefault((worker.rank, part.next), deque()).append(push)
        turn = part.next * len(state.fragments) + fragment
        part.made, part.seconds, part.next = state.made, state.seconds, part.next + 1
        worker.messages += 1
        if self._route is None:
            self._arrived(now, worker, turn, NO_WEIGHTS)
        else:
            self._plan(self._route.push(worker.rank, now), ARRIVED, worker, turn)

    def _pushed(self, now: float, worker: Worker, step: int, version: int, push: Pushed | None = None) -> None:
        inner, fragment = divmod(step, len(self._policies))
        sent = self._sent[fragment][worker.rank, inner][-1]
        sent.arrived = True
        loss, lr = (sent.block.loss, sent.block.lr) if sent.block and self._averaging.loss else (None, None)
        made = Pushed(worker.rank, inner, worker.batch * sent.count, (), sent.count, loss, lr)
        self._switch(fragment)
        super()._pushed(now, worker, inner, NO_WEIGHTS, made)

    def _stay(self, now: float, worker: Worker) -> None:
        """An idle worker starts no step now; one that has made its steps, and has all answers, leaves."""
        if worker.held_since == NOT_HELD and self._overlap:
            worker.held_since = now
        state = self._states[worker.rank]
        if state.position < self._steps_each or worker.flying:
            return
        if all(part.next <= part.allowed for part in state.fragments):
            self._plan(now, LEAVE, worker)

    # Membership: every fragment's policy hears of it.

    def _feed(self, event: Event, now: float) -> None:
        if isinstance(event, Pushed):
            super()._feed(event, now)
            return
        for fragment in range(len(self._policies)):
            self._switch(fragment)
            super()._feed(event, now)

    def _wake(self, now: float, worker: Worker, step: int, version: int) -> None:
        self._switch(step)
        if self._policy.members:
            super()._feed(Ticked(), now)

    def _set_alarm(self, wake: Wake, now: float) -> None:
        self._plan(wake.at, WAKE, self.workers[0], step=self._fragment, life=ANY_LIFE)

    def _admit(self, admit: Admit, now: float) -> None:
        state = self._states[admit.worker]
        state.fragments[self._fragment].next = admit.step
        self._together = 0
        if self._learner and self._fragment == 0:
            self._learner.begin(admit.worker)
        if self._fragment == len(self._policies) - 1:
            self._begin(state, admit.worker)

    def _begin(self, state: BlockProgress, rank: int) -> None:
        """A worker has been admitted by the policies of all fragments: its turn, and its place in the data."""
        count = len(state.fragments)
        state.turn = min(part.next * count + (number - 1) % count for number, part in enumerate(state.fragments))
        if self._averaging.decoupled:
            state.position = self._positions[rank]
        else:
            state.position = self._starts.get(state.turn, 0)

    def _end_life(self, worker: Worker) -> None:
        self._waste(worker)
        self._ended = self.now
        super()._end_life(worker)
        self._states[worker.rank] = BlockProgress(len(self._policies))
        if self._learner:
            self._learner.end(worker.rank)

    def _waste(self, worker: Worker) -> None:
        """What a worker has computed and not delivered is lost."""
        state, parts = self._states[worker.rank], len(self._policies)
        worker.wasted += sum(state.seconds - part.seconds for part in state.fragments) / parts
        for number, part in enumerate(state.fragments):
            waiting = self._sent[number].get((worker.rank, part.next - 1))
            if waiting and waiting[-1].life == worker.life and not waiting[-1].arrived:
                worker.wasted += waiting.pop().seconds / parts

    def _finish(self) -> None:
        if not self._stopped and not self._policy.members:
            self.now = self._ended  # alarms may be later
        if self._learner:
            self._learner.close()
        for worker in self.workers:
            if worker.alive:
                self._waste(worker)
        for sent in self._sent:  # arrived, and not merged
            for (rank, _), waiting in sent.items():
                self.workers[rank].wasted += sum(push.seconds for push in waiting if push.arrived) / len(self._policies)
        super()._finish()

    # Actions.

    def _release(self, release: Release, now: float) -> None:
        worker, step = self.workers[release.worker], release.step
        self.max_lead = max(self.max_lead, step - release.slowest)
        if not worker.alive:
            return
        part = self._states[worker.rank].fragments[self._fragment]
        part.next = step
        if release.period:
            self._interval = max(1, release.period // len(self._policies))
        if worker.held_since != NOT_HELD and not self._overlap:
            worker.end_hold(now)
        if self._learner:
            self._learner.fetch(worker.rank, self._fragment)
        if self._route is None:
            self._answered(now, worker, step * len(self._policies) + self._fragment, self._versions[self._fragment])
        else:
            self._answers[worker] = step

    def _answer(self, route: Route, now: float) -> None:
        arrivals = route.answer([worker.rank for worker in self._answers], now, self._together)
        version = self._versions[self._fragment]
        for (worker, step), at in zip(self._answers.items(), arrivals, strict=True):
            self._plan(at, ANSWERED, worker, step * len(self._policies) + self._fragment, version)

    def _answered(self, now: float, worker: Worker, step: int, version: int) -> None:
        inner, fragment = divmod(step, len(self._policies))
        part = self._states[worker.rank].fragments[fragment]
        first = part.base == NO_WEIGHTS
        part.allowed, part.base, part.ready = inner, version, not first
        if first and self._learner:
            self._learner.install(worker.rank, fragment)
        if not worker.busy:
            self._go(now, worker)

    def _hold(self, hold: Hold, now: float) -> None:
        if not self._overlap:  # else it goes on; what it waits in the end is counted where it stops
            super()._hold(hold, now)

    def _apply(self, apply: Apply, now: float) -> None:
        fragment, parts = self._fragment, len(self._policies)
        version = self._versions[fragment]
        self._together = len(apply.pushes)
        merged = [self._delivered(push) for push in apply.pushes]
        for push, sent in zip(apply.pushes, merged, strict=True):
            worker, stale = self.workers[push.worker], version - sent.base
            self._merged[push.worker] += sent.count
            self._merged_by_all += sent.count
            worker.steps = self._merged[push.worker] // parts
            worker.staleness_sum += stale * sent.count
            worker.staleness_max = max(worker.staleness_max, stale)
        if self._learner:
            weights = apply.weights or tuple(push.samples for push in apply.pushes)
            self._learner.merge(fragment, [sent.block for sent in merged if sent.block], weights)
        self._versions[fragment] = version + 1
        self.updates += 1
        if self._route is not None:
            self._route.applied(now)
        if self._counts:
            self._stopped = self._charge(apply, parts)

    def _charge(self, apply: Apply, parts: int) -> bool:
        used, budget = self._used, self._budget
        used.steps = self._merged_by_all // parts
        used.samples += sum(push.samples for push in apply.pushes) / parts
        return used.steps >= budget.steps or used.samples >= budget.samples

    def _drop(self, action: Discard | Refuse, now: float) -> None:
        worker = self.workers[action.worker]
        worker.discarded += 1
        if (worker.rank, action.step) in self._sent[self._fragment]:
            push = Pushed(worker.rank, action.step)
            worker.wasted += self._delivered(push).seconds / len(self._policies)

    def _delivered(self, push: Pushed) -> BlockPush:
        """The oldest push of this worker and step, which is merged or dropped now."""
        waiting = self._sent[self._fragment][push.worker, push.step]
        sent = waiting.popleft()
        if not waiting:
            del self._sent[self._fragment][push.worker, push.step]
        return sent

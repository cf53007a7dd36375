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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.engine import ANSWERED, ANY_LIFE, ARRIVED, LEAVE, WAKE, Decisions, SimulationEngine
from polytempo.simulate.links import Route
from polytempo.simulate.outcome import Budget
from polytempo.simulate.worker import NO_WEIGHTS, NOT_HELD, BlockTrainer, SentBlock, Trainer, Worker
from polytempo.summation import in_order
from polytempo.sync.actions import Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.corrections import Corrections
from polytempo.sync.directives import NextBlock
from polytempo.sync.events import Event, Pushed, Ticked
from polytempo.sync.local_sgd import Averaging
from polytempo.sync.policy import Policy


@dataclass(slots=True)
class BlockPush:
    """A push in flight, or one that waits for its merge."""

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


class FragmentClock:
    """One fragment: its policy, the merges that this has decided, and the pushes that wait for one."""

    def __init__(
        self, number: int, policy: Policy, corrections: Corrections, shards: int, told: Callable[[RecordLine], None] | None
    ) -> None:
        self.policy = policy
        self.version = 0  # merges
        self.sent: dict[tuple[int, int], deque[BlockPush]] = {}  # by worker and step
        self.decisions = Decisions(policy, corrections, shards, lambda: self.version, self._base)
        self.record = told
        if told is not None and number:
            self.record = lambda line: told({**line, "optimizer": str(number)})
        policy.explains = told is not None

    def _base(self, push: Pushed) -> int:
        return self.sent[push.worker, push.step][0].base

    def settle(self, worker: int, step: int) -> BlockPush:
        """The oldest push of this worker and step, which is merged or dropped now."""
        waiting = self.sent[worker, step]
        push = waiting.popleft()
        if not waiting:
            del self.sent[worker, step]
        return push

    def lose(self, worker: int, step: int, life: int) -> float:
        """Drop the push of this life if it is still in flight; the seconds that are lost with it."""
        waiting = self.sent.get((worker, step))
        if not waiting or waiting[-1].life != life or waiting[-1].arrived:
            return 0.0
        return waiting.pop().seconds

    def unmerged(self) -> Iterator[tuple[int, float]]:
        """Workers and seconds of pushes that have arrived and were not merged."""
        for (worker, _), waiting in self.sent.items():
            yield worker, in_order(push.seconds for push in waiting if push.arrived)


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
        self._hurries = self._decoupled and averaging.fragments > 1
        self._overlap: float = math.inf if self._decoupled else averaging.overlap
        self._interval = max(1, averaging.period // len(policies))  # local steps between two turns
        self._states = [BlockProgress(len(policies)) for _ in self.workers]
        self._merged = [0] * len(self.workers)  # local steps, times the number of fragments
        self._merged_by_all = 0
        self._positions = [0] * len(self.workers)  # of each worker's data, over all lives
        self._starts: dict[int, int] = {}  # the position at which each turn's block begins
        shards = cluster.servers.shards
        self._clocks = [FragmentClock(n, one, self._corrections, shards, self._record) for n, one in enumerate(policies)]
        self._ended = 0.0  # the last life
        self._fragment = -1  # whose policy decides now
        self._switch(0)

    def _switch(self, fragment: int) -> None:
        """Events and actions are this fragment's from now on."""
        if fragment == self._fragment:
            return
        clock = self._clocks[fragment]
        self._fragment, self._policy, self._record = fragment, clock.policy, clock.record
        self._decide, self._decisions = clock.policy.handle, clock.decisions

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
            done = state.position >= self._steps_each
            if part.ready and (self._decoupled or done or state.since >= self._overlap):
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
        worker.since = now
        self._send_all(now, worker, self._due(state, last))
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
        return self._unsent(state, [(turn + 1) % count for turn in turns])

    def _unsent(self, state: BlockProgress, numbers: Sequence[int]) -> list[int]:
        """Of these fragments, those that have something to send, and the answer to the push before."""
        parts = [(number, state.fragments[number]) for number in numbers]
        return [number for number, part in parts if part.made < state.made and part.next <= part.allowed]

    def _send_all(self, now: float, worker: Worker, fragments: list[int]) -> None:
        worker.flying += len(fragments)
        for fragment in fragments:
            self._send(now, worker, fragment)

    def _send(self, now: float, worker: Worker, fragment: int) -> None:
        state = self._states[worker.rank]
        part = state.fragments[fragment]
        block = self._learner.send(worker.rank, fragment) if self._learner else None
        count, seconds = state.made - part.made, state.seconds - part.seconds
        push = BlockPush(count, seconds, part.base, worker.life, block)
        self._clocks[fragment].sent.setdefault((worker.rank, part.next), deque()).append(push)
        turn = part.next * len(state.fragments) + fragment
        part.made, part.seconds, part.next = state.made, state.seconds, part.next + 1
        worker.messages += 1
        if self._route is None:
            self._arrived(now, worker, turn, NO_WEIGHTS)
        else:
            self._plan(self._route.push(worker.rank, now), ARRIVED, worker, turn)

    def _pushed(self, now: float, worker: Worker, step: int, version: int, push: Pushed | None = None) -> None:
        inner, fragment = divmod(step, len(self._clocks))
        sent = self._clocks[fragment].sent[worker.rank, inner][-1]
        sent.arrived = True
        loss = sent.block.loss if sent.block and self._averaging.loss else None
        lr = sent.block.lr if sent.block and self._averaging.lr else None
        made = Pushed(worker.rank, inner, worker.batch * sent.count, (), sent.count, loss, lr)
        self._switch(fragment)
        super()._pushed(now, worker, inner, NO_WEIGHTS, made)

    def _stay(self, now: float, worker: Worker) -> None:
        """An idle worker starts no step now. One that has made its steps sends what is left, and leaves with all answers.
        It does not wait for those of decoupled fragments: two workers could wait for each other in different ones."""
        if worker.held_since == NOT_HELD and self._overlap:
            worker.held_since = now
        state = self._states[worker.rank]
        if state.position < self._steps_each or worker.flying:
            return
        self._take_values(worker, state)
        if left := self._unsent(state, range(len(state.fragments))):
            self._send_all(now, worker, left)
        elif self._hurries or all(part.next <= part.allowed for part in state.fragments):
            self._plan(now, LEAVE, worker)

    # Membership: every fragment's policy hears of it.

    def _feed(self, event: Event, now: float) -> None:
        if isinstance(event, Pushed):
            super()._feed(event, now)
            return
        for fragment in range(len(self._clocks)):
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
        if self._fragment == len(self._clocks) - 1:
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
        self._states[worker.rank] = BlockProgress(len(self._clocks))

    def _waste(self, worker: Worker) -> None:
        """What a worker has computed and not delivered is lost."""
        state, parts = self._states[worker.rank], len(self._clocks)
        worker.wasted += in_order(state.seconds - part.seconds for part in state.fragments) / parts
        for clock, part in zip(self._clocks, state.fragments, strict=True):
            worker.wasted += clock.lose(worker.rank, part.next - 1, worker.life) / parts

    def _finish(self) -> None:
        if not self._stopped and not self._policy.members:
            self.now = self._ended  # alarms may be later
        if self._learner:
            self._learner.close()
        for worker in self.workers:
            if worker.alive:
                self._waste(worker)
        for clock in self._clocks:
            for rank, seconds in clock.unmerged():
                self.workers[rank].wasted += seconds / len(self._clocks)
        super()._finish()

    # Actions.

    def _release(self, release: Release, now: float) -> None:
        worker, step = self.workers[release.worker], release.step
        self.max_lead = max(self.max_lead, step - release.slowest)
        if not worker.alive:
            return
        part = self._states[worker.rank].fragments[self._fragment]
        part.next = step
        if isinstance(release.directive, NextBlock):
            self._interval = max(1, release.directive.period // len(self._clocks))
        if worker.held_since != NOT_HELD and not self._overlap:
            worker.end_hold(now)
        if self._learner:
            self._learner.fetch(worker.rank, self._fragment)
        if self._route is None:
            turn = step * len(self._clocks) + self._fragment
            self._answered(now, worker, turn, self._clocks[self._fragment].version)
        else:
            self._answers[worker] = step

    def _answer(self, route: Route, now: float) -> None:
        arrivals = route.answer([worker.rank for worker in self._answers], now, self._together)
        version = self._clocks[self._fragment].version
        for (worker, step), at in zip(self._answers.items(), arrivals, strict=True):
            self._plan(at, ANSWERED, worker, step * len(self._clocks) + self._fragment, version)

    def _answered(self, now: float, worker: Worker, step: int, version: int) -> None:
        inner, fragment = divmod(step, len(self._clocks))
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
        clock, parts = self._clocks[self._fragment], len(self._clocks)
        self._together = len(apply.pushes)
        merged = [clock.settle(push.worker, push.step) for push in apply.pushes]
        for push, sent in zip(apply.pushes, merged, strict=True):
            worker, stale = self.workers[push.worker], clock.version - sent.base
            self._merged[push.worker] += sent.count
            self._merged_by_all += sent.count
            worker.steps = self._merged[push.worker] // parts
            worker.staleness_sum += stale * sent.count
            worker.staleness_max = max(worker.staleness_max, stale)
        if self._learner:
            weights = apply.weights or tuple(push.samples for push in apply.pushes)
            self._learner.merge(self._fragment, [sent.block for sent in merged if sent.block], weights)
        clock.version += 1
        self.updates += 1
        if self._route is not None:
            self._route.applied(now)
        if self._counts:
            self._stopped = self._charge(apply, parts)

    def _charge(self, apply: Apply, parts: int) -> bool:
        used, budget = self._used, self._budget
        used.steps = self._merged_by_all // parts
        used.samples += in_order(push.samples for push in apply.pushes) / parts
        return used.steps >= budget.steps or used.samples >= budget.samples

    def _drop(self, action: Discard | Refuse, now: float) -> None:
        worker = self.workers[action.worker]
        worker.discarded += 1
        clock = self._clocks[self._fragment]
        if (worker.rank, action.step) in clock.sent:
            worker.wasted += clock.settle(worker.rank, action.step).seconds / len(self._clocks)

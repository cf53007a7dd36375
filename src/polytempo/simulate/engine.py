"""The discrete-event engine: virtual time drives the policies and machines of a live job.

    Compute -> computed -> SendPush -> (in flight) -> arrived -> policy -> apply, hold, release -> (in flight) -> answered

A heap holds what will happen; each entry is (time, order, what, worker, life, told, version). `order` makes equal times
happen in the order they were planned, so a run is the same every time. `life` counts a rank's lives: what a crashed worker
had in flight meets a newer life and is dropped; events of a rank in any life have ANY_LIFE. `version` is the version of the
weights that a step is computed on, or that an answer brings: with it the engine knows every gradient's staleness, and
training in virtual time knows which weights to take. Weights are read at the moment the release is decided: an answer
carries all updates decided before it and none after. `Corrections` may slow or drop an update before it is applied.

What a worker does is its machine's business (`sync/machine.py`); the engine asks a machine only what its pushes bring:

    gradient   of a step. The fast path: nothing is kept of a push but the version that it was computed on
    others     a `Sent`: what it is made of, and the seconds that are lost with it

A model in P fragments has P policies, and each of them 1/P of the bytes. Of micro-batches all until the push are planned at
once, since nothing that others do changes them: a round costs one event a worker.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from polytempo.errors import StuckError
from polytempo.records.lines import RecordLine, action_line, apply_line, event_line
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.dealing import DealtSamples, MicroBatch
from polytempo.simulate.durations import stretched
from polytempo.simulate.links import PeerRoute, Route, ServerRoute
from polytempo.simulate.outcome import Budget, BudgetUse
from polytempo.simulate.worker import NO_WEIGHTS, NOT_HELD, Worker
from polytempo.summation import in_order
from polytempo.sync.actions import NAMED_AT_MOST, Action, Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.blocks import BlockMachine
from polytempo.sync.corrections import NOTHING
from polytempo.sync.events import Event, Joined, Left, Pushed, Ticked
from polytempo.sync.machine import (
    ALL_ARRIVED,
    ASKED,
    COMPUTED,
    DROPPED,
    FETCHED,
    GO,
    LEAVING,
    PUSHES,
    Abandon,
    AddStep,
    AnswerPartner,
    AskAgain,
    AskPartner,
    Begin,
    Compute,
    Computed,
    GoHome,
    Install,
    Mix,
    Orders,
    Parted,
    PushStep,
    Replied,
    Requested,
    RequestValues,
    SendModel,
    SendPush,
    Settle,
    Snapshot,
    StartsAt,
    StepHere,
    TimeUp,
)
from polytempo.sync.policy import Policy
from polytempo.sync.shares import cut
from polytempo.sync.spec import Spec

if TYPE_CHECKING:
    from polytempo.simulate.virtual_model import VirtualModel

(
    HAS_COMPUTED,
    ARRIVED,
    ANSWERED,
    JOIN,
    LEAVE,
    CRASH,
    NOTICE,
    WAKE,
    OBSERVE,
    HAS_FETCHED,
    REQUESTED,
    REPLIED,
    DEADLINE,
    LATE,
) = range(14)

ANY_LIFE = -1

#: How many events pass between two calls of the progress function, in plain runs and beside training.
PROGRESS_EVERY = (8192, 64)

HeapEntry = tuple[float, int, int, Worker, int, Any, int]


@dataclass(slots=True, eq=False)
class Sent:
    """A push in flight, or one that waits for its merge."""

    step: int
    part: int
    count: int  #: (local) steps in it
    samples: int
    seconds: float  #: that these took
    version: int  #: that they were computed on
    content: Any = None  #: what the trainer has made, or the micro-batches
    work: float = 0.0  #: that the push speaks of, which may be other than what it brings
    computed: float = 0.0


@dataclass(slots=True)
class FragmentClock:
    """A fragment: its policy, what this has decided, and the pushes that wait for their update."""

    number: int
    policy: Policy
    decide: Callable[[Event, float], list[Action]]
    record: Callable[[RecordLine], None] | None
    version: int = 0  #: updates
    sent: dict[tuple[int, int], deque[Sent]] = field(default_factory=dict)  #: by worker and step

    def take(self, worker: int, step: int, newest: bool = False) -> Sent:
        """The push of this worker and step that is applied, or dropped, now. A worker that has come back may push a step a
        second time before the first is applied."""
        waiting = self.sent[worker, step]
        push = waiting.pop() if newest else waiting.popleft()
        if not waiting:
            del self.sent[worker, step]
        return push


class Engine:
    """One run of one mode on one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        spec: Spec,
        route: Route | None,
        budget: Budget,
        trainer: VirtualModel | None = None,
        seed: int = 0,
        record: Callable[[RecordLine], None] | None = None,
        observe_every: float | None = None,
        progress: Callable[[float], None] | None = None,
        figures: bool = False,
    ) -> None:
        machine = spec.machine(0)
        self.now = 0.0
        self.workers = [Worker(cluster, rank, seed) for rank in cluster.ranks()]
        self.updates = 0
        self.max_lead = 0
        self._cluster, self._spec, self._route = cluster, spec, route
        self._record, self._trainer, self._progress = record, trainer, progress
        self._observe_every, self._figures = observe_every, figures
        self._brings, self._measures, self._micro = machine.brings, machine.measures, machine.micro
        self._corrections = NOTHING if machine.brings == "values" else spec.corrections
        if machine.brings == "batches":  # a step of others has a whole batch
            samples = min(budget.samples, budget.steps * cluster.batch)
            budget = replace(budget, samples=samples, steps=math.inf)
        self._budget, self._used = budget, BudgetUse(budget)
        self._counts = min(budget.steps, budget.samples) < math.inf
        self._parts = [self._part(number) for number in range(machine.parts)]
        self._first = self._parts[0]
        self._overlaps, self._alarms_late = machine.overlaps, machine.brings in ("values", "batches")
        self._carries = machine.brings not in ("gradient", "nothing")
        self._instant = route is None and machine.brings == "gradient"  # what most simulated steps are: a shorter way
        self._reads = trainer is not None and machine.brings in ("gradient", "share", "batches")
        self._goes_on = isinstance(machine, BlockMachine) and machine.goes_on
        self._heap: list[HeapEntry] = []
        self._order = 0
        self._stopped = False
        self._ended = 0.0  # when the last life ended: alarms may ring later
        self._together = 0  # pushes of the last update
        self._answers: dict[Worker, Release] = {}  # to be sent: the last release of each
        self._starts: dict[int, int] = {}  # local steps at which each turn's block begins
        self._there: dict[int, dict[int, float]] = {}  # step: worker: when all values sent to it have come
        self._oldest = 0  # the first step of which that is not forgotten
        self._askers: dict[int, set[int]] = {}  # of each worker, those that wait for its reply
        self._samples = DealtSamples(trainer.length if trainer is not None else None)
        self._round, self._deal = -1, dict[int, list[MicroBatch]]()  # the joint batch that is dealt out: what is not begun
        for worker in self.workers if self._carries else ():
            worker.load(len(self._parts), machine.brings in ("share", "batches"), machine.micro)
        self._acts: dict[type, Callable[[FragmentClock, Any, float], None]] = {
            Release: self._release,
            Apply: self._apply,
            Hold: self._hold,
            Discard: self._drop,
            Refuse: self._drop,
            Admit: self._admit,
            Wake: self._set_alarm,
        }
        by_kind = {"share": self._compute_share, "batches": self._compute_batches, "sum": self._compute_local}
        self._local = machine.brings in ("values", "sum")
        compute = by_kind.get(machine.brings, self._compute)
        self._performs: dict[type, Callable[[Any, Worker, float], None]] = {
            Compute: compute,
            PushStep: self._push_step if machine.brings == "gradient" else self._send_share,
            SendPush: self._send_word if machine.brings == "nothing" else self._send_content,
            StepHere: self._step_here,
            Begin: self._begin,
            Install: self._install,
            Snapshot: self._snapshot,
            AddStep: self._add_step,
            SendModel: self._send_model,
            Mix: self._mix,
            RequestValues: self._request_values,
            AskPartner: self._ask_partner,
            AnswerPartner: self._answer_partner,
            AskAgain: self._ask_again,
            Settle: self._settle,
            GoHome: self._go_home,
        }

    def _part(self, number: int) -> FragmentClock:
        policy, told = self._spec.policy(self._cluster.workers), self._record
        policy.explains = told is not None
        named = (lambda line: told({**line, "optimizer": str(number)})) if told is not None and number else told
        part = FragmentClock(number, policy, policy.handle, named)
        if self._corrections.any:
            part.decide = lambda event, now: self._corrected(part, event, now)
        return part

    # The run.

    def run(self) -> None:
        """Run to the end of the budget."""
        self._plan_membership()
        if self._observe_every:
            self._plan(0.0, OBSERVE, self.workers[0], life=ANY_LIFE)
        handlers = (
            self._computed,
            self._arrived,
            self._answered,
            self._join,
            self._leave,
            self._crash,
            self._notice,
            self._wake,
            self._observe,
            self._fetched,
            self._requested,
            self._replied,
            self._deadline,
            self._late,
        )
        heap, pop, limit, progress = self._heap, heapq.heappop, self._budget.seconds, self._progress
        count, every = 0, PROGRESS_EVERY[self._trainer is not None]
        while heap and not self._stopped:
            now, _, what, worker, life, told, version = pop(heap)
            if now > limit:
                self.now, self._stopped = limit, True
                break
            self.now = now
            if life == worker.life or life == ANY_LIFE:
                handlers[what](now, worker, told, version)
            elif self._trainer and version != NO_WEIGHTS:
                self._trainer.drop(version)
            count += 1
            if progress and count % every == 0:
                progress(self._budget.used(now, sum(w.steps for w in self.workers), self._used.samples, len(self.workers)))
        self._finish()

    def _finish(self) -> None:
        policy = self._first.policy
        if not self._stopped and policy.members:
            raise StuckError(f"nothing can happen after {self.now:g} s: {deadlock_report(policy, self.workers)}")
        if not self._stopped and self._alarms_late:
            self.now = self._ended
        if self._trainer:
            self._trainer.close()
        alive = [worker for worker in self.workers if worker.alive]
        for worker in alive:
            self._waste(worker)
        for part in self._parts if self._brings == "values" else ():
            for (rank, _), waiting in part.sent.items():
                self.workers[rank].wasted += in_order(sent.seconds for sent in waiting) / len(self._parts)
        for worker in alive:
            worker.settle(self.now, self._route is not None)
        if self._trainer:
            self._trainer.observe(self.now)
        if self._progress:
            self._progress(1.0)

    def _plan(
        self, at: float, what: int, worker: Worker, told: Any = None, version: int = NO_WEIGHTS, life: int | None = None
    ) -> None:
        self._order += 1
        life = worker.life if life is None else life
        heapq.heappush(self._heap, (at, self._order, what, worker, life, told, version))

    def _plan_membership(self) -> None:
        cluster, workers = self._cluster, self.workers
        for worker in workers[: cluster.workers]:
            self._plan(0.0, JOIN, worker, life=ANY_LIFE)
        for join in cluster.joins:
            self._plan(join.at, JOIN, workers[join.worker], life=ANY_LIFE)
        for leave in cluster.leaves:
            self._plan(leave.at, LEAVE, workers[leave.worker], life=ANY_LIFE)
        for crash in cluster.crashes:
            self._plan(crash.at, CRASH, workers[crash.worker], crash, life=ANY_LIFE)

    # What happens to a worker, and the orders of its machine.

    def _computed(self, now: float, worker: Worker, told: Any, version: int) -> None:
        worker.busy = False
        worker.spent = now - worker.since
        machine = worker.machine
        orders = machine.handle(COMPUTED, now) if told is None else told
        if orders is PUSHES and self._instant:
            worker.used = version
            part, push = self._first, Pushed(worker.rank, machine.step - 1, worker.batch)
            if self._record is None:
                self._carry_out(part, part.decide(push, now), now)
            else:
                self._feed(part, push, now)
            if worker.leaving:
                self._leave(now, worker)
            return
        worker.since = now
        worker.reading = version
        if self._local:
            worker.cargo.seconds += worker.spent
            if self._brings == "values":
                self._note_turn(worker)
        self._obey(orders, worker, now)
        if worker.leaving:
            self._leave(now, worker)

    def _obey(self, orders: Orders, worker: Worker, now: float) -> None:
        for order in orders:
            self._performs[type(order)](order, worker, now)
        if not worker.busy and not worker.machine.computes:  # else the order to compute is still to come
            if self._reads:
                self._forget_weights(worker)  # it will not compute on them again
            if self._overlaps and worker.alive and not worker.leaving and worker.held_since == NOT_HELD:
                worker.held_since = now

    def _compute(self, order: Compute, worker: Worker, now: float, seconds: float | None = None) -> None:
        """A worker is busy from now on, for the time of one step."""
        if self._trainer:
            self._trainer.keep(worker.weights)
        if self._overlaps and worker.held_since != NOT_HELD:
            worker.end_hold(now)
        if self._route is not None:
            worker.exchanged = now - worker.since - worker.held_for
            worker.communicating += worker.exchanged
            worker.held_for = 0.0
        self._work(worker, now, seconds)

    def _work(self, worker: Worker, now: float, seconds: float | None = None) -> None:
        worker.busy = True
        worker.since = now
        if seconds is None:
            if not worker.step_times:
                worker.draw()
            seconds = worker.step_times.pop()
        end = now + seconds
        if worker.stalls:
            end = stretched(now, end - now, worker.stalls)
        self._order += 1
        heapq.heappush(self._heap, (end, self._order, HAS_COMPUTED, worker, worker.life, None, worker.weights))

    def _compute_local(self, order: Compute, worker: Worker, now: float) -> None:
        if worker.machine.begins_push:
            worker.cargo.started = worker.weights
        self._compute(order, worker, now)

    def _push_step(self, order: PushStep, worker: Worker, now: float) -> None:
        step = worker.machine.step - 1
        if self._route is None:
            self._take_in(step, worker, now, worker.reading)
            return
        worker.flying += 1
        worker.messages += 1
        self._plan(self._route.push(worker.rank, now), ARRIVED, worker, step, worker.reading)

    def _send_word(self, order: SendPush, worker: Worker, now: float) -> None:
        """The policy hears of a step, whose values go to other workers."""
        assert self._route is not None
        told, at = order.step, max(now, worker.left_at)
        if not order.count:
            told, at = -1 - order.step, now  # below 0: of a worker that only takes part
        worker.flying += 1
        self._plan(self._route.push(worker.rank, at), ARRIVED, worker, told)

    def _arrived(self, now: float, worker: Worker, told: Any, version: int) -> None:
        worker.flying -= 1
        self._take_in(told, worker, now, version)

    def _take_in(self, told: Any, worker: Worker, now: float, version: int) -> None:
        """A push has reached its policy."""
        part = self._first
        if self._brings == "gradient":
            worker.used = version
            push = Pushed(worker.rank, told, worker.batch)
        elif self._brings == "nothing":
            worker.used = self.updates
            push = Pushed(worker.rank, told, worker.batch) if told >= 0 else Pushed(worker.rank, -1 - told, 0)
        else:
            push, part = self._event_of(told, worker), self._parts[told.part]
        if self._record is None:
            self._carry_out(part, part.decide(push, now), now)
        else:
            self._feed(part, push, now)
        if self._there:
            self._forget_old()
        if worker.leaving:
            self._leave(now, worker)

    def _answered(self, now: float, worker: Worker, told: tuple[FragmentClock, Release], version: int) -> None:
        part, release = told
        if self._reads:
            self._forget_weights(worker)
        if self._brings == "values":
            worker.cargo.bases[part.number] = version
        elif self._brings != "sum":
            worker.weights = version
        worked = worker.busy
        orders = worker.machine.handle(release, now, part.number)
        if self._brings != "batches":
            self._obey(orders, worker, now)
        elif worked:
            self._hear(worker)
        else:
            self._obey_in_round(orders, worker, now)

    def _forget_weights(self, worker: Worker) -> None:
        if self._reads and worker.weights != NO_WEIGHTS:
            self._trainer.drop(worker.weights)  # type: ignore[union-attr]
            worker.weights = NO_WEIGHTS

    def _ask_again(self, order: AskAgain, worker: Worker, now: float) -> None:
        if worker.alive:
            self._obey(worker.machine.handle(ASKED, now), worker, now)

    def _settle(self, order: Settle, worker: Worker, now: float) -> None:
        if not worker.flying:
            self._obey(worker.machine.handle(ALL_ARRIVED, now), worker, now)

    def _go_home(self, order: GoHome, worker: Worker, now: float) -> None:
        self._plan(now, LEAVE, worker)

    # What pushes bring beside a gradient.

    def _send_share(self, order: PushStep, worker: Worker, now: float) -> None:
        self._send_content(SendPush(worker.machine.step - 1), worker, now)

    def _send_content(self, order: SendPush, worker: Worker, now: float) -> None:
        sent = self._sent(order, worker)
        if self._route is None:
            self._take_in(sent, worker, now, sent.version)
            return
        worker.flying += 1
        worker.messages += 1
        worker.cargo.flights.append(sent)
        self._plan(self._route.push(worker.rank, now), ARRIVED, worker, sent, worker.reading)

    def _sent(self, order: SendPush, worker: Worker) -> Sent:
        step, number, count, samples = order.step, order.part, order.count, worker.batch * order.count
        if self._brings == "values":
            seconds, worker.cargo.sendings[number] = (
                worker.cargo.seconds - worker.cargo.sendings[number],
                worker.cargo.seconds,
            )
            content = self._trainer.send(worker.rank, number) if self._trainer else None
            return Sent(step, number, count, samples, seconds, worker.cargo.bases[number], content)
        if self._brings == "sum":
            seconds, worker.cargo.seconds = worker.cargo.seconds, 0.0
            content = self._trainer.send(worker.rank, number) if self._trainer else None
            return Sent(step, number, count, samples, seconds, worker.cargo.started, content)
        made_of, worker.cargo.made_of = worker.cargo.made_of, []
        samples = sum(batch.samples for batch in made_of)
        shares = self._brings == "share"
        seconds = worker.spent if shares else in_order(batch.seconds for batch in made_of)
        return Sent(step, number, len(made_of) if not shares else 1, samples, seconds, worker.reading, made_of)

    def _event_of(self, sent: Sent, worker: Worker) -> Pushed:
        """The event of a push that has arrived."""
        if sent in worker.cargo.flights:
            worker.cargo.flights.remove(sent)
        part, rank, step, made_of = self._parts[sent.part], worker.rank, sent.step, sent.content
        if self._brings == "sum":  # its own pushes, which its local steps stand for, do not make it stale
            sent.version += worker.cargo.applied
        worker.used = sent.version
        part.sent.setdefault((rank, step), deque()).append(sent)
        if self._brings == "sum":
            return Pushed(rank, step, sent.samples)
        if self._brings == "values":
            loss = made_of.loss if made_of and "loss" in self._measures else None
            lr = made_of.lr if made_of and "lr" in self._measures else None
            return Pushed(rank, step, sent.samples, (), sent.count, loss, lr)
        if self._brings == "share":
            drawn = None if self._micro else (0, step)
            return Pushed(rank, step, sent.samples, (), len(made_of), None, None, sent.samples, sent.seconds, drawn)
        work, computed = (sent.samples, sent.seconds) if made_of or not worker.cargo.abandoned else worker.cargo.abandoned
        worker.cargo.abandoned = None
        return Pushed(rank, step, sent.samples, (), sent.count, None, None, work, computed)

    def _note_turn(self, worker: Worker) -> None:
        """Where the block that starts begins in a worker's data: one that joins at this turn takes part from there."""
        machine = worker.machine
        if self._goes_on:
            worker.cargo.made = machine.step
        elif not machine.since:
            self._starts[machine.turn] = max(machine.step, self._starts.get(machine.turn, 0))

    def _compute_share(self, order: Compute, worker: Worker, now: float) -> None:
        step = worker.machine.step
        if step != self._round:
            self._deal_out(step, order.weights)
        worker.cargo.made_of = self._deal.pop(worker.rank, [])
        samples = sum(batch.samples for batch in worker.cargo.made_of)
        self._compute(order, worker, now, worker.share_seconds(samples, len(worker.cargo.made_of)) if samples else 0.0)

    def _deal_out(self, step: int, weights: tuple[tuple[int, float], ...]) -> None:
        """Cut the joint batch of a round, a batch for each member, or what the epoch has left; of the one before, what
        workers that are gone have left is dealt out again."""
        for rank, share in self._deal.items():
            self._samples.give_back(rank, share)
        micro = self._micro
        unit = max(1, self._cluster.batch // micro) if micro else 1
        wanted = unit * micro * len(weights) if micro else sum(self.workers[rank].batch for rank, _ in weights)
        parts = cut(-(-self._samples.left(wanted) // unit), weights)
        self._round, self._deal = step, {
            rank: [self._samples.take(rank, unit if micro else count) for _ in range(count if micro else count > 0)]
            for rank, count in parts.items()
        }  # fmt: skip

    def _compute_batches(self, order: Compute, worker: Worker, now: float) -> None:
        """The micro-batches until the push, or the one that is not done at the deadline."""
        assert worker.cargo.times is not None
        self._begin_work(worker, now)
        machine, times, version, at = worker.machine, worker.cargo.times, worker.weights, now
        while True:
            batch = self._samples.take(worker.rank, times.size, version)
            seconds = times.next(batch.samples)
            end = stretched(at, seconds, worker.stalls) if worker.stalls else at + seconds
            if end > machine.ends_at:
                worker.cargo.unfinished, worker.cargo.begun_at, worker.cargo.until = batch, at, end
                if self._trainer:
                    self._trainer.keep(version)
                self._plan(machine.ends_at, DEADLINE, worker, machine.step, version)
                self._plan(end, LATE, worker, None, version)
                return
            worker.cargo.made_of.append(batch._replace(seconds=end - at))
            orders = machine.handle(Computed(end - at), end)
            if orders is not GO:
                self._plan(end, HAS_COMPUTED, worker, orders, version)
                return
            at = end

    def _begin_work(self, worker: Worker, now: float) -> None:
        if self._trainer:
            self._trainer.keep(worker.weights)
        if self._route is not None:
            worker.communicating += now - worker.since - worker.held_for
            worker.held_for = 0.0
        worker.busy, worker.since = True, now

    def _obey_in_round(self, orders: Orders, worker: Worker, now: float) -> None:
        """A worker that has no time for another micro-batch pushes what it has, as one that has just finished."""
        if orders and type(orders[0]) is SendPush:
            self._begin_work(worker, now)
            self._plan(now, HAS_COMPUTED, worker, orders, worker.weights)
        else:
            self._obey(orders, worker, now)

    def _hear(self, worker: Worker) -> None:
        """A new round, while the worker is in the middle of a micro-batch: its communication thread takes part."""
        machine = worker.machine
        if machine.in_round and worker.cargo.until > machine.ends_at:
            if self._trainer:
                self._trainer.keep(worker.weights)
            self._plan(machine.ends_at, DEADLINE, worker, machine.step, worker.weights)

    def _deadline(self, now: float, worker: Worker, step: int, version: int) -> None:
        """The communication thread pushes what was finished."""
        worker.reading, worker.since = version, max(worker.since, worker.cargo.begun_at)
        self._obey(worker.machine.handle(TimeUp(step), now), worker, now)

    def _late(self, now: float, worker: Worker, told: None, version: int) -> None:
        """The micro-batch that was not done at a deadline is done."""
        batch, worker.cargo.unfinished = worker.cargo.unfinished, None
        assert batch is not None
        late = batch._replace(seconds=now - worker.cargo.begun_at, late=True)
        orders = worker.machine.handle(Computed(late.seconds), now)
        if orders and type(orders[0]) is Abandon:
            orders = orders[1:]
            worker.cargo.abandoned = late.samples, late.seconds
            worker.wasted += now - worker.since
            self._return([late], worker.rank)
        else:
            worker.cargo.made_of.append(late)
        worker.busy, worker.since = False, now
        if worker.leaving:
            self._leave(now, worker)
            return
        self._obey_in_round(orders, worker, now)
        if not worker.busy:
            worker.held_since = now if worker.held else NOT_HELD

    def _return(self, made_of: Sequence[MicroBatch], rank: int) -> None:
        """These are not used. Late ones have read weights of their own, which they do not need any more."""
        self._samples.give_back(rank, made_of)
        for batch in made_of if self._trainer else ():
            if batch.late:
                self._trainer.drop(batch.version)  # type: ignore[union-attr]

    # Orders beside training.

    def _step_here(self, order: StepHere, worker: Worker, now: float) -> None:
        if self._trainer:
            self._trainer.step(worker.rank, order.number)

    def _begin(self, order: Begin, worker: Worker, now: float) -> None:
        if self._trainer:
            self._trainer.begin(worker.rank, order.empty)

    def _snapshot(self, order: Snapshot, worker: Worker, now: float) -> None:
        if self._trainer:
            self._trainer.snapshot(worker.rank)

    def _add_step(self, order: AddStep, worker: Worker, now: float) -> None:
        if self._trainer:
            self._trainer.add_step(worker.rank)

    def _mix(self, order: Mix, worker: Worker, now: float) -> None:
        if self._trainer:
            self._trainer.mix(worker.rank, order.step, order.row, order.lost)

    def _install(self, order: Install, worker: Worker, now: float) -> None:
        if self._brings == "sum":
            worker.weights = worker.cargo.fetched
        if self._trainer:
            self._trainer.install(worker.rank, order.part)

    # Values between workers, and beside pushes.

    def _send_model(self, order: SendModel, worker: Worker, now: float) -> None:
        assert isinstance(self._route, PeerRoute)
        if self._trainer:
            self._trainer.send_model(worker.rank, order.step)
        receivers = [other for other, _ in order.row.send]
        worker.messages += len(receivers)
        worker.left_at, arrivals = self._route.send(worker.rank, receivers, now)
        there = self._there.setdefault(order.step, {})
        for other, at in zip(receivers, arrivals, strict=True):
            there[other] = max(at, there.get(other, 0.0))

    def _forget_old(self) -> None:
        """All members have mixed what was sent two steps before the slowest one's."""
        while self._oldest + 2 <= self._first.policy.progress.slowest:
            self._there.pop(self._oldest, None)
            if self._trainer:
                self._trainer.forget(self._oldest)
            self._oldest += 1

    def _request_values(self, order: RequestValues, worker: Worker, now: float) -> None:
        worker.cargo.fetched = self.updates - worker.cargo.applied
        if self._trainer:
            self._trainer.fetch(worker.rank, 0)
        if isinstance(self._route, ServerRoute):
            self._plan(self._route.fetch(worker.rank, now), HAS_FETCHED, worker)
        else:
            worker.machine.handle(FETCHED, now)

    def _fetched(self, now: float, worker: Worker, told: None, version: int) -> None:
        worker.machine.handle(FETCHED, now)

    def _ask_partner(self, order: AskPartner, worker: Worker, now: float) -> None:
        assert isinstance(self._route, PeerRoute)
        partner = self.workers[order.partner]
        self._askers.setdefault(partner.rank, set()).add(worker.rank)
        worker.messages += 1
        self._plan(self._route.send(worker.rank, [partner.rank], now)[1][0], REQUESTED, worker, order, partner.life)

    def _requested(self, now: float, worker: Worker, ask: AskPartner, partner_life: int) -> None:
        """The request of a worker has reached its partner. The event is the asker's: if this dies, it meets a newer life."""
        if worker.rank not in self._askers.get(ask.partner, ()) or worker.machine.step != ask.step:
            return  # the wait has ended: the partner was lost
        partner = self.workers[ask.partner]
        if partner.alive and partner.life == partner_life:
            self._obey(partner.machine.handle(Requested(worker.rank, ask.step), now), partner, now)
        elif partner.alive or partner.rank not in self._first.policy.members:
            self._answer_partner(AnswerPartner(worker.rank, ask.step, averaged=False), partner, now)

    def _answer_partner(self, order: AnswerPartner, partner: Worker, now: float) -> None:
        """The average happens in one moment: both have the mean from then on, as far as others can tell."""
        assert isinstance(self._route, PeerRoute)
        asker = self.workers[order.asker]
        at = self._route.push(asker.rank, now)
        if order.averaged:
            if self._trainer:
                self._trainer.average(asker.rank, partner.rank)
            partner.messages += 1
            at = self._route.send(partner.rank, [asker.rank], now)[1][0]
        self._plan(at, REPLIED, asker, Replied(partner.rank, order.step, order.averaged))

    def _replied(self, now: float, worker: Worker, reply: Replied, version: int) -> None:
        self._askers.get(reply.sender, set()).discard(worker.rank)
        self._obey(worker.machine.handle(reply, now), worker, now)

    # Membership.

    def _join(self, now: float, worker: Worker, told: None, version: int) -> None:
        if worker.alive:
            return
        if worker.rank in self._first.policy.members:  # its crash was not noticed before it came back
            self._tell_all(Left(worker.rank, "lost"), now)
        worker.join(now, self._spec.machine(worker.rank, self._budget.steps_each))
        self._tell_all(Joined(worker.rank), now)

    def _leave(self, now: float, worker: Worker, told: None = None, version: int = NO_WEIGHTS) -> None:
        worker.leaving = True
        if not worker.alive:
            return
        worker.machine.handle(LEAVING, now)
        if not worker.busy and not worker.flying and worker.machine.is_free:
            self._end_life(worker)
            self._tell_all(Left(worker.rank, "finished"), now)

    def _crash(self, now: float, worker: Worker, crash: Any, version: int) -> None:
        if not worker.alive:
            return
        self._end_life(worker)
        if crash.noticed_after is not None:
            self._plan(now + crash.noticed_after, NOTICE, worker)

    def _notice(self, now: float, worker: Worker, told: None, version: int) -> None:
        self._tell_all(Left(worker.rank, "lost"), now)

    def _end_life(self, worker: Worker) -> None:
        self._waste(worker)
        self._forget_weights(worker)
        for waiting in self._askers.values():
            waiting.discard(worker.rank)
        worker.end_life(self.now, self._route is not None)
        self._ended = self.now
        if self._trainer:
            self._trainer.end(worker.rank, worker.machine.done)
        if self._brings in ("share", "batches"):
            cargo = worker.cargo
            self._return([*cargo.made_of, *(batch for sent in cargo.flights for batch in sent.content)], worker.rank)
            if cargo.unfinished is not None:
                self._samples.give_back(worker.rank, [cargo.unfinished])

    def _waste(self, worker: Worker) -> None:
        """What a worker has computed of its own values and not delivered is lost."""
        if self._brings == "values":
            parts = len(self._parts)
            worker.wasted += in_order(worker.cargo.seconds - sent for sent in worker.cargo.sendings) / parts
            for sent in worker.cargo.flights:
                worker.wasted += sent.seconds / parts

    # The policies, and their actions.

    def _tell_all(self, event: Event, now: float) -> None:
        for part in self._parts:
            self._feed(part, event, now)
        if isinstance(event, Left):
            for rank in sorted(self._askers.pop(event.worker, ())):
                worker = self.workers[rank]
                self._obey(worker.machine.handle(Parted(event.worker), now), worker, now)

    def _feed(self, part: FragmentClock, event: Event, now: float) -> None:
        """Let a policy decide on an event, record it, and carry out the actions."""
        actions = part.decide(event, now)
        if part.record is not None:
            for line in self._lines(part, event, actions, now):
                part.record(line)
        self._carry_out(part, actions, now)

    def _lines(self, part: FragmentClock, event: Event, actions: list[Action], now: float) -> Iterator[RecordLine]:
        """The lines of an event, with what a worker of a live job would tell of its step, and of its actions."""
        figures: RecordLine | None = None
        if self._figures and isinstance(event, Pushed) and self._brings != "values":
            worker = self.workers[event.worker]
            figures = {"computed": worker.spent, "exchanged": worker.exchanged} if worker.spent else {}
        if (line := event_line(event, now, figures)) is not None:
            yield line
        version = part.version
        for action in actions:
            if isinstance(action, Apply):
                staleness = [version - self._version_of(part, push) for push in action.pushes]
                version += 1
                for server in range(self._cluster.servers.shards):
                    yield apply_line(action, now, server, version, staleness)
            elif (line := action_line(action, now)) is not None:
                yield line

    def _version_of(self, part: FragmentClock, push: Pushed) -> int:
        """The version of the weights that a push which has arrived was computed on."""
        waiting = part.sent.get((push.worker, push.step))
        return waiting[0].version if waiting else self.workers[push.worker].used

    def _corrected(self, part: FragmentClock, event: Event, now: float) -> list[Action]:
        """The actions of the policy, corrected for staleness: updates are slower, or become discards."""
        actions: list[Action] = []
        for action in part.policy.handle(event, now):
            if type(action) is Apply:
                push = action.pushes[0]  # modes with corrections apply single pushes
                verdict = self._corrections.verdict(part.version - self._version_of(part, push))
                if verdict.drop:
                    action = Discard(push.worker, push.step, verdict.drop)
                else:
                    action = Apply(action.pushes, action.rate * verdict.rate, action.weights)
            actions.append(action)
        return actions

    def _carry_out(self, part: FragmentClock, actions: list[Action], now: float) -> None:
        for action in actions:
            self._acts[type(action)](part, action, now)
        if self._answers and self._route is not None:
            self._answer(part, self._route, now)
            self._answers.clear()

    def _answer(self, part: FragmentClock, route: Route, now: float) -> None:
        """Send weights and permissions, in one message to each worker."""
        if isinstance(route, ServerRoute) and self._brings == "sum":  # only its first answer has weights
            first = [worker for worker in self._answers if worker.cargo.fresh]
            arrivals = dict(zip(first, route.answer([one.rank for one in first], now, 1), strict=True)) if first else {}
            for worker, release in self._answers.items():
                worker.cargo.fresh = False
                self._plan(arrivals.get(worker, route.permit(worker.rank, now)), ANSWERED, worker, (part, release))
            return
        peers = self._brings == "nothing"
        told = route.answer([worker.rank for worker in self._answers], now, 0 if peers else self._together)
        for (worker, release), at in zip(self._answers.items(), told, strict=True):
            if peers:
                at = max(at, self._there.get(release.step - 1, {}).get(worker.rank, 0.0))
            self._plan(at, ANSWERED, worker, (part, release), self._read(part))

    def _release(self, part: FragmentClock, release: Release, now: float) -> None:
        worker = self.workers[release.worker]
        lead = release.step - release.slowest
        if lead > self.max_lead:
            self.max_lead = lead
        if not worker.alive:  # it crashed, and the policy does not know yet
            return
        if worker.held_since != NOT_HELD and not self._overlaps:
            worker.end_hold(now)
        if self._instant and self._trainer is None:
            worker.weights = part.version
            orders = worker.machine.handle(release, now)
            if orders is GO:
                self._work(worker, now)
            elif orders:
                self._obey(orders, worker, now)
            return
        worker.held = False
        if self._brings == "values" and self._trainer:
            self._trainer.fetch(worker.rank, part.number)
        elif self._brings == "sum" and worker.weights == NO_WEIGHTS:
            worker.weights, worker.cargo.fresh = self.updates, True
            if self._trainer:
                self._trainer.begin(worker.rank)
        if self._route is not None:  # several steps released to a worker at once travel in one answer
            self._answers[worker] = release
        else:
            self._answered(now, worker, (part, release), self._read(part))

    def _hold(self, part: FragmentClock, hold: Hold, now: float) -> None:
        worker = self.workers[hold.worker]
        if self._overlaps:  # it goes on; what it waits in the end is counted where it stops
            return
        if worker.busy and self._brings == "batches":
            worker.held = True
        elif worker.held_since == NOT_HELD:  # else it stays held, for another reason
            worker.held_since = now

    def _admit(self, part: FragmentClock, admit: Admit, now: float) -> None:
        worker = self.workers[admit.worker]
        self._together = 0  # its first answer belongs to no update
        worker.machine.handle(admit, now, part.number)
        if self._brings == "values":
            if self._trainer and not part.number:
                self._trainer.begin(admit.worker)
            made = worker.cargo.made if self._goes_on else self._starts.get(worker.machine.turn, 0)
            worker.machine.handle(StartsAt(made), now)

    def _set_alarm(self, part: FragmentClock, wake: Wake, now: float) -> None:
        self._plan(wake.at, WAKE, self.workers[0], part, life=ANY_LIFE)

    def _wake(self, now: float, worker: Worker, part: FragmentClock, version: int) -> None:
        if part.policy.members or self._brings != "values":
            self._feed(part, Ticked(), now)

    def _read(self, part: FragmentClock) -> int:
        """The newest version, which gets one reader more."""
        if self._trainer:
            self._trainer.keep(part.version)
        return part.version

    def _apply(self, part: FragmentClock, apply: Apply, now: float) -> None:
        version, pushes = part.version, apply.pushes
        self._together = len(pushes)
        if not self._carries:
            for push in pushes:
                worker = self.workers[push.worker]
                stale = version - worker.used
                worker.steps += 1
                worker.staleness_sum += stale
                if stale > worker.staleness_max:
                    worker.staleness_max = stale
            if self._trainer:
                self._trainer.apply(apply, [self.workers[push.worker].used for push in pushes], (), 0)
            steps = len(pushes)
            if self._brings == "nothing" and not pushes[0].samples:  # of a worker that only takes part
                worker.steps -= 1
                steps = 0
        else:
            steps = self._apply_content(part, apply)
        part.version = version + 1
        self.updates += 1
        if self._route is not None:
            self._route.applied(now)
        if self._counts:
            self._stopped = self._used.charge(steps, sum(push.samples for push in pushes), len(self._parts))

    def _apply_content(self, part: FragmentClock, apply: Apply) -> int:
        """Account for pushes that bring more than a gradient; the steps in them."""
        taken = [part.take(push.worker, push.step) for push in apply.pushes]
        each = self._brings in ("values", "sum")
        for push, sent in zip(apply.pushes, taken, strict=True):
            worker, stale = self.workers[push.worker], part.version - sent.version
            worker.cargo.merged += sent.count
            worker.steps = worker.cargo.merged // len(self._parts)
            worker.staleness_sum += stale * sent.count if each else stale
            worker.staleness_max = max(worker.staleness_max, stale)
            worker.cargo.applied += 1
            if not each:
                worker.samples = (worker.samples or 0) + sent.samples
                self._samples.finish(push.worker, sent.content)
            for batch in sent.content if self._brings == "batches" else ():
                if batch.late:
                    late = part.version - batch.version
                    worker.staleness_sum += late
                    worker.staleness_max = max(worker.staleness_max, late)
        if self._trainer:
            contents = [sent.content for sent in taken]
            self._trainer.apply(apply, [sent.version for sent in taken], contents, part.number)
            for sent in taken if self._brings == "batches" else ():
                for batch in sent.content:
                    if batch.late:
                        self._trainer.drop(batch.version)
        return sum(sent.count for sent in taken)

    def _drop(self, part: FragmentClock, action: Discard | Refuse, now: float) -> None:
        worker = self.workers[action.worker]
        worker.discarded += 1
        if not self._carries:
            worker.wasted += worker.spent
        elif (worker.rank, action.step) in part.sent:
            sent = part.take(worker.rank, action.step, newest=True)
            worker.wasted += sent.seconds / len(self._parts)
            if self._brings in ("share", "batches"):
                self._return(sent.content, worker.rank)
        if not self._corrections.gives(action.reason):  # a too stale push does not move its worker
            worker.machine.handle(DROPPED, now)
        if self._trainer:
            self._trainer.lose(worker.rank, action.step, worker.used)

    def _observe(self, now: float, worker: Worker, told: None, version: int) -> None:
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

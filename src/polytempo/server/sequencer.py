"""The sequencer: one order of everything that happens in a job.

It is fed what arrives (`register`, `arrived`, `left`, `ask`, `read`, `metric`, `tick`), with the moment on the job's clock,
and returns effects: entries of the log that every shard carries out, messages to workers, lines of the record. Its parts:

    PolicyRunner        the only one to feed the policies; their actions become effects
    SampleLedger        which samples are leased to whom, and which are trained on (`server/sample_ledger.py`)
    JobBudget           what is used up, and whether workers are to stop; CheckpointContents: what a checkpoint of this
                        moment holds; JobFigures: status and summary; DivergenceGuard: whether the training has diverged,
                        as pushes show (`server/job_figures.py`)

A push is counted when it has arrived at every shard (`docs/design/0003`), however often it was sent: its content is always
the same. A repeat of a counted push changes nothing. An answer that was lost is given again, at a new place of the log, so
that all shards answer alike (`docs/design/0010`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from polytempo.checkpoints import step_name
from polytempo.errors import ModeError, OrderError, UsageError
from polytempo.protocol.log import Drop, ForgetWorker, LoadState, ReadHere, Reply, Save, Seed, Setup
from polytempo.protocol.messages import Departed, Held, LeaseSamples, MetricReport, Push, ReadRequest, Refused, SendSeed
from polytempo.protocol.push import Content, FirstValues, Measures, NewState, NewValues
from polytempo.protocol.values import OptimizerSpec, PushId, beside
from polytempo.records.lines import RecordLine, action_line, apply_line, event_line
from polytempo.records.step_figures import FigureLog
from polytempo.server.effects import Effect, StopJob, Tell, ToShards, ToWorker, WakeAt, Write
from polytempo.server.job_figures import CheckpointContents, DivergenceGuard, JobBudget, JobFigures, WorkerStatistics
from polytempo.server.job_plan import JobPlan
from polytempo.server.optimizer_clock import OptimizerClock, WorkerSlot, disagreement, open_clock
from polytempo.server.resume_rules import holding_in, holding_of, resumption
from polytempo.server.sample_ledger import SampleLedger
from polytempo.sync.actions import Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.events import Event, Joined, Left, Measured, Pushed, Ticked
from polytempo.sync.fields import trouble

#: Digits of figures in records.
MICROSECONDS = 6


@dataclass
class PushArrival:
    """A push that is on its way to all shards."""

    head: Push | None = None
    shards: set[int] = field(default_factory=set)


class PolicyRunner:
    """Feeds the policies: what a policy decides becomes entries of the log, messages and lines of the record."""

    def __init__(
        self,
        plan: JobPlan,
        statistics: list[WorkerStatistics],
        budget: JobBudget,
        ledger: SampleLedger,
        paces: FigureLog,
    ) -> None:
        self._plan = plan
        self._statistics = statistics
        self._budget = budget
        self._ledger = ledger
        self._paces = paces

    def feed(self, clock: OptimizerClock, event: Event, now: float, figures: RecordLine | None = None) -> list[Effect]:
        """Give the policy an event; what its actions and the record ask for. `figures`: more for the event's line."""
        try:
            actions = clock.policy.handle(event, now)
        except ModeError as error:  # of a mode that was brought in: what it would do next cannot be known
            return [StopJob(str(error))]
        self._budget.check(now)
        effects = self._written(clock, partial(event_line, figures=figures) if figures else event_line, event, now)
        last = {action.worker: action.step for action in actions if isinstance(action, Release)}
        for action in actions:
            effects += self._written(clock, action_line, action, now)
            match action:
                case Apply():
                    effects += self._apply(clock, action, now)
                case Release(worker=worker, step=step):
                    if last[worker] == step:  # several steps at once are one answer
                        effects += self._release(clock, action, now)
                case Hold():
                    effects.append(self._hold(clock, action, now))
                case Discard():
                    effects += self._discard(clock, action)
                case Refuse(worker=worker, step=step, reason=reason):
                    push = clock.drop(worker, step)
                    self.tally(clock, push, -1)
                    effects += [ToShards(Drop(id=push.id)), ToWorker(worker, Refused(reason=reason, differs=True))]
                case Wake(at=at):
                    clock.wakes.append(at)
                    effects.append(WakeAt(at))
                case Admit(worker=worker, step=step):
                    slot = clock.slots[worker]  # the exchange before this step counts as made, and is to be answered
                    slot.exchange, slot.answered = step - 1, step - 2
                    clock.made.enter(worker)
        return effects

    def tally(self, clock: OptimizerClock, push: Push, sign: int = 1) -> None:
        """A push was counted (or, with sign -1, refused after all)."""
        if clock.is_main:
            self._budget.count(push, sign, clock.spec.capabilities.by_speed)
            if sign > 0 and push.measures.positions:
                self._ledger.counted(push)
        clock.made.count(push.id.worker, sign * push.measures.count)
        if clock.is_first:
            self._statistics[push.id.worker].pushed(push, sign, counts=clock.is_main)

    def _written(
        self, clock: OptimizerClock, line_of: Callable[[Any, float], RecordLine | None], what: Any, now: float
    ) -> list[Effect]:
        line = line_of(what, now) if self._plan.recorded else None
        return [] if line is None else [Write(clock.mark(line))]

    def _apply(self, clock: OptimizerClock, action: Apply, now: float) -> list[Effect]:
        corrected = clock.corrected(action)
        if isinstance(corrected, Discard):
            return [*self._written(clock, action_line, corrected, now), *self._discard(clock, corrected)]
        heads = clock.heads(action)
        if any(head.measures.positions for head in heads):
            self._ledger.applied(heads)
        clock.made.close(heads)
        update, staleness = clock.update(corrected)
        if clock.is_main:
            for push, stale in zip(action.pushes, staleness, strict=True):
                self._statistics[push.worker].stale(stale)
        shards = range(self._plan.shards if self._plan.recorded else 0)
        lines = [clock.mark(apply_line(action, now, shard, clock.version, staleness)) for shard in shards]
        return [ToShards(update), *(Write(line) for line in lines)]

    def _release(self, clock: OptimizerClock, action: Release, now: float) -> list[Effect]:
        if clock.is_main:
            self._budget.begin(now)
            self._paces.released(action.worker, now)
        if clock.is_first:
            self._statistics[action.worker].released(action.step, now)
        fenced, budget = clock.slots[action.worker].fenced, self._budget
        certain = budget.certain(clock.is_main and clock.in_step) if fenced else 0
        return [ToShards(clock.reply(action, now, budget.stopping, certain))]

    def _hold(self, clock: OptimizerClock, action: Hold, now: float) -> ToWorker:
        slot = clock.slots[action.worker]
        if not slot.busy:
            if clock.is_first:
                self._statistics[action.worker].held(now, action.waiting_for)
            slot.held_at = now if slot.held_at is None else slot.held_at
        return held_message(clock, slot, action)

    def _discard(self, clock: OptimizerClock, action: Discard) -> list[Effect]:
        push = clock.drop(action.worker, action.step)
        self._ledger.discarded(push)
        if clock.is_main:
            self._statistics[action.worker].discard(push.measures)
            self._budget.discard(push.measures)
        return [ToShards(Drop(id=push.id))]


class Sequencer:
    """Decides for one job. Every method returns what is to be done, in order."""

    def __init__(self, plan: JobPlan) -> None:
        self.plan = plan
        self.clocks: dict[str, OptimizerClock] = {}
        self.statistics = [WorkerStatistics(worker) for worker in range(plan.size)]
        self.budget = JobBudget(plan)
        self.ledger = SampleLedger(plan.size, plan.resumed.get("positions", []))
        self.checkpoints = CheckpointContents(plan, self.clocks, self.statistics, self.budget, self.ledger)
        self.guard = DivergenceGuard(plan.size, self.statistics)
        self.figures = JobFigures(self.clocks, self.statistics, self.budget, self.guard)
        self._arrivals: dict[PushId, PushArrival] = {}  # pushes that are at some shards and not yet at all
        self._incarnations: dict[int, int] = {}  # the present one of each worker
        self.paces = FigureLog(plan.size)  #: how long each worker's steps took, for the report at the end
        self._runner = PolicyRunner(plan, self.statistics, self.budget, self.ledger, self.paces)
        self._saved_at = plan.first_step
        self._looked_at = plan.first_push
        self._ending = False  # the job is told to end early

    # Members.

    def register(self, worker: int, incarnation: int, name: str, optimizer_spec: OptimizerSpec, now: float) -> list[Effect]:
        """A worker has made an optimizer: it takes part in it from now on."""
        known = self._incarnations.get(worker, 0)
        effects = self.left(worker, known, "lost", now) if incarnation > known else []  # its earlier life is over
        if self.statistics[worker].left_at is not None:
            self.statistics[worker].back(now)
        self._incarnations[worker] = incarnation
        clock = self.clocks.get(name)
        if clock is None:
            try:
                clock = open_clock(name, worker, optimizer_spec, self.plan)
                if reason := self._misplaced(clock, worker):
                    raise UsageError(reason)
            except UsageError as error:
                return [*effects, refusal(worker, str(error))]
            try:
                effects += self._open(clock, now)
            except UsageError as error:
                return [*effects, StopJob(str(error))]
        reason = disagreement(clock, worker, optimizer_spec)
        if reason:
            return [*effects, refusal(worker, f"{reason}; all workers must make the same optimizer")]
        if reason := self._misplaced(clock, worker):
            return [*effects, refusal(worker, reason)]
        if worker in clock.slots:
            return [*effects, refusal(worker, f"optimizer {name} was made twice by worker {worker}")]
        clock.slots[worker] = WorkerSlot(incarnation)
        if clock.optimizer_spec.members:
            lost = [stats for stats in self.statistics if stats.left_at is not None and stats.state != "finished"]
            effects += [effect for stats in lost for effect in told_of_loss(clock, stats.worker, [worker])]
        if clock.seeded:
            return effects + self._runner.feed(clock, Joined(worker), now)
        clock.early.append(worker)
        return effects + self._request_seed(clock, worker)

    def _open(self, clock: OptimizerClock, now: float) -> list[Effect]:
        """A new optimizer; `UsageError` where it cannot go on from the checkpoint that the job goes on from."""
        effects: list[Effect] = []
        resume = clock.name in self.plan.resumed.get("tracks", {})
        if resume:
            saved, wanted = holding_in(self.plan.resumed, clock.name), holding_of(clock.optimizer_spec)
            kept = resumption(step_name(self.plan.first_step), saved, wanted)
            effects += [Tell(f"warning: {kept.dropped}")] if kept.dropped else []
        self.clocks[clock.name] = clock
        clock.seeded = clock.seeded or resume
        clock.restored = self.plan.saved_policy(clock.name, clock.spec.text)
        clock.policy.restore(clock.restored)
        effects.append(ToShards(Setup(optimizer_id=clock.name, optimizer_spec=clock.optimizer_spec, resume=resume)))
        for stats in self.statistics:
            if stats.left_at is not None and clock.includes(stats.worker):  # not waited for
                effects += self._runner.feed(clock, Left(stats.worker, stats.state), now)
        return effects

    def _misplaced(self, clock: OptimizerClock, worker: int) -> str:
        """Why this worker cannot be in this clock: it belongs to no group, or to two side by side."""
        members = clock.optimizer_spec.members
        if not clock.includes(worker):
            return f"worker {worker} is not in the group of ranks {listed(members)}; give it the group that it is in"
        for other in self.clocks.values():
            if other is not clock and beside(other.name) == beside(clock.name):
                both = [rank for rank in members or range(self.plan.size) if other.includes(rank)]
                if both:
                    return (
                        f"rank {both[0]} is in the group of ranks {listed(members)} and in that of ranks "
                        f"{listed(other.optimizer_spec.members)}; groups of optimizers made side by side must be disjoint"
                    )
        return ""

    def _request_seed(self, clock: OptimizerClock, worker: int) -> list[Effect]:
        """A job starts from the values of the lowest rank that may still come, among the members."""
        seeder = next((a.worker for a in self.statistics if a.left_at is None and clock.includes(a.worker)), None)
        return [ToWorker(worker, SendSeed(optimizer_id=clock.name))] if worker == seeder else []

    def left(self, worker: int, incarnation: int, reason: str, now: float) -> list[Effect]:
        stats = self.statistics[worker]
        if stats.left_at is not None or incarnation < self._incarnations.get(worker, 0):
            if stats.state == "finished" and incarnation == self._incarnations.get(worker, 0):
                stats.state = reason  # it said goodbye, and then its exit status was not 0
            return []
        stats.left(reason, now)
        counted = tuple(i for clock in self.clocks.values() for i in clock.counted_of(worker))
        effects: list[Effect] = [ToShards(ForgetWorker(worker=worker, incarnation=incarnation, counted=counted))]
        for identity in [i for i in self._arrivals if i.worker == worker]:
            del self._arrivals[identity]  # what has not arrived will not be counted
        self.ledger.left(worker, [push for clock in self.clocks.values() for push in clock.pending()])
        for clock in [clock for clock in self.clocks.values() if clock.includes(worker)]:
            lost = clock.optimizer_spec.members and reason != "finished"
            if lost:  # before answers to rounds that close without it
                effects += told_of_loss(clock, worker, [other for other in clock.slots if other != worker])
            if reason == "finished" and worker in clock.policy.members:
                clock.early_ends.finished(worker, clock.policy.progress.pushed[worker])
            effects += self._runner.feed(clock, Left(worker, reason), now)
            effects += left_behind(clock)
            clock.slots.pop(worker, None)
            clock.made.leave(worker)
            if clock.optimizer_spec.apply == "peers" and not lost:
                effects += [ToWorker(other, Departed(worker=worker)) for other in clock.slots]
            if worker in clock.early:
                clock.early.remove(worker)
            if not clock.seeded and clock.early:
                effects += self._request_seed(clock, min(clock.early))
        return effects

    def ends_early(self) -> None:
        """The job is told to end: its last checkpoint is of this moment. A push that comes now is not counted: its worker
        will not hear of it, so that what its script has registered would be of the step before."""
        self._ending = True
        self.checkpoints.ends_early()

    # Pushes.

    def arrived(self, shard: int, identity: PushId, head: Push | None, now: float) -> list[Effect]:
        """A push is at one shard in full; the first shard brings its head."""
        present, clock = self._incarnations.get(identity.worker), self.clocks.get(identity.optimizer_id)
        if identity.incarnation != present or clock is None:
            return self._drop(identity) if head is not None else []
        if identity.worker not in clock.slots:
            return self._drop(identity)  # it has left, or was given up
        arrival = self._arrivals.setdefault(identity, PushArrival())
        arrival.shards.add(shard)
        arrival.head = head or arrival.head
        if len(arrival.shards) < self.plan.shards or arrival.head is None:
            return []
        del self._arrivals[identity]
        return self._count(arrival.head, now)

    def _count(self, push: Push, now: float) -> list[Effect]:
        """A push is at every shard: from here on it survives its worker."""
        clock, worker = self.clocks[push.id.optimizer_id], push.id.worker
        slot = clock.slots.get(worker)
        if slot is None or self._ending or (isinstance(push.body, FirstValues) and clock.seeded):
            return self._drop(push.id)
        if isinstance(push.body, FirstValues):  # workers that registered earlier join now
            clock.seeded = True
            early, clock.early = clock.early, []
            joined = [effect for early_one in sorted(early) for effect in self._runner.feed(clock, Joined(early_one), now)]
            return [ToShards(Seed(id=push.id)), *joined]
        if isinstance(push.body, NewValues | NewState):
            place = clock.next_place(worker, push.id.step)
            return [ToShards(LoadState(id=push.id, place=place, again=clock.has_loaded(push.id, push.body)))]
        if push.id.step <= slot.exchange:
            held = push.id.step == slot.exchange and slot.answered < slot.exchange  # its release will be the answer
            return [] if held else [ToShards(clock.answer(worker, push.id.step))]
        if push.measures.fields is not None and (wrong := trouble(push.measures.fields, clock.spec.mode.measures)):
            return [*self._drop(push.id), refusal(worker, f"a push was refused: it measures {wrong}")]
        if clock.spec.capabilities.ahead and push.id.step > slot.exchange + 1:
            slot.ahead[push.id.step] = push  # one before it was lost on the way, and will be sent again
            return []
        effects = self._accept(clock, slot, push, now)
        following = slot.ahead.pop(slot.exchange + 1, None)
        return effects if following is None else effects + self._count(following, now)

    def _accept(self, clock: OptimizerClock, slot: WorkerSlot, push: Push, now: float) -> list[Effect]:
        """A new push, in its turn: the policy decides."""
        worker, made, measures = push.id.worker, push.made, push.measures
        content = made if isinstance(made, Content) else None
        hyper = clock.hyper((*made.hyper, *content.rules) if content is not None else made.hyper)
        event = Pushed(worker, push.id.step, measures.samples, hyper, number=clock.count(push))
        if clock.spec.capabilities.by_speed:
            event.measured = Measured(None, None, measures.work, measures.computed, measures.drawn)
        elif measures.loss is not None or measures.lr is not None:
            event.measured = Measured(measures.loss, measures.lr)
        if clock.spec.mode.measures and measures.fields is not None:
            event.measured = replace(event.measured, fields=measures.fields)
        if clock.spec.capabilities.averages or clock.spec.capabilities.by_speed:
            event.count = measures.count
        figures = push_figures(measures, slot.waited) if self.plan.recorded else None
        before, slot.exchange = slot.exchange, push.id.step
        slot.fenced, slot.busy = content is not None and content.fence > 0, measures.busy
        self._runner.tally(clock, push)
        try:
            if clock.is_main:
                own = own_figures(measures, slot.waited).values()
                self.paces.add(worker, push.id.step, now, measures.samples, measures.count, *own)
            effects = self._runner.feed(clock, event, now, figures)
            self.statistics[worker].accepted = True
            return effects + self._checkpoint(clock, now, effects) + self._troubles(clock, push)
        except OrderError as error:
            slot.exchange = before
            clock.drop(worker, push.id.step)
            self._runner.tally(clock, push, -1)
            return [ToShards(Drop(id=push.id)), refusal(worker, str(error))]

    def _troubles(self, clock: OptimizerClock, push: Push) -> list[Effect]:
        steps = clock.first_step + self.statistics[push.id.worker].steps - 1
        count = push.measures.count
        if clock.ends_together:
            clock.early_ends.pushed(push.id.worker, push.id.step, count)
        diverged = self.guard.pushed(clock, push, push.id.step if count == 1 else steps)
        return [*diverged, *left_behind(clock)]

    def _drop(self, identity: PushId) -> list[Effect]:
        """Drop a push of an unknown worker, or a duplicate, unless it repeats one that is still to be applied."""
        counted = any(identity in clock.counted_of(identity.worker) for clock in self.clocks.values())
        return [] if counted else [ToShards(Drop(id=identity))]

    def _checkpoint(self, clock: OptimizerClock, now: float, before: list[Effect]) -> list[Effect]:
        """A checkpoint, where one is due: each N steps of the slowest worker, at the end of its block or round."""
        every, pushes = self.plan.checkpoint_every, clock.policy.reached
        if not every or not clock.is_main or not clock.has_values or pushes == self._looked_at:
            return []
        self._looked_at, slowest = pushes, clock.made.slowest
        if slowest // every <= self._saved_at // every:
            return []
        self._saved_at = slowest
        told = {worker for other in self.clocks.values() if other.is_first for worker in other.slots}
        due = {}  # in rounds and blocks all are told with their last push
        if not (clock.spec.capabilities.rounds or clock.spec.capabilities.averages):
            due = {worker: pushed - 1 for worker, pushed in clock.policy.progress.pushed.items()}
        effect = replace(self.checkpoints.at(slowest, pushes), told=tuple(sorted(told)), due=due)
        for other in self.clocks.values():
            entries = [o.entry for o in before if isinstance(o, ToShards)] if other is clock else []
            other.saving(effect.name, [entry for entry in entries if isinstance(entry, Reply)])
        line = {"t": now, "kind": "checkpoint", "name": effect.name, "step": slowest}
        return [ToShards(Save(name=effect.name)), effect, Write(line)]

    # Questions, figures, time.

    def ask(self, identity: PushId) -> list[Effect]:
        """A worker asks about its push: if the policy holds it, the worker is told for which ranks it waits."""
        clock = self.clocks.get(identity.optimizer_id)
        slot = clock.slots.get(identity.worker) if clock else None
        if clock is None or slot is None:
            return []
        if identity.step == slot.exchange and slot.answered < slot.exchange:
            hold = next((h for h in clock.policy.holds() if h.worker == identity.worker), None)
            return [held_message(clock, slot, hold)] if hold else []
        return []

    def repeat(self, identity: PushId, place: int) -> list[Effect]:
        """The answer from this place was lost on its way: another, unless a newer one is under way already."""
        clock = self.clocks.get(identity.optimizer_id)
        slot = clock.slots.get(identity.worker) if clock else None
        if clock is None or slot is None or slot.places.get(identity.step) != place:
            return []
        if slot.loads <= identity.step < 0:
            return [ToShards(LoadState(id=identity, place=clock.next_place(identity.worker, identity.step), again=True))]
        return [ToShards(clock.answer(identity.worker, identity.step))]

    def read(self, request: ReadRequest) -> list[Effect]:
        if request.optimizer_id not in self.clocks:
            return [refusal(request.worker, f"there is no optimizer {request.optimizer_id} to read")]
        slot = self.clocks[request.optimizer_id].slots.get(request.worker)
        entry = ReadHere(
            optimizer_id=request.optimizer_id, worker=request.worker, request=request.request, what=request.what
        )
        entry.exchange = slot.exchange if slot is not None else -1
        return [ToShards(entry)]

    def lease(self, worker: int, incarnation: int, asked: LeaseSamples) -> list[Effect]:
        if incarnation != self._incarnations.get(worker, 0) or self.statistics[worker].left_at is not None:
            return []  # it has left, or was given up
        return [ToWorker(worker, self.ledger.lease(worker, asked))]

    def metric(self, metric: MetricReport, now: float) -> list[Effect]:
        line = {"t": now, "kind": "metric", "worker": metric.worker}
        return [Write(line | {name: value for name, value in metric.values.items() if name not in line})]

    def tick(self, now: float) -> list[Effect]:
        """A moment asked for by `WakeAt` has come."""
        effects: list[Effect] = []
        for clock in self.clocks.values():
            later = [at for at in clock.wakes if at > now]
            if len(later) < len(clock.wakes):
                clock.wakes = later
                effects += self._runner.feed(clock, Ticked(), now)
        return effects


def left_behind(clock: OptimizerClock) -> list[Effect]:
    """Tell the user, once, of workers that have no more data while others go on."""
    said = clock.early_ends.left_behind(clock.first_step, clock.slots) if clock.ends_together else ""
    return [Tell(said)] if said else []


def own_figures(measures: Measures, waited: float) -> dict[str, float]:
    """A worker's own figures of a step, as its push tells them."""
    return {
        "work": measures.work or 0.0,
        "computed": measures.computed,
        "input": measures.input,
        "exchanged": measures.exchanging(waited),
    }


def push_figures(measures: Measures, waited: float) -> dict[str, float]:
    """The same for a line of the record."""
    return {name: round(value, MICROSECONDS) for name, value in own_figures(measures, waited).items() if value}


def held_message(clock: OptimizerClock, slot: WorkerSlot, hold: Hold) -> ToWorker:
    """Tell a worker that its push is held, and for which ranks it waits."""
    return ToWorker(
        hold.worker,
        Held(
            optimizer_id=clock.name,
            exchange=slot.exchange,
            waiting_for=hold.waiting_for,
            waiting_count=hold.waiting_count,
            reason=hold.reason,
        ),
    )


def told_of_loss(clock: OptimizerClock, lost: int, workers: Iterable[int]) -> list[Effect]:
    """Tell these members of a group that another is lost, without which it does not go on."""
    members = clock.optimizer_spec.members
    told = Departed(worker=lost, group=members, optimizer_id=clock.name)
    return [ToWorker(worker, told) for worker in workers] if lost in members else []


def listed(ranks: Sequence[int]) -> str:
    """Ranks for a text."""
    return ", ".join(map(str, ranks)) or "of the whole job"


def refusal(worker: int, reason: str) -> ToWorker:
    """Tell a worker that what it sent was refused."""
    return ToWorker(worker, Refused(reason=reason))

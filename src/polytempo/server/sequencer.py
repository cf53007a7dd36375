"""The sequencer: one order of everything that happens in a job.

It is fed what arrives (`register`, `arrived`, `left`, `ask`, `read`, `metric`, `tick`), with the moment on the job's clock,
and returns effects: entries of the log that every shard carries out, messages to workers, lines of the record. It owns
a policy for each optimizer and is the only one to feed it.

A push is counted when it has arrived at every shard (`docs/design/0003`), however often it was sent: its content is always
the same. A repeat of a counted push changes nothing. An answer that was lost is given again, at a new place of the log, so
that all shards answer alike (`docs/design/0010`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from polytempo.errors import OrderError, UsageError
from polytempo.protocol.log import Drop, ForgetWorker, LoadState, ReadHere, Reply, Save, Seed, Setup
from polytempo.protocol.messages import Departed, Held, MetricReport, Push, ReadRequest, Refused, SendSeed, Status
from polytempo.protocol.values import OptimizerSpec, PushId
from polytempo.records.lines import MAIN, MEAN, RecordLine, action_line, event_line
from polytempo.server.effects import Checkpoint, Effect, ToShards, ToWorker, WakeAt, Write
from polytempo.server.job_plan import JobPlan
from polytempo.server.optimizer_clock import OptimizerClock, WorkerSlot, disagreement, open_clock
from polytempo.server.worker_statistics import WorkerStatistics, sum_up
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.events import Event, Joined, Left, Pushed, Ticked


@dataclass
class PushArrival:
    """A push that is on its way to all shards."""

    head: Push | None = None
    shards: set[int] = field(default_factory=set)


class Sequencer:
    """Decides for one job. Every method returns what is to be done, in order."""

    def __init__(self, plan: JobPlan) -> None:
        self.plan = plan
        self.clocks: dict[str, OptimizerClock] = {}
        self.statistics = [WorkerStatistics(worker) for worker in range(plan.size)]
        self.started: float | None = None  # when the first step was released
        self.stopping = False
        self._incarnations: dict[int, int] = {}
        self._arrivals: dict[PushId, PushArrival] = {}
        self._steps = int(plan.resumed.get("steps", 0))
        self._samples = float(plan.resumed.get("samples", 0))
        self._beyond = 0  # steps that came after the budget was used up
        self._asked = False  # has any worker asked whether to stop?
        self._saved_at = plan.first_step
        self._handlers: dict[type, Callable[[OptimizerClock, Any, float], list[Effect]]] = {
            Apply: self._apply,
            Release: self._release,
            Hold: self._hold,
            Discard: self._discard,
            Refuse: self._refuse_push,
            Wake: self._wake,
            Admit: self._admit,
        }

    # Members.

    def register(self, worker: int, incarnation: int, name: str, optimizer_spec: OptimizerSpec, now: float) -> list[Effect]:
        """A worker has made an optimizer: it takes part in it from now on."""
        effects = self._enter(worker, incarnation, now)
        clock = self.clocks.get(name)
        if clock is None:
            try:
                clock = open_clock(name, worker, optimizer_spec, self.plan.size, self.plan.first_step)
            except UsageError as error:
                return [*effects, self._refuse(worker, str(error))]
            effects += self._add(clock, now)
        reason = disagreement(clock, worker, optimizer_spec)
        if reason:
            return [*effects, self._refuse(worker, f"{reason}; all workers must make the same optimizer")]
        if worker in clock.slots:
            return [*effects, self._refuse(worker, f"optimizer {name} was made twice by worker {worker}")]
        clock.slots[worker] = WorkerSlot(incarnation)
        if clock.seeded:
            return effects + self._feed(clock, Joined(worker), now)
        clock.early.append(worker)
        return effects + self._request_seed(clock, worker)

    def _enter(self, worker: int, incarnation: int, now: float) -> list[Effect]:
        """A worker is there; when it came back, its earlier life is over."""
        known = self._incarnations.get(worker, 0)
        effects = self.left(worker, known, "lost", now) if incarnation > known else []
        if self.statistics[worker].left_at is not None:
            self.statistics[worker].back(now)
        self._incarnations[worker] = incarnation
        return effects

    def _add(self, clock: OptimizerClock, now: float) -> list[Effect]:
        self.clocks[clock.name] = clock
        resume = clock.name in self.plan.resumed.get("tracks", {})
        clock.seeded = clock.seeded or resume
        gone = [stats for stats in self.statistics if stats.left_at is not None]  # they are not waited for
        effects: list[Effect] = [
            ToShards(Setup(optimizer_id=clock.name, optimizer_spec=clock.optimizer_spec, resume=resume))
        ]
        return effects + [effect for a in gone for effect in self._feed(clock, Left(a.worker, a.state), now)]

    def _request_seed(self, clock: OptimizerClock, worker: int) -> list[Effect]:
        """A job starts from the values of the lowest rank that may still come."""
        seeder = next((a.worker for a in self.statistics if a.left_at is None), None)
        return [ToWorker(worker, SendSeed(optimizer_id=clock.name))] if worker == seeder else []

    def left(self, worker: int, incarnation: int, reason: str, now: float) -> list[Effect]:
        """A worker is gone: those who waited for it go on."""
        stats = self.statistics[worker]
        if stats.left_at is not None or incarnation < self._incarnations.get(worker, 0):
            if stats.state == "finished" and incarnation == self._incarnations.get(worker, 0):
                stats.state = reason  # it said goodbye, and then its exit status was not 0
            return []
        stats.left(reason, now)
        counted = tuple(i for clock in self.clocks.values() for i in clock.counted_of(worker))
        effects: list[Effect] = [ToShards(ForgetWorker(worker=worker, incarnation=incarnation, counted=counted))]
        for identity in [i for i in self._arrivals if i.worker == worker]:
            del self._arrivals[identity]
        for clock in self.clocks.values():
            effects += self._feed(clock, Left(worker, reason), now)
            clock.slots.pop(worker, None)
            if clock.optimizer_spec.apply == "peers":
                effects += [ToWorker(other, Departed(worker=worker)) for other in clock.slots]
            if worker in clock.early:
                clock.early.remove(worker)
            if not clock.seeded and clock.early:
                effects += self._request_seed(clock, min(clock.early))
        return effects

    # Pushes.

    def arrived(self, shard: int, identity: PushId, head: Push | None, now: float) -> list[Effect]:
        """A push is at one shard in full; the first shard brings its head."""
        if identity.incarnation != self._incarnations.get(identity.worker) or identity.optimizer_id not in self.clocks:
            return self._drop(identity) if head is not None else []
        if identity.worker not in self.clocks[identity.optimizer_id].slots:
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
        if slot is None or (push.kind == "seed" and clock.seeded):
            return self._drop(push.id)
        if push.kind == "seed":
            return self._seeded(clock, push, now)
        if push.kind in ("state", "values"):
            place = clock.next_place(worker, push.id.step)
            return [ToShards(LoadState(id=push.id, place=place, again=clock.has_loaded(push)))]
        if push.id.step <= slot.exchange:
            return self._repeated(clock, slot, push)
        if clock.spec.ahead and push.id.step > slot.exchange + 1:
            slot.ahead[push.id.step] = push  # one before it was lost on the way, and will be sent again
            return []
        effects = self._accept(clock, slot, push, now)
        following = slot.ahead.pop(slot.exchange + 1, None)
        return effects if following is None else effects + self._count(following, now)

    def _accept(self, clock: OptimizerClock, slot: WorkerSlot, push: Push, now: float) -> list[Effect]:
        """A new push, in its turn: the policy decides."""
        worker = push.id.worker
        hyper = clock.hyper((*push.hyper, *push.rules) if push.rules else push.hyper)
        event = Pushed(worker, push.id.step, push.samples, hyper)
        clock.count(event, push)
        before, slot.exchange = slot.exchange, push.id.step
        self._tally(clock, push)
        try:
            effects = self._feed(clock, event, now)
            self.statistics[worker].accepted = True
            return effects + self._checkpoint(clock, now, effects)
        except OrderError as error:
            slot.exchange = before
            clock.drop(worker, push.id.step)
            self._tally(clock, push, -1)
            return [ToShards(Drop(id=push.id)), self._refuse(worker, str(error))]

    def _drop(self, identity: PushId) -> list[Effect]:
        """Drop a push of an unknown worker, or a duplicate, unless it repeats one that is still to be applied."""
        counted = any(identity in clock.counted_of(identity.worker) for clock in self.clocks.values())
        return [] if counted else [ToShards(Drop(id=identity))]

    def _seeded(self, clock: OptimizerClock, push: Push, now: float) -> list[Effect]:
        """There are values to start from: those who came early may join."""
        clock.seeded = True
        early, clock.early = clock.early, []
        joined = [effect for worker in sorted(early) for effect in self._feed(clock, Joined(worker), now)]
        return [ToShards(Seed(id=push.id)), *joined]

    def _tally(self, clock: OptimizerClock, push: Push, sign: int = 1) -> None:
        if clock.is_main:
            self._beyond += sign * push.count * self.stopping
            self._asked |= push.asked
            self.statistics[push.id.worker].pushed(push, sign)
            self._steps += sign * push.count
            self._samples += sign * push.samples

    def _repeated(self, clock: OptimizerClock, slot: WorkerSlot, push: Push) -> list[Effect]:
        if push.id.step == slot.exchange and slot.answered < slot.exchange:
            return []  # it is held; its release will be the answer
        return [ToShards(clock.answer(push.id.worker, push.id.step))]

    def ask(self, identity: PushId) -> list[Effect]:
        """A worker asks about its push: if the policy holds it, the worker is told for which ranks it waits."""
        clock = self.clocks.get(identity.optimizer_id)
        slot = clock.slots.get(identity.worker) if clock else None
        if clock is None or slot is None:
            return []
        if identity.step == slot.exchange and slot.answered < slot.exchange:
            hold = next((h for h in clock.policy.holds() if h.worker == identity.worker), None)
            return [self._held(clock, slot, hold)] if hold else []
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
        """A worker wants to see one state of all shards."""
        if request.optimizer_id not in self.clocks:
            return [self._refuse(request.worker, f"there is no optimizer {request.optimizer_id} to read")]
        slot = self.clocks[request.optimizer_id].slots.get(request.worker)
        entry = ReadHere(
            optimizer_id=request.optimizer_id, worker=request.worker, request=request.request, what=request.what
        )
        entry.exchange = slot.exchange if slot is not None else -1
        return [ToShards(entry)]

    def metric(self, metric: MetricReport, now: float) -> list[Effect]:
        """A worker's figure for the record."""
        line = {"t": now, "kind": "metric", "worker": metric.worker}
        return [Write(line | {name: value for name, value in metric.values.items() if name not in line})]

    def tick(self, now: float) -> list[Effect]:
        """A moment asked for by `WakeAt` has come."""
        effects: list[Effect] = []
        for clock in self.clocks.values():
            later = [at for at in clock.wakes if at > now]
            if len(later) < len(clock.wakes):
                clock.wakes = later
                effects += self._feed(clock, Ticked(), now)
        return effects

    # What a policy decides becomes orders.

    def _feed(self, clock: OptimizerClock, event: Event, now: float) -> list[Effect]:
        actions = clock.policy.handle(event, now)
        self._check_budget(now)
        effects = self._written(clock, event_line, event, now)
        last = {action.worker: action.step for action in actions if isinstance(action, Release)}
        for action in actions:
            effects += self._written(clock, action_line, action, now)
            if isinstance(action, Release) and last[action.worker] != action.step:
                continue  # several steps at once are one answer
            effects += self._carry_out(clock, action, now)
        return effects

    def _written(
        self, clock: OptimizerClock, line_of: Callable[[Any, float], RecordLine | None], what: Any, now: float
    ) -> list[Effect]:
        line = line_of(what, now) if self.plan.recorded else None
        return [] if line is None else [Write(clock.mark(line))]

    def _carry_out(self, clock: OptimizerClock, action: Action, now: float) -> list[Effect]:
        return self._handlers[type(action)](clock, action, now)

    def _release(self, clock: OptimizerClock, action: Release, now: float) -> list[Effect]:
        if clock.is_main:
            self.started = now if self.started is None else self.started
            self.statistics[action.worker].released(action.step, now)
        return [ToShards(clock.reply(action, self.stopping, now))]

    def _hold(self, clock: OptimizerClock, action: Hold, now: float) -> list[Effect]:
        if clock.is_main:
            self.statistics[action.worker].held(now, action.waiting_for)
        slot = clock.slots[action.worker]
        slot.held_at = now if slot.held_at is None else slot.held_at
        return [self._held(clock, slot, action)]

    def _discard(self, clock: OptimizerClock, action: Discard, now: float) -> list[Effect]:
        push = clock.drop(action.worker, action.step)
        if clock.is_main:
            self.statistics[action.worker].discard(push)
            self._steps -= push.count
            self._samples -= push.samples
        return [ToShards(Drop(id=push.id))]

    def _refuse_push(self, clock: OptimizerClock, action: Refuse, now: float) -> list[Effect]:
        push = clock.drop(action.worker, action.step)
        self._tally(clock, push, -1)
        return [ToShards(Drop(id=push.id)), self._refuse(action.worker, action.reason)]

    def _wake(self, clock: OptimizerClock, action: Wake, now: float) -> list[Effect]:
        clock.wakes.append(action.at)
        return [WakeAt(action.at)]

    def _admit(self, clock: OptimizerClock, action: Admit, now: float) -> list[Effect]:
        clock.slots[action.worker].enter(action.step)
        return []

    def _apply(self, clock: OptimizerClock, action: Apply, now: float) -> list[Effect]:
        verdict = clock.verdict(action)
        if verdict.drop:
            push = action.pushes[0]
            discard = Discard(push.worker, push.step, verdict.drop)
            return self._written(clock, action_line, discard, now) + self._carry_out(clock, discard, now)
        update, staleness = clock.update(action, verdict.rate)
        if clock.is_main:
            for push, stale in zip(action.pushes, staleness, strict=True):
                self.statistics[push.worker].stale(stale)
        lines = clock.update_lines(action, now, self.plan.shards, staleness) if self.plan.recorded else ()
        return [ToShards(update), *(Write(line) for line in lines)]

    def _held(self, clock: OptimizerClock, slot: WorkerSlot, hold: Hold) -> ToWorker:
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

    def _refuse(self, worker: int, reason: str) -> ToWorker:
        return ToWorker(worker, Refused(reason=reason))

    # Budget, checkpoints, figures.

    def _check_budget(self, now: float) -> None:
        if not self.stopping and self.used(now) >= 1:
            self.stopping = True

    def unheeded(self) -> int:
        """Steps beyond the budget, where no worker ever asks whether to stop."""
        return 0 if self._asked else self._beyond

    def used(self, now: float) -> float:
        """The share of the budget that is used up."""
        seconds = now - self.started if self.started is not None else 0.0
        return self.plan.limits.used(self._steps, self._samples, seconds)

    def _checkpoint(self, clock: OptimizerClock, now: float, before: list[Effect]) -> list[Effect]:
        every, slowest = self.plan.checkpoint_every, clock.policy.progress.slowest
        if not every or not clock.is_main or slowest // every <= self._saved_at // every:
            return []
        self._saved_at = slowest
        effect = self.checkpoint(slowest)
        for other in self.clocks.values():
            entries = [o.entry for o in before if isinstance(o, ToShards)] if other is clock else []
            other.saving(effect.name, [entry for entry in entries if isinstance(entry, Reply)])
        line = {"t": now, "kind": "checkpoint", "name": effect.name, "step": slowest}
        return [ToShards(Save(name=effect.name)), effect, Write(line)]

    def last_checkpoint(self) -> Checkpoint:
        """What is left to save when all workers have left."""
        return self.checkpoint(self.clocks[MAIN].policy.progress.fastest if MAIN in self.clocks else self.plan.first_step)

    def checkpoint_now(self) -> Checkpoint | None:
        """A checkpoint of this moment, in the middle of training; None when there is nothing to save yet."""
        main = self.clocks.get(MAIN)
        if main is None or not main.seeded or not any(stats.pushes for stats in self.statistics):
            return None
        progress = main.policy.progress
        return self.checkpoint(progress.slowest if progress.pushed else progress.fastest)

    def checkpoint(self, step: int) -> Checkpoint:
        """A checkpoint of this moment, named after a step."""
        return Checkpoint(f"step-{step:08d}", self.manifest(step))

    def manifest(self, step: int) -> dict[str, Any]:
        """What a checkpoint must know beside the tensors."""
        clocks = self.clocks[MAIN].policy.progress.pushed if MAIN in self.clocks else {}
        pending = self._pending()
        return {
            "step": step,
            "steps": self._steps - sum(push.count for push in pending),
            "samples": self._samples - sum(push.samples for push in pending),
            "size": self.plan.size,
            "sync": self.plan.sync,
            "clocks": {str(worker): clock for worker, clock in clocks.items()},
            "positions": self._positions({push.id.worker for push in pending if push.positions}),
            "tracks": {
                name: {"proposal": _plain(clock.optimizer_spec), "version": clock.version}
                for name, clock in self.clocks.items()
                if not name.endswith(MEAN)
            },
        }

    def _pending(self) -> list[Push]:
        """What is counted but in no update: it is lost to a job that goes on from here, and its samples are not done."""
        return self.clocks[MAIN].pending() if MAIN in self.clocks else []

    def _positions(self, ahead: set[int]) -> list[dict[str, Any]]:
        """How far each sampler was: this job's part, after those of the jobs it goes on from.

        The last push of those `ahead` is not applied: they were as far as the one before.
        """
        earlier = self.plan.resumed.get("positions", [])
        named = {name: None for stats in self.statistics for name in stats.positions}  # in the order they came
        result = [part for part in earlier if part.get("sampler", "") not in named]
        for name in named:
            positions = [(stats.before if stats.worker in ahead else stats.positions).get(name) for stats in self.statistics]
            epoch = max((position.epoch for position in positions if position), default=None)
            if epoch is None:  # none of it is applied yet
                result += [part for part in earlier if part.get("sampler", "") == name]
                continue
            taken = [position.taken if position and position.epoch == epoch else 0 for position in positions]
            result += [part for part in earlier if (part.get("sampler", ""), part["epoch"]) == (name, epoch)]
            result.append({"sampler": name, "epoch": epoch, "size": self.plan.size, "taken": taken})
        return result

    def status(self, now: float) -> Status:
        """For the display."""
        seconds = now - self.started if self.started is not None else 0.0
        workers = tuple(stats.status(now) for stats in self.statistics)
        return Status(seconds=seconds, used=self.used(now), workers=workers, trains=bool(self.clocks))

    def summary(self, now: float) -> dict[str, Any]:
        """For meta.json and the last line."""
        ends = [stats.left_at for stats in self.statistics if stats.left_at is not None]
        updates = sum(clock.version for clock in self.clocks.values() if clock.is_main)
        return sum_up(self.statistics, max(ends, default=now), self.started) | {
            "updates": updates,
            "optimizers": {name: clock.spec.text for name, clock in self.clocks.items()},
        }


def _plain(optimizer_spec: OptimizerSpec) -> dict[str, Any]:
    tensors = [[info.name, list(info.shape), info.dtype, info.group] for info in optimizer_spec.tensors]
    tables = [list(structs.astuple(info)) for info in optimizer_spec.tables]
    return {"apply": optimizer_spec.apply, "optimizer": optimizer_spec.optimizer, "tensors": tensors, "tables": tables}

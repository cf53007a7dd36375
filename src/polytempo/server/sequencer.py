"""The sequencer: one order of everything that happens in a job.

It is fed what arrives (`register`, `arrived`, `left`, `ask`, `read`, `metric`, `tick`), with the moment on the job's clock,
and returns orders: entries of the log that every shard carries out, messages to workers, lines of the record. It owns
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
        self.tracks: dict[str, OptimizerClock] = {}
        self.accounts = [WorkerStatistics(worker) for worker in range(plan.size)]
        self.started: float | None = None  # when the first step was released
        self.stopping = False
        self._incarnations: dict[int, int] = {}
        self._arrivals: dict[PushId, PushArrival] = {}
        self._steps = int(plan.resumed.get("steps", 0))
        self._samples = float(plan.resumed.get("samples", 0))
        self._beyond = 0  # steps that came after the budget was used up
        self._asked = False  # has any worker asked whether to stop?
        self._saved_at = plan.first_step

    # Members.

    def register(self, worker: int, incarnation: int, name: str, proposal: OptimizerSpec, now: float) -> list[Effect]:
        """A worker has made an optimizer: it takes part in this track from now on."""
        orders = self._enter(worker, incarnation, now)
        track = self.tracks.get(name)
        if track is None:
            try:
                track = open_clock(name, worker, proposal, self.plan.size, self.plan.first_step)
            except UsageError as error:
                return [*orders, self._refuse(worker, str(error))]
            orders += self._add(track, now)
        reason = disagreement(track, worker, proposal)
        if reason:
            return [*orders, self._refuse(worker, f"{reason}; all workers must make the same optimizer")]
        if worker in track.seats:
            return [*orders, self._refuse(worker, f"optimizer {name} was made twice by worker {worker}")]
        track.seats[worker] = WorkerSlot(incarnation)
        if track.seeded:
            return orders + self._feed(track, Joined(worker), now)
        track.early.append(worker)
        return orders + self._ask_for_seed(track, worker)

    def _enter(self, worker: int, incarnation: int, now: float) -> list[Effect]:
        """A worker is there; when it came back, its earlier life is over."""
        known = self._incarnations.get(worker, 0)
        orders = self.left(worker, known, "lost", now) if incarnation > known else []
        if self.accounts[worker].left_at is not None:
            self.accounts[worker].back(now)
        self._incarnations[worker] = incarnation
        return orders

    def _add(self, track: OptimizerClock, now: float) -> list[Effect]:
        self.tracks[track.name] = track
        resume = track.name in self.plan.resumed.get("tracks", {})
        track.seeded = track.seeded or resume
        gone = [account for account in self.accounts if account.left_at is not None]  # they are not waited for
        orders: list[Effect] = [ToShards(Setup(track=track.name, proposal=track.proposal, resume=resume))]
        return orders + [order for a in gone for order in self._feed(track, Left(a.worker, a.state), now)]

    def _ask_for_seed(self, track: OptimizerClock, worker: int) -> list[Effect]:
        """A job starts from the values of the lowest rank that may still come."""
        seeder = next((a.worker for a in self.accounts if a.left_at is None), None)
        return [ToWorker(worker, SendSeed(track=track.name))] if worker == seeder else []

    def left(self, worker: int, incarnation: int, reason: str, now: float) -> list[Effect]:
        """A worker is gone: those who waited for it go on."""
        account = self.accounts[worker]
        if account.left_at is not None or incarnation < self._incarnations.get(worker, 0):
            if account.state == "finished" and incarnation == self._incarnations.get(worker, 0):
                account.state = reason  # it said goodbye, and then its exit status was not 0
            return []
        account.left(reason, now)
        counted = tuple(i for track in self.tracks.values() for i in track.counted_of(worker))
        orders: list[Effect] = [ToShards(ForgetWorker(worker=worker, incarnation=incarnation, counted=counted))]
        for identity in [i for i in self._arrivals if i.worker == worker]:
            del self._arrivals[identity]
        for track in self.tracks.values():
            orders += self._feed(track, Left(worker, reason), now)
            track.seats.pop(worker, None)
            if track.proposal.apply == "peers":
                orders += [ToWorker(other, Departed(worker=worker)) for other in track.seats]
            if worker in track.early:
                track.early.remove(worker)
            if not track.seeded and track.early:
                orders += self._ask_for_seed(track, min(track.early))
        return orders

    # Pushes.

    def arrived(self, shard: int, identity: PushId, head: Push | None, now: float) -> list[Effect]:
        """A push is at one shard in full; the first shard brings its head."""
        if identity.incarnation != self._incarnations.get(identity.worker) or identity.track not in self.tracks:
            return self._drop(identity) if head is not None else []
        if identity.worker not in self.tracks[identity.track].seats:
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
        track, worker = self.tracks[push.id.track], push.id.worker
        seat = track.seats.get(worker)
        if seat is None or (push.kind == "seed" and track.seeded):
            return self._drop(push.id)
        if push.kind == "seed":
            return self._seeded(track, push, now)
        if push.kind in ("state", "values"):
            place = track.next_place(worker, push.id.step)
            return [ToShards(LoadState(id=push.id, place=place, again=track.has_loaded(push)))]
        if push.id.step <= seat.exchange:
            return self._repeated(track, seat, push)
        if track.spec.ahead and push.id.step > seat.exchange + 1:
            seat.ahead[push.id.step] = push  # one before it was lost on the way, and will be sent again
            return []
        orders = self._accept(track, seat, push, now)
        following = seat.ahead.pop(seat.exchange + 1, None)
        return orders if following is None else orders + self._count(following, now)

    def _accept(self, track: OptimizerClock, seat: WorkerSlot, push: Push, now: float) -> list[Effect]:
        """A new push, in its turn: the policy decides."""
        worker = push.id.worker
        hyper = track.hyper((*push.hyper, *push.rules) if push.rules else push.hyper)
        event = Pushed(worker, push.id.step, push.samples, hyper)
        track.count(event, push)
        before, seat.exchange = seat.exchange, push.id.step
        self._tally(track, push)
        try:
            orders = self._feed(track, event, now)
            self.accounts[worker].accepted = True
            return orders + self._checkpoint(track, now, orders)
        except OrderError as error:
            seat.exchange = before
            track.drop(worker, push.id.step)
            self._tally(track, push, -1)
            return [ToShards(Drop(id=push.id)), self._refuse(worker, str(error))]

    def _drop(self, identity: PushId) -> list[Effect]:
        """Nobody's push, or one too many: forget it, unless it is the repeat of one that is still to be applied."""
        counted = any(identity in track.counted_of(identity.worker) for track in self.tracks.values())
        return [] if counted else [ToShards(Drop(id=identity))]

    def _seeded(self, track: OptimizerClock, push: Push, now: float) -> list[Effect]:
        """There are values to start from: those who came early may join."""
        track.seeded = True
        early, track.early = track.early, []
        joined = [order for worker in sorted(early) for order in self._feed(track, Joined(worker), now)]
        return [ToShards(Seed(id=push.id)), *joined]

    def _tally(self, track: OptimizerClock, push: Push, sign: int = 1) -> None:
        if track.is_main:
            self._beyond += sign * push.count * self.stopping
            self._asked |= push.asked
            self.accounts[push.id.worker].pushed(push, sign)
            self._steps += sign * push.count
            self._samples += sign * push.samples

    def _repeated(self, track: OptimizerClock, seat: WorkerSlot, push: Push) -> list[Effect]:
        if push.id.step == seat.exchange and seat.answered < seat.exchange:
            return []  # it is held; its release will be the answer
        return [ToShards(track.answer(push.id.worker, push.id.step))]

    def ask(self, identity: PushId) -> list[Effect]:
        """A worker has heard nothing of its push for a while: if it is held, it is told for whom. (What is lost, the desk of
        each shard knows.)"""
        track = self.tracks.get(identity.track)
        seat = track.seats.get(identity.worker) if track else None
        if track is None or seat is None:
            return []
        if identity.step == seat.exchange and seat.answered < seat.exchange:
            hold = next((h for h in track.policy.holds() if h.worker == identity.worker), None)
            return [self._held(track, seat, hold)] if hold else []
        return []

    def repeat(self, identity: PushId, place: int) -> list[Effect]:
        """The answer from this place was lost on its way: another, unless a newer one is under way already."""
        track = self.tracks.get(identity.track)
        seat = track.seats.get(identity.worker) if track else None
        if track is None or seat is None or seat.places.get(identity.step) != place:
            return []
        if seat.loads <= identity.step < 0:
            return [ToShards(LoadState(id=identity, place=track.next_place(identity.worker, identity.step), again=True))]
        return [ToShards(track.answer(identity.worker, identity.step))]

    def read(self, request: ReadRequest) -> list[Effect]:
        """A worker wants to see one state of all shards."""
        if request.track not in self.tracks:
            return [self._refuse(request.worker, f"there is no optimizer {request.track} to read")]
        seat = self.tracks[request.track].seats.get(request.worker)
        entry = ReadHere(track=request.track, worker=request.worker, request=request.request, what=request.what)
        entry.exchange = seat.exchange if seat is not None else -1
        return [ToShards(entry)]

    def metric(self, metric: MetricReport, now: float) -> list[Effect]:
        """A worker's figure for the record."""
        line = {"t": now, "kind": "metric", "worker": metric.worker}
        return [Write(line | {name: value for name, value in metric.values.items() if name not in line})]

    def tick(self, now: float) -> list[Effect]:
        """A moment asked for by `WakeAt` has come."""
        orders: list[Effect] = []
        for track in self.tracks.values():
            later = [at for at in track.wakes if at > now]
            if len(later) < len(track.wakes):
                track.wakes = later
                orders += self._feed(track, Ticked(), now)
        return orders

    # What a policy decides becomes orders.

    def _feed(self, track: OptimizerClock, event: Event, now: float) -> list[Effect]:
        actions = track.policy.handle(event, now)
        self._check_budget(now)
        orders = self._written(track, event_line, event, now)
        last = {action.worker: action.step for action in actions if isinstance(action, Release)}
        for action in actions:
            orders += self._written(track, action_line, action, now)
            if isinstance(action, Release) and last[action.worker] != action.step:
                continue  # several steps at once are one answer
            orders += self._carry_out(track, action, now)
        return orders

    def _written(
        self, track: OptimizerClock, line_of: Callable[[Any, float], RecordLine | None], what: Any, now: float
    ) -> list[Effect]:
        line = line_of(what, now) if self.plan.recorded else None
        return [] if line is None else [Write(track.mark(line))]

    def _carry_out(self, track: OptimizerClock, action: Action, now: float) -> list[Effect]:
        if isinstance(action, Apply):
            return self._apply(track, action, now)
        if isinstance(action, Release):
            if self.started is None and track.is_main:
                self.started = now
            if track.is_main:
                self.accounts[action.worker].released(action.step, now)
            return [ToShards(track.reply(action, self.stopping, now))]
        if isinstance(action, Hold):
            if track.is_main:
                self.accounts[action.worker].held(now, action.waiting_for)
            seat = track.seats[action.worker]
            seat.held_at = now if seat.held_at is None else seat.held_at
            return [self._held(track, seat, action)]
        if isinstance(action, Discard):
            push = track.drop(action.worker, action.step)
            if track.is_main:
                self.accounts[action.worker].discard(push)
                self._steps -= push.count
                self._samples -= push.samples
            return [ToShards(Drop(id=push.id))]
        if isinstance(action, Refuse):
            push = track.drop(action.worker, action.step)
            self._tally(track, push, -1)
            return [ToShards(Drop(id=push.id)), self._refuse(action.worker, action.reason)]
        if isinstance(action, Wake):
            track.wakes.append(action.at)
            return [WakeAt(action.at)]
        if isinstance(action, Admit):
            track.seats[action.worker].enter(action.step)
        return []

    def _apply(self, track: OptimizerClock, action: Apply, now: float) -> list[Effect]:
        verdict = track.verdict(action)
        if verdict.drop:
            push = action.pushes[0]
            discard = Discard(push.worker, push.step, verdict.drop)
            return self._written(track, action_line, discard, now) + self._carry_out(track, discard, now)
        update, staleness = track.update(action, verdict.rate)
        if track.is_main:
            for push, stale in zip(action.pushes, staleness, strict=True):
                self.accounts[push.worker].stale(stale)
        lines = track.update_lines(action, now, self.plan.shards, staleness) if self.plan.recorded else ()
        return [ToShards(update), *(Write(line) for line in lines)]

    def _held(self, track: OptimizerClock, seat: WorkerSlot, hold: Hold) -> ToWorker:
        return ToWorker(
            hold.worker,
            Held(
                track=track.name,
                exchange=seat.exchange,
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

    def _checkpoint(self, track: OptimizerClock, now: float, before: list[Effect]) -> list[Effect]:
        every, slowest = self.plan.checkpoint_every, track.policy.progress.slowest
        if not every or not track.is_main or slowest // every <= self._saved_at // every:
            return []
        self._saved_at = slowest
        order = self.checkpoint(slowest)
        for other in self.tracks.values():
            entries = [o.entry for o in before if isinstance(o, ToShards)] if other is track else []
            other.saving(order.name, [entry for entry in entries if isinstance(entry, Reply)])
        line = {"t": now, "kind": "checkpoint", "name": order.name, "step": slowest}
        return [ToShards(Save(name=order.name)), order, Write(line)]

    def last_checkpoint(self) -> Checkpoint:
        """What is left to save when everybody is gone."""
        return self.checkpoint(self.tracks[MAIN].policy.progress.fastest if MAIN in self.tracks else self.plan.first_step)

    def checkpoint_now(self) -> Checkpoint | None:
        """A checkpoint of this moment, in the middle of training; None when there is nothing to save yet."""
        main = self.tracks.get(MAIN)
        if main is None or not main.seeded or not any(account.pushes for account in self.accounts):
            return None
        progress = main.policy.progress
        return self.checkpoint(progress.slowest if progress.pushed else progress.fastest)

    def checkpoint(self, step: int) -> Checkpoint:
        """A checkpoint of this moment, named after a step."""
        return Checkpoint(f"step-{step:08d}", self.manifest(step))

    def manifest(self, step: int) -> dict[str, Any]:
        """What a checkpoint must know beside the tensors."""
        clocks = self.tracks[MAIN].policy.progress.pushed if MAIN in self.tracks else {}
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
                name: {"proposal": _plain(track.proposal), "version": track.version}
                for name, track in self.tracks.items()
                if not name.endswith(MEAN)
            },
        }

    def _pending(self) -> list[Push]:
        """What is counted but in no update: it is lost to a job that goes on from here, and its samples are not done."""
        return self.tracks[MAIN].pending() if MAIN in self.tracks else []

    def _positions(self, ahead: set[int]) -> list[dict[str, Any]]:
        """How far each sampler was: this job's part, after those of the jobs it goes on from.

        The last push of those `ahead` is not applied: they were as far as the one before.
        """
        earlier = self.plan.resumed.get("positions", [])
        named = {name: None for account in self.accounts for name in account.positions}  # in the order they came
        result = [part for part in earlier if part.get("sampler", "") not in named]
        for name in named:
            positions = [
                (account.before if account.worker in ahead else account.positions).get(name) for account in self.accounts
            ]
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
        workers = tuple(account.status(now) for account in self.accounts)
        return Status(seconds=seconds, used=self.used(now), workers=workers, trains=bool(self.tracks))

    def summary(self, now: float) -> dict[str, Any]:
        """For meta.json and the last line."""
        ends = [account.left_at for account in self.accounts if account.left_at is not None]
        updates = sum(track.version for track in self.tracks.values() if track.is_main)
        return sum_up(self.accounts, max(ends, default=now), self.started) | {
            "updates": updates,
            "optimizers": {name: track.spec.text for name, track in self.tracks.items()},
        }


def _plain(proposal: OptimizerSpec) -> dict[str, Any]:
    tensors = [[info.name, list(info.shape), info.dtype, info.group] for info in proposal.tensors]
    tables = [list(structs.astuple(info)) for info in proposal.tables]
    return {"apply": proposal.apply, "optimizer": proposal.optimizer, "tensors": tensors, "tables": tables}

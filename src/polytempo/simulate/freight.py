"""What pushes bring in virtual time: a small class for each kind (`machine.brings`), which the engine asks.

    gradient   of a step: nothing is kept of a push but the version that it was computed on
    share      of the joint batch, as samples that are dealt
    batches    micro-batches until a deadline. All until the push are planned at once, since nothing that others do changes
               them: a round costs one event a worker
    sum        of the gradients of local steps, with requests for values beside the pushes
    values     of a fragment after a block of local steps
    nothing    the values go to other workers

Useful is what is in an update. Of values, for each of P fragments, 1/P of the seconds of its local steps: what is pending
when a worker dies or the run ends is wasted. A push that has arrived counts, though its worker may be dead by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import stretched
from polytempo.simulate.links import PeerRoute, ServerRoute
from polytempo.simulate.worker import NO_WEIGHTS, NOT_HELD, DealtSamples, MicroBatch, Worker
from polytempo.summation import in_order
from polytempo.sync import machine as machines
from polytempo.sync.actions import Action, Apply, Release
from polytempo.sync.events import NOT_MEASURED, Event, Measured, Pushed
from polytempo.sync.fields import Fields
from polytempo.sync.machine import Orders, WorkerMachine
from polytempo.sync.policy import Policy
from polytempo.sync.shares import cut

if TYPE_CHECKING:
    from polytempo.simulate.run import Engine

#: How each kind of order is performed.
Performs = dict[type, Callable[[Any, Worker, float], None]]


def own_measures(measured: Fields | None) -> Measured:
    """What a push says where its worker's machine alone has measured something."""
    return NOT_MEASURED if measured is None else Measured(fields=measured)


@dataclass(slots=True, eq=False)
class Sent:
    """A push in flight, or one that waits for its merge."""

    step: int
    part: int
    count: int  #: (local) steps in it
    samples: int
    seconds: float  #: that these took
    version: int  #: that they were computed on
    content: Any  #: what the trainer has made, or the micro-batches
    measured: Fields | None  #: what the worker's machine has measured


@dataclass(slots=True)
class FragmentClock:
    """A fragment: its policy, what this has decided, and the pushes that wait for their update."""

    number: int
    policy: Policy
    decide: Callable[[Event, float], list[Action]] = field(init=False)  #: the policy's `handle`, looked up once
    version: int = 0  #: updates
    sent: dict[tuple[int, int], deque[Sent]] = field(default_factory=dict)  #: by worker and step

    def __post_init__(self) -> None:
        self.decide = self.policy.handle

    def take(self, worker: int, step: int, newest: bool = False) -> Sent:
        """The push of this worker and step that is applied, or dropped, now. A worker that has come back may push a step a
        second time before the first is applied."""
        waiting = self.sent[worker, step]
        push = waiting.pop() if newest else waiting.popleft()
        if not waiting:
            del self.sent[worker, step]
        return push

    def version_of(self, push: Pushed, worker: Worker) -> int:
        """The version of the weights that a push which has arrived was computed on."""
        waiting = self.sent.get((push.worker, push.step))
        return waiting[0].version if waiting else worker.used


class Freight:
    """The gradient of a step; other kinds change what is different."""

    carries = False  #: more than a gradient
    reads = True  #: workers hold versions of the servers' weights
    until_deadline = False  #: pushes hold what is done by then; the worker computes on while the policy holds it
    alarms_late = False  #: may alarms ring after the last worker has left?

    def __init__(self, engine: Engine, machine: WorkerMachine) -> None:
        self.engine, self.trainer = engine, engine.trainer
        #: The orders of this kind of machine alone.
        self.performs: Performs = {machines.Compute: self.compute, machines.PushStep: self.push_step}

    def compute(self, order: machines.Compute, worker: Worker, now: float) -> None:
        self.engine.compute(worker, now)

    def push_step(self, order: machines.PushStep, worker: Worker, now: float) -> None:
        worker.messages += self.engine.route is not None
        self.engine.send((worker.machine.step - 1, order.measured), worker, now, worker.reading)

    def computed(self, worker: Worker) -> None:
        """A step was computed, and what follows is not performed yet."""

    def event(self, told: Any, worker: Worker, version: int) -> tuple[FragmentClock, Pushed]:
        """What its policy hears of a push that has arrived."""
        worker.used = version
        step, measured = told
        return self.engine.clocks[0], Pushed(worker.rank, step, worker.batch, measured=own_measures(measured))

    def figures(self, worker: Worker) -> RecordLine:
        """What a worker of a live job would tell of its own time for the step that it has pushed."""
        return {"computed": worker.spent, "exchanged": worker.exchanged}

    def admitted(self, clock: FragmentClock, worker: Worker, now: float) -> None:
        """A worker is a member of this clock from now on."""

    def released(self, clock: FragmentClock, worker: Worker) -> None:
        """A release was decided on."""

    def arrivals(self, answers: Mapping[Worker, Release], now: float, together: int) -> Iterable[float]:
        """When answers that are decided on now reach their workers."""
        assert self.engine.route is not None
        return self.engine.route.answer([worker.rank for worker in answers], now, together)

    def hear(self, clock: FragmentClock, release: Release, worker: Worker, now: float, version: int) -> None:
        """A release has reached its worker."""
        if self.reads:
            worker.weights = version
        self.engine.tell(release, worker, now, clock.number)

    def applied(self, clock: FragmentClock, apply: Apply) -> int:
        """An update is made of pushes that bring more than gradients; the steps in them."""
        raise NotImplementedError

    def dropped(self, clock: FragmentClock, worker: Worker, step: int) -> None:
        """A push is not applied."""
        worker.wasted += worker.spent

    def parted(self, rank: int, now: float) -> None:
        """A worker is gone, as the policies know now."""

    def end_life(self, worker: Worker) -> None:
        """What a worker has computed and not delivered is lost."""

    def close(self, alive: Sequence[Worker]) -> None:
        """The run is over."""


class Carried(Freight):
    """Pushes that bring more than a gradient: micro-batches of samples that are dealt out, or what local steps have made."""

    carries = True
    deals = False  #: else every local step in a push is as stale as it
    by_part = False  #: seconds, and the version of what is held, are those of each fragment

    def __init__(self, engine: Engine, machine: WorkerMachine) -> None:
        super().__init__(engine, machine)
        self.samples = DealtSamples(self.trainer.length, self.trainer.drop)
        for worker in engine.workers:
            worker.load(machine.parts, self.deals, machine.micro)
        self.performs |= {
            machines.SendPush: self._send,
            machines.Install: self._install,
            machines.RequestValues: self._request,
        }

    def computed(self, worker: Worker) -> None:
        cargo = worker.cargo
        cargo.seconds += worker.spent
        if cargo.bases[0] == NO_WEIGHTS:
            cargo.bases[0] = worker.reading

    def push_step(self, order: machines.PushStep, worker: Worker, now: float) -> None:
        self._send(machines.SendPush(worker.machine.step - 1, measured=order.measured), worker, now)

    def _send(self, order: machines.SendPush, worker: Worker, now: float) -> None:
        cargo, part = worker.cargo, order.part
        seconds, version = cargo.seconds - cargo.sendings[part], cargo.bases[part]
        if self.by_part:
            cargo.sendings[part] = cargo.seconds
        else:
            cargo.seconds, cargo.bases[0] = 0, NO_WEIGHTS
        if self.deals:
            version = worker.reading
            content, cargo.made_of = cargo.made_of, []
            samples = sum(batch.samples for batch in content)
        else:
            content = self.trainer.send(worker.rank, part)
            samples = worker.batch * order.count
        sent = Sent(order.step, part, order.count, samples, seconds, version, content, order.measured)
        if self.engine.route is not None:
            worker.messages += 1
            cargo.flights.append(sent)
        self.engine.send(sent, worker, now, worker.reading)

    def _install(self, order: machines.Install, worker: Worker, now: float) -> None:
        worker.weights = worker.cargo.fetched
        self.trainer.install(worker.rank, order.part, order.pull)

    def _request(self, order: machines.RequestValues, worker: Worker, now: float) -> None:
        worker.cargo.fetched = self.engine.clocks[0].version - worker.cargo.applied
        self.trainer.fetch(worker.rank, 0)
        if isinstance(self.engine.route, ServerRoute):
            self.engine.plan(self.engine.route.fetch(worker.rank, now), self._fetched, worker)
        else:
            self._fetched(now, worker, None, NO_WEIGHTS)

    def _fetched(self, now: float, worker: Worker, told: None, version: int) -> None:
        worker.machine.handle(machines.FETCHED, now)

    def event(self, told: Sent, worker: Worker, version: int) -> tuple[FragmentClock, Pushed]:
        clock, flights = self.engine.clocks[told.part], worker.cargo.flights
        if told in flights:
            flights.remove(told)
        push = self.pushed(told, worker)
        if told.measured is not None:
            push.measured = replace(push.measured, fields=told.measured)
        worker.used = told.version
        clock.sent.setdefault((worker.rank, told.step), deque()).append(told)
        return clock, push

    def pushed(self, sent: Sent, worker: Worker) -> Pushed:
        """The event of a push."""
        raise NotImplementedError

    def applied(self, clock: FragmentClock, apply: Apply) -> int:
        taken, parts = [clock.take(push.worker, push.step) for push in apply.pushes], len(self.engine.clocks)
        for push, sent in zip(apply.pushes, taken, strict=True):
            worker, stale = self.engine.workers[push.worker], clock.version - sent.version
            worker.cargo.merged += sent.count
            worker.cargo.applied += 1
            worker.steps = worker.cargo.merged // parts
            worker.add_staleness(stale, 1 if self.deals else sent.count)
            if self.deals:
                worker.samples = (worker.samples or 0) + sent.samples
                for batch in (batch for batch in sent.content if batch.late):  # they are as stale as they are
                    worker.add_staleness(clock.version - batch.version)
        self.trainer.apply(apply, [sent.version for sent in taken], [sent.content for sent in taken], clock.number)
        if self.deals:
            for push, sent in zip(apply.pushes, taken, strict=True):
                self.samples.finish(push.worker, sent.content)
        return sum(sent.count for sent in taken)

    def dropped(self, clock: FragmentClock, worker: Worker, step: int) -> None:
        if (worker.rank, step) in clock.sent:
            sent = clock.take(worker.rank, step, newest=True)
            worker.wasted += sent.seconds / len(self.engine.clocks)
            if self.deals:
                self.samples.give_back(worker.rank, sent.content)

    def end_life(self, worker: Worker) -> None:
        if self.deals:
            cargo = worker.cargo
            for made_of in (cargo.made_of, *(sent.content for sent in cargo.flights), cargo.unfinished):
                self.samples.give_back(worker.rank, made_of)


class SharesOfBatch(Carried):
    """A share of the joint batch: the batch of each member, or what is left of the epoch. It is dealt out when the first
    worker begins the round; one that joins in the middle has no share in it. A share of half a batch takes half the time of
    a step, of its fixed time all; stalls take what they take."""

    deals = True

    def __init__(self, engine: Engine, machine: WorkerMachine) -> None:
        super().__init__(engine, machine)
        self._micro = machine.micro
        self._round, self._deal = -1, dict[int, list[MicroBatch]]()  # what is dealt out and not begun

    def compute(self, order: machines.Compute, worker: Worker, now: float) -> None:
        step = worker.machine.step
        if step != self._round:
            self._deal_out(step, order.weights)
        share = worker.cargo.made_of = self._deal.pop(worker.rank, [])
        seconds = 0.0
        if samples := sum(batch.samples for batch in share):
            step, stall = worker.next_step()  # a stall takes what it takes
            seconds = worker.seconds_for(samples, step, len(share)) + stall
        self.engine.compute(worker, now, seconds)

    def _deal_out(self, step: int, weights: tuple[tuple[int, float], ...]) -> None:
        """Cut the joint batch of a round; what workers that are gone have left of the one before is dealt out again."""
        for rank, share in self._deal.items():
            self.samples.give_back(rank, share)
        micro, batch = self._micro, self.engine.cluster.batch
        unit = max(1, batch // micro) if micro else 1
        wanted = unit * micro * len(weights) if micro else sum(self.engine.workers[rank].batch for rank, _ in weights)
        parts = cut(-(-self.samples.left(wanted) // unit), weights)
        self._round, self._deal = step, {}
        for rank, count in parts.items():
            sizes = [unit] * count if micro else [count] * (count > 0)
            self._deal[rank] = [self.samples.take(rank, size) for size in sizes]

    def pushed(self, sent: Sent, worker: Worker) -> Pushed:
        drawn = None if self._micro else (0, sent.step)
        measured = Measured(None, None, sent.samples, sent.seconds, drawn)
        return Pushed(worker.rank, sent.step, sent.samples, (), len(sent.content), measured)


class MicroBatches(Carried):
    """What a worker manages until a deadline; a step's time is that of `micro` micro-batches."""

    deals = until_deadline = alarms_late = True

    def _begin(self, worker: Worker, now: float) -> None:
        self.engine.go_on(worker, now)
        worker.busy, worker.since, worker.exchanged = True, now, 0.0

    def compute(self, order: machines.Compute, worker: Worker, now: float) -> None:
        """The micro-batches until the push, or the one that is not done at the deadline."""
        self._begin(worker, now)
        engine, machine, cargo, version, at = self.engine, worker.machine, worker.cargo, worker.weights, now
        while True:
            batch = self.samples.take(worker.rank, worker.unit, version)
            seconds = worker.micro_batch_seconds(batch.samples)
            end = stretched(at, seconds, worker.stalls) if worker.stalls else at + seconds
            if end > machine.ends_at:
                cargo.unfinished, cargo.begun_at, cargo.until = (batch,), at, end
                self.trainer.keep(version)
                engine.plan(machine.ends_at, self._deadline, worker, machine.step, version)
                engine.plan(end, self._late, worker, None, version)
                return
            self._done(batch, end - at, worker)
            orders = machine.handle(machines.Computed(end - at), end)
            if not (orders and type(orders[0]) is machines.Compute):
                engine.plan(end, engine.computed, worker, orders, version)
                return
            at = end

    def _done(self, batch: MicroBatch, seconds: float, worker: Worker) -> None:
        worker.cargo.made_of.append(batch)
        worker.cargo.seconds += seconds

    def hear(self, clock: FragmentClock, release: Release, worker: Worker, now: float, version: int) -> None:
        worker.weights, worked, machine = version, worker.busy, worker.machine
        orders = machine.handle(release, now)
        if not worked:
            self._go_on(orders, worker, now)
        elif machine.in_round and worker.cargo.until > machine.ends_at:  # its communication thread takes part
            self.trainer.keep(version)
            self.engine.plan(machine.ends_at, self._deadline, worker, machine.step, version)

    def _go_on(self, orders: Orders, worker: Worker, now: float) -> None:
        """A worker that has no time for another micro-batch pushes what it has, as one that has just finished."""
        if orders and type(orders[0]) is machines.SendPush:
            self._begin(worker, now)
            self.engine.plan(now, self.engine.computed, worker, orders, worker.weights)
        else:
            self.engine.obey(orders, worker, now)

    def _deadline(self, now: float, worker: Worker, step: int, version: int) -> None:
        """The communication thread pushes what was finished."""
        worker.reading, worker.since = version, max(worker.since, worker.cargo.begun_at)
        self.engine.tell(machines.TimeUp(step), worker, now)

    def _late(self, now: float, worker: Worker, told: None, version: int) -> None:
        """The micro-batch that was not done at a deadline is done."""
        cargo = worker.cargo
        (batch,), cargo.unfinished = cargo.unfinished, ()
        batch, seconds = batch._replace(late=True), now - cargo.begun_at
        orders = worker.machine.handle(machines.Computed(seconds), now)
        if orders and type(orders[0]) is machines.Abandon:
            orders = orders[1:]
            cargo.abandoned = batch.samples, seconds
            worker.wasted += now - worker.since
            self.samples.give_back(worker.rank, [batch])
        else:
            self._done(batch, seconds, worker)
        worker.busy, worker.since = False, now
        if worker.leaving:
            self.engine.leave(now, worker)
            return
        self._go_on(orders, worker, now)
        if not worker.busy:
            worker.held_since = now if worker.held else NOT_HELD

    def pushed(self, sent: Sent, worker: Worker) -> Pushed:
        abandoned, worker.cargo.abandoned = worker.cargo.abandoned, None
        work, computed = (sent.samples, sent.seconds) if sent.content or abandoned is None else abandoned
        return Pushed(worker.rank, sent.step, sent.samples, (), sent.count, Measured(None, None, work, computed))


class SumsOfSteps(Carried):
    """The sum of the gradients of local steps. Pushes, requested values and first values have the model's bytes, permissions
    have none. A worker's own pushes, which its local steps stand for, do not make it stale."""

    reads = False

    def pushed(self, sent: Sent, worker: Worker) -> Pushed:
        sent.version += worker.cargo.applied
        return Pushed(worker.rank, sent.step, sent.samples)

    def released(self, clock: FragmentClock, worker: Worker) -> None:
        if worker.weights == NO_WEIGHTS:
            worker.weights, worker.cargo.fresh = self.engine.clocks[0].version, True
            self.trainer.begin(worker.rank)

    def arrivals(self, answers: Mapping[Worker, Release], now: float, together: int) -> Iterable[float]:
        route = self.engine.route
        assert isinstance(route, ServerRoute)
        first = [worker for worker in answers if worker.cargo.fresh]
        weights = dict(zip(first, route.answer([one.rank for one in first], now, 1), strict=True)) if first else {}
        for worker in first:
            worker.cargo.fresh = False
        return [weights.get(worker, route.permit(worker.rank, now)) for worker in answers]


class ValuesOfFragments(Carried):
    """Values of a fragment after a block of local steps: each worker has a model of its own."""

    alarms_late = by_part = True
    reads = False

    def __init__(self, engine: Engine, machine: WorkerMachine) -> None:
        super().__init__(engine, machine)
        self._measures = machine.measures
        self._goes_on: bool = machine.goes_on  # type: ignore[attr-defined]
        self._starts: dict[int, int] = {}  # local steps at which each turn's block begins

    def computed(self, worker: Worker) -> None:
        worker.cargo.seconds += worker.spent
        machine = worker.machine
        if self._goes_on:
            worker.cargo.made = machine.step
        elif machine.at_turn:  # a block starts: a worker that joins at this turn takes part from here in its data
            self._starts[machine.turn] = max(machine.step, self._starts.get(machine.turn, 0))

    def admitted(self, clock: FragmentClock, worker: Worker, now: float) -> None:
        if not clock.number:
            self.trainer.begin(worker.rank)
        made = worker.cargo.made if self._goes_on else self._starts.get(worker.machine.turn, 0)
        worker.machine.handle(machines.StartsAt(made), now)

    def pushed(self, sent: Sent, worker: Worker) -> Pushed:
        told = {name: getattr(sent.content, name) for name in self._measures if sent.content is not None}
        return Pushed(worker.rank, sent.step, sent.samples, (), sent.count, Measured(**told))

    def figures(self, worker: Worker) -> RecordLine:
        return {}

    def released(self, clock: FragmentClock, worker: Worker) -> None:
        self.trainer.fetch(worker.rank, clock.number)

    def hear(self, clock: FragmentClock, release: Release, worker: Worker, now: float, version: int) -> None:
        worker.cargo.bases[clock.number] = version
        super().hear(clock, release, worker, now, version)

    def end_life(self, worker: Worker) -> None:
        cargo, parts = worker.cargo, len(self.engine.clocks)
        worker.wasted += in_order(cargo.seconds - sent for sent in cargo.sendings) / parts
        for sent in cargo.flights:
            worker.wasted += sent.seconds / parts

    def close(self, alive: Sequence[Worker]) -> None:
        for worker in alive:
            self.end_life(worker)
        for clock in self.engine.clocks:
            for (rank, _), waiting in clock.sent.items():
                self.engine.workers[rank].wasted += in_order(sent.seconds for sent in waiting) / len(self.engine.clocks)


class ModelsOfWorkers(Freight):
    """Nothing: the values of a worker's own model go to other workers, and its pushes are words that take a latency.

    An average of two happens in one moment, when the request reaches the partner: both have it from then on, as far as
    others can tell. A partner that has crashed does not answer: the asker waits until the job notices."""

    reads = False
    carries = True

    def __init__(self, engine: Engine, machine: WorkerMachine) -> None:
        super().__init__(engine, machine)
        assert isinstance(engine.route, PeerRoute)
        self._route = engine.route
        self._there: dict[int, dict[int, float]] = {}  # step: worker: when all values sent to it have come
        self._oldest = 0  # the first step of which that is not forgotten
        self._askers: dict[int, set[int]] = {}  # of each worker, those that wait for its reply
        self.performs |= {
            machines.SendPush: self._tell,
            machines.SendModel: self._send_model,
            machines.AskPartner: self._ask,
            machines.AnswerPartner: self._reply,
        }

    def _tell(self, order: machines.SendPush, worker: Worker, now: float) -> None:
        at = max(now, worker.left_at) if order.count else now
        self.engine.send(order, worker, at, NO_WEIGHTS)

    def event(self, told: machines.SendPush, worker: Worker, version: int) -> tuple[FragmentClock, Pushed]:
        worker.used = self.engine.clocks[0].version
        samples = worker.batch if told.count else 0
        return self.engine.clocks[0], Pushed(worker.rank, told.step, samples, measured=own_measures(told.measured))

    def applied(self, clock: FragmentClock, apply: Apply) -> int:
        """A worker's own steps are never stale; one that only takes part has made none."""
        (push,) = apply.pushes
        steps = int(push.samples > 0)
        self.engine.workers[push.worker].steps += steps
        self.trainer.apply(apply, [clock.version], (), 0)
        # All members have mixed what was sent two steps before the slowest one's.
        while self._there and self._oldest + 2 <= clock.policy.progress.slowest:
            self._there.pop(self._oldest, None)
            self.trainer.forget(self._oldest)
            self._oldest += 1
        return steps

    def arrivals(self, answers: Mapping[Worker, Release], now: float, together: int) -> Iterable[float]:
        told = super().arrivals(answers, now, 0)
        there = (self._there.get(one.step - 1, {}).get(worker.rank, 0.0) for worker, one in answers.items())
        return [max(at, came) for at, came in zip(told, there, strict=True)]

    def _send_model(self, order: machines.SendModel, worker: Worker, now: float) -> None:
        self.trainer.send_model(worker.rank, order.step)
        receivers = [other for other, _ in order.row.send]
        worker.messages += len(receivers)
        worker.left_at, arrivals = self._route.send(worker.rank, receivers, now)
        there = self._there.setdefault(order.step, {})
        for other, at in zip(receivers, arrivals, strict=True):
            there[other] = max(at, there.get(other, 0.0))

    def _ask(self, order: machines.AskPartner, worker: Worker, now: float) -> None:
        partner = self.engine.workers[order.partner]
        self._askers.setdefault(partner.rank, set()).add(worker.rank)
        worker.messages += 1
        _, (at,) = self._route.send(worker.rank, [partner.rank], now)
        self.engine.plan(at, self._asked, worker, order, partner.life)

    def _asked(self, now: float, worker: Worker, ask: machines.AskPartner, partner_life: int) -> None:
        """The request of a worker has reached its partner. The event is the asker's: if this dies, it meets a newer life."""
        if worker.rank not in self._askers.get(ask.partner, ()) or worker.machine.step != ask.step:
            return  # the wait has ended: the partner was lost
        partner = self.engine.workers[ask.partner]
        if partner.alive and partner.life == partner_life:
            self.engine.tell(machines.Requested(worker.rank, ask.step), partner, now)
        elif partner.alive or partner.rank not in self.engine.clocks[0].policy.members:
            self._reply(machines.AnswerPartner(worker.rank, ask.step, averaged=False), partner, now)

    def _reply(self, order: machines.AnswerPartner, partner: Worker, now: float) -> None:
        asker = self.engine.workers[order.asker]
        at = self._route.push(asker.rank, now)
        if order.averaged:
            self.trainer.average(asker.rank, partner.rank)
            partner.messages += 1
            _, (at,) = self._route.send(partner.rank, [asker.rank], now)
        self.engine.plan(at, self._replied, asker, machines.Replied(partner.rank, order.step, order.averaged))

    def _replied(self, now: float, worker: Worker, reply: machines.Replied, version: int) -> None:
        self._askers.get(reply.sender, set()).discard(worker.rank)
        self.engine.tell(reply, worker, now)

    def parted(self, rank: int, now: float) -> None:
        for asker in sorted(self._askers.pop(rank, ())):
            self.engine.tell(machines.Parted(rank), self.engine.workers[asker], now)

    def end_life(self, worker: Worker) -> None:
        for waiting in self._askers.values():
            waiting.discard(worker.rank)


KINDS: dict[str, type[Freight]] = {
    "gradient": Freight,
    "share": SharesOfBatch,
    "batches": MicroBatches,
    "sum": SumsOfSteps,
    "values": ValuesOfFragments,
    "nothing": ModelsOfWorkers,
}

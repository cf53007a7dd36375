"""A simulation by one call, and its discrete-event engine: virtual time drives the policies and machines of a live job.

    Compute -> computed -> push -> (in flight) -> arrived -> policy -> apply, hold, release -> (in flight) -> answered

A heap holds what will happen; each entry is (time, order, what, worker, life, told, version). `order` makes equal times
happen in the order they were planned, so a run is the same every time. `life` counts a rank's lives: what a crashed worker
had in flight meets a newer life and is dropped; events of a rank in any life have ANY_LIFE. `version` is the version of the
weights that a step is computed on, or that an answer brings: with it the engine knows every gradient's staleness, and
training in virtual time knows which weights to take.

What a worker does is its machine's business (`sync/machine.py`), what its pushes bring that of the freight (`freight.py`),
and what policies decide that of `decisions.py`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from polytempo.errors import StuckError, UsageError, nearest
from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import Cluster, stretched
from polytempo.simulate.decisions import Decisions
from polytempo.simulate.freight import KINDS, FragmentClock, Freight, Performs
from polytempo.simulate.links import ALGORITHMS, Route, best_all_reduce, make_route
from polytempo.simulate.outcome import Budget, Outcome, WorkerOutcome
from polytempo.simulate.worker import ANY_LIFE, NO_WEIGHTS, NOT_HELD, NOW, Worker
from polytempo.summation import in_order
from polytempo.sync import actions as policy_actions
from polytempo.sync import machine as machines
from polytempo.sync.actions import Release
from polytempo.sync.compatibility import Feature, check_features
from polytempo.sync.events import Joined, Left, Pushed
from polytempo.sync.machine import Orders, WorkerEvent
from polytempo.sync.mode import Mode
from polytempo.sync.policy import Policy
from polytempo.sync.spec import Spec, spec_of

if TYPE_CHECKING:
    from polytempo.simulate.virtual_model import VirtualModel

#: How gradients may travel in a simulation.
VIAS = ("auto", "ps", "allreduce", *ALGORITHMS, "peers")

#: Something that happens to a worker: the moment, the worker, what it is told, and the version that comes with it.
Happens = Callable[[float, Worker, Any, int], None]
HeapEntry = tuple[float, int, Happens, Worker, int, Any, int]

#: How many events pass between two calls of the progress function, in plain runs and beside training.
PROGRESS_EVERY = (8192, 64)

#: Made once, and compared by identity: most simulated steps have these.
COMPUTED, PUSHES = machines.COMPUTED, machines.PUSHES


class NoModel:
    """A run without training: what is asked of a model does nothing."""

    length = 0

    def keep(self, *_: object) -> None:
        pass

    drop = begin = end = snapshot = step = add_step = send = send_model = fetch = install = keep
    mix = forget = average = apply = lose = observe = close = keep


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
        figures: bool = False,
    ) -> None:
        self.now = 0.0
        self.cluster, self.spec, self.route = cluster, spec, route
        self.workers = [Worker(cluster, rank, seed) for rank in cluster.ranks()]
        self.trains = trainer is not None
        model = self.trainer = NoModel() if trainer is None else trainer
        machine = spec.machine(0)
        self.overlaps = machine.overlaps
        self.freight: Freight = KINDS[machine.brings](self, machine)
        if self.freight.until_deadline:  # one in steps is one in samples: a step of other modes has a whole batch
            budget = replace(budget, samples=min(budget.samples, budget.steps * cluster.batch), steps=math.inf)
        self._budget = budget
        policies = [spec.policy(cluster.workers) for _ in range(machine.parts)]
        for policy in policies:
            policy.explains = record is not None
        self.clocks = [FragmentClock(number, policy) for number, policy in enumerate(policies)]
        # What most simulated steps are: gradients, without a network. They go a shorter way.
        self.instant = route is None and type(self.freight) is Freight
        self._reads = self.trains and self.freight.reads  # versions have readers
        self._heap: list[HeapEntry] = []
        self._order = 0
        self._ended = 0.0  # when the last life ended: alarms may ring later
        self.decisions = Decisions(self, budget, record, figures)
        # Made once: they are called, or planned, in each step.
        self._first, self._feed, self._happens = self.clocks[0], self.decisions.feed, self.computed
        self._performs: Performs = {
            machines.StepHere: lambda order, worker, now: model.step(worker.rank, order.number),
            machines.Begin: lambda order, worker, now: model.begin(worker.rank, order.empty),
            machines.Snapshot: lambda order, worker, now: model.snapshot(worker.rank),
            machines.AddStep: lambda order, worker, now: model.add_step(worker.rank),
            machines.Mix: lambda order, worker, now: model.mix(worker.rank, order.step, order.row, order.lost),
            machines.AskAgain: lambda order, worker, now: self.tell(machines.ASKED, worker, now),
            machines.Settle: self._settle,
            machines.GoHome: lambda order, worker, now: self.plan(now, self.leave, worker),
            **self.freight.performs,
        }

    # The run.

    def run(self, observe_every: float | None = None, progress: Callable[[float], None] | None = None) -> None:
        """Run to the end of the budget."""
        for worker in self.workers[: self.cluster.workers]:
            self.plan(0.0, self._join, worker, life=ANY_LIFE)
        changes = ((self._join, self.cluster.joins), (self.leave, self.cluster.leaves), (self._crash, self.cluster.crashes))
        for change, moments in changes:
            for moment in moments:
                self.plan(moment.at, change, self.workers[moment.worker], moment, life=ANY_LIFE)
        if observe_every:
            self.plan(0.0, self._observe, self.workers[0], observe_every, life=ANY_LIFE)
        heap, pop, limit, decisions = self._heap, heapq.heappop, self._budget.seconds, self.decisions
        count, every = 0, PROGRESS_EVERY[self.trains]
        while heap and not decisions.stopped:
            now, _, happens, worker, life, told, version = pop(heap)
            if now > limit:
                self.now, decisions.stopped = limit, True
                break
            self.now = now
            if life == worker.life or life == ANY_LIFE:
                happens(now, worker, told, version)
            elif version != NO_WEIGHTS:  # the life has ended, and was to read these
                self.trainer.drop(version)
            count += 1
            if progress and count % every == 0:
                steps = sum(w.steps for w in self.workers)
                progress(self._budget.used(now, steps, decisions.used_samples, len(self.workers)))
        self._finish()
        if progress:
            progress(1.0)

    def _finish(self) -> None:
        if not self.decisions.stopped:
            policy = self._first.policy
            if policy.members:
                raise StuckError(f"nothing can happen after {self.now:g} s: {deadlock_report(policy, self.workers)}")
            if self.freight.alarms_late:
                self.now = self._ended
        self.trainer.close()
        alive = [worker for worker in self.workers if worker.alive]
        self.freight.close(alive)
        for worker in alive:
            worker.settle(self.now, self.route is not None)
        self.trainer.observe(self.now)

    def plan(
        self, at: float, happens: Happens, worker: Worker, told: Any = None, version: int = NO_WEIGHTS, life: int = NOW
    ) -> None:
        """This will happen to a worker, unless its life has ended by then."""
        self._order += 1
        life = worker.life if life == NOW else life
        heapq.heappush(self._heap, (at, self._order, happens, worker, life, told, version))

    # What happens to a worker, and the orders of its machine.

    def computed(self, now: float, worker: Worker, told: Orders | None, version: int) -> None:
        """A step is done, or what was planned ahead; `told`: the orders that its machine has given then."""
        worker.busy = False
        worker.spent = now - worker.since
        machine = worker.machine
        orders = machine.handle(COMPUTED, now) if told is None else told
        if orders is PUSHES and self.instant:
            worker.used = version
            self._feed(self._first, Pushed(worker.rank, machine.step - 1, worker.batch), now)  # measured nothing: `PUSHES`
            if worker.leaving:
                self.leave(now, worker)
            return
        worker.since = now
        worker.reading = version
        if told is None:
            self.freight.computed(worker)
        self.obey(orders, worker, now)
        if worker.leaving:
            self.leave(now, worker)

    def tell(self, event: WorkerEvent, worker: Worker, now: float, part: int = 0) -> None:
        """A worker's machine hears of this, and its orders are performed; one that is gone does nothing any more."""
        if worker.alive:
            self.obey(worker.machine.handle(event, now, part), worker, now)

    def obey(self, orders: Orders, worker: Worker, now: float) -> None:
        for order in orders:
            self._performs[type(order)](order, worker, now)
        if not worker.busy and not worker.machine.computes:  # else the order to compute is still to come
            self._forget_weights(worker)  # it will not compute on them again
            if self.overlaps and worker.alive and not worker.leaving and worker.held_since == NOT_HELD:
                worker.held_since = now

    def compute(self, worker: Worker, now: float, seconds: float | None = None) -> None:
        """A worker is busy from now on: for this long, or for the time of its next step."""
        self.go_on(worker, now)
        self.work(worker, now, seconds)

    def go_on(self, worker: Worker, now: float) -> None:
        """A worker waits no longer, and reads the values that it holds."""
        self.trainer.keep(worker.weights)
        if self.overlaps and worker.held_since != NOT_HELD:
            worker.end_hold(now)
        if self.route is not None:
            worker.exchanged = now - worker.since - worker.held_for
            worker.communicating += worker.exchanged
            worker.held_for = 0.0

    def work(self, worker: Worker, now: float, seconds: float | None = None) -> None:
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
        heapq.heappush(self._heap, (end, self._order, self._happens, worker, worker.life, None, worker.weights))

    def send(self, told: Any, worker: Worker, at: float, version: int) -> None:
        """A push leaves a worker: it reaches its policy now, or when it has passed the links."""
        worker.flying += 1
        if self.route is None:
            self._arrived(at, worker, told, version)
        else:
            self.plan(self.route.push(worker.rank, at), self._arrived, worker, told, version)

    def _arrived(self, now: float, worker: Worker, told: Any, version: int) -> None:
        worker.flying -= 1
        self._feed(*self.freight.event(told, worker, version), now)
        if worker.leaving:
            self.leave(now, worker)

    def answered(self, now: float, worker: Worker, told: tuple[FragmentClock, Release], version: int) -> None:
        self._forget_weights(worker)
        clock, release = told
        self.freight.hear(clock, release, worker, now, version)

    def _forget_weights(self, worker: Worker) -> None:
        if self._reads and worker.weights != NO_WEIGHTS:
            self.trainer.drop(worker.weights)
            worker.weights = NO_WEIGHTS

    def _settle(self, order: machines.Settle, worker: Worker, now: float) -> None:
        if not worker.flying:
            self.tell(machines.ALL_ARRIVED, worker, now)

    # Membership.

    def _join(self, now: float, worker: Worker, told: object, version: int) -> None:
        if worker.alive:
            return
        if worker.rank in self._first.policy.members:  # its crash was not noticed before it came back
            self.decisions.tell_all(Left(worker.rank, "lost"), now)
        worker.join(now, self.spec.machine(worker.rank, self._budget.steps_each))
        self.decisions.tell_all(Joined(worker.rank), now)

    def leave(self, now: float, worker: Worker, told: object = None, version: int = NO_WEIGHTS) -> None:
        """A worker is leaving, and has left if nothing of it is under way."""
        worker.leaving = True
        if not worker.alive:
            return
        worker.machine.handle(machines.LEAVING, now)
        if not worker.busy and not worker.flying and worker.machine.is_free:
            self._end_life(worker)
            self.decisions.tell_all(Left(worker.rank, "finished"), now)

    def _crash(self, now: float, worker: Worker, crash: Any, version: int) -> None:
        if not worker.alive:
            return
        self._end_life(worker)
        if crash.noticed_after is not None:
            self.plan(now + crash.noticed_after, self._notice, worker)

    def _notice(self, now: float, worker: Worker, told: None, version: int) -> None:
        self.decisions.tell_all(Left(worker.rank, "lost"), now)

    def _end_life(self, worker: Worker) -> None:
        self.freight.end_life(worker)
        self._forget_weights(worker)
        worker.end_life(self.now, self.route is not None)
        self._ended = self.now
        self.trainer.end(worker.rank, worker.machine.done)

    def _observe(self, now: float, worker: Worker, every: float, version: int) -> None:
        if self._heap:  # else nothing happens any more
            self.trainer.observe(now)
            self.plan(now + every, self._observe, worker, every, life=ANY_LIFE)


def deadlock_report(policy: Policy, workers: Sequence[Worker]) -> str:
    """All holds, and the crashed workers that are still members."""
    holds, most = policy.holds(), policy_actions.NAMED_AT_MOST
    waits = []
    for hold in holds[:most]:
        others = hold.waiting_count - len(hold.waiting_for)
        names = ", ".join(map(str, hold.waiting_for)) + (f" and {others} more" if others else "")
        waits.append(f"worker {hold.worker} waits for {names} ({hold.reason})")
    waiting = "; ".join(waits) or "no worker is held"
    more = f" and {len(holds) - most} more wait" if len(holds) > most else ""
    gone = [rank for rank in policy.members if not workers[rank].alive]
    crashed = f"; crashed and not noticed: {', '.join(map(str, gone[:most]))}" if gone else ""
    return f"{waiting}{more}{crashed}"


def simulate_job(
    cluster: Cluster,
    sync: str | Mode | Spec,
    *,
    via: str = "auto",
    seed: int = 0,
    record: Callable[[RecordLine], None] | None = None,
    trainer: VirtualModel | None = None,
    observe_every: float | None = None,
    progress: Callable[[float], None] | None = None,
    figures: bool = False,
    **budget: Any,
) -> Outcome:
    """Simulate a job in virtual time: the policies of a live job on a described cluster.

    Args:
        cluster: The machines and links.
        sync: The mode, such as `"ssp:3"`, or one of your own: `K_BATCH(2)`.
        via: `"ps"`, `"allreduce"` (its cheapest algorithm on this cluster) or the name of one; `"auto"` is `"ps"`,
            `"allreduce"` where models are averaged, and `"peers"` where they are mixed with those of neighbours.
        seed: Of everything random.
        record: Called with every line of the record.
        trainer: Computes real gradients along the run; `train_virtually` makes one.
        observe_every: Virtual seconds between evaluations of the trainer.
        progress: Called with the share of the budget that is used up.
        figures: Push lines of the record say what the step took of its worker's own time, as live ones do.
        **budget: At least one of `seconds`, `steps`, `samples` (summed over all workers) and `steps_each`.

    Returns:
        Times, throughput, waiting and staleness.

    Raises:
        UsageError: The mode, the way or the budget cannot be used.
        StuckError: The run cannot go on: which worker waits for which.

    Example:
        ```python
        from polytempo.simulate import Cluster, simulate_job

        simulate_job(Cluster(workers=8, slow={7: 3.0}), "ssp:3", steps=1000).efficiency
        ```
    """
    spec = spec_of(sync)
    way = resolve_via(spec, via, cluster)
    part = replace(cluster, model_bytes=cluster.model_bytes / spec.fragments)  # a message holds a fragment
    engine = Engine(
        cluster,
        spec,
        make_route(part, way),
        Budget(**budget),
        trainer,
        seed,
        record,
        figures,
    )
    engine.run(observe_every, progress)
    return _outcome_of(engine, way, part.model_bytes)


def _outcome_of(engine: Engine, via: str, message_bytes: float) -> Outcome:
    workers, seconds = engine.workers, engine.now
    parts = tuple(
        WorkerOutcome(
            worker=worker.rank,
            steps=worker.steps,
            samples=worker.steps * worker.batch if worker.samples is None else worker.samples,
            discarded=worker.discarded,
            computing_s=worker.computing,
            waiting_s=worker.waiting,
            communicating_s=worker.communicating,
            present_s=worker.present,
            bytes_sent=worker.messages * message_bytes,
            staleness_mean=worker.staleness_sum / max(worker.steps, 1),
            staleness_max=worker.staleness_max,
        )
        for worker in workers
    )
    present = in_order(part.present_s for part in parts) or 1.0
    steps = sum(part.steps for part in parts)
    samples = sum(part.samples for part in parts)
    return Outcome(
        sync=engine.spec.text,
        via=via,
        seconds=seconds,
        steps=steps,
        samples=samples,
        discarded=sum(part.discarded for part in parts),
        updates=sum(clock.version for clock in engine.clocks),
        samples_per_second=samples / seconds if seconds else 0.0,
        efficiency=in_order(worker.computing - worker.wasted for worker in workers) / present,
        waiting=in_order(part.waiting_s for part in parts) / present,
        communicating=in_order(part.communicating_s for part in parts) / present,
        staleness_mean=sum(worker.staleness_sum for worker in workers) / max(steps, 1),
        staleness_max=max(part.staleness_max for part in parts),
        max_lead=engine.decisions.max_lead,
        workers=parts,
        fragments=len(engine.clocks),
    )


def resolve_via(spec: Spec, via: str, cluster: Cluster) -> str:
    """The way gradients travel: "ps" or the name of an all-reduce; what the mode cannot use is refused."""
    if via not in VIAS:
        raise UsageError(f"unknown way {via!r}; known: {', '.join(VIAS)}{nearest(via, VIAS)}")
    by_peers, can = via == "peers", spec.capabilities
    wanted = {Feature.SIMULATED_PEERS: by_peers, Feature.SIMULATED_NO_PEERS: via not in ("auto", "peers")}
    check_features(spec, wanted, via=via)
    if can.neighbours:
        return "peers"
    if via == "auto":
        via = "allreduce" if can.averages and can.reduces else "ps"
    check_features(spec, {Feature.SIMULATED_ALLREDUCE: via != "ps"}, via=via)
    return best_all_reduce(cluster) if via == "allreduce" else via


def mean_step_time(cluster: Cluster, rank: int = -1) -> float:
    """Seconds of a rank's step without its slow-down, on average; without a rank, of a worker without times of its own."""
    draws = cluster.duration(rank).draw(Random(0), 0, 64)
    return in_order(draws) / len(draws)

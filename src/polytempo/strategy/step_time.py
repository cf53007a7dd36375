"""The seconds of a step: all ranks run their actions in virtual time.

Each rank has a program: work, messages to and from other stages, meetings of a group. It follows from the schedule:

    F m   receives the activation, computes its layers, sends its own; a layer's collectives lie between equal parts of it
    B m   the same backwards; a recomputed forward comes first, with its collectives
    U     gradients of tied parameters and of the data axis are exchanged, then the optimizer runs

Ranks of a host share its cores: with more ranks at work than cores, each runs at cores / ranks of its speed (processor
sharing). They all have the same speed then, so a host needs only one clock of work done, and the simulation is exact: events
are the ends of pieces of work and the arrivals of messages. While several cores compute, each is slower by the measured
contention. A message takes its link's latency and bytes, delays no other, and costs its sender nothing, as in
`pipeline/timeline.py`. A collective starts when all its members are there. It was measured for groups of that size, with all
groups at it side by side. Its latency is time in which ranks wait; its bytes are work of each rank, which on one host was
shared as it is here, and between hosts time, too. Where a group of that size was not measured, the figure of two ranks is
scaled: among p through shared memory each puts n bytes, adds up n and reads (p - 1) / p n, so bytes count (3 - 1 / p) / 2.5
times; by messages between hosts 2 (p - 1) / p times.

A step ends for a rank when it has updated and has the loss, which the last stage sends after its own update. Steps follow
each other without a barrier; what is predicted is the time from one to the next once all ranks are in step. In modes that
exchange every k steps it is the mean of k steps. Without a barrier on the data axis replicas do not meet at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from polytempo.errors import BrokenInvariant
from polytempo.mesh import MeshPoint
from polytempo.strategy.bytes_moved import HEAD, message_bytes
from polytempo.strategy.costs import Machine, MeasuredLink, ModelProfile, ShardedLayer
from polytempo.strategy.parallel_plan import ParallelPlan, stage_sum, tied_groups
from polytempo.summation import in_order

#: Steps that are simulated; the time of the last ones counts.
STEPS = 3
NO_LINK = MeasuredLink(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds on a core, and then seconds that occupy none."""

    core: float
    idle: float = 0.0


@dataclass(frozen=True, slots=True)
class Post:
    """A message that arrives after some seconds."""

    key: tuple[object, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for a message."""

    key: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait until all members are here. Each meeting of a program has a key of its own."""

    key: tuple[object, ...]
    members: int


@dataclass(frozen=True, slots=True)
class EndOfStep:
    """A mark."""


Operation = Work | Post | Await | Gather | EndOfStep


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step, and of what each rank does in it."""

    seconds: float
    busy: tuple[float, ...]  #: by rank: seconds of its own work, on a core of its own

    @property
    def balance(self) -> float:
        """Mean over maximum of the busy time; 1 where all ranks have the same."""
        return in_order(self.busy) / len(self.busy) / max(self.busy) if max(self.busy) > 0 else 1.0


def step_time(plan: ParallelPlan, profile: ModelProfile, machine: Machine) -> StepTime:
    """The time of a step in a long run."""
    period = plan.exchange.period if plan.mesh.data > 1 else 1
    seconds, busy = _long_run(plan, profile, machine, True)
    if period > 1:
        without, own = _long_run(plan, profile, machine, False)
        seconds = (seconds + (period - 1) * without) / period
        busy = [(one + (period - 1) * other) / period for one, other in zip(busy, own, strict=True)]
    return StepTime(seconds, tuple(busy))


def single_step(plan: ParallelPlan, profile: ModelProfile, machine: Machine) -> float:
    """The time of one step from its first action to the end of the last rank."""
    programs = rank_programs(plan, profile, machine, 1, True)
    return max(ends[-1] for ends in simulate_ranks(programs, machine))


def lower_bound(busy: Iterable[float], machine: Machine) -> float:
    """No step is shorter than the busiest rank's work, nor than the work of a host over its cores."""
    by_rank = list(busy)
    hosts = [in_order(by_rank[rank] for rank in host if rank < len(by_rank)) for host in machine.hosts]
    return max([*by_rank, *(whole / cores for whole, cores in zip(hosts, machine.cores, strict=True))])


def _long_run(plan: ParallelPlan, profile: ModelProfile, machine: Machine, exchanged: bool) -> tuple[float, list[float]]:
    programs = rank_programs(plan, profile, machine, STEPS, exchanged)
    ends = simulate_ranks(programs, machine)
    core = [in_order(one.core for one in program if isinstance(one, Work)) / STEPS for program in programs]
    idle = [in_order(one.idle for one in program if isinstance(one, Work)) / STEPS for program in programs]
    each = [(steps[-1] - steps[0]) / (STEPS - 1) for steps in ends]
    busy = [work + rest for work, rest in zip(core, idle, strict=True)]
    if plan.mesh.data > 1 and not plan.exchange.barrier:
        replicas = {plan.mesh.replica_group(rank) for rank in range(plan.mesh.size)}
        slowest = [max(each[rank] for rank in ranks) for ranks in sorted(replicas)]
        return in_order(slowest) / len(slowest), busy
    return max(*each, max(busy), lower_bound(core, machine)), busy


# The programs of the ranks.


def rank_programs(
    plan: ParallelPlan, profile: ModelProfile, machine: Machine, steps: int, exchanged: bool
) -> list[list[Operation]]:
    """By rank. `exchanged`: each step ends with an exchange on the data axis."""
    return [
        [operation for step in range(steps) for operation in _Program(rank, plan, profile, machine, step).step(exchanged)]
        for rank in range(plan.mesh.size)
    ]


class _Program:
    """A step of one rank."""

    def __init__(self, rank: int, plan: ParallelPlan, profile: ModelProfile, machine: Machine, step: int) -> None:
        self._rank, self._plan, self._profile, self._machine, self._step = rank, plan, profile, machine, step
        self._point = plan.mesh.point(rank)
        self._held = plan.held_layers(profile, self._point.pipe)
        self._meetings: dict[tuple[int, ...], int] = {}

    def step(self, exchanged: bool) -> Iterator[Operation]:
        stage, last = self._point.pipe, self._plan.mesh.pipe - 1
        again = self._plan.actions.recomputed(stage, 0)
        overhead = Work(self._machine.action_s)
        for action in self._plan.actions.actions[stage][0]:
            if action.kind == "U":
                yield from self._update(exchanged)
                continue
            forward = action.kind == "F"
            before, behind = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            if 0 <= before <= last:
                yield Await(self._key(before, stage, str(action)))
            yield overhead
            if forward or action.microbatch in again:
                yield from self._layers(False)
            if not forward:
                yield from self._layers(True)
            if 0 <= behind <= last:
                yield Post(self._key(stage, behind, str(action)), self._message(min(stage, behind)))
        yield from self._loss(stage, last)
        yield EndOfStep()

    def _key(self, source: int, target: int, what: str) -> tuple[object, ...]:
        return (self._step, self._point.data, self._point.tensor, source, target, what)

    def _message(self, cut: int) -> float:
        """Seconds of a message between the stages `cut` and `cut` + 1."""
        last = self._profile.layers[self._plan.stage_layers(cut)[-1]].layer
        ranks = [self._plan.mesh.rank(MeshPoint(self._point.data, at, self._point.tensor)) for at in (cut, cut + 1)]
        return link_of(ranks, self._machine).seconds(message_bytes(last.activation_bytes))

    def _loss(self, stage: int, last: int) -> Iterator[Operation]:
        if stage == last:
            lane = self._plan.mesh.pipe_group(self._rank)
            for other in range(last):
                seconds = link_of([self._rank, lane[other]], self._machine).seconds(HEAD)
                yield Post(self._key(last, other, "loss"), seconds)
        else:
            yield Await(self._key(last, stage, "loss"))

    def _layers(self, backward: bool) -> Iterator[Operation]:
        for held in reversed(self._held) if backward else self._held:
            yield from self._layer(held, backward)

    def _layer(self, held: ShardedLayer, backward: bool) -> Iterator[Operation]:
        """A layer's work in as many parts as it has collectives, each followed by one."""
        seconds = held.layer.backward_s if backward else held.layer.forward_s
        calls = [call for call in held.calls if call.backward == backward] if self._plan.mesh.tensor > 1 else []
        parts = max(1, len(calls))
        work = Work(seconds * held.core_share / parts, seconds * (1 - held.core_share) / parts)
        group = self._plan.mesh.tensor_group(self._rank)
        for number in range(parts):
            yield work
            if calls:
                share = 0.5 if calls[number].op == "all_gather" else 1.0  # there is no adding up, and no second barrier
                yield from self._collective("tensor", group, share * calls[number].nbytes)

    def _update(self, exchanged: bool) -> Iterator[Operation]:
        stage, mesh = self._point.pipe, self._plan.mesh
        lane, group = mesh.pipe_group(self._rank), mesh.data_group(self._rank)
        for stages, nbytes in tied_groups(self._plan, self._profile):
            if stage in stages:
                yield from self._collective("tensor", tuple(lane[held] for held in stages), nbytes)
        update = in_order(held.update_s for held in self._held)
        if mesh.data > 1 and exchanged:
            exchange, nbytes = self._plan.exchange, stage_sum(self._plan, self._profile, stage, "gradient_bytes")
            if exchange.servers:
                yield Work(update, 2 * link_of(group, self._machine).seconds(nbytes))
                if exchange.barrier:
                    yield self._gather(group)
                return
            yield from self._collective("data", group, nbytes)
        yield Work(update)

    def _collective(self, axis: str, group: tuple[int, ...], nbytes: float) -> Iterator[Operation]:
        yield self._gather(group)
        yield from collective_work(axis, group, nbytes, self._machine)

    def _gather(self, group: tuple[int, ...]) -> Gather:
        self._meetings[group] = self._meetings.get(group, 0) + 1
        return Gather((self._step, group, self._meetings[group]), len(group))


# Links.


def _on_one_host(group: Iterable[int], machine: Machine) -> bool:
    ranks = set(group)
    return any(ranks <= set(host) for host in machine.hosts)


def link_of(group: Iterable[int], machine: Machine) -> MeasuredLink:
    """The link that messages among these ranks take."""
    return machine.inside if _on_one_host(group, machine) else machine.between or machine.inside


def reduction_of(axis: str, group: tuple[int, ...], machine: Machine) -> MeasuredLink:
    """A reduction on an axis among these ranks: as measured for such a group, or scaled from that of two ranks."""
    if (measured := machine.reduction(axis, group)) is not None:
        return measured
    size = len(group)
    if _on_one_host(group, machine):
        link = (machine.data_inside if axis == "data" else None) or machine.reduce_inside or machine.inside
        return MeasuredLink(link.latency, link.per_byte * (3 - 1 / size) / 2.5)
    link = (machine.data_between if axis == "data" else None) or machine.reduce_between or machine.between or machine.inside
    return MeasuredLink(link.latency * math.log2(size), link.per_byte * 2 * (size - 1) / size)


def collective_work(axis: str, group: tuple[int, ...], nbytes: float, machine: Machine) -> list[Work]:
    """What a reduction is for each of its members, once all are there."""
    link = reduction_of(axis, group, machine)
    if not _on_one_host(group, machine):
        return [Work(0.0, link.seconds(nbytes))]
    host = next(number for number, ranks in enumerate(machine.hosts) if group[0] in ranks)
    crowd = max(1.0, len(machine.hosts[host]) / machine.cores[host]) if machine.reduction(axis, group) is not None else 1.0
    return [Work(0.0, link.latency), Work(link.per_byte * nbytes / crowd)]


def collective_seconds(axis: str, group: tuple[int, ...], nbytes: float, machine: Machine) -> float:
    """The same as seconds of each member."""
    return in_order(work.core + work.idle for work in collective_work(axis, group, nbytes, machine))


# Virtual time.


class _Host:
    """The ranks at work on one host: `done` is the work that each has got since the beginning, had it been there."""

    def __init__(self, cores: int, contention: float) -> None:
        self._cores, self._contention = cores, contention
        self.done, self.now = 0.0, 0.0
        self.working: list[tuple[float, int]] = []  # a heap: `done` at which the work of a rank ends, and the rank

    def _speed(self) -> float:
        busy = len(self.working)
        crowd = min(1.0, (busy - 1) / (self._cores - 1)) if self._cores > 1 else 0.0
        return min(1.0, self._cores / busy) / (1 + (self._contention - 1) * crowd)

    def forward_to(self, now: float) -> None:
        """Time passes."""
        if self.working:
            self.done += (now - self.now) * self._speed()
        self.now = now

    def begin(self, rank: int, seconds: float) -> None:
        heappush(self.working, (self.done + seconds, rank))

    def next_end(self) -> float:
        """When the next work ends, if none begins before."""
        return self.now + max(0.0, self.working[0][0] - self.done) / self._speed() if self.working else math.inf

    def end(self) -> int:
        """The rank whose work ends next."""
        self.done, rank = heappop(self.working)
        return rank


class _RankSimulation:
    """All ranks; `ends` are the times at which each ended its steps."""

    def __init__(self, programs: list[list[Operation]], machine: Machine) -> None:
        self._programs, self._at = programs, [0] * len(programs)
        self._hosts = [_Host(cores, machine.contention) for cores in machine.cores]
        self._host_of = {rank: host for ranks, host in zip(machine.hosts, self._hosts, strict=True) for rank in ranks}
        self._now = 0.0
        self._timers: list[tuple[float, int]] = []  # a heap: when a rank goes on
        self._arrivals: dict[tuple[object, ...], float] = {}
        self._waiting: dict[tuple[object, ...], int] = {}
        self._gathered: dict[tuple[object, ...], list[int]] = {}
        self.ends: list[list[float]] = [[] for _ in programs]

    def run(self) -> None:
        for rank in range(len(self._programs)):
            self._go_on(rank)
        while True:
            host = min(self._hosts, key=_Host.next_end)
            worked, timer = host.next_end(), self._timers[0][0] if self._timers else math.inf
            if worked == timer == math.inf:
                break
            self._now = min(worked, timer)
            if timer <= worked:
                _, rank = heappop(self._timers)
                self._go_on(rank)
                continue
            host.forward_to(self._now)
            rank = host.end()
            work = self._programs[rank][self._at[rank] - 1]
            assert isinstance(work, Work)
            self._sleep(rank, work.idle) if work.idle else self._go_on(rank)
        if stuck := [rank for rank, program in enumerate(self._programs) if self._at[rank] < len(program)]:
            raise BrokenInvariant(f"deadlock: ranks {stuck} wait in a simulated step")

    def _sleep(self, rank: int, seconds: float) -> None:
        heappush(self._timers, (self._now + seconds, rank))

    def _go_on(self, rank: int) -> None:
        """The next operations of a rank, until it works or waits."""
        program = self._programs[rank]
        while self._at[rank] < len(program):
            operation = program[self._at[rank]]
            self._at[rank] += 1
            if not self._done_at_once(rank, operation):
                return

    def _done_at_once(self, rank: int, operation: Operation) -> bool:
        if isinstance(operation, Work):
            return self._work(rank, operation)
        if isinstance(operation, Post):
            self._arrivals[operation.key] = self._now + operation.seconds
            if (waiting := self._waiting.pop(operation.key, None)) is not None:
                self._sleep(waiting, operation.seconds)
            return True
        if isinstance(operation, Await):
            return self._await(rank, operation)
        if isinstance(operation, Gather):
            return self._gather(rank, operation)
        self.ends[rank].append(self._now)
        return True

    def _work(self, rank: int, work: Work) -> bool:
        if work.core:
            host = self._host_of[rank]
            host.forward_to(self._now)
            host.begin(rank, work.core)
        elif work.idle:
            self._sleep(rank, work.idle)
        return not (work.core or work.idle)

    def _await(self, rank: int, operation: Await) -> bool:
        arrival = self._arrivals.get(operation.key)
        if arrival is None:
            self._waiting[operation.key] = rank
        elif arrival > self._now:
            self._sleep(rank, arrival - self._now)
        return arrival is not None and arrival <= self._now

    def _gather(self, rank: int, operation: Gather) -> bool:
        here = self._gathered.setdefault(operation.key, [])
        here.append(rank)
        if len(here) < operation.members:
            return False
        for other in here[:-1]:
            self._sleep(other, 0.0)
        return True


def simulate_ranks(programs: list[list[Operation]], machine: Machine) -> list[list[float]]:
    """When each rank ended each of its steps."""
    simulation = _RankSimulation([_merged(program) for program in programs], machine)
    simulation.run()
    return simulation.ends


def _merged(program: list[Operation]) -> list[Operation]:
    """Pieces of work on a core that follow each other are one."""
    merged: list[Operation] = []
    for operation in program:
        last = merged[-1] if merged else None
        if isinstance(operation, Work) and isinstance(last, Work) and not last.idle:
            merged[-1] = Work(last.core + operation.core, operation.idle)
        else:
            merged.append(operation)
    return merged

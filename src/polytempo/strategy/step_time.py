"""The seconds of a step: all ranks run their actions in virtual time.

Each rank has a program: work, messages to and from other stages, meetings of a group. It follows from the schedule:

    F m   receives the activation, computes its layers, sends its own; a layer's collectives lie between equal parts of it
    B m   the same backwards; a recomputed forward comes first, with its collectives
    U     gradients of tied parameters and of the data axis are exchanged, then the optimizer runs

Ranks of a host share its cores: with more ranks at work than cores, each runs at cores / ranks of its speed (processor
sharing). They all have the same speed then, so a host needs only one clock of work done, and the simulation is exact: events
are the ends of pieces of work and the arrivals of messages. While several cores compute, each is slower by the measured
contention.

A message takes its link's latency and bytes and delays no other, as in `pipeline/timeline.py`; a part of the latency is work
of its sender, and as much of its receiver. A collective starts when all its members are there. It was measured for groups of
that size, with all groups at it side by side. A part of its latency is work of each rank, and so are its bytes, which shared
the cores of a host as they do here; the rest is time in which ranks wait, and between hosts all of it is. Where a group of
that size was not measured, the figure of two ranks is scaled: among p through shared memory each puts n bytes, adds up n and
reads (p - 1) / p n, so bytes count (3 - 1 / p) / 2.5 times; by messages between hosts 2 (p - 1) / p times.

Hosts with equally many ranks and cores hold the same stages again and again: the ranks up to the first number that ends both
a host and a replica are a block, all blocks do the same at the same time, and only the first is simulated.

A step ends for a rank when it has updated and has the loss, which the last stage sends after its own update. Steps follow
each other without a barrier; what is predicted is the time from one to the next once all ranks are in step. In modes that
exchange every k steps it is the mean of k steps. Without a barrier on the data axis replicas do not meet at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from polytempo.errors import BrokenInvariant
from polytempo.strategy.bytes_moved import HEAD, message_bytes
from polytempo.strategy.costs import Machine, MeasuredLink, ModelProfile
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
    """Wait until all members are here. Each meeting of a step has a key of its own."""

    key: tuple[object, ...]
    members: int


Operation = Work | Post | Await | Gather


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step, and of what each rank does in it."""

    seconds: float
    busy: tuple[float, ...]  #: by rank: seconds of its own work, on a core of its own
    occupied: tuple[float, ...]  #: by rank: the same with its part of the cores that it gets

    @property
    def balance(self) -> float:
        """Mean over maximum of the busy time; 1 where all ranks have the same."""
        return in_order(self.busy) / len(self.busy) / max(self.busy) if max(self.busy) > 0 else 1.0


def step_time(plan: ParallelPlan, profile: ModelProfile, machine: Machine) -> StepTime:
    """The time of a step in a long run."""
    period = plan.exchange.period if plan.mesh.data > 1 else 1
    found = _long_run(plan, profile, machine, True)
    if period == 1:
        return found
    other = _long_run(plan, profile, machine, False)

    def mean(one: float, rest: float) -> float:
        return (one + (period - 1) * rest) / period

    return StepTime(
        mean(found.seconds, other.seconds),
        tuple(map(mean, found.busy, other.busy)),
        tuple(map(mean, found.occupied, other.occupied)),
    )


def lower_bound(busy: Iterable[float], machine: Machine) -> float:
    """No step is shorter than the busiest rank's work, nor than the work of a host over its cores."""
    by_rank = list(busy)
    hosts = [in_order(by_rank[rank] for rank in host if rank < len(by_rank)) for host in machine.hosts]
    return max([*by_rank, *(whole / cores for whole, cores in zip(hosts, machine.cores, strict=True))])


def _long_run(plan: ParallelPlan, profile: ModelProfile, machine: Machine, exchanged: bool) -> StepTime:
    programs = rank_programs(plan, profile, machine, exchanged)
    found = RankSimulation(programs, machine, STEPS)
    core = [in_order(one.core for one in program if isinstance(one, Work)) for program in programs]
    idle = [in_order(one.idle for one in program if isinstance(one, Work)) for program in programs]
    each = [(steps[-1] - steps[0]) / (STEPS - 1) for steps in found.ends]
    busy = [work + rest for work, rest in zip(core, idle, strict=True)]
    alike = [rank % len(programs) for rank in range(plan.mesh.size)]
    if plan.mesh.data > 1 and not plan.exchange.barrier:
        replicas = {plan.mesh.replica_group(rank) for rank in range(plan.mesh.size)}
        slowest = [max(each[alike[rank]] for rank in ranks) for ranks in sorted(replicas)]
        seconds = in_order(slowest) / len(slowest)
    else:
        seconds = max(*each, *busy, lower_bound([core[rank] for rank in alike], machine))
    occupied = [found.occupied[rank] / STEPS for rank in alike]
    return StepTime(seconds, tuple(busy[rank] for rank in alike), tuple(occupied))


# The programs of the ranks.


def rank_programs(plan: ParallelPlan, profile: ModelProfile, machine: Machine, exchanged: bool) -> list[list[Operation]]:
    """A step of each rank of a block. `exchanged`: it ends with an exchange on the data axis."""
    block = block_of(plan, machine)
    return [_merged(_Program(rank, plan, profile, machine, block).step(exchanged)) for rank in range(block)]


def block_of(plan: ParallelPlan, machine: Machine) -> int:
    """The number of ranks after which the same stages and shards lie on the same places of hosts again."""
    size, each = plan.mesh.size, plan.mesh.pipe * plan.mesh.tensor
    sizes = {(len(host), cores) for host, cores in zip(machine.hosts, machine.cores, strict=True)}
    in_order_of_rank = [rank for host in machine.hosts for rank in host] == list(range(size))
    if len(sizes) > 1 or not in_order_of_rank:
        return size
    block = math.lcm(each, len(machine.hosts[0]))
    return block if size % block == 0 else size


class _Program:
    """A step of one rank."""

    def __init__(self, rank: int, plan: ParallelPlan, profile: ModelProfile, machine: Machine, block: int) -> None:
        self._rank, self._plan, self._profile, self._machine, self._block = rank, plan, profile, machine, block
        self._point = plan.mesh.point(rank)
        self._held = plan.held_layers(profile, self._point.pipe)
        self._tensor_group = plan.mesh.tensor_group(rank)
        self._passes = {backward: list(self._pass(backward)) for backward in (False, True)}
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
                yield Work(self._link(before).core_s)
            yield overhead
            if forward or action.microbatch in again:
                yield from self._layers(False)
            if not forward:
                yield from self._layers(True)
            if 0 <= behind <= last:
                yield Work(self._link(behind).core_s)
                passing = self._profile.layers[self._plan.stage_layers(min(stage, behind))[-1]].layer.activation_bytes
                yield Post(self._key(stage, behind, str(action)), _on_the_way(self._link(behind), message_bytes(passing)))
        if stage < last:
            yield Await(self._key(last, stage, "loss"))
            yield Work(self._link(last).core_s)
            return
        for other in range(last):
            yield Work(self._link(other).core_s)
            yield Post(self._key(last, other, "loss"), _on_the_way(self._link(other), HEAD))

    def _key(self, source: int, target: int, what: str) -> tuple[object, ...]:
        return (self._point.data, self._point.tensor, source, target, what)

    def _link(self, other: int) -> MeasuredLink:
        """To another stage of this lane."""
        return link_of((self._rank, self._plan.mesh.pipe_group(self._rank)[other]), self._machine)

    def _layers(self, backward: bool) -> Iterator[Operation]:
        for operation in self._passes[backward]:
            yield operation if isinstance(operation, Work) else self._gather(self._tensor_group)

    def _pass(self, backward: bool) -> Iterator[Work | None]:
        """The work of all layers, each in as many parts as it has collectives; None where the tensor group meets."""
        group = self._tensor_group
        for held in reversed(self._held) if backward else self._held:
            seconds = held.layer.backward_s if backward else held.layer.forward_s
            calls = [call for call in held.calls if call.backward == backward] if len(group) > 1 else []
            parts = max(1, len(calls))
            work = Work(seconds * held.core_share / parts, seconds * (1 - held.core_share) / parts)
            if not calls:
                yield work
            for call in calls:
                yield work
                yield None
                share = 0.5 if call.op == "all_gather" else 1.0  # nothing is added up
                yield from collective_work("tensor", group, share * call.nbytes, self._machine)

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
        return Gather((group, self._meetings[group]), sum(rank < self._block for rank in group))


# Links.


def _on_one_host(group: Iterable[int], machine: Machine) -> bool:
    ranks = set(group)
    return any(ranks <= set(host) for host in machine.hosts)


def link_of(group: Iterable[int], machine: Machine) -> MeasuredLink:
    """The link that messages among these ranks take."""
    return machine.inside if _on_one_host(group, machine) else machine.between or machine.inside


def _on_the_way(link: MeasuredLink, nbytes: float) -> float:
    """Seconds of a message less those that its sender and its receiver work."""
    return max(0.0, link.seconds(nbytes) - 2 * link.core_s)


def reduction_of(axis: str, group: tuple[int, ...], machine: Machine) -> MeasuredLink:
    """A reduction on an axis among these ranks: as measured for such a group, or scaled from that of two ranks."""
    if (measured := machine.reduction(axis, group)) is not None:
        return measured
    size = len(group)
    if _on_one_host(group, machine):
        link = (machine.data_inside if axis == "data" else None) or machine.reduce_inside or machine.inside
        return MeasuredLink(link.latency, link.per_byte * (3 - 1 / size) / 2.5, link.core_s)
    link = (machine.data_between if axis == "data" else None) or machine.reduce_between or machine.between or machine.inside
    return MeasuredLink(link.latency * math.log2(size), link.per_byte * 2 * (size - 1) / size)


def collective_work(axis: str, group: tuple[int, ...], nbytes: float, machine: Machine) -> list[Work]:
    """What a reduction is for each of its members, once all are there."""
    link = reduction_of(axis, group, machine)
    if not _on_one_host(group, machine):
        return [Work(0.0, link.seconds(nbytes))]
    host = next(number for number, ranks in enumerate(machine.hosts) if group[0] in ranks)
    crowd = max(1.0, len(machine.hosts[host]) / machine.cores[host]) if machine.reduction(axis, group) is not None else 1.0
    core = min(link.core_s, link.latency / crowd)  # it took `crowd` times as long with all ranks at it
    return [Work(0.0, link.latency - core * crowd), Work(core + link.per_byte * nbytes / crowd)]


def collective_seconds(axis: str, group: tuple[int, ...], nbytes: float, machine: Machine) -> float:
    """The same as seconds of each member."""
    return in_order(work.core + work.idle for work in collective_work(axis, group, nbytes, machine))


# Virtual time.


class _Host:
    """The ranks at work on one host: `done` is the work that each has got since the beginning, had it been there."""

    def __init__(self, cores: int, contention: float) -> None:
        self._cores, self._contention = cores, contention
        self._done, self._now, self._speed = 0.0, 0.0, 1.0
        self._working: list[tuple[float, int]] = []  # a heap: `done` at which the work of a rank ends, and the rank
        self.next_end = math.inf  #: when the next work ends, if none begins before

    def begin(self, rank: int, seconds: float, now: float) -> None:
        self._done += (now - self._now) * self._speed if self._working else 0.0
        heappush(self._working, (self._done + seconds, rank))
        self._changed(now)

    def end(self) -> int:
        """The rank whose work ends next; it is that time now."""
        self._done, rank = heappop(self._working)
        self._changed(self.next_end)
        return rank

    def _changed(self, now: float) -> None:
        self._now, busy = now, len(self._working)
        if not busy:
            self.next_end = math.inf
            return
        crowd = min(1.0, (busy - 1) / max(1, self._cores - 1))
        self._speed = min(1.0, self._cores / busy) / (1 + (self._contention - 1) * crowd)
        self.next_end = now + max(0.0, self._working[0][0] - self._done) / self._speed


class RankSimulation:
    """Runs a program on each rank, some steps in a row.

    Args:
        programs: A step of each rank.
        machine: Its first hosts have these ranks.
        steps: How often each rank runs its program.
    """

    def __init__(self, programs: Sequence[Sequence[Operation]], machine: Machine, steps: int = 1) -> None:
        self._programs, self._steps = programs, steps
        self._at, self._step = [0] * len(programs), [0] * len(programs)
        self._hosts = [_Host(cores, machine.contention) for cores in machine.cores]
        self._host_of = {rank: host for ranks, host in zip(machine.hosts, self._hosts, strict=True) for rank in ranks}
        self._now = 0.0
        self._timers: list[tuple[float, int]] = []  # a heap: when a rank goes on
        self._arrivals: dict[object, float] = {}
        self._waiting: dict[object, int] = {}
        self._gathered: dict[object, list[int]] = {}
        self._began = [0.0] * len(programs)  # the work under way
        self.ends: list[list[float]] = [[] for _ in programs]  #: of each rank: when it ended its steps
        self.occupied = [0.0] * len(programs)  #: seconds in which each was at work
        self._run()

    def _run(self) -> None:
        for rank in range(len(self._programs)):
            self._go_on(rank)
        while True:
            host = min(self._hosts, key=lambda host: host.next_end)
            worked, timer = host.next_end, self._timers[0][0] if self._timers else math.inf
            if worked == timer == math.inf:
                break
            self._now = min(worked, timer)
            if timer <= worked:
                _, rank = heappop(self._timers)
                self._go_on(rank)
                continue
            rank = host.end()
            self.occupied[rank] += self._now - self._began[rank]
            work = self._programs[rank][self._at[rank] - 1]
            assert isinstance(work, Work)
            if work.idle:
                self._rest(rank, work.idle)
            else:
                self._go_on(rank)
        if stuck := [rank for rank, step in enumerate(self._step) if step < self._steps]:
            raise BrokenInvariant(f"deadlock: ranks {stuck} wait in a simulated step")

    def _sleep(self, rank: int, seconds: float) -> None:
        heappush(self._timers, (self._now + seconds, rank))

    def _rest(self, rank: int, seconds: float) -> None:
        self.occupied[rank] += seconds
        self._sleep(rank, seconds)

    def _go_on(self, rank: int) -> None:
        """The next operations of a rank, until it works or waits."""
        program = self._programs[rank]
        while self._step[rank] < self._steps:
            if self._at[rank] == len(program):
                self.ends[rank].append(self._now)
                self._at[rank] = 0
                self._step[rank] += 1
                continue
            operation = program[self._at[rank]]
            self._at[rank] += 1
            if isinstance(operation, Work):
                if operation.core:
                    self._began[rank] = self._now
                    self._host_of[rank].begin(rank, operation.core, self._now)
                    return
                if operation.idle:
                    self._rest(rank, operation.idle)
                    return
                continue
            key = (self._step[rank], operation.key)
            if isinstance(operation, Post):
                self._arrivals[key] = self._now + operation.seconds
                if (waiting := self._waiting.pop(key, None)) is not None:
                    self._sleep(waiting, operation.seconds)
            elif isinstance(operation, Await):
                arrival = self._arrivals.get(key)
                if arrival is None:
                    self._waiting[key] = rank
                    return
                if arrival > self._now:
                    self._sleep(rank, arrival - self._now)
                    return
            else:
                here = self._gathered.setdefault(key, [])
                here.append(rank)
                if len(here) < operation.members:
                    return
                for other in here[:-1]:
                    self._sleep(other, 0.0)


def _merged(program: Iterable[Operation]) -> list[Operation]:
    """Pieces of work on a core that follow each other are one."""
    merged: list[Operation] = []
    for operation in program:
        last = merged[-1] if merged else None
        if isinstance(operation, Work) and isinstance(last, Work) and not last.idle:
            merged[-1] = Work(last.core + operation.core, operation.idle)
        else:
            merged.append(operation)
    return merged

"""Runs the plans of all ranks on symbols, and raises `PlanError` where they are wrong.

A chunk holds a list of parts, (rank, chunk) as at the start, instead of numbers: a sum that misses a part, or has it
twice, is seen. Steps wait for messages of one named rank, or for a barrier, so any order of running gives the same
result, but for memory that is shared. There vector clocks, which messages and barriers carry to others, tell what comes
before what: two steps that touch one chunk of a slot, one of them writing, must be ordered.

An executor need not copy: no chunk is written while it may still be on its way to a rank; and what a rank receives may
be stored as soon as it arrives, since its sender knew that this rank had done all that it does before with the chunk.

The text of an error begins with its kind: `wrong result`, `deadlock`, `left over`, `race` or `impossible`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from polytempo.collectives.steps import (
    Combine,
    Copy,
    Fetch,
    HostRanks,
    Meet,
    Put,
    Receive,
    Send,
    Step,
    Total,
    fields,
    text_of,
)
from polytempo.errors import PolytempoError, UsageError

#: What a chunk of a rank held at the start: (rank, chunk).
ExpectedPart = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a collective among `size` ranks must leave where, on `chunks` chunks; said a second time, without an algorithm.

    At the start chunk c of rank r holds the part (r, c). At the end a chunk holds the sum of some parts.
    """

    collective: str
    size: int
    chunks: int
    root: int = 0

    def held(self, rank: int, chunk: int) -> bool:
        """Whether the rank has this chunk at all."""
        return self.collective not in ("gather", "scatter") or rank in (self.root, chunk)

    def wanted(self, rank: int, chunk: int) -> list[ExpectedPart] | None:
        """The parts whose sum this chunk must be at the end, in order; None where it does not matter."""
        all_ranks = [(other, chunk) for other in range(self.size)]
        owner = chunk * self.size // self.chunks
        match self.collective:
            case "broadcast":
                return [(self.root, chunk)]
            case "all_reduce":
                return all_ranks
            case "reduce":
                return all_ranks if rank == self.root else None
            case "reduce_scatter":
                return all_ranks if rank == owner else None
            case "all_gather":
                return [(owner, chunk)]
            case "gather":
                return [(chunk, chunk)] if self.held(rank, chunk) else None
            case "scatter":
                return [(self.root, chunk)] if self.held(rank, chunk) else None
            case "all_to_all":
                return [(rank, chunk)] if chunk < self.size else [(chunk - self.size, rank)]
            case "barrier":
                return None
        raise UsageError(f"there is no specification of the result of {self.collective!r}")


class PlanError(PolytempoError):
    """Plans that do not do what they should."""


def check(plans: Sequence[Sequence[Step]], collective: str, hosts: HostRanks, chunks: int, root: int = 0) -> None:
    """The plans of ranks 0, 1, ... compute this collective on this many chunks, whatever the timing."""
    expected = Expected(collective, len(plans), chunks, root)
    run = SymbolicRun(plans, hosts, chunks, expected)
    run.to_the_end()
    if collective == "barrier":
        _check_all_heard(run.clocks)
    for chunk in range(chunks):
        ends = [(rank, run.values[rank][chunk]) for rank in range(len(plans))]
        for rank, value in ends:
            _check_value(value.parts, expected.wanted(rank, chunk), rank, chunk)
        if collective == "all_reduce" and len({value.added for _, value in ends}) > 1:
            raise PlanError(f"wrong result: chunk {chunk} is added up in several places, so its bits may differ")


def _check_all_heard(clocks: list[list[int]]) -> None:
    for rank, clock in enumerate(clocks):
        for other in range(len(clocks)):
            if other != rank and not clock[other]:
                raise PlanError(f"wrong result: rank {rank} leaves the barrier without a word from rank {other}")


def _check_value(parts: Sequence[ExpectedPart], wanted: list[ExpectedPart] | None, rank: int, chunk: int) -> None:
    if wanted is None or sorted(parts) == wanted:
        return
    have, want = Counter(parts), Counter(wanted)
    complaints = [
        *_named("misses", want - have),
        *_named("has what it should not:", Counter(part for part in have if part not in want)),
        *_named("has more than once", Counter(part for part in want if have[part] > 1)),
    ]
    raise PlanError(f"wrong result: chunk {chunk} of rank {rank} {'; '.join(complaints)}")


def _named(what: str, parts: Iterable[ExpectedPart]) -> list[str]:
    names = [f"chunk {chunk} of rank {rank}" for rank, chunk in sorted(parts)]
    return [f"{what} {', '.join(names)}"] if names else []


@dataclass(frozen=True, slots=True)
class Value:
    """A sum of parts, and how it was added up: of which parts in which order, or by which step of which rank."""

    parts: tuple[ExpectedPart, ...]
    added: tuple[tuple[int, int], ...] | None = None


@dataclass(slots=True)
class PlannedMessage:
    """A chunk on its way to a peer, or received at this time of the peer's clock."""

    peer: int
    chunk: int
    value: Value
    clock: list[int]
    received: int | None = None


@dataclass(slots=True)
class PlannedSlot:
    """A chunk of a slot: what was put when, and which ranks have read it since."""

    value: Value
    time: int
    reads: list[tuple[int, int]] = field(default_factory=list)


class SymbolicRun:
    """All ranks, side by side."""

    def __init__(
        self, plans: Sequence[Sequence[Step]], hosts: HostRanks, chunks: int, expected: Expected | None = None
    ) -> None:
        self.plans, self.ranks = plans, range(len(plans))
        self.empty = expected is not None and expected.collective == "barrier"
        self.values = [[Value(((rank, chunk),)) for chunk in range(chunks)] for rank in self.ranks]
        self.clocks = [[0] * len(plans) for _ in plans]
        self.at = [0] * len(plans)
        self.queues: dict[tuple[int, int], deque[PlannedMessage]] = defaultdict(deque)
        self.on_way: dict[tuple[int, int], list[PlannedMessage]] = defaultdict(list)
        self.touched: dict[tuple[int, int], int] = {}
        self.slots: dict[tuple[int, int], PlannedSlot] = {}
        for rank, plan in enumerate(plans):
            for index, step in enumerate(plan):
                complaint = _impossible(step, rank, hosts, chunks, expected)
                if complaint:
                    raise PlanError(f"impossible: rank {rank}, step {index} ({text_of([step])}): {complaint}")

    def to_the_end(self) -> None:
        """Let every rank do what it can, until none can do anything."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while not self.ended(rank) and not self.awaited(rank):
                    self.do(rank)
                    moved = True
        if not all(map(self.ended, self.ranks)):
            raise PlanError(f"deadlock: {self.who_waits()}")
        for (sender, peer), queue in self.queues.items():
            if queue:
                raise PlanError(
                    f"left over: rank {sender} sends {len(queue)} messages to rank {peer} that are never received, "
                    f"the first with chunk {queue[0].chunk}"
                )

    def ended(self, rank: int) -> bool:
        return self.at[rank] == len(self.plans[rank])

    def awaited(self, rank: int) -> list[int]:
        """The ranks that this one waits for."""
        match self.plans[rank][self.at[rank]]:
            case Receive(peer) | Combine(peer):
                return [] if self.queues[peer, rank] else [peer]
            case Meet(members) as meet:
                return [member for member in members if self.ended(member) or self.plans[member][self.at[member]] != meet]
        return []

    def who_waits(self) -> str:
        stuck = [rank for rank in self.ranks if not self.ended(rank)]
        texts = [f"{self.where(rank)} waits for {' and '.join(map(self.state, self.awaited(rank)))}" for rank in stuck[:4]]
        return "; ".join([*texts, *([f"and {len(stuck) - 4} more"] if len(stuck) > 4 else [])])

    def state(self, rank: int) -> str:
        return f"rank {rank}, which has ended" if self.ended(rank) else f"rank {rank}"

    def where(self, rank: int) -> str:
        return f"rank {rank} at step {self.at[rank]} ({text_of([self.plans[rank][self.at[rank]]])})"

    def do(self, rank: int) -> None:
        """One step of this rank; a barrier is a step of all its members."""
        step, mine, clock = self.plans[rank][self.at[rank]], self.values[rank], self.clocks[rank]
        if isinstance(step, Meet):
            self.meet(step.members)
            return
        clock[rank] += 1
        match step:
            case Send(peer, chunk):
                self.send(rank, PlannedMessage(peer, chunk, mine[chunk], clock.copy()))
            case Receive(peer, chunk):
                message = self.receive(rank, peer)
                self.write(rank, chunk, message.value, message.clock)
            case Combine(peer, chunk):
                self.write(rank, chunk, self.total(rank, [mine[chunk], self.receive(rank, peer).value]))
            case Copy(source, chunk):
                self.write(rank, chunk, mine[source])
                self.touched[rank, source] = clock[rank]
            case Put(chunk):
                self.put(rank, chunk)
                self.touched[rank, chunk] = clock[rank]
            case Fetch(member, source, chunk):
                self.write(rank, chunk, self.read(rank, member, source))
            case Total(chunk, members):
                values = [mine[chunk] if member == rank else self.read(rank, member, chunk) for member in members]
                self.write(rank, chunk, self.total(rank, values))
        self.at[rank] += 1

    def meet(self, members: Sequence[int]) -> None:
        for member in members:
            self.clocks[member][member] += 1
        joined = [max(times) for times in zip(*(self.clocks[member] for member in members), strict=True)]
        for member in members:
            self.clocks[member] = joined.copy()
            self.at[member] += 1

    def send(self, rank: int, message: PlannedMessage) -> None:
        self.queues[rank, message.peer].append(message)
        self.on_way[rank, message.chunk].append(message)
        self.touched[rank, message.chunk] = message.clock[rank]

    def receive(self, rank: int, peer: int) -> PlannedMessage:
        message, clock = self.queues[peer, rank].popleft(), self.clocks[rank]
        clock[:] = map(max, clock, message.clock)
        message.received = clock[rank]
        return message

    def total(self, rank: int, values: Sequence[Value]) -> Value:
        parts = tuple(part for value in values for part in value.parts)
        if all(value.added is None for value in values):  # the same parts in the same order have the same sum
            return Value(parts, parts)
        return Value(parts, ((rank, self.at[rank]),))

    def write(self, rank: int, chunk: int, value: Value, known: Sequence[int] | None = None) -> None:
        """To a chunk of one's own, at any moment at which so much is known to be over."""
        clock = self.clocks[rank]
        for message in self.on_way.pop((rank, chunk), ()):
            if message.received is None or message.received > (known or clock)[message.peer]:
                self.race(rank, f"writes chunk {chunk}, which may still be on its way to rank {message.peer}")
        if known and self.touched.get((rank, chunk), 0) > known[rank]:
            self.race(rank, f"may store chunk {chunk} while an earlier step still uses it")
        self.touched[rank, chunk] = clock[rank]
        self.values[rank][chunk] = value

    def race(self, rank: int, what: str) -> None:
        if not self.empty:
            raise PlanError(f"race: {self.where(rank)} {what}")

    def put(self, rank: int, chunk: int) -> None:
        before, clock = self.slots.get((rank, chunk)), self.clocks[rank]
        for reader, time in before.reads if before else ():
            if time > clock[reader]:
                self.race(rank, f"writes to its slot what rank {reader} may still be reading")
        self.slots[rank, chunk] = PlannedSlot(self.values[rank][chunk], clock[rank])

    def read(self, rank: int, member: int, chunk: int) -> Value:
        slot, clock = self.slots.get((member, chunk)), self.clocks[rank]
        if slot is None or slot.time > clock[member]:
            when = "maybe while it is put" if Put(chunk) in self.plans[member] else "which is never put"
            raise PlanError(f"race: {self.where(rank)} reads chunk {chunk} of rank {member}'s slot, {when}")
        if member != rank:
            slot.reads.append((rank, clock[rank]))
        return slot.value


def _impossible(step: Step, rank: int, hosts: HostRanks, chunks: int, expected: Expected | None) -> str:
    """What is wrong with a step whatever the others do; an empty text if nothing is."""
    inside = next((host for host in hosts if rank in host), ())
    for name, numbers in fields(step):
        for number in numbers:
            if name in ("chunk", "source"):
                foreign = isinstance(step, Fetch) and name == "source"
                if not 0 <= number < chunks or (expected and not foreign and not expected.held(rank, number)):
                    return f"it has no chunk {number}"
            elif not 0 <= number < sum(map(len, hosts)) or (name == "peer" and number == rank):
                return f"there is no peer {number}"
            elif name != "peer" and number not in inside:
                return f"rank {number} is on another host"
    if isinstance(step, Meet) and rank not in step.members:
        return "it is not a member itself"
    return ""

"""The words of which plans are made: what one rank does with its chunks, step after step.

A chunk is a number here; the caller hands in the tensors. A plan is a list of steps for each rank. Only three steps wait
for others: `Receive` and `Combine` for a message, `Meet` for all members.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from polytempo.errors import UsageError

#: The ranks on each host.
HostRanks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Queue this chunk for a peer: never waits, and the messages to one peer stay in order."""

    peer: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the next message of the peer, and store it."""

    peer: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Combine:
    """Wait for the next message of the peer, and combine it into mine."""

    peer: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy my chunk `source` to my chunk `chunk`."""

    source: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Put:
    """Copy my chunk into my slot of shared memory, to the same place."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Meet:
    """A barrier of these members, of which this rank is one."""

    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copy chunk `source` of the member's slot into my chunk."""

    member: int
    source: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Total:
    """My chunk becomes that chunk of all members, combined in this order: theirs from their slots, mine from my tensor."""

    chunk: int
    members: tuple[int, ...]


Step = Send | Receive | Combine | Copy | Put | Meet | Fetch | Total

#: How each step is written.
FORMS: dict[type[Step], str] = {
    Send: "send {chunk} to {peer}",
    Receive: "receive {chunk} from {peer}",
    Combine: "combine {chunk} from {peer}",
    Copy: "copy {source} to {chunk}",
    Put: "put {chunk}",
    Meet: "meet {members}",
    Fetch: "fetch {source} of {member} as {chunk}",
    Total: "total {chunk} over {members}",
}


def fields(step: Step) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and numbers of a step; a single number as a tuple of one."""
    for name in step.__slots__:
        value: int | tuple[int, ...] = getattr(step, name)
        yield name, value if isinstance(value, tuple) else (value,)


def text_of(steps: Iterable[Step]) -> str:
    """One step a line."""
    lines = []
    for step in steps:
        words = {name: ",".join(map(str, numbers)) for name, numbers in fields(step)}
        lines.append(FORMS[type(step)].format(**words))
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands among all ranks, 0 to size - 1, and their hosts."""

    rank: int
    hosts: HostRanks

    def __post_init__(self) -> None:
        if sorted(rank for host in self.hosts for rank in host) != list(range(self.size)) or not all(self.hosts):
            raise UsageError(f"hosts must hold each rank from 0 on once, and none be empty; got {self.hosts}")
        if not 0 <= self.rank < self.size:
            raise UsageError(f"there is no rank {self.rank} among {self.size} ranks")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.hosts))

    @property
    def host(self) -> int:
        """Which host is mine."""
        return next(index for index, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks on my host, me among them."""
        return self.hosts[self.host]


# Cutting a length into parts.

#: Borders between parts fall on a multiple of this many elements where two processes write beside each other: no cache line
#: is written by both.
GRAIN = 32


def cuts(length: int, count: int, grain: int = GRAIN) -> list[slice]:
    """Parts that differ by at most a grain."""
    grains = -(-length // grain)
    borders = [min(length, grains * index // count * grain) for index in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(borders)]

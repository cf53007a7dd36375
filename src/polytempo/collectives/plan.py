"""What each process of a collective does, as data: pure, checked before it runs, carried out by `execute.py`.

The all-reduce in shared memory: every process has a *slot* that all can read, and there is one *result*. Each element of the
result is added up by one process, in the order of ranks, so the sum does not depend on timing.

    put     copy my tensor into my slot, but for the part that I add up myself
    meet    tell everybody, and wait for everybody
    reduce  add up my part of all tensors, into the result
    meet
    take    copy what the others have added up from the result
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Span:
    """Elements `start` to `stop`."""

    start: int
    stop: int


@dataclass(frozen=True)
class Put:
    """Copy these elements of mine into my slot."""

    span: Span


@dataclass(frozen=True)
class Meet:
    """Tell the others that I am so far, and wait until they are."""

    name: str
    members: tuple[int, ...]


@dataclass(frozen=True)
class Reduce:
    """Add these elements up, of all members in this order, into the result."""

    span: Span
    members: tuple[int, ...]


@dataclass(frozen=True)
class Take:
    """Copy these elements of the result."""

    span: Span


Step = Put | Meet | Reduce | Take

#: Borders between parts fall on a multiple of so many elements, so that no two processes write to one cache line.
GRAIN = 32


def parts(length: int, count: int) -> list[Span]:
    """Cut a length into parts that differ by at most a grain."""
    grains = -(-length // GRAIN)
    borders = [min(length, grains * index // count * GRAIN) for index in range(count + 1)]
    return [Span(start, stop) for start, stop in pairwise(borders)]


def own_part(members: Sequence[int], rank: int, length: int) -> Span:
    """What a member adds up."""
    return parts(length, len(members))[list(members).index(rank)]


def shared_all_reduce(members: Sequence[int], rank: int, length: int, in_place: bool = False) -> list[Step]:
    """The steps of one member.

    `in_place`: all tensors lie in their slots already, as everybody knows, and the result is read where it is.
    """
    everybody = tuple(members)
    own = own_part(everybody, rank, length)
    others = [span for span in (Span(0, own.start), Span(own.stop, length)) if span.start < span.stop]
    put = [] if in_place else [Put(span) for span in others]
    take = [] if in_place else [Take(span) for span in others]
    arrive = [] if in_place else [Meet("put", everybody)]
    return [*put, *arrive, Reduce(own, everybody), Meet("reduced", everybody), *take]

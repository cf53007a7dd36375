"""Collectives through memory that the ranks of one host share.

Each rank has a slot that all can read and only its owner writes. Within a plan, no slot is written while it may be read: a
barrier (`Meet`) lies between. Between calls no barrier is needed at the end, for calls use two halves of the slots in turns
(`shared_buffer.py`). Hence the one rule: every plan has at least one barrier of all members.
"""

from __future__ import annotations

from polytempo.collectives.steps import Copy, Fetch, Meet, Place, Put, Step, Total
from polytempo.errors import UsageError


def all_reduce(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Rank r adds up chunk r; the others take it from there."""
    members, others = _members(place)
    if not others:
        return []
    own: list[Step] = [Total(place.rank, members), Put(place.rank)]
    return [*map(Put, others), Meet(members), *own, Meet(members), *(Fetch(rank, rank, rank) for rank in others)]


def all_reduce_whole(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Each rank adds up everything, in the same order: one barrier less, where memory is fast and a barrier is slow."""
    members, others = _members(place)
    return [Put(0), Meet(members), Total(0, members)] if others else []


def broadcast(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """The others fetch a piece while the root puts the next."""
    members, others = _members(place)
    steps: list[Step] = []
    for chunk in range(pieces if others else 0):
        meet = Meet(members)
        steps += [Put(chunk), meet] if place.rank == root else [meet, Fetch(root, chunk, chunk)]
    return steps


def reduce(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """The root adds up alone, since what the others add up would be in their own tensors."""
    members, others = _members(place)
    if not others:
        return []
    return [Meet(members), Total(0, members)] if place.rank == root else [Put(0), Meet(members)]


def all_gather(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Rank r starts with chunk r, and all ranks end with all."""
    members, others = _members(place)
    return [Put(place.rank), Meet(members), *(Fetch(rank, rank, rank) for rank in others)] if others else []


def reduce_scatter(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Rank r ends with the sum of chunk r; its other chunks stay as they are."""
    members, others = _members(place)
    return [*map(Put, others), Meet(members), Total(place.rank, members)] if others else []


def gather(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """The root ends with chunk q of each rank q; the others have only their own."""
    members, others = _members(place)
    if not others:
        return []
    return [Meet(members), *(Fetch(q, q, q) for q in others)] if place.rank == root else [Put(place.rank), Meet(members)]


def scatter(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Rank q ends with chunk q of the root; the others have only their own."""
    members, others = _members(place)
    if not others:
        return []
    if place.rank == root:
        return [*map(Put, others), Meet(members)]
    return [Meet(members), Fetch(root, place.rank, place.rank)]


def all_to_all(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Input q goes to rank q; output size + q comes from rank q."""
    members, others = _members(place)
    size, rank = place.size, place.rank
    own = Copy(rank, size + rank)
    return [own, *map(Put, others), Meet(members), *(Fetch(q, rank, size + q) for q in others)] if others else [own]


def barrier(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """One barrier."""
    members, others = _members(place)
    return [Meet(members)] if others else []


def _members(place: Place) -> tuple[tuple[int, ...], list[int]]:
    """All members, and the others in the order in which this rank reads them: the next rank first, so that reads spread."""
    if len(place.hosts) != 1:
        raise UsageError(f"shared memory needs all ranks on one host, and these are on {len(place.hosts)}")
    size = place.size
    return tuple(range(size)), [(place.rank + distance) % size for distance in range(1, size)]

"""Linear algorithms: straight from one rank to another. Where each rank has its own data, no detour saves anything."""

from __future__ import annotations

from polytempo.collectives.steps import Copy, Place, Receive, Send, Step


def gather(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """The root ends with chunk q of each rank q; the others have only their own."""
    if place.rank != root:
        return [Send(root, place.rank)]
    return [Receive(rank, rank) for rank in range(place.size) if rank != root]


def scatter(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Rank q ends with chunk q of the root; the others have only their own."""
    if place.rank != root:
        return [Receive(root, place.rank)]
    return [Send(rank, rank) for rank in range(place.size) if rank != root]


def all_to_all(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Input q goes to rank q; output size + q comes from rank q.

    First to the next rank, then to the one after it, and so on: no rank is sent to by all at once.
    """
    size, rank = place.size, place.rank
    steps: list[Step] = [Copy(rank, size + rank)]
    for distance in range(1, size):
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        steps += [Send(ahead, ahead), Receive(behind, size + behind)]
    return steps

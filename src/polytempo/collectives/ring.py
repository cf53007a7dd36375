"""Rings: each rank sends to the next one only, so each link carries the least that is possible.

There are `size` parts of `pieces` chunks each; chunk j of part q has the number q * pieces + j. A piece is sent on as
soon as it is there, so that the pieces of a part follow each other around the ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from polytempo.collectives.steps import Combine, Place, Receive, Send, Step


def all_reduce(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """All ranks end with the sum of all parts, and have sent 2 (size - 1) parts."""
    return all_reduce_over(range(place.size), place.rank, pieces)


def all_reduce_over(ranks: Sequence[int], position: int, pieces: int) -> list[Step]:
    """The same over some of the ranks, seen from this position among them."""
    ring = _Ring(ranks, position, pieces)
    reduce = [step for turn in range(1, ring.size) for step in ring.combine(position - turn, send_on=True)]
    gather = [step for turn in range(1, ring.size) for step in ring.receive(position + 1 - turn, turn < ring.size - 1)]
    return [*ring.start(position), *reduce, *gather]


def reduce_scatter(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Rank r ends with the sum of part r; its other parts hold sums of some ranks only."""
    ring = _Ring(range(place.size), place.rank, pieces)
    last = place.rank - 1
    rest = [step for turn in range(1, ring.size) for step in ring.combine(last - turn, turn < ring.size - 1)]
    return [*ring.start(last), *rest]


def all_gather(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Rank r starts with part r, and all ranks end with all parts."""
    ring = _Ring(range(place.size), place.rank, pieces)
    rest = [step for turn in range(1, ring.size) for step in ring.receive(place.rank - turn, turn < ring.size - 1)]
    return [*ring.start(place.rank), *rest]


def broadcast(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """A chain from the root, the pieces behind each other."""
    ring = _Ring(range(place.size), place.rank, pieces)
    distance = (place.rank - root) % place.size
    if distance:
        return ring.receive(0, send_on=distance < place.size - 1)
    return ring.start(0)


class _Ring:
    """The steps of one position, a part at a time."""

    def __init__(self, ranks: Sequence[int], position: int, pieces: int) -> None:
        self.size, self.pieces = len(ranks), pieces
        self.left, self.right = ranks[position - 1], ranks[(position + 1) % len(ranks)]

    def chunks(self, part: int) -> range:
        first = part % self.size * self.pieces
        return range(first, first + self.pieces)

    def start(self, part: int) -> list[Step]:
        return [Send(self.right, chunk) for chunk in self.chunks(part) if self.size > 1]

    def combine(self, part: int, send_on: bool) -> list[Step]:
        return self._each(Combine, part, send_on)

    def receive(self, part: int, send_on: bool) -> list[Step]:
        return self._each(Receive, part, send_on)

    def _each(self, kind: type[Combine | Receive], part: int, send_on: bool) -> list[Step]:
        steps: list[Step] = []
        for chunk in self.chunks(part):
            steps += [kind(self.left, chunk), Send(self.right, chunk)] if send_on else [kind(self.left, chunk)]
        return steps

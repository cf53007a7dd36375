"""Two trees at once, each for half of the chunks: an inner rank of one is a leaf of the other.

In a binary tree the leaves, half of all ranks, never send down. Here all inner ranks of the first tree are odd, and the
second is the first moved by one rank, so that its inner ranks are even: the link of every rank is used, and none twice.
(Moved, not mirrored: with an odd number of ranks, a mirrored odd rank is odd.)
"""

from __future__ import annotations

from polytempo.collectives.steps import Place, Step
from polytempo.collectives.tree import Tree, all_reduce_through


def all_reduce(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """The first half of the chunks through one tree, the second through the other, by one timetable."""
    first, second = both_trees(place.size)
    return all_reduce_through([(first, range(pieces)), (second, range(pieces, 2 * pieces))], place.rank)


def both_trees(size: int) -> tuple[Tree, Tree]:
    """Two trees in which no rank has children twice."""
    parents: list[int | None] = [None] * size
    _hang(parents, 0, size, None)
    tree = Tree(tuple(parents))
    return tree, tree.moved(1)


def _hang(parents: list[int | None], start: int, stop: int, parent: int | None) -> None:
    """The odd rank nearest to the middle goes below the parent, and both sides below it; `start` is always even."""
    if start == stop:
        return
    middle = start if stop - start == 1 else (start + stop - 1) // 2 | 1
    parents[middle] = parent
    if stop - start > 1:
        _hang(parents, start, middle, middle)
        _hang(parents, middle + 1, stop, middle)

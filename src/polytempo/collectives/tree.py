"""Trees: few messages after each other, so good for what is small.

The chunks follow each other through the tree. In an all-reduce they go up and come down at the same time, and each rank
does its work in the order of a timetable: with height H, chunk k goes up from depth d at time k + H - d and comes down to
it at k + H + d. Whatever a rank waits for was sent at an earlier time, so ranks cannot wait in a circle; and two ranks put
what they exchange in the same order, even if two trees run at once.

Two trees, each for half of the chunks: an inner rank of one is a leaf of the other. In a binary tree the leaves, half of all
ranks, never send down. Here all inner ranks of the first tree are odd, and the second is the first moved by one rank, so
that its inner ranks are even: the link of every rank is used, and none twice. (Moved, not mirrored: with an odd number of
ranks, a mirrored odd rank is odd.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polytempo.collectives.steps import Combine, Place, Receive, Send, Step


@dataclass(frozen=True, slots=True)
class Tree:
    """The parent of each rank; the root has none."""

    parents: tuple[int | None, ...]

    def children(self, rank: int) -> list[int]:
        """Nearest first, counted upwards around the end: in a binomial tree, that with the fewest ranks below it."""
        size = len(self.parents)
        onwards = ((rank + distance) % size for distance in range(1, size))
        return [child for child in onwards if self.parents[child] == rank]

    def depth(self, rank: int) -> int:
        """Links up to the root."""
        parent = self.parents[rank]
        return 0 if parent is None else 1 + self.depth(parent)

    @property
    def height(self) -> int:
        """Links from the root to the deepest rank."""
        return max(self.depth(rank) for rank in range(len(self.parents)))

    def moved(self, distance: int) -> Tree:
        """The same tree with all ranks so much further, around the end."""
        size = len(self.parents)
        before = [self.parents[(rank - distance) % size] for rank in range(size)]
        return Tree(tuple(None if parent is None else (parent + distance) % size for parent in before))


def binomial(size: int, root: int = 0) -> Tree:
    """Without its lowest bit, a number is its parent's: after each round of sending twice as many have it."""
    return Tree(tuple(number & (number - 1) if number else None for number in range(size))).moved(root)


def broadcast(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """From the root to all ranks."""
    tree = binomial(place.size, root)
    return [step for chunk in range(pieces) for step in down(tree, place.rank, chunk)]


def reduce(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """The sum to the root; the chunks of ranks in between are left with sums of some ranks."""
    tree = binomial(place.size, root)
    return [step for chunk in range(pieces) for step in up(tree, place.rank, chunk)]


def all_reduce(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Up to the root and down again."""
    return all_reduce_through([(binomial(place.size, root), range(pieces))], place.rank)


def all_reduce_twice(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """The first half of the chunks through one of two trees, the second through the other, by one timetable."""
    first, second = both_trees(place.size)
    return all_reduce_through([(first, range(pieces)), (second, range(pieces, 2 * pieces))], place.rank)


def barrier(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """Dissemination: notify the rank 1, 2, 4, ... further, and wait for the rank as far behind. The chunk is empty."""
    steps: list[Step] = []
    for distance in (1 << level for level in range((place.size - 1).bit_length())):
        ahead, behind = (place.rank + distance) % place.size, (place.rank - distance) % place.size
        steps += [Send(ahead, 0), Receive(behind, 0)]
    return steps


def up(tree: Tree, rank: int, chunk: int) -> list[Step]:
    """Combine what the children send, the earliest first, and send it to the parent."""
    parent = tree.parents[rank]
    taken_in = [Combine(child, chunk) for child in tree.children(rank)]
    return [*taken_in, *([] if parent is None else [Send(parent, chunk)])]


def down(tree: Tree, rank: int, chunk: int) -> list[Step]:
    """Receive from the parent, and send it to the children, first to the one with the largest subtree."""
    parent = tree.parents[rank]
    handed_on = [Send(child, chunk) for child in reversed(tree.children(rank))]
    return [*([] if parent is None else [Receive(parent, chunk)]), *handed_on]


def all_reduce_through(trees: Iterable[tuple[Tree, range]], rank: int) -> list[Step]:
    """Chunks up and down through each tree, all of one height, by the timetable."""
    timed: list[tuple[int, int, list[Step]]] = []
    for tree, chunks in trees:
        depth, height = tree.depth(rank), tree.height
        for time, chunk in enumerate(chunks, height):
            timed.append((time - depth, 0, up(tree, rank, chunk)))
            timed.append((time + depth, 1, down(tree, rank, chunk)))
    return [step for *_, steps in sorted(timed, key=lambda entry: entry[:2]) for step in steps]


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

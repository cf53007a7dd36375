"""Graphs of neighbours and their mixing matrices P: with whom a worker averages, and at which weights.

    ring    each worker and the ones before and after it: 1/3 each (two workers: 1/2 and 1/2)
    torus   a grid that is closed in both directions: 1/5 each, less where two rows or columns make two edges one
    full    all workers: 1/n each, the mean
    exp     directed, one peer a step: in step k worker i sends half of its own to i + 2^(k mod ceil(log2 n)); all hold the
            exact mean after log2 n steps where n is a power of two
    exp, static=1   directed: the same peers, all of them in each step, at equal weights

x_i becomes the sum of P_ij x_j. Columns sum to 1, so the sum of all x is kept. In undirected graphs (ring, torus, full) P is
symmetric, with Metropolis weights P_ij = 1 / (1 + max(d_i, d_j)) and P_ii = 1 - the others: rows sum to 1 too. The directed
ones are regular, so their rows sum to 1 as well; what that takes away when a member is lost, the push-sum weights restore
(`gossip.py`).

A graph is made of positions in the sorted members, not of rank numbers: when members leave or join, it is made anew of those
that are there. A job may start with `torus` only if n = rows x columns with both at least 2 (the most square such grid is
taken), or alone. Once members have left or joined any number must do: where it does not factor the last row is shorter, and
its columns close over the rows that they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from polytempo.errors import SpecError
from polytempo.sync.directives import Mixing

Edges = Iterable[tuple[int, int]]
Members = tuple[int, ...]

#: The names of all topologies.
TOPOLOGIES = ("ring", "torus", "exp", "full")


def phases(topology: str, count: int, static: bool = False) -> int:
    """The number of different graphs that follow each other, step after step, among `count` members."""
    return max(1, _exponents(count)) if topology == "exp" and not static else 1


def mixing_rows(topology: str, members: Members, step: int = 0, static: bool = False) -> dict[int, Mixing]:
    """The mixing matrix of one step, as each member sees it.

    Args:
        topology: one of `TOPOLOGIES`.
        members: the ranks that take part, sorted.
        step: the step; only graphs that change from step to step depend on it.
        static: all peers of `exp` in each step.

    Returns:
        For each member what it keeps, sends and receives.
    """
    count = len(members)
    if topology == "exp":
        exponents = _exponents(count)
        used = range(exponents) if static else [step % exponents] if exponents else []
        return _circulant(members, [2**exponent for exponent in used])
    return _metropolis(members, _UNDIRECTED[topology](count))


def check_size(topology: str, count: int) -> None:
    """Refuse a number of workers with which a job cannot start.

    Raises:
        SpecError: a torus of this size does not factor; the nearest sizes that do are named.
    """
    if topology == "torus" and count > 1 and _rows(count) < 2:
        near = [size for size in (count - 1, count + 1) if _rows(size) >= 2] or [4]
        sizes = " or ".join(map(str, near))
        raise SpecError(f"gossip:torus needs rows x columns of workers, both at least 2, got {count}; start {sizes} of them")


# Undirected graphs, as edges between positions.


def _torus(count: int) -> Edges:
    rows = _rows(count) if _rows(count) > 1 else math.isqrt(count)
    columns = -(-count // max(rows, 1))
    lines = [range(start, min(start + columns, count)) for start in range(0, count, columns)]
    lines += [range(start, count, columns) for start in range(columns)]
    return [(line[place], line[(place + 1) % len(line)]) for line in lines for place in range(len(line))]


_UNDIRECTED: dict[str, Callable[[int], Edges]] = {
    "ring": lambda count: [(position, (position + 1) % count) for position in range(count)],
    "torus": _torus,
    "full": lambda count: [(one, other) for one in range(count) for other in range(one)],
}


def _rows(count: int) -> int:
    """The rows of the most square grid of this size."""
    return max((rows for rows in range(1, math.isqrt(count) + 1) if count % rows == 0), default=1)


def _exponents(count: int) -> int:
    """ceil(log2 n), without floats."""
    return (count - 1).bit_length()


# Weights.


def _metropolis(members: Members, edges: Edges) -> dict[int, Mixing]:
    neighbours: list[set[int]] = [set() for _ in members]
    for one, other in edges:
        if one != other:
            neighbours[one].add(other)
            neighbours[other].add(one)
    rows: dict[int, Mixing] = {}
    for position, rank in enumerate(members):
        near = neighbours[position]
        shares = tuple((members[other], 1 / (1 + max(len(near), len(neighbours[other])))) for other in sorted(near))
        rows[rank] = Mixing(1 - math.fsum(share for _, share in shares), shares, shares)
    return rows


def _circulant(members: Members, hops: list[int]) -> dict[int, Mixing]:
    """Each position sends equal shares to those that are `hops` further on; hops are distinct and below the count."""
    count, share = len(members), 1 / (len(hops) + 1)
    return {
        rank: Mixing(
            1 - share * len(hops),
            tuple((members[(position + hop) % count], share) for hop in hops),
            tuple((members[(position - hop) % count], share) for hop in hops),
        )
        for position, rank in enumerate(members)
    }

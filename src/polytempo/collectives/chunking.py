"""Cutting a length into parts."""

from __future__ import annotations

from itertools import pairwise

#: Borders between parts fall on a multiple of this many elements where two processes write beside each other: no cache line
#: is written by both.
GRAIN = 32


def cuts(length: int, count: int, grain: int = GRAIN) -> list[slice]:
    """Parts that differ by at most a grain."""
    grains = -(-length // grain)
    borders = [min(length, grains * index // count * grain) for index in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(borders)]

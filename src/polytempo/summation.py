"""Sums of floats that are the same on every Python version: since 3.12 the built-in `sum` compensates rounding errors.

Numbers on which a decision or a record depends are summed here; integers may be summed by `sum`.
"""

from __future__ import annotations

from collections.abc import Iterable


def in_order(terms: Iterable[float]) -> float:
    """The terms added from left to right, each addition rounded."""
    total: float = 0
    for term in terms:
        total += term
    return total

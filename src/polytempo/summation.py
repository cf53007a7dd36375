"""Sums that come out the same on every Python: since 3.12 the built-in `sum` makes up for rounding, before it did not.

What a decision or a record depends on is summed here; whole numbers may be summed by `sum`.
"""

from __future__ import annotations

from collections.abc import Iterable


def in_order(terms: Iterable[float]) -> float:
    """The terms added from left to right, each addition rounded."""
    total: float = 0
    for term in terms:
        total += term
    return total
